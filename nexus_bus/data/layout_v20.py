"""LeRobot v2.0: an episode is a parquet file and a film per camera, and metadata are lines of JSON. Below data/reader.py.

`meta/info.json`, `meta/tasks.jsonl`, `meta/episodes.jsonl`, `meta/stats.json`;
`data/chunk-000/episode_000000.parquet`, `videos/chunk-000/<key>/episode_000000.mp4`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from nexus_bus.data.layout import Episode, Film, Layout, Root, features_of, fps_of, template, whole
from nexus_bus.errors import BadMessage

VERSION = "v2.0"
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
CHUNK = 1000  # episodes per folder


class _Episode(msgspec.Struct):
    episode_index: int
    length: int
    tasks: list[str] = []


class _Task(msgspec.Struct):
    task_index: int
    task: str


def read(root: Root, info: dict[str, Any]) -> Layout:
    """The layout of a v2.0 dataset. Raises BadMessage naming the file and field."""
    return layout(root, info, VERSION, lambda: root.json("meta/stats.json"))


def layout(root: Root, info: dict[str, Any], version: str, declared: Callable[[], dict[str, dict[str, Any]]]) -> Layout:
    """What v2.0 and v2.1 have in common: everything but the statistics."""
    features = features_of(info)
    data = template(info, "data_path", DATA_PATH, ("episode_chunk", "episode_index"))
    video = template(info, "video_path", VIDEO_PATH, ("episode_chunk", "episode_index", "video_key"))
    chunk = whole(info, "chunks_size", CHUNK)
    films = [key for key, feature in features.items() if feature["dtype"] == "video"]
    episodes: list[Episode] = []
    begin = 0
    for number, line in enumerate(sorted(root.lines("meta/episodes.jsonl", _Episode), key=lambda line: line.episode_index)):
        if line.episode_index != number:
            raise BadMessage(f"meta/episodes.jsonl: episode_index {line.episode_index} where {number} was expected")
        place = {"episode_chunk": number // chunk, "episode_index": number}
        places = {key: Film(video.format(video_key=key, **place), 0.0) for key in films}
        episodes.append(Episode(begin, begin + line.length, tuple(line.tasks), data.format(**place), places))
        begin += line.length
    tasks = {line.task: line.task_index for line in root.lines("meta/tasks.jsonl", _Task)}
    return Layout(root, version, info, features, fps_of(info), tasks, episodes, declared)
