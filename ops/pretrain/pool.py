"""A pool of pictures on disk, drawn once by several processes, so that training never waits for a renderer.

Folder layout: `images-K.npy` (uint8 [n, 96, 96, 3]) and `scenes-K.npz` per shard. A shard depends on (seed, K) alone.
"""

import multiprocessing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.pretrain.checkpoint import IMAGE_SIZE
from ops.pretrain.scenes import Painter, Scene, Style, random_style

SHARD = 5000


@dataclass
class Pool:
    """Pictures and, under the names of `Scene`, stacked arrays of what they show."""

    images: list[NDArray[np.uint8]]  # memory maps, one per shard
    scenes: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.scenes["count"])

    def take(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Pictures [n, 96, 96, 3]."""
        size = len(self.images[0])
        return np.stack([self.images[i // size][i % size] for i in indices])


def paint_many(seed: tuple[int, ...], count: int, style: Style | None) -> tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]:
    """Draw `count` scenes of one style (None: the mixture of pretraining)."""
    rng = np.random.default_rng(seed)
    painter = Painter()
    images = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    scenes: list[Scene] = []
    for index in range(count):
        images[index], scene = painter.paint(rng, style or random_style(rng))
        scenes.append(scene)
    painter.close()
    return images, {f.name: np.array([getattr(scene, f.name) for scene in scenes]) for f in fields(Scene)}


def _shard(job: tuple[Path, int, int]) -> None:
    folder, seed, index = job
    images, scenes = paint_many((seed, index), SHARD, None)
    np.save(folder / f"images-{index}.npy", images)
    part = folder / f"scenes-{index}.part.npz"
    np.savez(part, **scenes)
    part.replace(folder / f"scenes-{index}.npz")  # last, so a shard with scenes is whole


def open_pool(folder: Path, seed: int, count: int, processes: int) -> Pool:
    """Draw what is missing of `count` pictures under `folder`, and open all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = range(max(1, count // SHARD))
    missing = [(folder, seed, index) for index in shards if not (folder / f"scenes-{index}.npz").is_file()]
    if missing:
        # spawn: a process forked after a GL context exists would hang
        with multiprocessing.get_context("spawn").Pool(processes) as workers:
            workers.map(_shard, missing, chunksize=1)
    loaded = [dict(np.load(folder / f"scenes-{index}.npz")) for index in shards]
    images = [np.load(folder / f"images-{index}.npy", mmap_mode="r") for index in shards]
    return Pool(images, {name: np.concatenate([part[name] for part in loaded]) for name in loaded[0]})
