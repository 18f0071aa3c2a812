"""LeRobot v3.0: many episodes share a file, and a table says where each begins. Below data/reader.py and data/writer.py.

The number of a film's file is its camera's own and differs from that of the data file: an episode's pictures are found by
`videos/<key>/{chunk_index, file_index, from_timestamp}` and by nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nexus_bus.data.layout import Episode, Film, Layout, Root, features_of, fps_of, template
from nexus_bus.errors import BadMessage

VERSION = "v3.0"
CHUNK = 1000  # files per folder
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
TASKS_PATH = "meta/tasks.parquet"


def place(file: int) -> dict[str, int]:
    """Folder and number of a file, counted from 0 over all folders."""
    return {"chunk_index": file // CHUNK, "file_index": file % CHUNK}


def read(root: Root, info: dict[str, Any]) -> Layout:
    """The layout of a v3.0 dataset. Raises BadMessage naming the file and column."""
    features = features_of(info)
    films = [key for key, feature in features.items() if feature["dtype"] == "video"]
    data = template(info, "data_path", DATA_PATH, ("chunk_index", "file_index"))
    video = template(info, "video_path", VIDEO_PATH, ("chunk_index", "file_index", "video_key"))
    columns = ["episode_index", "tasks", "data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index"]
    for key in films:
        columns += [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    try:
        rows = _rows(root, columns)
        tasks = _tasks(root)
        episodes = [
            Episode(
                int(row["dataset_from_index"]),
                int(row["dataset_to_index"]),
                tuple(row["tasks"] or ()),
                data.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]),
                {key: _film(key, video, row) for key in films},
            )
            for row in rows
        ]
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        raise BadMessage(f"dataset {root.name}: not a whole LeRobot dataset: {type(error).__name__}: {error}") from error
    return Layout(root, VERSION, info, features, fps_of(info), tasks, episodes, lambda: root.json("meta/stats.json"))


def _film(key: str, video: str, row: dict[str, Any]) -> Film:
    where = f"videos/{key}/"
    path = video.format(video_key=key, chunk_index=row[where + "chunk_index"], file_index=row[where + "file_index"])
    return Film(path, float(row[where + "from_timestamp"]))


def _rows(root: Root, columns: list[str]) -> list[dict[str, Any]]:
    """The episodes' table, of which the many columns of statistics are left alone."""
    folder = root.inside("meta/episodes")
    names = sorted(str(path.relative_to(root.path)) for path in folder.rglob("*.parquet"))
    if not names:
        raise BadMessage(f"dataset {root.name}: there is no {EPISODES_PATH}; a writer that was killed leaves none")
    rows: list[dict[str, Any]] = []
    for name in names:
        with _parquet(root, name) as file:
            missing = [column for column in columns if column not in file.schema_arrow.names]
            if missing:
                raise BadMessage(f"{name}: no column {missing[0]}")
            rows += file.read(columns=columns).to_pylist()
    rows.sort(key=lambda row: row["episode_index"])
    for number, row in enumerate(rows):
        if row["episode_index"] != number:
            raise BadMessage(f"meta/episodes: episode_index {row['episode_index']} where {number} was expected")
    return rows


@contextmanager
def _parquet(root: Root, name: str) -> Iterator[pq.ParquetFile]:
    """A table of the dataset. What is wrong with the file is said with its name."""
    try:
        with pq.ParquetFile(root.inside(name)) as file:
            yield file
    except FileNotFoundError as error:
        raise BadMessage(f"dataset {root.name}: there is no {name}") from error
    except (OSError, pa.ArrowException) as error:
        raise BadMessage(f"dataset {root.name}: {name} cannot be read: {type(error).__name__}: {error}") from error


def _tasks(root: Root) -> dict[str, int]:
    with _parquet(root, TASKS_PATH) as file:
        table = file.read()
    names = table["task"] if "task" in table.column_names else table["__index_level_0__"]
    return dict(zip(names.to_pylist(), table["task_index"].to_pylist(), strict=True))
