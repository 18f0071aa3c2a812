"""What a dataset holds, without reading its frames: behind `nexus data inspect`."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nexus_bus.data.layout import INDEX
from nexus_bus.data.reader import Dataset


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes on disk, lengths frames of an episode."""

    dataset: str
    version: str
    robot: str
    fps: float
    episodes: int
    frames: int
    seconds: float
    length_min: int
    length_median: float
    length_max: int
    files: int
    bytes: int
    bytes_by_folder: dict[str, int]
    features: dict[str, dict[str, Any]]  # dtype, shape
    cameras: dict[str, dict[str, Any]]  # dtype, shape, codec
    tasks: dict[str, int]  # episodes of each


def summarize(root: Path | str) -> Summary:
    """Look at a dataset's metadata. Raises NotFound, BadMessage."""
    dataset = Dataset(root)
    try:
        lengths = np.array([episode.end - episode.begin for episode in dataset.episodes])
        folders: Counter[str] = Counter()
        files = 0
        for folder, _, names in os.walk(dataset.root):
            top = Path(folder).relative_to(dataset.root).parts[:1]
            for name in names:
                files += 1
                folders[top[0] if top else "."] += os.lstat(os.path.join(folder, name)).st_size
        asked: Counter[str] = Counter(task for episode in dataset.episodes for task in episode.tasks)
        pictures = set(dataset.cameras.values())
        return Summary(
            dataset=dataset.root.name,
            version=dataset.version,
            robot=str(dataset.info.get("robot_type") or "unknown"),
            fps=dataset.fps,
            episodes=len(lengths),
            frames=len(dataset),
            seconds=len(dataset) / dataset.fps,
            length_min=int(lengths.min()),
            length_median=float(np.median(lengths)),
            length_max=int(lengths.max()),
            files=files,
            bytes=sum(folders.values()),
            bytes_by_folder=dict(folders),
            features={
                key: {"dtype": feature["dtype"], "shape": feature["shape"]}
                for key, feature in dataset.features.items()
                if key not in INDEX and key not in pictures
            },
            cameras={camera: _camera(dataset.features[key]) for camera, key in dataset.cameras.items()},
            tasks=dict(asked.most_common()),
        )
    finally:
        dataset.close()


def _camera(feature: dict[str, Any]) -> dict[str, Any]:
    info = feature.get("info") or feature.get("video_info") or {}
    return {"dtype": feature["dtype"], "shape": feature["shape"], "codec": str(info.get("video.codec") or "")}
