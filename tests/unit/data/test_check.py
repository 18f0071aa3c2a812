"""`check` says what is wrong, in which episode and frame; and nothing about a dataset that is well."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nexus_bus.data.alignment import alignment
from nexus_bus.data.check import LISTED, Finding, Report, check
from nexus_bus.data.writer import DatasetWriter
from nexus_bus.errors import NotFound

SIDE = 16
FRONT = "observation.images.front"
LENGTHS = (40, 60, 50, 45)


def motion(rng: np.random.Generator, length: int, *, late: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """States that noisy actions move; each action stands `late` frames after the observation it was taken on."""
    action = np.clip(rng.normal(size=(length + 2, 2)), -1, 1)
    state = np.concatenate([np.zeros((1, 2)), (0.05 * action + rng.normal(0, 0.003, (length + 2, 2))).cumsum(0)])
    return state[1 : length + 1].astype(np.float32), action[1 - late : length + 1 - late].astype(np.float32)


def frames(number: int, *, late: int = 0, length: int | None = None) -> dict[str, np.ndarray]:
    length = length or LENGTHS[number]
    state, action = motion(np.random.default_rng(number), length, late=late)
    pictures = np.full((length, SIDE, SIDE, 3), 90, np.uint8)
    return {"observation.state": state, "action": action, "next.done": np.arange(length) == length - 1, FRONT: pictures}


def write(root: Path, pictures: str = "image", **changes: dict[str, np.ndarray]) -> Path:
    """Four episodes; `episode_2=…` replaces columns of one."""
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        FRONT: {"dtype": pictures, "shape": [SIDE, SIDE, 3], "names": None},
    }
    with DatasetWriter(root, 10, features, "test") as writer:
        for number in range(len(LENGTHS)):
            writer.add_episode(frames(number) | changes.get(f"episode_{number}", {}), "touch it")
        writer.finalize()
    return root


def rewrite(root: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Change columns behind the writer's back, as a damaged tool would."""
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    for place, name in enumerate(table.column_names):
        if name in (FRONT, "next.done"):
            continue
        column = table[name].combine_chunks()
        vector = pa.types.is_fixed_size_list(column.type)
        values = change(name, (column.flatten() if vector else column).to_numpy().reshape(len(column), -1).copy())
        flat = pa.array(values.ravel())
        table = table.set_column(place, name, pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if vector else flat)
    pq.write_table(table, path)


def only(report: Report, code: str) -> Finding:
    """The one finding there is."""
    assert [finding.code for finding in report.findings] == [code], report.findings
    return report.findings[0]


@pytest.mark.parametrize("pictures", ["image", "video"])
def test_a_dataset_that_is_well(tmp_path: Path, pictures: str) -> None:
    told: list[tuple[int, int]] = []
    report = check(write(tmp_path / "set", pictures), progress=lambda *step: told.append(step))
    assert report.findings == []
    assert (report.episodes, report.frames, report.pictures, report.errors) == (4, 195, 195, 0)
    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1)), "told step by step to the last"


def test_fewer_pictures_or_none_may_be_looked_at(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    assert check(root, every=10).pictures == 4 + 6 + 5 + 5
    assert check(root, every=0).pictures == 0


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    root = write(tmp_path / "set")

    def change(name: str, values: np.ndarray) -> np.ndarray:
        if name == "action":
            values[47:50, 1] = np.nan
        return values

    rewrite(root, change)
    found = only(check(root), "not_finite")
    assert (found.severity, found.key, found.episode, found.frame) == ("error", "action", 1, 7)
    assert found.text == "action is not finite in 3 of 60 frames"


def test_jumps_of_time_and_of_counting(tmp_path: Path) -> None:
    root = write(tmp_path / "set")

    def change(name: str, values: np.ndarray) -> np.ndarray:
        if name == "timestamp":
            values[110:150] += 0.5
        if name == "frame_index":
            values[149] += 1
        return values

    rewrite(root, change)
    count, jump = sorted(check(root).findings, key=lambda found: found.code)
    assert (jump.code, jump.episode, jump.frame) == ("time_jump", 2, 10)
    assert jump.text == "time goes from 0.900 to 1.500 s, a frame takes 0.100 s; 1 jump"
    assert (count.code, count.key, count.episode, count.frame) == ("counting", "frame_index", 2, 49)


def test_black_pictures(tmp_path: Path) -> None:
    for pictures in ("image", "video"):
        dark = frames(1)[FRONT]
        dark[20:23] = 0
        found = only(check(write(tmp_path / pictures, pictures, episode_1={FRONT: dark})), "black")
        assert (found.severity, found.key, found.episode, found.frame, found.text) == (
            "error",
            FRONT,
            1,
            20,
            "3 black pictures",
        )


def test_episodes_cut_short(tmp_path: Path) -> None:
    root = write(
        tmp_path / "set",
        episode_0=frames(0, length=5),
        episode_2=frames(2, length=1),
        episode_3={"next.done": np.zeros(45, bool)},
    )
    one, few, unmarked = check(root).findings
    assert {found.code for found in (one, few, unmarked)} == {"cut_short"}
    assert (one.severity, one.episode, one.text) == ("error", 2, "1 frame, the median of all episodes is 25")
    assert (few.severity, few.episode, few.frame) == ("warning", 0, 4)
    assert (unmarked.severity, unmarked.key, unmarked.episode, unmarked.frame) == ("warning", "next.done", 3, 44)


def test_a_film_that_ends_early(tmp_path: Path) -> None:
    root, short = write(tmp_path / "set", "video"), write(tmp_path / "short", "video", episode_3=frames(3, length=40))
    next(root.rglob("*.mp4")).write_bytes(next(short.rglob("*.mp4")).read_bytes())
    found = only(check(root), "picture")
    assert (found.episode, found.frame) == (3, 40)
    assert "no picture at 19.000 s" in found.text


def test_constant_and_sparse_dimensions(tmp_path: Path) -> None:
    changes = {}
    for number, length in enumerate(LENGTHS):
        state, action = motion(np.random.default_rng(number), length)
        action[:, 1] = 0.0
        state[:, 1] = 0.0
        if number == 0:
            state[7, 1] = 1.0
        changes[f"episode_{number}"] = {"observation.state": state, "action": action}
    constant, sparse = sorted(check(write(tmp_path / "set", **changes)).findings, key=lambda found: found.code)
    assert (constant.code, constant.severity, constant.text) == ("constant", "warning", "action[1] is 0 in every frame")
    assert (sparse.code, sparse.severity) == ("quantiles_equal", "warning")
    assert sparse.text.startswith("observation.state[1] is 0 in 98 of 100 frames: q01 = q99")


def test_any_float_is_looked_at_for_dimensions_that_hold_nothing(tmp_path: Path) -> None:
    features: dict[str, dict[str, Any]] = {
        key: {"dtype": "float32", "shape": [2], "names": None} for key in ("observation.state", "action", "observation.force")
    } | {"next.reward": {"dtype": "float32", "shape": [1], "names": None}}
    with DatasetWriter(tmp_path / "set", 10, features, "test") as writer:
        for number in range(4):
            state, action = motion(np.random.default_rng(number), 100)
            force = np.stack([np.full(100, 2.0), np.arange(100) == 3 + 100 * number], 1).astype(np.float32)
            reward = (np.arange(100) == 99 + 100 * number).astype(np.float32)
            frames = {"observation.state": state, "action": action, "observation.force": force, "next.reward": reward}
            writer.add_episode(frames, "x")
        writer.finalize()
    constant, sparse = check(tmp_path / "set").findings
    assert (constant.code, constant.text) == ("constant", "observation.force[0] is 2 in every frame")
    assert (sparse.code, sparse.text.split(":")[0]) == ("quantiles_equal", "observation.force[1] is 0 in 98 of 100 frames")


def test_a_feature_whose_statistics_are_of_something_else_is_one_finding(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats["action"] = {name: (np.asarray(values) * 2 + 5).tolist() for name, values in stats["action"].items()}
    path.write_text(json.dumps(stats))
    found = only(check(root), "statistics")
    assert (found.severity, found.key) == ("error", "action")
    assert "(max, mean, std, q01, q10, q50, q90, q99 too)" in found.text


def test_statistics_that_are_missing_or_of_other_frames(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats["action"]["mean"][0] += 0.5
    stats["observation.state"]["q01"][0] -= 10
    del stats["observation.state"]["q99"]
    del stats[FRONT]
    path.write_text(json.dumps(stats))
    found = {(one.code, one.key): one for one in check(root).findings}
    assert found["statistics", "action"].severity == "error"
    assert found["statistics", "action"].text.startswith("meta states a mean of [")
    assert found["statistics", "observation.state"].severity == "warning", "others estimate quantiles"
    assert "no q99" in found["statistics_missing", "observation.state"].text
    assert "no min, max" in found["statistics_missing", FRONT].text
    assert len(found) == 4
    path.unlink()
    assert "there is no meta/stats.json" in check(root).findings[0].text


@pytest.mark.parametrize(
    ("late", "severity", "text"), [(1, "error", "one frame too late"), (-1, "warning", "one frame too early")]
)
def test_actions_beside_the_wrong_observation(tmp_path: Path, late: int, severity: str, text: str) -> None:
    found = only(check(write(tmp_path / "set", **{f"episode_{n}": frames(n, late=late) for n in range(4)})), "shifted")
    assert (found.severity, found.key, found.episode) == (severity, "action", None)
    assert text in found.text
    assert found.text.startswith("in all episodes, ")


@pytest.mark.parametrize(("late", "text"), [(1, "one frame too late"), (-1, "one frame too early")])
def test_a_shift_is_seen_in_a_few_short_episodes(tmp_path: Path, late: int, text: str) -> None:
    changes = {f"episode_{n}": frames(n, late=late, length=8 + n) for n in range(4)}
    assert text in only(check(write(tmp_path / "set", **changes)), "shifted").text


def test_what_is_too_small_to_be_judged_is_said_to_be_so(tmp_path: Path) -> None:
    changes = {f"episode_{n}": frames(n, late=1, length=6) for n in range(4)}
    found = only(report := check(write(tmp_path / "set", **changes)), "alignment")
    assert (found.severity, report.errors, found.key) == ("notice", 0, "action")
    assert found.text == (
        "whether actions stand beside their own observations was not judged: 16 frames have a frame before and two after them "
        "in their episode, 20 are needed"
    )


def test_a_short_episode_that_is_shifted_may_be_chance_and_is_named(tmp_path: Path) -> None:
    found = only(check(write(tmp_path / "set", episode_1=frames(1, late=1, length=20))), "shifted")
    assert (found.severity, found.episode) == ("warning", 1)


def test_one_episode_whose_actions_are_shifted(tmp_path: Path) -> None:
    found = only(check(write(tmp_path / "set", episode_1=frames(1, late=1))), "shifted")
    assert (found.severity, found.episode) == ("error", 1)
    assert "unlike in the other episodes" in found.text


def position_control(rng: np.random.Generator, length: int, late: int) -> tuple[np.ndarray, np.ndarray]:
    """Actions are where the robot is to be next, and it gets there almost."""
    target = rng.normal(0, 0.05, (length + 2, 3)).cumsum(0)
    state = np.concatenate([np.zeros((1, 3)), target + rng.normal(0, 0.002, target.shape)])
    return state[1 : length + 1], target[1 - late : length + 1 - late]


def steered(rng: np.random.Generator, length: int, late: int) -> tuple[np.ndarray, np.ndarray]:
    """An expert that always steers to one goal: its actions are known from the state, which proves nothing."""
    state, states, actions = rng.normal(size=3), [], []
    for _ in range(length):
        action = np.clip(2 * (0.3 - state), -1, 1)
        states.append(state)
        actions.append(action)
        state = state + 0.1 * action + rng.normal(0, 0.01, 3)
    return np.array(states), np.roll(np.array(actions), late, axis=0)


def noise(rng: np.random.Generator, length: int, late: int) -> tuple[np.ndarray, np.ndarray]:
    """Actions that move nothing that the state shows."""
    del late
    return rng.normal(size=(length, 3)).cumsum(0), rng.normal(size=(length, 3))


@pytest.mark.parametrize(
    ("robot", "late", "lag"),
    [(position_control, 0, 0), (position_control, 1, -1), (position_control, -1, 1), (steered, 0, 0), (noise, 0, 0)],
)
def test_shifts_are_seen_where_the_motion_shows_them(robot: Any, late: int, lag: int) -> None:
    episodes = [(n, *robot(np.random.default_rng(n), 80, late)) for n in range(8)]
    found = alignment(lambda: episodes)
    assert (found.lag, found.odd) == (lag, {})


def test_too_little_to_say_anything() -> None:
    assert alignment(lambda: []).lag == 0
    assert alignment(lambda: [(0, np.zeros((1, 2)), np.zeros((1, 2)))]).lag == 0


def test_columns_and_features_that_disagree(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("next.reward", pa.array(np.zeros(len(table)))), path)
    found = only(check(root), "features")
    assert (found.severity, found.key, found.episode) == ("warning", "next.reward", 0)
    pq.write_table(table.drop_columns(["next.done"]), path)
    found = only(check(root), "unreadable")
    assert "no column next.done" in found.text


def test_a_column_of_another_type(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    rewrite(root, lambda name, values: values.astype(np.float64) if name == "action" else values)
    found = only(check(root), "dtype")
    assert (found.key, found.text) == ("action", "action is float64 in the files, meta/info.json says float32")


def test_a_dataset_that_does_not_open_is_a_finding_and_none_at_all_an_error(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    (root / "meta/tasks.parquet").write_bytes(b"")
    assert only(check(root), "unreadable").severity == "error"
    (root / "meta/tasks.parquet").unlink()
    assert only(check(root), "unreadable").text == "dataset set: there is no meta/tasks.parquet"
    with pytest.raises(NotFound):
        check(tmp_path / "nothing")


def test_a_set_without_episodes_is_empty_and_not_unreadable(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    info = json.loads((root / "meta/info.json").read_text()) | {"total_episodes": 0, "total_frames": 0}
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/episodes/chunk-000/file-000.parquet").unlink()
    found = only(check(root), "empty")
    assert found.text == "meta/info.json: total_episodes is 0: dataset set holds no episodes; record or import some"


def test_one_damaged_file_does_not_hide_what_is_wrong_with_others(write_v2: Callable[..., Path]) -> None:
    root = write_v2("v2.1")
    path = root / "data/chunk-000/episode_000000.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + bytes(300) + whole[340:])
    (root / "videos/chunk-000/observation.images.wrist/episode_000002.mp4").write_bytes(b"")
    findings = check(root).findings
    damaged = next(found for found in findings if found.code == "unreadable")
    assert damaged.episode == 0
    assert "episode_000000.parquet" in damaged.text
    film = next(found for found in findings if found.code == "picture")
    assert (film.key, film.episode, film.frame) == ("observation.images.wrist", 2, 0)


def test_a_film_that_has_more_pictures_than_rows(write_v2: Callable[..., Path]) -> None:
    root = write_v2("v2.1")
    films = root / "videos/chunk-000/observation.images.front"
    (films / "episode_000001.mp4").write_bytes((films / "episode_000000.mp4").read_bytes())
    found = [one for one in check(root).findings if one.code not in ("statistics_missing", "alignment")]
    assert [(one.code, one.key, one.episode, one.frame) for one in found] == [("film_length", "observation.images.front", 1, 4)]
    assert "7 pictures for 4 rows" in found[0].text


def test_where_few_episodes_succeed_the_others_were_not_cut_short(tmp_path: Path) -> None:
    report = check(write(tmp_path / "set", **{f"episode_{n}": {"next.done": np.zeros(LENGTHS[n], bool)} for n in range(1, 4)}))
    assert report.findings == []


def test_a_flood_of_findings_is_counted(tmp_path: Path) -> None:
    features = {key: {"dtype": "float32", "shape": [1], "names": None} for key in ("observation.state", "action")}
    with DatasetWriter(tmp_path / "set", 10, features, "test") as writer:
        for number in range(LISTED + 30):
            writer.add_episode({key: np.full(1, number, np.float32) for key in features}, "x")
        writer.finalize()
    report = check(tmp_path / "set")
    assert sum(found.code == "cut_short" for found in report.findings) == LISTED
    assert report.more == {"cut_short": 30}
