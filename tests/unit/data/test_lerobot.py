"""What we write, LeRobot itself reads: an independent reader, in an interpreter of its own since it needs another torch.

`python3.12 -m venv DIR && DIR/bin/pip install 'lerobot[dataset]==0.6.1'`, then NEXUS_LEROBOT_PYTHON=DIR/bin/python.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexus_bus.data import film_writer
from nexus_bus.data import writer as writer_module
from nexus_bus.data.check import check
from nexus_bus.data.convert import convert
from nexus_bus.data.reader import Dataset
from nexus_bus.data.writer import DatasetWriter

WriteV2 = Callable[..., Path]
PYTHON = os.environ.get("NEXUS_LEROBOT_PYTHON", "")
SIDE = 32
LENGTHS = (7, 4, 9)

pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="NEXUS_LEROBOT_PYTHON names no Python with lerobot[dataset]==0.6.1"),
    pytest.mark.timeout(600),  # its imports take half a minute on a cold disk
]

SCRIPT = """
import json, sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, out = sys.argv[1:]
dataset = LeRobotDataset("local/set", root=root, video_backend="pyav")
found = {"episodes": dataset.num_episodes, "frames": dataset.num_frames, "fps": dataset.fps}
found["stats"] = {k: {n: np.asarray(v).ravel().tolist() for n, v in s.items()} for k, s in dataset.meta.stats.items()}
arrays = {}
for index in range(len(dataset)):
    for key, value in dataset[index].items():
        if key == "task":
            found.setdefault("tasks", []).append(value)
        elif hasattr(value, "numpy"):
            arrays[f"{index}/{key}"] = value.numpy()
np.savez(out, **arrays)
print(json.dumps(found))
"""


CREATE = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, kind = sys.argv[1:]
picture = {"dtype": kind, "shape": (64, 64, 3), "names": ["height", "width", "channels"]}
features = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
    "observation.images.front": picture,
    "observation.images.wrist": picture,
}
video = kind == "video"
dataset = LeRobotDataset.create("local/set", fps=10, features=features, root=root, robot_type="so100", use_videos=video)
for episode, length in enumerate((7, 4, 9)):
    for frame in range(length):
        dataset.add_frame({
            "observation.state": np.full(3, episode + frame / 10, np.float32),
            "action": np.full(2, frame, np.float32),
            "observation.images.front": np.full((64, 64, 3), 20 + 20 * frame, np.uint8),
            "observation.images.wrist": np.full((64, 64, 3), 240 - 20 * frame, np.uint8),
            "task": f"task {episode % 2}",
        })
    dataset.save_episode()
dataset.finalize()
"""


def lerobot(script: str, home: Path, *arguments: object) -> str:
    """Run a script in its interpreter; what it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "HF_DATASETS_OFFLINE": "1"}
    words = [PYTHON, "-c", script, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def read(root: Path, tmp_path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    said = lerobot(SCRIPT, tmp_path / "hf", root, tmp_path / "frames.npz")
    with np.load(tmp_path / "frames.npz") as arrays:
        return json.loads(said.splitlines()[-1]), dict(arrays)


def compare(root: Path, tmp_path: Path, tolerance: float) -> None:
    found, arrays = read(root, tmp_path)
    ours = Dataset(root)
    assert (found["episodes"], found["frames"], found["fps"]) == (len(ours.episodes), len(ours), ours.fps)
    for index in range(len(ours)):
        frame = ours.frame(index)
        np.testing.assert_array_equal(arrays[f"{index}/action"], frame.action)
        np.testing.assert_array_equal(arrays[f"{index}/observation.state"], frame.state)
        assert int(arrays[f"{index}/episode_index"]) == frame.episode
        assert found["tasks"][index] == frame.instruction
        for camera, key in ours.cameras.items():
            theirs = arrays[f"{index}/{key}"].transpose(1, 2, 0) * 255
            assert np.abs(theirs - frame.images[camera]).mean() <= tolerance, (index, camera)
    for key in ("action", "observation.state", *ours.cameras.values()):
        for name in ("min", "max", "mean", "std", "q01", "q99"):
            np.testing.assert_allclose(found["stats"][key][name], getattr(ours.stats(key), name), rtol=1e-6, atol=1e-6)
    ours.close()


def write(root: Path, pictures: str) -> Path:
    rng = np.random.default_rng(0)
    picture = {"dtype": pictures, "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]}
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "observation.images.front": picture,
        "observation.images.wrist": picture,
    }
    with DatasetWriter(root, 10, features, "test") as writer:
        for number, length in enumerate(LENGTHS):
            ramp = np.linspace(0, 200, SIDE, dtype=np.uint8)[None, :, None, None]
            pictures_of = [np.broadcast_to(ramp, (length, SIDE, SIDE, 3)).copy() for _ in range(2)]
            for camera, stack in enumerate(pictures_of):
                stack[..., camera] = (20 * np.arange(length, dtype=np.uint8) + 10 * number)[:, None, None]
            writer.add_episode(
                {
                    "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
                    "action": rng.normal(size=(length, 2)).astype(np.float32),
                    "next.success": np.arange(length) == length - 1,
                    "observation.images.front": pictures_of[0],
                    "observation.images.wrist": pictures_of[1],
                },
                f"task {number % 2}",
            )
        writer.finalize()
    return root


@pytest.mark.parametrize(("pictures", "tolerance"), [("image", 0.0), ("video", 2.0)])
def test_lerobot_reads_what_we_write(tmp_path: Path, pictures: str, tolerance: float) -> None:
    """Two readers of one film may turn colours a little differently."""
    compare(write(tmp_path / "set", pictures), tmp_path, tolerance)


def test_lerobot_finds_films_whose_files_count_on_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_writer, "VIDEO_MB", 0)
    monkeypatch.setattr(writer_module, "DATA_MB", 1)
    compare(write(tmp_path / "set", "video"), tmp_path, 2.0)


def test_lerobot_reads_what_we_convert(tmp_path: Path, write_v2: WriteV2) -> None:
    convert(write_v2("v2.1"), tmp_path / "set")
    compare(tmp_path / "set", tmp_path, 2.0)


@pytest.mark.parametrize("pictures", ["image", "video"])
def test_we_read_what_lerobot_writes_and_find_nothing_wrong_with_it(tmp_path: Path, pictures: str) -> None:
    root = tmp_path / "set"
    lerobot(CREATE, tmp_path / "hf", root, pictures)
    dataset = Dataset(root)
    assert [episode.end - episode.begin for episode in dataset.episodes] == list(LENGTHS)
    for index in [*range(20), 13, 2, 19, 0]:
        number = dataset.episode_of(index)
        at = index - dataset.episodes[number].begin
        seen = dataset.frame(index)
        assert seen.action.tolist() == [at, at]
        assert seen.instruction == f"task {number % 2}"
        assert abs(seen.images["front"].mean() - 20 - 20 * at) < 4
        assert abs(seen.images["wrist"].mean() - 240 + 20 * at) < 4
    assert [found for found in check(root).findings if found.severity == "error"] == []
