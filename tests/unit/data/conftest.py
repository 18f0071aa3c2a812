"""Datasets of LeRobot v2.0 and v2.1 as their specification lays them out, written with nothing of ours."""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LENGTHS = (7, 4, 9)
TASKS = ("pick the cup", "open the drawer", "pick the cup")
FPS = 10
SIDE = 32
CAMERAS = ("observation.images.front", "observation.images.wrist")

WriteV2 = Callable[..., Path]


def tint(episode: int, frame: int, camera: int) -> tuple[int, int, int]:
    """The colour that tells a frame from all others."""
    return (20 + 22 * frame, 40 + 60 * episode, 60 + 120 * camera)


def numbers(episode: int) -> tuple[np.ndarray, np.ndarray]:
    """State and action of an episode: an action is the step that the state takes."""
    rng = np.random.default_rng(episode)
    action = rng.normal(size=(LENGTHS[episode], 2)).astype(np.float32)
    state = np.concatenate([np.zeros((1, 2), np.float32), action.cumsum(0)[:-1]]).astype(np.float32)
    return state, action


@pytest.fixture
def write_v2(tmp_path: Path) -> WriteV2:
    """`write_v2("v2.1", pictures="video")`: the root of three episodes with two cameras; `info` overrides info.json."""

    def write(version: str, *, pictures: str = "video", name: str = "old", info: dict[str, Any] | None = None) -> Path:
        root = tmp_path / name
        (root / "meta").mkdir(parents=True)
        index = 0
        for episode, length in enumerate(LENGTHS):
            state, action = numbers(episode)
            columns: dict[str, Any] = {
                "observation.state": pa.array(list(state), pa.list_(pa.float32())),
                "action": pa.array(list(action), pa.list_(pa.float32())),
                "timestamp": pa.array(np.arange(length) / FPS, pa.float32()),
                "frame_index": pa.array(range(length), pa.int64()),
                "episode_index": pa.array([episode] * length, pa.int64()),
                "index": pa.array(range(index, index + length), pa.int64()),
                "task_index": pa.array([TASKS.index(TASKS[episode])] * length, pa.int64()),
            }
            for camera, key in enumerate(CAMERAS):
                frames = [np.full((SIDE, SIDE, 3), tint(episode, frame, camera), np.uint8) for frame in range(length)]
                if pictures == "video":
                    film(root / f"videos/chunk-000/{key}/episode_{episode:06d}.mp4", frames)
                else:
                    columns[key] = stills(root, key, episode, frames)
            path = root / f"data/chunk-000/episode_{episode:06d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), path)
            index += length
        picture = {"dtype": pictures, "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]}
        whole = {"shape": [1], "names": None}
        features = {
            "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
            "action": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
            **dict.fromkeys(CAMERAS, picture),
            "timestamp": {"dtype": "float32", **whole},
            **{key: {"dtype": "int64", **whole} for key in ("frame_index", "episode_index", "index", "task_index")},
        }
        written = {
            "codebase_version": version, "robot_type": "so100", "total_episodes": len(LENGTHS), "total_frames": index,
            "total_tasks": 2, "total_videos": 6, "total_chunks": 1, "chunks_size": 1000, "fps": FPS, "splits": {"train": "0:3"},
            "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
            "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
            "features": features,
        }  # fmt: skip
        (root / "meta/info.json").write_text(json.dumps(written | (info or {})))
        lines(root / "meta/tasks.jsonl", [{"task_index": 0, "task": TASKS[0]}, {"task_index": 1, "task": TASKS[1]}])
        episodes = [{"episode_index": n, "tasks": [TASKS[n]], "length": length} for n, length in enumerate(LENGTHS)]
        lines(root / "meta/episodes.jsonl", episodes)
        if version == "v2.0":
            (root / "meta/stats.json").write_text(
                json.dumps({"action": stats(np.concatenate([numbers(n)[1] for n in range(3)]))})
            )
        else:
            rows = [{"episode_index": n, "stats": {"action": stats(numbers(n)[1])}} for n in range(3)]
            lines(root / "meta/episodes_stats.jsonl", rows)
        return root

    return write


def stats(values: np.ndarray) -> dict[str, Any]:
    found = {name: getattr(values.astype(np.float64), name)(0).tolist() for name in ("min", "max", "mean", "std")}
    return found | {"count": [len(values)]}


def film(path: Path, frames: list[np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=FPS, options={"crf": "10", "g": "30", "bf": "2"})
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def stills(root: Path, key: str, episode: int, frames: list[np.ndarray]) -> pa.Array:
    """Every other one as bytes, the rest as files that the cell names."""
    from io import BytesIO

    from PIL import Image

    cells = []
    for number, picture in enumerate(frames):
        buffer = BytesIO()
        Image.fromarray(picture).save(buffer, "PNG")
        name = f"images/{key}/episode_{episode:06d}/frame_{number:06d}.png"
        if number % 2:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(buffer.getvalue())
        cells.append({"bytes": None if number % 2 else buffer.getvalue(), "path": name})
    return pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
