"""Write a LeRobot v3.0 dataset, episode by episode. Fed by data/record.py.

Everything goes into a hidden folder beside the target, which `finalize` renames into place as its last act: a writer that
was killed leaves nothing that looks like a dataset, and a new recording replaces an old one whole. Pictures are stored as
PNG bytes inside the parquet files (dtype "image", exact) or as one H.264 film per camera (dtype "video", small).
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nexus_bus.data.statistics import Statistic, histogram, number_statistics, picture_statistics, plain
from nexus_bus.errors import BadMessage, Conflict
from nexus_bus.tensors import encode_image

VERSION = "v3.0"
CHUNK = 1000  # files per folder
DATA_MB = 100
VIDEO_MB = 200
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"

Feature = dict[str, Any]  # dtype, shape, names, as in info.json

_INDEX = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"}
_ARROW: dict[str, pa.DataType] = {"float32": pa.float32(), "float64": pa.float64(), "int64": pa.int64(), "bool": pa.bool_()}
_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class DatasetInfo(msgspec.Struct, frozen=True):
    """What was written. `attempts` counts the expert's tries, `success` is episodes over attempts."""

    episodes: int
    frames: int
    attempts: int = 0
    success: float = 1.0


@dataclass
class _Film:
    """The open mp4 of one camera; the number of its file is its own, not that of the data file."""

    file: int = -1
    frames: int = 0  # in this file
    path: Path = Path()
    container: Any = None
    stream: Any = None


@dataclass
class _Totals:
    numbers: list[np.ndarray] = field(default_factory=list)
    counts: np.ndarray = field(default_factory=lambda: np.zeros((3, 256), np.int64))


class DatasetWriter:
    """A context manager: leaving it without `finalize` throws the recording away.

    Args:
        root: folder of the dataset; its parent is created.
        fps: frames per second, nominal; an integer, as the format wants it.
        features: key -> {"dtype": "float32" | "int64" | "bool" | "image" | "video", "shape": [...], "names": ...}.
    Raises:
        Conflict: another process is recording the same dataset.
        BadMessage: a feature or a frame that does not fit; the text names it.
    """

    def __init__(self, root: Path | str, fps: int, features: Mapping[str, Feature], robot_type: str) -> None:
        self.root = Path(root)
        self.fps = fps
        self.robot_type = robot_type
        self._features = {key: dict(feature) for key, feature in features.items()}
        for key, feature in self._features.items():
            if feature["dtype"] not in (*_ARROW, "image", "video"):
                raise BadMessage(f"features.{key}.dtype: {feature['dtype']!r} is not one of {', '.join(_ARROW)}, image, video")
        self._features |= {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in _INDEX.items()}
        self._films = {key: _Film() for key, feature in self._features.items() if feature["dtype"] == "video"}
        self._totals = {key: _Totals() for key in self._features}
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._frames = 0
        self._schema = _schema(self._features)
        self._table: pq.ParquetWriter | None = None
        self._table_path = Path()
        self._table_file = -1
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self._lock = (self.root.parent / f".{self.root.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when a writer dies
        except OSError as error:
            self._lock.close()
            raise Conflict(f"dataset {self.root.name}: another process is recording it") from error
        self._partial = self.root.parent / f".{self.root.name}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)  # what a killed writer left
        self._partial.mkdir()

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._lock.closed:
            self._close_files()
            shutil.rmtree(self._partial, ignore_errors=True)
            self._lock.close()

    def add_episode(self, frames: Mapping[str, np.ndarray], task: str) -> None:
        """Append an episode: one array per feature, `[N, *shape]`, pictures `[N, H, W, 3]` uint8."""
        length = self._checked(frames)
        number = len(self._episodes)
        columns = dict(frames) | {
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": np.arange(self._frames, self._frames + length),
            "task_index": np.full(length, self._tasks.setdefault(task, len(self._tasks))),
        }
        episode: dict[str, Any] = {"episode_index": number, "tasks": [task], "length": length}
        episode |= self._write_rows(columns)
        episode |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + length}
        for key in self._films:
            episode |= self._write_film(key, columns[key])
        for key, values in columns.items():
            for name, value in plain(self._count(key, values)).items():
                episode[f"stats/{key}/{name}"] = value
        self._episodes.append(episode | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._frames += length

    def finalize(self) -> DatasetInfo:
        """Write the metadata and put the dataset in place. Raises BadMessage for one without episodes."""
        if not self._episodes:
            raise BadMessage(f"dataset {self.root.name}: no episodes to write")
        self._close_files()
        meta = self._partial / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), self._partial / EPISODES_PATH)
        pq.write_table(_task_table(self._tasks), meta / "tasks.parquet")
        (meta / "stats.json").write_text(json.dumps({key: plain(self._total(key)) for key in self._features}))
        (meta / "info.json").write_text(json.dumps(self._info(), indent=2))
        retired = self.root.parent / f".{self.root.name}.replaced"
        shutil.rmtree(retired, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.root.rename(retired)
        self._partial.rename(self.root)
        shutil.rmtree(retired, ignore_errors=True)
        self._lock.close()
        return DatasetInfo(len(self._episodes), self._frames)

    def _checked(self, frames: Mapping[str, np.ndarray]) -> int:
        given = {key for key in self._features if key not in _INDEX}
        if set(frames) != given:
            raise BadMessage(f"episode: keys {sorted(frames)}, expected {sorted(given)}")
        length = len(next(iter(frames.values())))
        for key, values in frames.items():
            feature = self._features[key]
            dtype = "uint8" if feature["dtype"] in ("image", "video") else feature["dtype"]
            scalar = feature["shape"] == [1] and values.ndim == 1
            if not length or len(values) != length or not (scalar or list(values.shape[1:]) == list(feature["shape"])):
                raise BadMessage(f"episode.{key}: shape {list(values.shape)}, expected [{length}, {feature['shape']}]")
            if values.dtype != dtype:
                raise BadMessage(f"episode.{key}: dtype {values.dtype}, expected {dtype}")
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise BadMessage(f"episode.{key}: holds a value that is not finite")
        return length

    def _write_rows(self, columns: Mapping[str, np.ndarray]) -> dict[str, int]:
        if self._table is None or self._table_path.stat().st_size > DATA_MB << 20:
            if self._table is not None:
                self._table.close()
            self._table_file += 1
            self._table_path = self._partial / DATA_PATH.format(**_place(self._table_file))
            self._table_path.parent.mkdir(parents=True, exist_ok=True)
            self._table = pq.ParquetWriter(self._table_path, self._schema, compression="snappy")
        arrays = [_column(columns[column.name], column.type) for column in self._schema]
        self._table.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        return {f"data/{name}": value for name, value in _place(self._table_file).items()}

    def _write_film(self, key: str, pictures: np.ndarray) -> dict[str, Any]:
        import av  # here: only films need it

        film = self._films[key]
        if film.container is None or film.path.stat().st_size > VIDEO_MB << 20:
            _close_film(film)
            film.file, film.frames = film.file + 1, 0
            film.path = self._partial / VIDEO_PATH.format(video_key=key, **_place(film.file))
            film.path.parent.mkdir(parents=True, exist_ok=True)
            film.container = av.open(str(film.path), "w")
            film.stream = film.container.add_stream("h264", rate=self.fps, options={"crf": "18", "g": "2"})
            film.stream.height, film.stream.width = pictures.shape[1:3]
            film.stream.pix_fmt = "yuv420p"
            film.stream.time_base = Fraction(1, self.fps)
        begin = film.frames
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts, frame.time_base = film.frames, Fraction(1, self.fps)
            film.container.mux(film.stream.encode(frame))
            film.frames += 1
        times = {"from_timestamp": begin / self.fps, "to_timestamp": film.frames / self.fps}
        return {f"videos/{key}/{name}": value for name, value in (_place(film.file) | times).items()}

    def _count(self, key: str, values: np.ndarray) -> Statistic:
        totals = self._totals[key]
        if values.dtype == np.uint8 and values.ndim == 4:
            counts = histogram(values)
            totals.counts += counts
            return picture_statistics(counts, len(values))
        totals.numbers.append(values)
        return number_statistics(values)

    def _total(self, key: str) -> Statistic:
        totals = self._totals[key]
        return (
            number_statistics(np.concatenate(totals.numbers))
            if totals.numbers
            else picture_statistics(totals.counts, self._frames)
        )

    def _close_files(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None
        for film in self._films.values():
            _close_film(film)

    def _info(self) -> dict[str, Any]:
        for key in self._films:
            height, width, _ = self._features[key]["shape"]
            self._features[key]["info"] = {
                "video.height": height, "video.width": width, "video.codec": "h264", "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False, "video.fps": self.fps, "video.channels": 3, "has_audio": False,
            }  # fmt: skip
        return {
            "codebase_version": VERSION,
            "robot_type": self.robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK,
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._films else None,
            "features": self._features,
        }


def _place(file: int) -> dict[str, int]:
    return {"chunk_index": file // CHUNK, "file_index": file % CHUNK}


def _close_film(film: _Film) -> None:
    if film.container is not None:
        film.container.mux(film.stream.encode(None))
        film.container.close()
        film.container = None


def _schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Columns and the "huggingface" metadata by which `datasets` knows vectors and pictures."""
    columns: list[tuple[str, pa.DataType]] = []
    described: dict[str, Any] = {}
    for key, feature in features.items():
        size = int(np.prod(feature["shape"]))
        if feature["dtype"] == "video":
            continue
        if feature["dtype"] == "image":
            columns.append((key, _PICTURE))
            described[key] = {"_type": "Image"}
            continue
        value = {"dtype": feature["dtype"], "_type": "Value"}
        dtype = _ARROW[feature["dtype"]]
        columns.append((key, dtype if size == 1 else pa.list_(dtype, size)))
        described[key] = value if size == 1 else {"feature": value, "length": size, "_type": "List"}
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def _column(values: np.ndarray, dtype: pa.DataType) -> pa.Array:
    if dtype == _PICTURE:
        return pa.array([{"bytes": encode_image(picture, "png").data, "path": None} for picture in values], dtype)
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, dtype.list_size) if pa.types.is_fixed_size_list(dtype) else flat.cast(dtype)


def _task_table(tasks: Mapping[str, int]) -> pa.Table:
    """`task` is the pandas index of this table, which the format's readers rely on."""

    def column(name: str, kind: str, dtype: str) -> dict[str, Any]:
        return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}

    index = {
        "name": None,
        "field_name": None,
        "pandas_type": "unicode",
        "numpy_type": "object",
        "metadata": {"encoding": "UTF-8"},
    }
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [index],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    table = pa.table({"task_index": pa.array(list(tasks.values()), pa.int64()), "task": pa.array(list(tasks))})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
