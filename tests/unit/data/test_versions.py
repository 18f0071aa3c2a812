"""LeRobot v2.0 and v2.1 are read as they are, and become v3.0 without losing anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexus_bus.data import film_writer
from nexus_bus.data.convert import convert
from nexus_bus.data.reader import Dataset
from nexus_bus.errors import BadMessage, NotFound, Refused

WriteV2 = Callable[..., Path]
LENGTHS = (7, 4, 9)
TASKS = ("pick the cup", "open the drawer", "pick the cup")


def tint(episode: int, frame: int, camera: int) -> tuple[int, int, int]:
    """As conftest.py paints them."""
    return (20 + 22 * frame, 40 + 60 * episode, 60 + 120 * camera)


def assert_whole(root: Path, *, exact: bool) -> None:
    """All numbers, tasks, and every picture of both cameras at its place, in an order that jumps between films."""
    dataset = Dataset(root)
    assert [episode.end - episode.begin for episode in dataset.episodes] == list(LENGTHS)
    assert len(dataset) == sum(LENGTHS)
    places = [(number, frame) for number, length in enumerate(LENGTHS) for frame in range(length)]
    for number, frame in [*places, *reversed(places), *places[::3]]:
        rng = np.random.default_rng(number)
        action = rng.normal(size=(LENGTHS[number], 2)).astype(np.float32)
        seen = dataset.frame(dataset.episodes[number].begin + frame)
        np.testing.assert_array_equal(seen.action, action[frame])
        assert (seen.instruction, seen.episode) == (TASKS[number], number)
        assert set(seen.images) == {"front", "wrist"}
        for camera, name in enumerate(("front", "wrist")):
            off = np.abs(seen.images[name].astype(int) - tint(number, frame, camera)).mean()
            assert off == 0 if exact else off < 5, (number, frame, name)
    dataset.close()


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
@pytest.mark.parametrize("pictures", ["image", "video"])
def test_old_versions_are_read(write_v2: WriteV2, version: str, pictures: str) -> None:
    root = write_v2(version, pictures=pictures)
    assert_whole(root, exact=pictures == "image")
    assert Dataset(root).version == version


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_statistics_of_old_versions_have_quantiles_for_they_are_computed(write_v2: WriteV2, version: str) -> None:
    found = Dataset(write_v2(version)).stats("action")
    actions = np.concatenate([np.random.default_rng(n).normal(size=(LENGTHS[n], 2)).astype(np.float32) for n in range(3)])
    np.testing.assert_allclose(found.q01, np.quantile(actions.astype(np.float64), 0.01, axis=0))
    np.testing.assert_allclose(found.std, actions.astype(np.float64).std(0))


def test_axes_of_pictures_may_be_named_in_another_order(write_v2: WriteV2, tmp_path: Path) -> None:
    root = write_v2("v2.1")
    info = json.loads((root / "meta/info.json").read_text())
    for key in ("observation.images.front", "observation.images.wrist"):
        info["features"][key] |= {"shape": [3, 32, 32], "names": ["channels", "height", "width"]}
    (root / "meta/info.json").write_text(json.dumps(info))
    assert_whole(root, exact=False)
    convert(root, tmp_path / "new")
    assert Dataset(tmp_path / "new").info["features"]["observation.images.front"]["shape"] == [32, 32, 3]


def test_statistics_per_episode_are_joined_to_those_of_all_frames(write_v2: WriteV2) -> None:
    declared = Dataset(write_v2("v2.1")).layout.declared()["action"]
    actions = np.concatenate([np.random.default_rng(n).normal(size=(LENGTHS[n], 2)).astype(np.float32) for n in range(3)])
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(declared[name], getattr(actions.astype(np.float64), name)(0))
    assert declared["count"] == [20]


@pytest.mark.parametrize(
    ("version", "pictures", "keep"), [("v2.0", "image", "keep"), ("v2.1", "video", "keep"), ("v2.1", "video", "image")]
)
def test_converted_datasets_are_v3_and_hold_the_same(
    write_v2: WriteV2, tmp_path: Path, version: str, pictures: str, keep: Any
) -> None:
    told: list[tuple[int, int]] = []
    source = write_v2(version, pictures=pictures)
    info = convert(source, tmp_path / "new", pictures=keep, progress=lambda *step: told.append(step))
    assert (info.episodes, info.frames) == (3, 20)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert_whole(tmp_path / "new", exact=pictures == "image")
    new = Dataset(tmp_path / "new")
    assert new.version == "v3.0"
    assert new.info["robot_type"] == "so100"
    assert new.tasks == {TASKS[0]: 0, TASKS[1]: 1}
    assert json.loads((new.root / "meta/stats.json").read_text())["observation.images.front"]["count"] == [20]


def test_films_go_over_as_they_are_and_share_a_file(write_v2: WriteV2, tmp_path: Path) -> None:
    """Encoding them anew would lose a little at each conversion."""
    source, target = write_v2("v2.1"), tmp_path / "new"
    convert(source, target)
    assert len(list(target.rglob("*.mp4"))) == 2, "one film per camera"
    old, new = Dataset(source), Dataset(target)
    for index in range(20):
        for camera, picture in old.images(index).items():
            np.testing.assert_array_equal(new.images(index)[camera], picture)


def test_films_that_fill_a_file_go_on_in_the_next(write_v2: WriteV2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_writer, "VIDEO_MB", 0)
    convert(write_v2("v2.1"), tmp_path / "new")
    assert len(list((tmp_path / "new").rglob("*.mp4"))) == 6
    assert_whole(tmp_path / "new", exact=False)


def test_v3_converts_to_v3_with_other_pictures(write_v2: WriteV2, tmp_path: Path) -> None:
    convert(write_v2("v2.0", pictures="image"), tmp_path / "new")
    convert(tmp_path / "new", tmp_path / "small", pictures="video")
    assert_whole(tmp_path / "small", exact=False)
    convert(tmp_path / "small", tmp_path / "again", drop=["observation.images.wrist"])
    assert set(Dataset(tmp_path / "again").cameras) == {"front"}


def test_a_conversion_that_would_lose_something_is_refused(write_v2: WriteV2, tmp_path: Path) -> None:
    source = write_v2("v2.1")
    with pytest.raises(Refused, match="would replace the source"):
        convert(source, source)
    with pytest.raises(Refused, match="would replace the source"):
        convert(source, source.parent)
    with pytest.raises(NotFound, match="no such feature; there are"):
        convert(source, tmp_path / "new", drop=["observation.images.back"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(Refused, match="holds something that is no dataset"):
        convert(source, tmp_path / "mine")
    with pytest.raises(NotFound, match="no such directory"):
        convert(tmp_path / "nothing", tmp_path / "new")
    info = json.loads((source / "meta/info.json").read_text())
    (source / "meta/info.json").write_text(json.dumps(info | {"fps": 12.5}))
    with pytest.raises(BadMessage, match=r"fps is 12\.5; v3\.0 wants whole frames"):
        convert(source, tmp_path / "new")
    (source / "meta/info.json").write_text(json.dumps(info | {"fps": 20}))
    with pytest.raises(BadMessage, match=r"episode 0: frame 1 is at 0\.100 s, not 0\.050"):
        convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("meta/episodes.jsonl", lambda path: path.unlink(), r"there is no meta/episodes\.jsonl"),
        ("meta/tasks.jsonl", lambda path: path.unlink(), r"there is no meta/tasks\.jsonl"),
        ("meta/episodes.jsonl", lambda path: path.write_text(""), "holds no episodes"),
        ("meta/episodes.jsonl", lambda path: path.write_text('{"episode_index": 0}\n'), r"episodes\.jsonl:1: .*`length`"),
        ("meta/episodes.jsonl", lambda path: path.write_text("{\n"), r"episodes\.jsonl:1"),
        ("data/chunk-000/episode_000001.parquet", lambda path: path.unlink(), r"there is no data/chunk-000/episode_000001"),
        (
            "data/chunk-000/episode_000001.parquet",
            lambda path: path.write_bytes(b""),
            r"episode_000001\.parquet: .*it is empty",
        ),
        ("data/chunk-000/episode_000001.parquet", lambda path: path.write_bytes(path.read_bytes()[:-9]), "footer is missing"),
    ],
)
def test_old_datasets_that_are_not_whole_are_refused(write_v2: WriteV2, name: str, change: Any, text: str) -> None:
    root = write_v2("v2.1")
    change(root / name)
    with pytest.raises(BadMessage, match=text):
        Dataset(root)
