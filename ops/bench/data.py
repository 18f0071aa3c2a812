"""Datasets: how long one of 10,000 episodes takes to open, what open decoders are worth, how long a check takes.

`python -m ops.bench.data` adds its numbers to runs/bench/envs.json. With NEXUS_LEROBOT_PYTHON (a Python with lerobot) the
loader of LeRobot reads the same frames of the same files.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq

from nexus_bus.data.check import check
from nexus_bus.data.reader import Dataset
from nexus_bus.data.sampler import batch_indices
from nexus_bus.data.writer import DatasetWriter

EPISODES = 10_000
SIDE, SEEN_EPISODES, LENGTH = 224, 40, 60
CAMERAS = ("observation.images.front", "observation.images.wrist")
BATCH, ROUNDS = 32, 5

Clock = Callable[[], float]

LEROBOT = """
import json, sys, time
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, asked = sys.argv[1], json.loads(sys.argv[2])
dataset = LeRobotDataset("local/set", root=root, video_backend="pyav")
dataset[0]
spent = []
for indices in asked:
    started = time.process_time()
    for index in indices:
        dataset[index]
    spent.append(time.process_time() - started)
print(json.dumps(sorted(spent)[len(spent) // 2]))
"""


def timed(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Seconds of one call; wall unless said otherwise, since opening is as much the disk's as the processor's."""
    started = clock()
    work()
    return clock() - started


def median(works: Mapping[str, Callable[[int], object]], rounds: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Of each, run in turns, so that whatever else the machine does meets all alike; a first round warms up."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            taken = timed(lambda work=work, number=number: work(number), clock)
            if number:
                spent[name].append(taken)
    return {name: float(np.median(seconds)) for name, seconds in spent.items()}


def opening(directory: Path, episodes: int) -> dict[str, float]:
    """v3.0 as our writer makes it, and v2.1 with a file per episode and camera, all of them links to one."""
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": [8], "names": None},
        "action": {"dtype": "float32", "shape": [7], "names": None},
        CAMERAS[0]: {"dtype": "video", "shape": [16, 16, 3], "names": None},
    }
    rng = np.random.default_rng(0)
    with DatasetWriter(directory / "v30", 10, features, "bench") as writer:
        for number in range(episodes):
            frames = {
                "observation.state": rng.normal(size=(2, 8)).astype(np.float32),
                "action": rng.normal(size=(2, 7)).astype(np.float32),
                CAMERAS[0]: np.full((2, 16, 16, 3), 90, np.uint8),
            }
            writer.add_episode(frames, f"task {number % 50}")
        writer.finalize()
    old = directory / "v21"
    (old / "meta").mkdir(parents=True)
    info = json.loads((directory / "v30/meta/info.json").read_text())
    info |= {"codebase_version": "v2.1", "data_path": None, "video_path": None}
    (old / "meta/info.json").write_text(json.dumps(info))
    rows = [{"episode_index": n, "tasks": [f"task {n % 50}"], "length": 2} for n in range(episodes)]
    (old / "meta/episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"task_index": n, "task": f"task {n}"} for n in range(min(50, episodes))]
    (old / "meta/tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = directory / "episode.parquet"
    pq.write_table(pq.read_table(directory / "v30/data/chunk-000/file-000.parquet").slice(0, 2), data)
    for number in range(episodes):
        path = old / f"data/chunk-{number // 1000:03d}/episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(data, path)
    works = {name: lambda _, name=name: Dataset(directory / name).close() for name in ("v30", "v21")}
    taken = median(works, ROUNDS)
    return {"dataset_open_s_10k": taken["v30"], "dataset_open_s_10k_v21": taken["v21"]}


def recording(root: Path, episodes: int) -> Path:
    """Two cameras of moving shapes at 224 pixels, as films."""
    picture = {"dtype": "video", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]}
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": [8], "names": None},
        "action": {"dtype": "float32", "shape": [7], "names": None},
        **dict.fromkeys(CAMERAS, picture),
    }
    rng = np.random.default_rng(0)
    ground = np.repeat(np.repeat(rng.integers(0, 255, (28, 28, 3), np.uint8), 8, 0), 8, 1)
    with DatasetWriter(root, 20, features, "bench") as writer:
        for number in range(episodes):
            action = rng.normal(size=(LENGTH, 7)).astype(np.float32)
            shown = np.repeat(ground[None], LENGTH, 0)
            for frame in range(LENGTH):
                shown[frame, 40 + frame : 80 + frame, 2 * frame : 2 * frame + 60] = (255, 5 * number, 0)
            state = np.pad(action.cumsum(0) - action, ((0, 0), (0, 1))).astype(np.float32)
            columns = {"observation.state": state, "action": action, CAMERAS[0]: shown, CAMERAS[1]: shown[:, ::-1]}
            writer.add_episode(columns, "move")
        writer.finalize()
    return root


def naive(root: Path, index: int) -> dict[str, Any]:
    """A sample as first written down: open the table and the films, find the frame, close them."""
    info = json.loads((root / "meta/info.json").read_text())
    episodes = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    episode = next(row for row in episodes if row["dataset_from_index"] <= index < row["dataset_to_index"])
    place = {"chunk_index": episode["data/chunk_index"], "file_index": episode["data/file_index"]}
    row = pq.read_table(root / info["data_path"].format(**place)).slice(index, 1).to_pylist()[0]
    for key in CAMERAS:
        place = {name: episode[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        wanted = episode[f"videos/{key}/from_timestamp"] + row["timestamp"]
        with av.open(str(root / info["video_path"].format(video_key=key, **place))) as container:
            stream = container.streams.video[0]
            container.seek(max(0, int((wanted - 0.025) / float(stream.time_base or 1))), stream=stream)
            frames = (frame for frame in container.decode(stream) if frame.time >= wanted - 0.025)
            row[key] = next(frames).to_ndarray(format="rgb24")
    return row


def sampling(root: Path, rounds: int) -> dict[str, float]:
    """Decoded samples per second of CPU time, which LeRobot's process can be compared by, two cameras each.

    The batches are those of a job, read as a job reads them the first time; later epochs find most pictures encoded.
    """
    dataset = Dataset(root)
    asked = [batch_indices(len(dataset), 1, number, BATCH).tolist() for number in range(rounds + 1)]
    taken = median(
        {
            "ours": lambda number: dataset.frames(asked[number]),
            "naive": lambda number: [naive(root, index) for index in asked[number]],
        },
        rounds,
        time.process_time,
    )
    dataset.close()
    found = {
        "sampling_per_s": BATCH / taken["ours"],
        "sampling_naive_per_s": BATCH / taken["naive"],
        "sampling_x_naive": taken["naive"] / taken["ours"],
    }
    python = os.environ.get("NEXUS_LEROBOT_PYTHON")
    if python:
        with tempfile.TemporaryDirectory() as home:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": home}
            words = [python, "-c", LEROBOT, str(root), json.dumps(asked[1:])]
            done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)  # noqa: S603
        theirs = float(done.stdout.splitlines()[-1])
        found |= {"sampling_lerobot_per_s": BATCH / theirs, "sampling_x_lerobot": theirs / taken["ours"]}
    return found | {"sampling_x": found.get("sampling_x_lerobot", found["sampling_x_naive"])}


def measure(quick: bool = False) -> dict[str, float]:
    """All numbers; `quick` makes everything small, to see that it runs."""
    with tempfile.TemporaryDirectory() as directory:
        found = opening(Path(directory), 200 if quick else EPISODES)
        root = recording(Path(directory) / "films", 4 if quick else SEEN_EPISODES)
        found |= sampling(root, 1 if quick else ROUNDS)
        report = None

        def look() -> None:
            nonlocal report
            report = check(root)

        found["check_s"] = timed(look)
        assert report is not None
        found["check_pictures_per_s"] = report.pictures / found["check_s"]
        assert report.errors == 0, report.findings
    return found


def main() -> None:
    """Measure, print, and write beside what other benches wrote."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.data", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/envs.json"))
    parser.add_argument("--quick", action="store_true", help="everything small, to see that it runs")
    arguments = parser.parse_args()
    numbers = {name: round(value, 4) for name, value in measure(arguments.quick).items()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    others = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    arguments.out.write_text(json.dumps(others | numbers, indent=2) + "\n")
    for name, value in numbers.items():
        print(f"{name:<32} {value:>12,.3f}")


if __name__ == "__main__":
    main()
