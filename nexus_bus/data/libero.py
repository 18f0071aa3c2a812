"""Demonstrations of LIBERO (and robomimic) as HDF5, episode by episode. Read by data/convert.py; needs the extra `hdf5`.

A file is one task: `data/demo_i/{actions, rewards, dones, obs/…}`. Pictures lie as the simulator draws them, upside down and
mirrored, and are turned by 180° as policies expect. Actions keep the simulator's signs: gripper -1 opens, +1 closes.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nexus_bus.data.layout import IMAGES, Feature
from nexus_bus.errors import BadMessage, NotFound
from nexus_bus.tensors import MAX_PIXELS

FPS = 20
SUFFIXES = (".hdf5", ".h5")
STATE = ("obs/ee_states", "obs/gripper_states")  # position 3, axis-angle 3, gripper joints 2
MAX_NUMBERS = 256 << 20  # bytes of one column of a demonstration; pictures are read one by one


@dataclass(frozen=True)
class Demonstration:
    """One episode: columns by feature, pictures one by one; where it was."""

    frames: dict[str, Any]
    task: str
    where: str


def files_of(source: Path) -> list[Path]:
    """The HDF5 files that `source` is or holds, in order."""
    if source.is_file() and source.suffix in SUFFIXES:
        return [source]
    return sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file()) if source.is_dir() else []


def features_of(path: Path, pictures: str) -> dict[str, Feature]:
    """The features that the first demonstration of a file has."""
    with _opened(path) as file:
        demo = _group(file, "data", path)
        name = _names(demo, path)[0]
        one = _group(demo, name, path)
        features: dict[str, Feature] = {
            "observation.state": {"dtype": "float32", "shape": [_state(one, path).shape[1]], "names": None},
            "action": {"dtype": "float32", "shape": [int(_data(one, "actions", path, 2).shape[1])], "names": None},
            "next.reward": {"dtype": "float32", "shape": [1], "names": None},
            "next.done": {"dtype": "bool", "shape": [1], "names": None},
        }
        for camera in _cameras(one, path):
            shape = [int(size) for size in _data(one, f"obs/{camera}", path, 4).shape[1:]]
            if shape[2] != 3 or shape[0] * shape[1] > MAX_PIXELS:
                raise BadMessage(f"{path.name}: data/{name}/obs/{camera} has pictures {shape}, expected [height, width, 3]")
            names = ["height", "width", "channels"]
            features[f"{IMAGES}{camera.removesuffix('_rgb')}"] = {"dtype": pictures, "shape": shape, "names": names}
    return features


def demonstrations(path: Path, *, turn: bool = True) -> Iterator[Demonstration]:
    """The demonstrations of a file in order. `turn` rotates pictures by 180°.

    Raises:
        BadMessage: a file that is cut off or not of this kind, or that refers to other files; the text names the place.
        NotFound: h5py is not installed.
    """
    with _opened(path) as file:
        data = _group(file, "data", path)
        task = _task(data, path)
        for name in _names(data, path):
            demo = _group(data, name, path)
            actions = np.asarray(_data(demo, "actions", path, 2)[()], np.float32)
            length = len(actions)
            if not length:
                raise BadMessage(f"{path.name}: data/{name} has no frames")
            frames: dict[str, Any] = {
                "observation.state": _state(demo, path),
                "action": actions,
                "next.reward": _series(demo, "rewards", path, length).astype(np.float32),
                "next.done": _series(demo, "dones", path, length).astype(np.bool_),
            }
            for camera in _cameras(demo, path):
                stored = _data(demo, f"obs/{camera}", path, 4)
                frames[f"{IMAGES}{camera.removesuffix('_rgb')}"] = _Pictures(stored, turn, f"{path.name}: data/{name}/{camera}")
            for key, values in frames.items():
                if len(values) != length:
                    raise BadMessage(
                        f"{path.name}: data/{name} has {length} actions and {len(values)} of {key}; it was cut short"
                    )
            yield Demonstration(frames, task, f"{path.name}: data/{name}")


class _Pictures(Sequence[np.ndarray]):
    """The pictures of an episode, read one by one."""

    def __init__(self, stored: Any, turn: bool, where: str) -> None:
        self._stored, self._turn, self._where = stored, turn, where

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self._stored):
            raise IndexError(index)
        try:
            picture = np.asarray(self._stored[index])
        except OSError as error:
            raise BadMessage(f"{self._where}: frame {index} is not readable: {error}") from error
        return picture[::-1, ::-1] if self._turn else picture


def _opened(path: Path) -> Any:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise NotFound("h5py is not installed here: pip install 'nexus-bus[hdf5]'") from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise BadMessage(f"{path.name}: no whole HDF5 file: {error}") from error


def _child(group: Any, name: str, path: Path) -> Any:
    """A member that lies in this very file: one that leads elsewhere could be any file of this machine."""
    import h5py

    here = group
    for part in name.split("/"):
        link = here.get(part, getlink=True) if isinstance(here, h5py.Group) else None
        if link is None:
            raise BadMessage(f"{path.name}: there is no {group.name.strip('/')}/{name}; LIBERO's demonstrations have it")
        if not isinstance(link, h5py.HardLink):
            raise BadMessage(f"{path.name}: {group.name.strip('/')}/{name} is a link; copy what it points to into the file")
        try:
            here = here[part]  # type: ignore[index]
        except (OSError, KeyError, RuntimeError) as error:
            raise BadMessage(f"{path.name}: {name} is not readable: {error}") from error
    return here


def _group(parent: Any, name: str, path: Path) -> Any:
    import h5py

    found = _child(parent, name, path)
    if not isinstance(found, h5py.Group):
        raise BadMessage(f"{path.name}: {name} is no group")
    return found


def _data(group: Any, name: str, path: Path, dimensions: int) -> Any:
    import h5py

    found = _child(group, name, path)
    where = f"{path.name}: {group.name.strip('/')}/{name}"
    if not isinstance(found, h5py.Dataset) or found.ndim != dimensions or found.dtype.kind not in "fiub":
        raise BadMessage(f"{where} is no array of numbers with {dimensions} dimensions")
    if found.external or found.is_virtual:
        raise BadMessage(f"{where} lies in another file; copy it into this one")
    unpacked = math.prod(found.chunks or (1,)) * found.dtype.itemsize if dimensions == 4 else found.nbytes
    if unpacked > MAX_NUMBERS:
        raise BadMessage(f"{where} unpacks to {unpacked} bytes at once; {MAX_NUMBERS} is the limit")
    return found


def _names(data: Any, path: Path) -> list[str]:
    """demo_0, demo_1, … by number."""
    found = [name for name in data if name.startswith("demo_") and name[5:].isdecimal()]
    if not found:
        raise BadMessage(f"{path.name}: data holds no demo_0; this is no file of demonstrations")
    return sorted(found, key=lambda name: int(name[5:]))


def _cameras(demo: Any, path: Path) -> list[str]:
    return sorted(name for name in _group(demo, "obs", path) if name.endswith("_rgb"))


def _state(demo: Any, path: Path) -> np.ndarray:
    parts = [np.asarray(_data(demo, name, path, 2)[()], np.float32) for name in STATE]
    if len({len(part) for part in parts}) > 1:
        said = " and ".join(f"{len(part)} of {name}" for part, name in zip(parts, STATE, strict=True))
        raise BadMessage(f"{path.name}: {demo.name.strip('/')} has rows {said}; it was cut short")
    return np.concatenate(parts, axis=1)


def _series(demo: Any, name: str, path: Path, length: int) -> np.ndarray:
    """One number per frame; where there is none, zero, and one at the end: only demonstrations that succeed are kept."""
    if demo.get(name, getlink=True) is not None:
        return np.asarray(_data(demo, name, path, 1)[()])
    return np.arange(length) == length - 1


def _task(data: Any, path: Path) -> str:
    """The sentence, from the file's own account of its problem, else from its name."""
    try:
        said = json.loads(data.attrs["problem_info"])["language_instruction"]
    except (KeyError, ValueError, TypeError, OSError):
        said = path.stem.removesuffix("_demo").replace("_", " ")
    return " ".join(str("".join(said) if isinstance(said, list) else said).strip('" ').split())
