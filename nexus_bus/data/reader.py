"""Read a LeRobot v3.0 dataset: what workers/environment.py draws SFT batches from.

A dataset is a tenant's: paths it names may not leave its folder, sizes are compared with what is declared, and a missing
statistics key is an error, because a policy that runs on numbers that were never normalised moves a robot wrongly.
"""

import bisect
import io
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image as Pillow

from nexus_bus.data.writer import DATA_PATH, EPISODES_PATH, VERSION, VIDEO_PATH
from nexus_bus.errors import BadMessage, ContractError, NotFound
from nexus_bus.tensors import MAX_PIXELS
from schemas.policy import Statistics

IMAGES = "observation.images."
OPEN_FILMS = 8


@dataclass(frozen=True)
class Episode:
    """Rows [begin, end) of the dataset, and where its films are: key -> (chunk, file, first second)."""

    begin: int
    end: int
    task: str
    films: dict[str, tuple[int, int, float]]


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
    """A whole dataset; numbers in memory, pictures decoded when asked for.

    Raises:
        NotFound: no finalised dataset there.
        BadMessage: it is not LeRobot v3.0, or contradicts itself; the text names the file and key.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        info_path = self.root / "meta/info.json"
        if not info_path.is_file():
            raise NotFound(
                f"dataset {self.root.name}: there is no meta/info.json in {self.root.parent.name}/{self.root.name}. A dataset "
                "is a finalised LeRobot v3.0 directory that lies there already: nothing is fetched from a hub"
            )
        try:
            self.info: dict[str, Any] = json.loads(info_path.read_text())
            self._statistics: dict[str, Any] = json.loads((self.root / "meta/stats.json").read_text())
            if self.info["codebase_version"] != VERSION:
                raise BadMessage(
                    f"meta/info.json: codebase_version {self.info['codebase_version']!r}, this reader takes {VERSION}"
                )
            self.features: dict[str, Any] = self.info["features"]
            self.fps = float(self.info["fps"])
            self.tasks = _tasks(pq.read_table(self.root / "meta/tasks.parquet"))
            rows = self._episode_rows()
            self.episodes = [self._episode(row) for row in rows]
            self._table = self._rows(rows)
            self.cameras = {key.removeprefix(IMAGES): key for key in self.features if key.startswith(IMAGES)}
            self._check()
        except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
            raise BadMessage(
                f"dataset {self.root.name}: not a whole LeRobot dataset: {type(error).__name__}: {error}"
            ) from error
        self._begins = [episode.begin for episode in self.episodes]
        self._films: OrderedDict[Path, _Decoder] = OrderedDict()

    def __len__(self) -> int:
        """Number of frames."""
        return self._table.num_rows

    def stats(self, key: str) -> Statistics:
        """Per-dimension statistics of a key over all frames. Raises ContractError when any of them is missing."""
        found = self._statistics.get(key)
        if found is None:
            raise ContractError(f"meta/stats.json: no statistics of {key!r}; there are {', '.join(sorted(self._statistics))}")
        missing = [name for name in ("min", "max", "mean", "std", "q01", "q99", "count") if name not in found]
        if missing:
            raise ContractError(
                f"meta/stats.json: {key} has no {missing[0]}; write it with true quantiles, nothing stands in for it"
            )
        values = {name: np.asarray(found[name], np.float64).ravel() for name in ("min", "max", "mean", "std", "q01", "q99")}
        size = 3 if key.startswith(IMAGES) else int(np.prod(self.features[key]["shape"]))
        for name, value in values.items():
            if value.size != size or not np.isfinite(value).all():
                raise ContractError(f"meta/stats.json: {key}.{name} is not {size} finite numbers")
        lists = {name: value.tolist() for name, value in values.items()}
        return Statistics(**lists, count=int(np.ravel(found["count"])[0]))

    def frame(self, index: int) -> Frame:
        """One row with its pictures. Raises IndexError past the end."""
        chunk = self.chunk(index, 1)
        return Frame(self.images(index), chunk.state, chunk.actions[0], chunk.instruction, self._episode_of(index))

    def chunk(self, index: int, horizon: int) -> Chunk:
        """The `horizon` actions from a frame on; past the episode's end the last one repeats, marked in `is_pad`."""
        episode = self.episodes[self._episode_of(index)]
        rows = np.arange(index, index + horizon)
        actions = self._actions[np.minimum(rows, episode.end - 1)]
        return Chunk(self._states[index], self._instructions[self._task_of[index]], actions, rows >= episode.end)

    def images(self, index: int) -> dict[str, np.ndarray]:
        """A frame's pictures by camera, HWC uint8."""
        episode = self.episodes[self._episode_of(index)]
        pictures: dict[str, np.ndarray] = {}
        for camera, key in self.cameras.items():
            if self.features[key]["dtype"] == "video":
                chunk, file, begin = episode.films[key]
                pattern = self.info["video_path"] or VIDEO_PATH
                path = self._inside(pattern.format(video_key=key, chunk_index=chunk, file_index=file))
                picture = self._film(path).at(begin + (index - episode.begin) / self.fps)
            else:
                picture = self._still(self._table[key][index].as_py())
            if list(picture.shape) != list(self.features[key]["shape"]):
                raise BadMessage(f"{key}[{index}]: picture {list(picture.shape)}, info.json says {self.features[key]['shape']}")
            pictures[camera] = picture
        return pictures

    def close(self) -> None:
        """Close the films that are open."""
        while self._films:
            self._films.popitem()[1].close()

    def _check(self) -> None:
        for key in ("observation.state", "action"):
            if key not in self._table.column_names:
                raise BadMessage(f"dataset {self.root.name}: no column {key}")
        missing = [key for key in self.cameras.values() if self.features[key]["dtype"] not in ("image", "video")]
        if missing:
            raise BadMessage(
                f"meta/info.json: {missing[0]} has dtype {self.features[missing[0]]['dtype']!r}, not image or video"
            )
        self._states = _matrix(self._table["observation.state"])
        self._actions = _matrix(self._table["action"])
        self._task_of = self._table["task_index"].to_numpy()
        self._instructions = {number: task for task, number in self.tasks.items()}
        if not set(np.unique(self._task_of).tolist()) <= set(self._instructions):
            raise BadMessage("data: a task_index that meta/tasks.parquet does not have")
        if not (np.isfinite(self._states).all() and np.isfinite(self._actions).all()):
            raise BadMessage("data: observation.state or action holds a value that is not finite")

    def _episode_rows(self) -> list[dict[str, Any]]:
        files = sorted((self.root / "meta/episodes").rglob("*.parquet")) or [self.root / EPISODES_PATH]
        wanted = ("episode_index", "tasks", "length", "data/", "videos/", "dataset_")
        rows: list[dict[str, Any]] = []
        for file in files:
            names = [name for name in pq.read_schema(file).names if name.startswith(wanted)]
            rows += pq.read_table(file, columns=names).to_pylist()
        return sorted(rows, key=lambda row: row["episode_index"])

    def _episode(self, row: dict[str, Any]) -> Episode:
        films = {
            key: tuple(row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index", "from_timestamp"))
            for key, feature in self.features.items()
            if feature["dtype"] == "video"
        }
        return Episode(row["dataset_from_index"], row["dataset_to_index"], row["tasks"][0], films)  # type: ignore[arg-type]

    def _rows(self, episodes: list[dict[str, Any]]) -> pa.Table:
        pattern = self.info.get("data_path") or DATA_PATH
        places = sorted({(row["data/chunk_index"], row["data/file_index"]) for row in episodes})
        paths = [self._inside(pattern.format(chunk_index=chunk, file_index=file)) for chunk, file in places]
        table = pa.concat_tables([pq.read_table(path, memory_map=True) for path in paths])
        index = table["index"].to_numpy()
        if len(index) != self.info["total_frames"] or not np.array_equal(index, np.arange(len(index))):
            raise BadMessage(f"data: {len(index)} rows that do not count 0..{self.info['total_frames'] - 1}")
        ends = [0] + [row["dataset_to_index"] for row in episodes]
        if ends[:-1] != [row["dataset_from_index"] for row in episodes] or ends[-1] != len(index):
            raise BadMessage("meta/episodes: the episodes do not follow each other from the first row to the last")
        return table

    def _episode_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"frame {index} of {len(self)}")
        return bisect.bisect_right(self._begins, index) - 1

    def _inside(self, name: str) -> Path:
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root):
            raise BadMessage(f"dataset {self.root.name}: {name!r} leads out of it")
        return path

    def _still(self, cell: dict[str, Any]) -> np.ndarray:
        data = cell["bytes"] if cell["bytes"] is not None else self._inside(cell["path"]).read_bytes()
        try:
            with Pillow.open(io.BytesIO(data), formats=["PNG", "JPEG"]) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise BadMessage(f"picture of {opened.width}x{opened.height} pixels")
                return np.array(opened.convert("RGB"))
        except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
            raise BadMessage(f"dataset {self.root.name}: unreadable picture: {error}") from error

    def _film(self, path: Path) -> "_Decoder":
        """Opening a film costs more than a frame of it, so some stay open."""
        if path not in self._films:
            self._films[path] = _Decoder(path)
            if len(self._films) > OPEN_FILMS:
                self._films.popitem(last=False)[1].close()
        self._films.move_to_end(path)
        return self._films[path]


class _Decoder:
    """An open film: forward frame by frame while times rise, by seeking otherwise."""

    def __init__(self, path: Path) -> None:
        import av  # here: only films need it

        self._path = path
        self._container = av.open(str(path))
        self._stream = self._container.streams.video[0]
        if not 0 < self._stream.width * self._stream.height <= MAX_PIXELS:
            raise BadMessage(f"{path.name}: film of {self._stream.width}x{self._stream.height} pixels")
        self._frames: Iterator[Any] = iter(())
        self._time = float("inf")  # of the last frame decoded

    def at(self, time: float) -> np.ndarray:
        """The picture shown at `time` seconds."""
        rate = float(self._stream.average_rate or 1)
        half = 0.5 / rate
        if not self._time + half < time < self._time + 8 / rate:
            self._container.seek(max(0, int((time - half) / float(self._stream.time_base or 1))), stream=self._stream)
            self._frames = self._container.decode(self._stream)
        for frame in self._frames:
            self._time = float(frame.time)
            if self._time >= time - half:
                return frame.to_ndarray(format="rgb24")
        raise BadMessage(f"{self._path.name}: no picture at {time:.3f} s")

    def close(self) -> None:
        """Let go of the file."""
        self._container.close()


def _tasks(table: pa.Table) -> dict[str, int]:
    names = table["task"] if "task" in table.column_names else table["__index_level_0__"]
    return dict(zip(names.to_pylist(), table["task_index"].to_pylist(), strict=True))


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    values = column.combine_chunks()
    if pa.types.is_fixed_size_list(values.type) or pa.types.is_list(values.type):
        return values.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(values), -1)
    return values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, 1)
