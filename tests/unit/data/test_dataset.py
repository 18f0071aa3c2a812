"""What is written is LeRobot v3.0, comes back exactly, and only a finished dataset looks like one."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from nexus_bus.data import film_writer, layout_v30
from nexus_bus.data import writer as writer_module
from nexus_bus.data.reader import Dataset
from nexus_bus.data.writer import DatasetWriter
from nexus_bus.errors import BadMessage, Conflict, ContractError, NotFound, Refused

RNG = np.random.default_rng(0)
LENGTHS = (5, 8, 3)
TASKS = ("touch the red block", "touch the blue block", "touch the red block")


def features(pictures: str = "image", side: int = 16) -> dict[str, dict[str, Any]]:
    return {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "observation.images.front": {"dtype": pictures, "shape": [side, side, 3], "names": ["height", "width", "channels"]},
    }


def episode(length: int, side: int = 16) -> dict[str, np.ndarray]:
    ramp = np.linspace(0, 200, side, dtype=np.uint8)
    smooth = np.broadcast_to(ramp[None, :, None, None], (length, side, side, 3)).copy()
    smooth[..., 0] = (np.arange(length, dtype=np.uint8) * 25)[:, None, None]  # the red channel tells the frame
    return {
        "observation.state": RNG.normal(size=(length, 3)).astype(np.float32),
        "action": RNG.normal(size=(length, 2)).astype(np.float32),
        "next.success": np.arange(length) == length - 1,
        "observation.images.front": smooth,
    }


EPISODES = [episode(length) for length in LENGTHS]


def write(root: Path, pictures: str = "image") -> Path:
    with DatasetWriter(root, 10, features(pictures), "tabletop") as writer:
        for frames, task in zip(EPISODES, TASKS, strict=True):
            writer.add_episode(frames, task)
        info = writer.finalize()
    assert (info.episodes, info.frames) == (3, 16)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "set")


def test_everything_comes_back_exactly(root: Path) -> None:
    dataset = Dataset(root)
    assert (len(dataset), len(dataset.episodes), dataset.tasks) == (16, 3, {TASKS[0]: 0, TASKS[1]: 1})
    index = 0
    for number, (frames, task) in enumerate(zip(EPISODES, TASKS, strict=True)):
        for i in range(len(frames["action"])):
            frame = dataset.frame(index)
            np.testing.assert_array_equal(frame.images["front"], frames["observation.images.front"][i])
            np.testing.assert_array_equal(frame.state, frames["observation.state"][i])
            np.testing.assert_array_equal(frame.action, frames["action"][i])
            assert (frame.instruction, frame.episode) == (task, number)
            index += 1
    with pytest.raises(IndexError, match="frame 16 of 16"):
        dataset.frame(16)


def test_a_chunk_stops_at_the_end_of_its_episode(root: Path) -> None:
    chunk = Dataset(root).chunk(3, 4)
    assert chunk.is_pad.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(chunk.actions, EPISODES[0]["action"][[3, 4, 4, 4]])
    assert (chunk.instruction, chunk.actions.dtype) == (TASKS[0], np.float32)


def test_statistics_are_over_all_frames_with_true_quantiles(root: Path) -> None:
    actions = np.concatenate([frames["action"] for frames in EPISODES]).astype(np.float64)
    found = Dataset(root).stats("action")
    np.testing.assert_allclose(found.q01, np.quantile(actions, 0.01, axis=0))
    np.testing.assert_allclose(found.q99, np.quantile(actions, 0.99, axis=0))
    np.testing.assert_allclose(found.std, actions.std(0))
    assert found.count == 16
    assert len(Dataset(root).stats("observation.images.front").mean) == 3


def test_statistics_are_computed_whatever_the_files_state(root: Path) -> None:
    """A dataset whose stats.json is of other frames must not move a robot."""
    _edit(root, "meta/stats.json", action={"min": [0.0, 0.0], "q01": [5.0, 5.0]})
    actions = np.concatenate([frames["action"] for frames in EPISODES]).astype(np.float64)
    np.testing.assert_allclose(Dataset(root).stats("action").q01, np.quantile(actions, 0.01, axis=0))


def test_a_missing_statistic_is_an_error_never_a_default(root: Path) -> None:
    path = root / "meta/stats.json"
    key = "observation.images.front"
    stats = json.loads(path.read_text())
    with pytest.raises(ContractError, match=r"no feature 'observation\.environment_state'; there are action"):
        Dataset(root).stats("observation.environment_state")
    del stats[key]["q99"]
    path.write_text(json.dumps(stats))
    with pytest.raises(ContractError, match="front has no q99"):
        Dataset(root).stats(key)
    stats[key]["q99"] = [1.0]
    path.write_text(json.dumps(stats))
    with pytest.raises(ContractError, match=r"front\.q99 is not 3 finite numbers"):
        Dataset(root).stats(key)
    path.write_text("{}")
    with pytest.raises(ContractError, match=r"no statistics of 'observation\.images\.front'"):
        Dataset(root).stats(key)


def test_the_layout_is_lerobot_v3(root: Path) -> None:
    """Read with nothing of ours but pyarrow."""
    info = json.loads((root / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["fps"], info["total_frames"], info["total_tasks"], info["splits"]) == (10, 16, 2, {"train": "0:3"})
    assert info["features"]["observation.images.front"]["dtype"] == "image"
    data = pq.read_table(root / info["data_path"].format(chunk_index=0, file_index=0))
    assert data["frame_index"].to_pylist() == [*range(5), *range(8), *range(3)]
    assert data["episode_index"].to_pylist() == [0] * 5 + [1] * 8 + [2] * 3
    assert data["task_index"].to_pylist() == [0] * 5 + [1] * 8 + [0] * 3
    assert str(data.schema.field("action").type).startswith("fixed_size_list<")
    assert str(data.schema.field("timestamp").type) == "float"
    assert data["observation.images.front"][0].as_py()["bytes"].startswith(b"\x89PNG")
    described = json.loads(data.schema.metadata[b"huggingface"])["info"]["features"]
    assert described["action"] == {"feature": {"dtype": "float32", "_type": "Value"}, "length": 2, "_type": "List"}
    assert described["observation.images.front"] == {"_type": "Image"}
    tasks = pq.read_table(root / "meta/tasks.parquet")
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    episodes = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(e["dataset_from_index"], e["dataset_to_index"], e["length"]) for e in episodes] == [
        (0, 5, 5),
        (5, 13, 8),
        (13, 16, 3),
    ]
    assert episodes[1]["tasks"] == [TASKS[1]]
    assert np.shape(episodes[1]["stats/observation.images.front/mean"]) == (3, 1, 1)
    assert set(json.loads((root / "meta/stats.json").read_text())["action"]) == {
        "min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99",
    }  # fmt: skip


def test_films_come_back_at_the_right_frame(tmp_path: Path) -> None:
    dataset = Dataset(write(tmp_path / "film", "video"))
    assert (tmp_path / "film/videos/observation.images.front/chunk-000/file-000.mp4").is_file()
    wanted = np.concatenate([frames["observation.images.front"] for frames in EPISODES]).astype(int)
    for index in [*range(16), 2, 14, 0, 9, 8]:  # forward, and by seeking
        seen = dataset.images(index)["front"].astype(int)
        assert abs(seen[..., 0].mean() - wanted[index, ..., 0].mean()) < 8, index
    dataset.close()


def test_files_rotate_and_films_count_on_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "DATA_MB", 0)
    monkeypatch.setattr(film_writer, "VIDEO_MB", 0)
    monkeypatch.setattr(layout_v30, "CHUNK", 2)
    root = write(tmp_path / "set", "video")
    assert sorted(str(p.relative_to(root)) for p in root.glob("data/*/*")) == [
        "data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet", "data/chunk-001/file-000.parquet",
    ]  # fmt: skip
    dataset = Dataset(root)
    np.testing.assert_array_equal(dataset.frame(15).action, EPISODES[2]["action"][2])
    for index, red in ((0, 0), (5, 0), (12, 175), (15, 50)):
        assert abs(dataset.images(index)["front"][..., 0].mean() - red) < 8
    dataset.close()


def test_a_recording_replaces_the_old_one_whole(root: Path) -> None:
    with DatasetWriter(root, 10, features(), "tabletop") as writer:
        writer.add_episode(EPISODES[2], "another task")
        assert len(Dataset(root)) == 16  # until it is finished
        writer.finalize()
    assert Dataset(root).tasks == {"another task": 0}
    assert len(Dataset(root)) == 3
    assert sorted(p.name for p in root.parent.iterdir()) == [".set.lock", "set"]


def test_leaving_without_finalize_leaves_the_old_dataset(root: Path) -> None:
    with pytest.raises(RuntimeError, match="half-way"), DatasetWriter(root, 10, features(), "tabletop") as writer:  # noqa: PT012
        writer.add_episode(EPISODES[0], "x")
        raise RuntimeError("half-way")
    assert len(Dataset(root)) == 16
    assert sorted(p.name for p in root.parent.iterdir()) == [".set.lock", "set"]


def test_a_killed_writer_leaves_nothing_that_looks_like_a_dataset(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_dataset import DatasetWriter, EPISODES, features\n"
        "w = DatasetWriter(Path(sys.argv[1]), 10, features(), 'x'); w.add_episode(EPISODES[0], 't'); "
        "print('ready', flush=True); import time; time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "set"), str(Path(__file__).parent)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(Conflict, match="another process is recording"):
        DatasetWriter(tmp_path / "set", 10, features(), "x")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with pytest.raises(NotFound, match="nothing is fetched from a hub"):
        Dataset(tmp_path / "set")
    assert len(Dataset(write(tmp_path / "set"))) == 16  # and the next one is not in its way


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"action": np.zeros((4, 2), np.float32)}, r"episode\.action: 4 frames, expected 5"),
        ({"action": np.zeros((5, 3), np.float32)}, r"episode\.action: shape \[5, 3\]"),
        ({"action": np.zeros((5, 2))}, r"episode\.action: dtype float64"),
        ({"action": np.full((5, 2), np.nan, np.float32)}, r"episode\.action: holds a value that is not finite"),
        ({"extra": np.zeros(5, np.float32)}, "keys"),
    ],
)
def test_frames_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, np.ndarray], text: str) -> None:
    with DatasetWriter(tmp_path / "set", 10, features(), "x") as writer, pytest.raises(BadMessage, match=text):
        writer.add_episode(EPISODES[0] | change, "t")


def test_an_empty_recording_is_refused(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", 10, features(), "x") as writer, pytest.raises(BadMessage, match="no episodes"):
        writer.finalize()


def _edit(root: Path, name: str, **changes: Any) -> None:
    path = root / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_paths_that_lead_out_of_the_dataset_are_refused(root: Path) -> None:
    (root.parent / "secret.parquet").write_bytes((root / "data/chunk-000/file-000.parquet").read_bytes())
    _edit(root, "meta/info.json", data_path="../secret.parquet")
    with pytest.raises(BadMessage, match="leads out of it"):
        Dataset(root)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"codebase_version": "v1.6"}, r"'v1\.6', this reader takes v2\.0, v2\.1, v3\.0"),
        ({"codebase_version": "v2.1"}, r"data_path is .*; a path may hold \{episode_chunk\}, \{episode_index\}"),
        ({"total_frames": 17}, "total_frames is 17, the episodes have 16 rows"),
        ({"features": 3}, "features is 3, expected an object"),
        ({"fps": 0}, "fps is 0, expected a number"),
        ({"fps": "10"}, "fps is '10', expected a number"),
        ({"data_path": "data/{chunk_index:0999999999d}"}, "data_path is .* a path may hold {chunk_index}, {file_index}"),
        ({"data_path": "{file_index.__class__}"}, "data_path is"),
    ],
)
def test_datasets_that_contradict_themselves_are_refused(root: Path, changes: dict[str, Any], text: str) -> None:
    _edit(root, "meta/info.json", **changes)
    with pytest.raises(BadMessage, match=text):
        Dataset(root)


@pytest.mark.parametrize("name", ["meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet"])
def test_a_table_that_cannot_be_read_is_named(root: Path, name: str) -> None:
    (root / name).write_bytes((root / name).read_bytes()[:300])
    with pytest.raises(BadMessage, match=f"{name} cannot be read: "):
        Dataset(root)


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"file/demo: cannot be written: .*; name another place"):
        DatasetWriter(tmp_path / "file/demo", 10, {}, "test")


def test_a_truncated_file_is_refused(root: Path) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadMessage, match=r"file-000\.parquet: no whole parquet file: its footer is missing"):
        Dataset(root)


def test_the_same_frames_give_the_same_bytes(root: Path, tmp_path: Path) -> None:
    assert _digest(root) == _digest(write(tmp_path / "again"))


def _digest(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


def test_a_dataset_that_was_recorded_anew_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    root = write(tmp_path / "set", "video")
    old = Dataset(root)
    assert not old.replaced
    with DatasetWriter(root, 10, features("video"), "tabletop") as writer:
        writer.add_episode(EPISODES[1], "another task")
        writer.finalize()
    assert old.replaced
    np.testing.assert_array_equal(old.chunk(0, 1).actions[0], EPISODES[0]["action"][0])  # what is open is the old one still
    with pytest.raises(Conflict, match="recorded anew while it was read; open it again"):
        old.images(0)
    assert Dataset(root).tasks == {"another task": 0}
