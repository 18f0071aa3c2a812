"""Write a LeRobot v3.0 dataset, episode by episode. Fed by data/record.py and data/convert.py.

Everything goes into a hidden folder beside the target, which `finalize` renames into place as its last act: a writer that
was killed leaves nothing that looks like a dataset, and a new recording replaces an old one whole. One that rests keeps that
folder, and another writer goes on from there. Pictures are stored as
PNG bytes inside the parquet files (dtype "image", exact) or as one H.264 film per camera (dtype "video", small).
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nexus_bus.data import tables
from nexus_bus.data.film_writer import VIDEO_MB, FilmWriter
from nexus_bus.data.layout import INDEX, INFO, PICTURES, Feature
from nexus_bus.data.layout_v30 import CHUNK, DATA_PATH, EPISODES_PATH, TASKS_PATH, VERSION, VIDEO_PATH, place
from nexus_bus.data.rows import BATCH, matrix
from nexus_bus.data.statistics import Statistic, histogram, number_statistics, over, picture_statistics, plain
from nexus_bus.errors import BadMessage, Conflict, Refused
from nexus_bus.tensors import encode_image

DATA_MB = 100
REST = "rest.json"  # of a writing that rests, in its hidden folder
EPISODES_AT_ONCE = 200  # whose statistics wait in memory to be written

Pictures = np.ndarray | Sequence[np.ndarray]  # `[n, H, W, 3]` uint8, or one by one for an episode that is large


class DatasetInfo(msgspec.Struct, frozen=True):
    """What was written. `attempts` counts what was played for it, `success` is the share of those that succeeded."""

    episodes: int
    frames: int
    attempts: int = 0
    success: float = 1.0


class Rest(msgspec.Struct, frozen=True):
    """Where a writing rests."""

    whose: str
    note: dict[str, int]
    episodes: int
    frames: int
    table_file: int
    tasks: dict[str, int]
    counts: dict[str, list[list[int]]]


class DatasetWriter:
    """A context manager: leaving it without `finalize` or `rest` throws the recording away.

    Args:
        root: folder of the dataset; its parent is created.
        fps: frames per second, nominal; an integer, as the format wants it.
        features: key -> {"dtype": a number's, "image" or "video", "shape": [...], "names": ...}.
        whose: what is written, if it may `rest`: one that rests under the same name is gone on with.

    Attributes:
        episodes: that are written.
        note: what was given to `rest`, where this goes on; else empty.

    Raises:
        Conflict: another process is recording the same dataset.
        Refused: there is something at `root` that is no dataset.
        BadMessage: a feature or a frame that does not fit; the text names it.
    """

    def __init__(self, root: Path | str, fps: int, features: Mapping[str, Feature], robot_type: str, whose: str = "") -> None:
        self.root = Path(root)
        if self.root.exists() and not (self.root / INFO).is_file() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise Refused(f"{self.root}: holds something that is no dataset, which writing one there would replace")
        self.fps = fps
        self.robot_type = robot_type
        self._features = {key: dict(feature) for key, feature in features.items() if key not in INDEX}
        for key, feature in self._features.items():
            if feature["dtype"] not in (*tables.NUMBERS, *PICTURES):
                raise BadMessage(
                    f"features.{key}.dtype: {feature['dtype']!r} is not one of {', '.join((*tables.NUMBERS, *PICTURES))}"
                )
        self._features |= {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in INDEX.items()}
        self._counts = {key: np.zeros((3, 256), np.int64) for key, f in self._features.items() if f["dtype"] in PICTURES}
        self._tasks: dict[str, int] = {}
        self._waiting: list[dict[str, Any]] = []  # episodes whose rows are not in the table yet
        self.episodes = self._frames = 0
        self.note: dict[str, int] = {}
        self._whose = whose
        self._schema = tables.schema(self._features)
        self._table: pq.ParquetWriter | None = None
        self._episode_table: pq.ParquetWriter | None = None
        self._table_path = Path()
        self._table_file = -1
        self._partial = partial(self.root)
        self._films = {
            key: FilmWriter(self._partial, key, fps, feature["shape"])
            for key, feature in self._features.items()
            if feature["dtype"] == "video"
        }
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self._lock = (self.root.parent / f".{self.root.name}.lock").open("w")
        except OSError as error:
            raise Refused(f"{self.root}: cannot be written: {error.strerror or error}; name another place") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when a writer dies
        except OSError as error:
            self._lock.close()
            raise Conflict(f"dataset {self.root.name}: another process is recording it") from error
        if not self._goes_on():
            shutil.rmtree(self._partial, ignore_errors=True)  # what a killed writer left
            self._partial.mkdir()

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._lock.closed:
            self._close_files()
            shutil.rmtree(self._partial, ignore_errors=True)
            self._lock.close()

    def add_episode(
        self, frames: Mapping[str, Pictures], task: str | Sequence[str], films: Mapping[str, Path] | None = None
    ) -> None:
        """Append an episode: one array per feature, `[N, *shape]`, pictures `[N, H, W, 3]` uint8 or one by one.

        Args:
            task: the instruction, or one per frame.
            films: of cameras whose film exists already and holds this episode alone: it is taken over as it is.
        """
        length = self._checked(frames)
        said = [task] * length if isinstance(task, str) else list(task)
        if len(said) != length:
            raise BadMessage(f"episode: {len(said)} tasks for {length} frames")
        numbers = [self._tasks.setdefault(one, len(self._tasks)) for one in said]
        columns: dict[str, Any] = dict(frames) | {
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, self.episodes),
            "index": np.arange(self._frames, self._frames + length),
            "task_index": np.array(numbers),
        }
        episode: dict[str, Any] = {"episode_index": self.episodes, "tasks": list(dict.fromkeys(said)), "length": length}
        rows, seen, where = {}, {}, {}
        for key, values in columns.items():
            if key in self._counts:
                counts = np.zeros((3, 256), np.int64)
                rows[key], place_of = self._pictures(key, self._looked_at(key, values, counts), (films or {}).get(key), length)
                where |= place_of
                self._counts[key] += counts
                seen[key] = picture_statistics(counts, length)
            else:
                rows[key] = tables.column(values, self._schema.field(key).type)
                seen[key] = number_statistics(values)
        episode |= self._write_rows(rows)
        episode |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + length} | where
        for key, statistic in seen.items():
            episode |= {f"stats/{key}/{name}": value for name, value in plain(statistic).items()}
        self._waiting.append(episode | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self.episodes += 1
        self._frames += length
        if len(self._waiting) >= EPISODES_AT_ONCE:
            self._write_episodes()

    def rest(self, note: dict[str, int]) -> None:
        """Close it, so that a writer of the same name goes on from here. Films cannot be gone on with."""
        if self.episodes:
            self._write_episodes()
        self._close_files()
        if self.episodes:
            shutil.copyfile(self._partial / EPISODES_PATH, self._partial / f"episodes-{self.episodes}.parquet")
        counts = {key: count.tolist() for key, count in self._counts.items()}
        rest = Rest(self._whose, note, self.episodes, self._frames, self._table_file, self._tasks, counts)
        fresh = self._partial / f"{REST}.new"
        fresh.write_bytes(msgspec.json.encode(rest))
        fresh.replace(self._partial / REST)  # whole, or as it was
        self._lock.close()

    def _goes_on(self) -> bool:
        """Whether there is something to go on with. A writer that is killed later leaves it as it was found."""
        rest = resting(self.root)
        if not self._whose or rest is None or rest.whose != self._whose:
            return False
        self.note, self.episodes, self._frames, self._table_file = rest.note, rest.episodes, rest.frames, rest.table_file
        self._tasks = dict(rest.tasks)
        self._counts = {key: np.array(count, np.int64) for key, count in rest.counts.items()}
        if self.episodes:
            written = pq.read_table(self._partial / f"episodes-{self.episodes}.parquet")
            self._episode_table = pq.ParquetWriter(self._partial / EPISODES_PATH, written.schema)
            self._episode_table.write_table(written)
        kept = {self._partial / DATA_PATH.format(**place(number)) for number in range(self._table_file + 1)}
        for path in self._partial.glob("data/*/*"):
            if path not in kept:
                path.unlink()
        return True

    def finalize(self) -> DatasetInfo:
        """Write the metadata and put the dataset in place. Raises BadMessage for one without episodes."""
        if not self.episodes:
            raise BadMessage(f"dataset {self.root.name}: no episodes to write")
        self._write_episodes()
        self._close_files()
        pq.write_table(tables.tasks(self._tasks), self._partial / TASKS_PATH)
        statistics = json.dumps({key: plain(self._total(key)) for key in self._features})
        (self._partial / "meta/stats.json").write_text(statistics)
        (self._partial / "meta/info.json").write_text(json.dumps(self._info(), indent=2))
        for left in (*self._partial.glob("episodes-*.parquet"), *self._partial.glob(f"{REST}*")):
            left.unlink()
        retired = self.root.parent / f".{self.root.name}.replaced"
        shutil.rmtree(retired, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.root.rename(retired)
        self._partial.rename(self.root)
        shutil.rmtree(retired, ignore_errors=True)
        self._lock.close()
        return DatasetInfo(self.episodes, self._frames)

    def _checked(self, frames: Mapping[str, Pictures]) -> int:
        given = {key for key in self._features if key not in INDEX}
        if set(frames) != given:
            raise BadMessage(f"episode: keys {sorted(frames)}, expected {sorted(given)}")
        length = len(next(iter(frames.values())))
        for key, values in frames.items():
            feature = self._features[key]
            shape, dtype = list(feature["shape"]), "uint8" if feature["dtype"] in PICTURES else feature["dtype"]
            if not length or len(values) != length:
                raise BadMessage(f"episode.{key}: {len(values)} frames, expected {length or 'at least 1'}")
            if not isinstance(values, np.ndarray):
                continue  # pictures one by one are looked at as they come
            if not ((shape == [1] and values.ndim == 1) or list(values.shape[1:]) == shape):
                raise BadMessage(f"episode.{key}: shape {list(values.shape)}, expected {[length, *shape]}")
            if values.dtype != dtype:
                raise BadMessage(f"episode.{key}: dtype {values.dtype}, expected {dtype}")
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                frame = int(np.flatnonzero(~np.isfinite(values.reshape(length, -1)).all(1))[0])
                raise BadMessage(f"episode.{key}: holds a value that is not finite, in frame {frame}")
        return length

    def _looked_at(self, key: str, pictures: Iterable[np.ndarray], counts: np.ndarray) -> Iterator[np.ndarray]:
        """The pictures on their way into a file, checked and counted."""
        shape = tuple(self._features[key]["shape"])
        for number, picture in enumerate(pictures):
            if picture.shape != shape or picture.dtype != np.uint8:
                raise BadMessage(
                    f"episode.{key}: frame {number} is {picture.dtype} {list(picture.shape)}, expected uint8 {list(shape)}"
                )
            counts += histogram(picture)
            yield picture

    def _pictures(self, key: str, pictures: Iterator[np.ndarray], film: Path | None, length: int) -> tuple[Any, dict[str, Any]]:
        """An episode's pictures as a column, or into a film; there is no column then, but a place."""
        if key not in self._films:
            cells = [{"bytes": encode_image(picture, "png").data, "path": None} for picture in pictures]
            return pa.array(cells, tables.PICTURE), {}
        if film is None:
            return None, self._films[key].write(pictures)
        for _ in pictures:
            pass  # counted
        return None, self._films[key].copy(film, length)

    def _write_rows(self, columns: Mapping[str, Any]) -> dict[str, int]:
        if self._table is None or self._table_path.stat().st_size > DATA_MB << 20:
            if self._table is not None:
                self._table.close()
            self._table_file += 1
            self._table_path = self._partial / DATA_PATH.format(**place(self._table_file))
            self._table_path.parent.mkdir(parents=True, exist_ok=True)
            self._table = pq.ParquetWriter(self._table_path, self._schema, compression="snappy")
        self._table.write_table(pa.Table.from_arrays([columns[name] for name in self._schema.names], schema=self._schema))
        return {f"data/{name}": value for name, value in place(self._table_file).items()}

    def _write_episodes(self) -> None:
        if self._episode_table is None:
            path = self._partial / EPISODES_PATH
            path.parent.mkdir(parents=True, exist_ok=True)
            self._episode_table = pq.ParquetWriter(path, pa.Table.from_pylist(self._waiting).schema)
        if self._waiting:
            self._episode_table.write_table(pa.Table.from_pylist(self._waiting, schema=self._episode_table.schema))
            self._waiting.clear()

    def _total(self, key: str) -> Statistic:
        if key in self._counts:
            return picture_statistics(self._counts[key], self._frames)
        return over(lambda: self._written(key))

    def _written(self, key: str) -> Iterator[np.ndarray]:
        """A column as it went into the files, for its statistics: it need not fit in memory."""
        for number in range(self._table_file + 1):
            name = DATA_PATH.format(**place(number))
            with pq.ParquetFile(self._partial / name) as file:
                for batch in file.iter_batches(BATCH, columns=[key]):
                    yield matrix(batch[key], self._features[key], name, key)

    def _close_files(self) -> None:
        for table in (self._table, self._episode_table):
            if table is not None:
                table.close()
        self._table = self._episode_table = None
        for film in self._films.values():
            film.close()

    def _info(self) -> dict[str, Any]:
        for key, film in self._films.items():
            self._features[key]["info"] = film.info
        return {
            "codebase_version": VERSION,
            "robot_type": self.robot_type,
            "total_episodes": self.episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK,
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._films else None,
            "features": self._features,
        }


def partial(root: Path) -> Path:
    """The hidden folder of a dataset that is being written, or whose writing rests."""
    return root.parent / f".{root.name}.partial"


def resting(root: Path) -> Rest | None:
    """Where the writing of a dataset rests, if it does."""
    try:
        return msgspec.json.decode((partial(root) / REST).read_bytes(), type=Rest)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
