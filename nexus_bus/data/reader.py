"""Read a LeRobot dataset of v2.0, v2.1 or v3.0: what workers/environment.py draws SFT batches from.

A dataset is a tenant's: paths it names may not leave its folder, sizes are compared with what is declared, and its
statistics are computed from all frames, because a policy that runs on wrong ones moves a robot wrongly.
"""

import bisect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nexus_bus.data import layout_v20, layout_v21, layout_v30
from nexus_bus.data.layout import IMAGES, INDEX, INFO, PICTURES, Empty, Episode, Layout, Root, check_order, read_info
from nexus_bus.data.pictures import Films, still
from nexus_bus.data.rows import Rows
from nexus_bus.data.statistics import over, plain
from nexus_bus.errors import BadMessage, ContractError
from schemas.policy import Statistics

LAYOUTS = {"v2.0": layout_v20.read, "v2.1": layout_v21.read, "v3.0": layout_v30.read}
STATE, ACTION = "observation.state", "action"
STATISTICS = ("min", "max", "mean", "std", "q01", "q99", "count")  # those a policy needs


@dataclass(frozen=True)
class Chunk:
    """A training sample without its pictures: state `[S]`, actions `[T, D]` float32, and which of them lie past the end."""

    state: np.ndarray
    instruction: str
    actions: np.ndarray
    is_pad: np.ndarray


@dataclass(frozen=True)
class Frame:
    """One row: HWC uint8 pictures by camera, state `[S]`, action `[D]`."""

    images: dict[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    instruction: str
    episode: int


class Dataset:
    """A dataset of any size; what is asked for is read then, and a bounded part of it stays. Threads may share it.

    Raises:
        NotFound: no finalised dataset there.
        BadMessage: a version nobody here reads, or a dataset that contradicts itself; the text names the file and key.
    """

    def __init__(self, root: Path | str) -> None:
        self.layout = read_layout(root)
        self.root = self.layout.root.path
        self.version = self.layout.version
        self.info = self.layout.info
        self.features = self.layout.features
        self.fps = self.layout.fps
        self.tasks = self.layout.tasks
        self.episodes: list[Episode] = self.layout.episodes
        self.cameras = {key.removeprefix(IMAGES): key for key, f in self.features.items() if f["dtype"] in PICTURES}
        for key in (STATE, ACTION, *INDEX):
            if key not in self.features:
                raise BadMessage(f"{INFO}: no feature {key}; a policy learns from {STATE} and {ACTION}")
        self.rows = Rows(self.layout)
        self.rows.check_ends()
        columns = self.rows.columns(0).names
        for key, feature in self.features.items():
            if feature["dtype"] != "video" and key not in columns:
                raise BadMessage(f"{self.rows.tables[0].name}: no column {key}, which {INFO} names as a feature")
        self.films = Films(self.layout.root, self.fps)
        self._instructions = {number: task for task, number in self.tasks.items()}
        self._begins = [episode.begin for episode in self.episodes]
        self._statistics: dict[str, Statistics] = {}
        self._lock = threading.RLock()  # decoders and open files serve one at a time

    def __len__(self) -> int:
        """Number of frames."""
        return self.episodes[-1].end

    @property
    def replaced(self) -> bool:
        """Whether another dataset lies in this one's place by now; what is not read yet cannot be read any more."""
        return self.layout.root.replaced

    def stats(self, key: str) -> Statistics:
        """Per-dimension statistics of a key over all frames: of numbers computed, of pictures as meta/stats.json states them.

        Raises:
            ContractError: no such key, or pictures without whole statistics; nothing stands in for them.
            BadMessage: a value that is not finite.
        """
        with self._lock:
            if key not in self._statistics:
                self._statistics[key] = self._declared(key) if self._is_picture(key) else self._computed(key)
            return self._statistics[key]

    def frame(self, index: int) -> Frame:
        """One row with its pictures. Raises IndexError past the end."""
        chunk = self.chunk(index, 1)
        return Frame(self.images(index), chunk.state, chunk.actions[0], chunk.instruction, self.episode_of(index))

    def frames(self, indices: Sequence[int] | np.ndarray) -> list[Frame]:
        """Several rows with their pictures, in the order asked for, decoded in the order in which they lie."""
        found = {index: self.frame(index) for index in sorted({int(index) for index in indices})}
        return [found[int(index)] for index in indices]

    def chunk(self, index: int, horizon: int) -> Chunk:
        """The `horizon` actions from a frame on; past the episode's end the last one repeats, marked in `is_pad`."""
        episode = self.episodes[self.episode_of(index)]
        rows = np.arange(index, index + horizon)
        with self._lock:
            actions = self._finite(ACTION, index, min(index + horizon, episode.end))
            state = self._finite(STATE, index, index + 1)[0]
            instruction = self.instructions(index, index + 1)[0]
        actions = actions[np.minimum(rows, episode.end - 1) - index]
        return Chunk(state, instruction, actions, rows >= episode.end)

    def instructions(self, begin: int, end: int) -> list[str]:
        """What rows [begin, end) were asked to do."""
        with self._lock:
            numbers = self.rows.numbers("task_index", begin, end).ravel().tolist()
        for row, number in enumerate(numbers, begin):
            if number not in self._instructions:
                raise BadMessage(f"data: frame {row} has task_index {number}, which meta/tasks does not have")
        return [self._instructions[number] for number in numbers]

    def images(self, index: int) -> dict[str, np.ndarray]:
        """A frame's pictures by camera, HWC uint8."""
        return {camera: self.image(key, index) for camera, key in self.cameras.items()}

    def image(self, key: str, index: int) -> np.ndarray:
        """A frame's picture of one feature, HWC uint8."""
        number = self.episode_of(index)
        episode, shape = self.episodes[number], self.features[key]["shape"]
        with self._lock:
            if self.features[key]["dtype"] == "video":
                film = episode.films[key]
                where = f"{film.path}: {key} of episode {number}, frame {index - episode.begin}"
                time = film.begin + (index - episode.begin) / self.fps
                return self.films.at(film.path, time, shape, where)
            cell = self.rows.cell(key, index)
            where = f"{episode.data}: {key} of episode {number}, frame {index - episode.begin}"
            return still(self._stored(cell, where), shape, where)

    def numbers(self, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """All rows of some columns in order, as (first row, columns by key `[n, *shape]`), a bounded number at a time."""
        return self.rows.stream(keys)

    def episode_of(self, index: int) -> int:
        """The episode of a frame. Raises IndexError past the end."""
        if not 0 <= index < len(self):
            raise IndexError(f"frame {index} of {len(self)}")
        return bisect.bisect_right(self._begins, index) - 1

    def close(self) -> None:
        """Close what is open; it opens again when asked."""
        with self._lock:
            self.films.close()
            self.rows.close()

    def _is_picture(self, key: str) -> bool:
        return key in self.features and self.features[key]["dtype"] in PICTURES

    def _finite(self, key: str, begin: int, end: int) -> np.ndarray:
        found = self.rows.numbers(key, begin, end).astype(np.float32).reshape(end - begin, -1)
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found).all(1))[0])
            raise BadMessage(f"data: {key} of frame {begin + row} is not finite; `nexus data check` lists all")
        return found

    def _stored(self, cell: dict[str, Any], where: str) -> bytes:
        if cell["bytes"] is not None:
            return cell["bytes"]
        try:
            return self.layout.root.current(cell["path"]).read_bytes()
        except OSError as error:
            raise BadMessage(f"{where}: {cell['path']!r} is not readable: {error.strerror}") from error

    def _computed(self, key: str) -> Statistics:
        if key not in self.features:
            raise ContractError(f"{INFO}: no feature {key!r}; there are {', '.join(sorted(self.features))}")

        def batches() -> Iterator[np.ndarray]:
            for begin, columns in self.numbers([key]):
                if key not in columns:
                    raise BadMessage(f"data: no column {key}, which {INFO} names as a feature")
                values = columns[key].reshape(len(columns[key]), -1)
                wrong = np.flatnonzero(~np.isfinite(values).all(1))
                if len(wrong):
                    raise BadMessage(f"data: {key} of frame {begin + wrong[0]} is not finite; `nexus data check` lists all")
                yield values

        found = plain(over(batches))
        return Statistics(**{name: found[name] for name in STATISTICS[:-1]}, count=found["count"][0])

    def _declared(self, key: str) -> Statistics:
        declared = self.layout.declared().get(key)
        if declared is None:
            raise ContractError(f"meta: no statistics of {key!r}; `nexus data convert` computes them")
        missing = [name for name in STATISTICS if name not in declared]
        if missing:
            raise ContractError(f"meta: {key} has no {missing[0]}; `nexus data convert` computes it, nothing stands in for it")
        values = {name: np.asarray(declared[name], np.float64).ravel() for name in STATISTICS[:-1]}
        for name, value in values.items():
            if value.size != 3 or not np.isfinite(value).all():
                raise ContractError(f"meta: {key}.{name} is not 3 finite numbers")
        lists = {name: value.tolist() for name, value in values.items()}
        return Statistics(**lists, count=int(np.ravel(declared["count"])[0]))


def read_layout(root: Path | str) -> Layout:
    """The metadata of a dataset of any version. Raises NotFound, BadMessage."""
    folder = Root(root)
    info = read_info(folder)
    version = info.get("codebase_version")
    if version not in LAYOUTS:
        raise BadMessage(f"{INFO}: codebase_version {version!r}, this reader takes {', '.join(LAYOUTS)}")
    if info.get("total_episodes") == 0:  # it needs no further files
        raise Empty(f"{INFO}: total_episodes is 0: dataset {folder.name} holds no episodes; record or import some")
    return check_order(LAYOUTS[version](folder, info))


__all__ = ["Chunk", "Dataset", "Episode", "Frame", "read_layout"]
