"""Any dataset that this package reads, written anew as LeRobot v3.0 with statistics of its own. Behind `nexus data convert`.

Films of v2 hold one episode each and go over as they are; those of v3.0 are encoded again, since an episode need not begin
where a film can be cut.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nexus_bus.data import layout_v30, libero, tables
from nexus_bus.data.layout import INDEX, PICTURES, Feature
from nexus_bus.data.reader import Dataset
from nexus_bus.data.writer import DatasetInfo, DatasetWriter
from nexus_bus.errors import BadMessage, NotFound, Refused

Progress = Callable[[int, int], None]  # episodes done, of how many
Keep = Literal["keep", "image", "video"]

TOLERANCE = 0.1  # of a frame, by which a time may differ from its place


def convert(
    source: Path | str,
    target: Path | str,
    *,
    pictures: Keep = "keep",
    drop: Sequence[str] = (),
    turn: bool = True,
    progress: Progress | None = None,
) -> DatasetInfo:
    """Write `source`, a LeRobot dataset or HDF5 demonstrations, as a LeRobot v3.0 dataset at `target`.

    Args:
        pictures: "image" (exact) or "video" (small); "keep" leaves them, and makes "image" of HDF5.
        drop: features to leave out. turn: rotate HDF5's pictures by 180°.
    Raises:
        NotFound: nothing to read there. Refused: source and target are one.
        BadMessage: what cannot be read or would lose something; the text names the file, episode and feature.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve() or target.resolve() in source.resolve().parents:
        raise Refused(f"{target}: the target would replace the source; name another directory")
    tell = progress or (lambda done, total: None)
    files = [] if (source / "meta/info.json").exists() else libero.files_of(source)
    if files:
        return _demonstrations(files, target, "image" if pictures == "keep" else pictures, drop, turn, tell)
    if not source.exists():
        raise NotFound(f"{source}: there is no such directory or file")
    dataset = Dataset(source)
    try:
        return _dataset(dataset, target, pictures, drop, tell)
    finally:
        dataset.close()


def _demonstrations(
    files: list[Path], target: Path, pictures: str, drop: Sequence[str], turn: bool, tell: Progress
) -> DatasetInfo:
    features = _without(libero.features_of(files[0], pictures), drop)
    with DatasetWriter(target, libero.FPS, features, "libero") as writer:
        for done, path in enumerate(files):
            tell(done, len(files))
            for demo in libero.demonstrations(path, turn=turn):
                frames = {key: values for key, values in demo.frames.items() if key not in drop}
                try:
                    writer.add_episode(frames, demo.task)
                except BadMessage as error:
                    raise BadMessage(f"{demo.where}: {error}") from error
        tell(len(files), len(files))
        return writer.finalize()


def _dataset(dataset: Dataset, target: Path, pictures: Keep, drop: Sequence[str], tell: Progress) -> DatasetInfo:
    if dataset.fps != round(dataset.fps):
        raise BadMessage(f"meta/info.json: fps is {dataset.fps}; v3.0 wants whole frames per second")
    features = _without({key: f for key, f in dataset.features.items() if key not in INDEX}, drop)
    written = {key: _rewritten(key, feature, pictures) for key, feature in features.items()}
    # A film of v2 is one episode's alone.
    whole = [
        k for k in written if features[k]["dtype"] == written[k]["dtype"] == "video" and dataset.version != layout_v30.VERSION
    ]
    robot = str(dataset.info.get("robot_type") or "unknown")
    with DatasetWriter(target, round(dataset.fps), written, robot) as writer:
        for number, episode in enumerate(dataset.episodes):
            tell(number, len(dataset.episodes))
            _check_times(dataset, number)
            columns = {key: _column(dataset, key, number) for key in written}
            films = {key: dataset.layout.root.inside(episode.films[key].path) for key in whole}
            said = dataset.instructions(episode.begin, episode.end)
            try:
                writer.add_episode(columns, said, films)
            except BadMessage as error:
                raise BadMessage(f"episode {number}: {error}") from error
        tell(len(dataset.episodes), len(dataset.episodes))
        return writer.finalize()


def _rewritten(key: str, feature: Feature, pictures: Keep) -> Feature:
    dtype = feature["dtype"]
    if dtype in PICTURES:
        dtype = dtype if pictures == "keep" else pictures
    elif dtype not in tables.NUMBERS:
        raise BadMessage(f"features.{key}.dtype: {dtype!r} cannot be written; leave it out with --drop {key}")
    kept = {name: value for name, value in feature.items() if name in ("shape", "names")}
    return {"dtype": dtype, "names": None, **kept}


def _without(features: dict[str, Feature], drop: Sequence[str]) -> dict[str, Feature]:
    unknown = [key for key in drop if key not in features]
    if unknown:
        raise NotFound(f"--drop {unknown[0]}: no such feature; there are {', '.join(features)}")
    return {key: feature for key, feature in features.items() if key not in drop}


def _column(dataset: Dataset, key: str, number: int) -> Any:
    episode, feature = dataset.episodes[number], dataset.features[key]
    if feature["dtype"] in PICTURES:
        return _Pictures(dataset, key, number)
    return dataset.rows.numbers(key, episode.begin, episode.end).astype(feature["dtype"], copy=False)


def _check_times(dataset: Dataset, number: int) -> None:
    """Times are written anew from the frame's place, so they must have been that before."""
    episode = dataset.episodes[number]
    times = dataset.rows.numbers("timestamp", episode.begin, episode.end).ravel()
    off = np.abs(times - np.arange(len(times)) / dataset.fps) * dataset.fps
    wrong = np.flatnonzero(~(off < TOLERANCE))
    if len(wrong):
        frame = int(wrong[0])
        raise BadMessage(
            f"episode {number}: frame {frame} is at {times[frame]:.3f} s, not {frame / dataset.fps:.3f} at {dataset.fps:g} "
            "a second; `nexus data check` lists all such jumps"
        )


class _Pictures(Sequence[np.ndarray]):
    """An episode's pictures, decoded one by one."""

    def __init__(self, dataset: Dataset, key: str, number: int) -> None:
        self._dataset, self._key, self._episode = dataset, key, dataset.episodes[number]

    def __len__(self) -> int:
        return self._episode.end - self._episode.begin

    def __getitem__(self, index: Any) -> Any:
        return self._dataset.image(self._key, self._episode.begin + index)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))
