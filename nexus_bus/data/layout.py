"""Where things lie in a LeRobot dataset: one description for all versions of the format. Below data/reader.py.

A version's own file (layout_v20.py, layout_v21.py, layout_v30.py) turns its metadata into a `Layout`; nothing else of this
package knows versions. Whoever made a dataset chose its names and numbers, so they are checked before they are used: a path
that leads out, a template that would unfold to a gigabyte and a feature without a shape are refused by name.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nexus_bus.errors import BadMessage, Conflict, NotFound

Feature = dict[str, Any]  # dtype, shape, names, as in info.json
T = TypeVar("T")

IMAGES = "observation.images."
INFO = "meta/info.json"
PICTURES = ("image", "video")
INDEX = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"}

MAX_META = 64 << 20  # bytes of info.json or stats.json
MAX_SIZE = 1 << 24  # numbers of one cell
_FIELD = re.compile(r"\{(\w+)(?::0?\d?d)?\}")  # all that a path template may hold


@dataclass(frozen=True, slots=True)
class Film:
    """Where an episode lies in a camera's film: a path below the root, and the second at which its first frame is shown."""

    path: str
    begin: float


@dataclass(frozen=True, slots=True)
class Episode:
    """Rows [begin, end) of the dataset, the file that holds them, and its films by feature."""

    begin: int
    end: int
    tasks: tuple[str, ...]
    data: str
    films: dict[str, Film]

    @property
    def task(self) -> str:
        """The instruction; the first one where an episode has several."""
        return self.tasks[0] if self.tasks else ""


@dataclass(frozen=True)
class Layout:
    """A dataset's metadata, whatever its version. `declared` reads the statistics that its files state: key, name, values."""

    root: "Root"
    version: str
    info: dict[str, Any]
    features: dict[str, Feature]
    fps: float
    tasks: dict[str, int]
    episodes: list[Episode]
    declared: Callable[[], dict[str, dict[str, Any]]]


class Empty(BadMessage):
    """A dataset without episodes."""


class Root:
    """The folder of a dataset: no name leads out of it, be it by dots, by being absolute or by a link."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        self.name = self.path.name
        self._identity = self._found()
        self._folders: dict[Path, Path] = {}  # resolved: ten thousand files lie in a few

    @property
    def replaced(self) -> bool:
        """Whether another dataset was put in this one's place since it was opened: the two must not be mixed."""
        return self._found() != self._identity

    def inside(self, name: str) -> Path:
        """The file of that name. Raises BadMessage if it lies elsewhere."""
        if "\0" in name:
            raise BadMessage(f"dataset {self.name}: {name[:80]!r} is no path")
        try:
            path = self.path / name
            folder = self._folders.get(path.parent)
            if folder is None:
                folder = self._folders[path.parent] = path.parent.resolve()
            found = folder / path.name
            if path.name == ".." or found.is_symlink():
                found = found.resolve()
        except (OSError, ValueError) as error:
            raise BadMessage(f"dataset {self.name}: {name[:80]!r} is no path: {error}") from error
        if not found.is_relative_to(self.path):
            raise BadMessage(f"dataset {self.name}: {name!r} leads out of it; copy the file in, links are not followed")
        return found

    def current(self, name: str) -> Path:
        """The same, of the dataset that was opened. Raises Conflict if another one has taken its place."""
        if self.replaced:
            raise Conflict(f"dataset {self.name}: was recorded anew while it was read; open it again")
        return self.inside(name)

    def _found(self) -> tuple[int, ...]:
        try:
            stat = self.path.stat()
        except OSError:
            return ()
        return (stat.st_dev, stat.st_ino, stat.st_mtime_ns)  # a number that was free is given again

    def json(self, name: str) -> dict[str, Any]:
        """A metadata file, which must hold an object. Raises BadMessage."""
        path = self.inside(name)
        try:
            if path.stat().st_size > MAX_META:
                raise BadMessage(f"{name}: {path.stat().st_size} bytes; metadata has at most {MAX_META}")
            found = json.loads(path.read_bytes())  # which, unlike msgspec, takes the NaN that others write into statistics
        except FileNotFoundError as error:
            raise BadMessage(f"dataset {self.name}: there is no {name}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise BadMessage(f"{name}: not readable JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadMessage(f"{name}: holds a {type(found).__name__}, expected an object")
        return found

    def lines(self, name: str, kind: type[T]) -> Iterator[T]:
        """The lines of a JSONL file. Raises BadMessage naming the line and its field."""
        path = self.inside(name)
        decoder = msgspec.json.Decoder(kind)
        try:
            with path.open("rb") as opened:
                for number, line in enumerate(opened, 1):
                    if line.strip():
                        try:
                            yield decoder.decode(line)
                        except msgspec.MsgspecError as error:
                            raise BadMessage(f"{name}:{number}: {error}") from error
        except FileNotFoundError as error:
            raise BadMessage(f"dataset {self.name}: there is no {name}") from error
        except OSError as error:
            raise BadMessage(f"{name}: {error}") from error


def read_info(root: Root) -> dict[str, Any]:
    """meta/info.json. Raises NotFound where there is no dataset at all."""
    if not root.inside(INFO).is_file():
        raise NotFound(
            f"dataset {root.name}: there is no {INFO} in {root.path.parent.name}/{root.name}. A dataset is a finalised LeRobot "
            "directory that lies there already: nothing is fetched from a hub"
        )
    return root.json(INFO)


def features_of(info: Mapping[str, Any]) -> dict[str, Feature]:
    """The features of info.json, each with a dtype and a shape of whole numbers. Raises BadMessage naming the one without."""
    found = info.get("features")
    if not isinstance(found, dict) or not found:
        raise BadMessage(f"{INFO}: features is {_short(found)}, expected an object of features")
    for key, feature in found.items():
        if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
            raise BadMessage(f"{INFO}: features.{key} has no dtype")
        shape = feature.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise BadMessage(f"{INFO}: features.{key}.shape is {_short(shape)}, expected a list of positive whole numbers")
        if math.prod(shape) > MAX_SIZE * (3 if feature["dtype"] in PICTURES else 1):
            raise BadMessage(f"{INFO}: features.{key}.shape {shape} holds more than {MAX_SIZE} numbers")
        if feature["dtype"] in PICTURES and len(shape) != 3:
            raise BadMessage(f"{INFO}: features.{key}.shape {shape}, expected [height, width, 3] of a picture")
        if key.startswith(IMAGES) and feature["dtype"] not in PICTURES:
            raise BadMessage(f"{INFO}: {key} has dtype {feature['dtype']!r}, not image or video")
    return {key: _upright(feature) for key, feature in found.items()}


def fps_of(info: Mapping[str, Any]) -> float:
    """Frames per second. Raises BadMessage."""
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not math.isfinite(fps) or not 0 < fps <= 10_000:
        raise BadMessage(f"{INFO}: fps is {_short(fps)}, expected a number of frames per second")
    return float(fps)


def whole(info: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of info.json, at least 1 if it has a default, else at least 0. Raises BadMessage."""
    value = info.get(key, default)
    if type(value) is not int or value < (0 if default is None else 1):
        raise BadMessage(f"{INFO}: {key} is {_short(value)}, expected a whole number")
    return value


def template(info: Mapping[str, Any], key: str, default: str, fields: Sequence[str]) -> str:
    """A path template of info.json. Raises BadMessage if it holds anything but `fields`, or more than a short zero padding."""
    found = info.get(key) or default
    if not isinstance(found, str):
        raise BadMessage(f"{INFO}: {key} is {_short(found)}, expected a path")
    unknown = [field for field in _FIELD.findall(found) if field not in fields]
    rest = _FIELD.sub("", found)
    if unknown or "{" in rest or "}" in rest:
        raise BadMessage(f"{INFO}: {key} is {_short(found)}; a path may hold {', '.join('{' + f + '}' for f in fields)}")
    return found


def check_order(layout: Layout) -> Layout:
    """The layout, if its episodes follow each other from the first row to the last. Raises BadMessage."""
    end = 0
    if not layout.episodes:
        raise Empty(f"dataset {layout.root.name}: holds no episodes; record or import some")
    for number, episode in enumerate(layout.episodes):
        if episode.begin != end or episode.end <= episode.begin:
            raise BadMessage(
                f"meta/episodes: episode {number} has rows {episode.begin} to {episode.end}, expected a first row of {end} and "
                "at least one: the episodes do not follow each other from the first row to the last"
            )
        end = episode.end
    total = whole(layout.info, "total_frames")
    if end != total:
        raise BadMessage(f"{INFO}: total_frames is {total}, the episodes have {end} rows")
    return layout


def _upright(feature: Feature) -> Feature:
    """Pictures as [height, width, channels], also where a v2 dataset names its axes in another order."""
    names = feature.get("names")
    if feature["dtype"] in PICTURES and isinstance(names, list) and names and str(names[0]).startswith("channel"):
        channels, height, width = feature["shape"]
        feature = feature | {"shape": [height, width, channels], "names": ["height", "width", "channels"]}
    return feature


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
