"""What is wrong with a dataset, and where: behind `nexus data check`. Reads everything once, holds an episode at a time.

Errors are what makes a policy wrong without a word; warnings are what somebody should have looked at; notices tell what could
not be looked at.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from nexus_bus.data import layout_v30
from nexus_bus.data.alignment import SURELY, alignment
from nexus_bus.data.layout import INDEX, INFO, Empty
from nexus_bus.data.reader import ACTION, STATE, STATISTICS, Dataset
from nexus_bus.data.statistics import QUANTILES, Statistic, over
from nexus_bus.errors import BadMessage, NotFound

Severity = Literal["error", "warning", "notice"]
Progress = Callable[[int, int], None]  # steps done, of how many

LISTED = 50  # findings of one code
JITTER = 0.05  # of a frame, by which times may be off
DARK = 16  # no channel of a black picture is above, of 255; an encoder leaves a little
SHORT = 4  # an episode this many times shorter than the median was cut short, maybe
CLOSE, CLOSE_QUANTILE = 1e-3, 0.05  # of a dimension's range, by which stated statistics may be off; others estimate quantiles
BASIC = ("min", "max", "mean", "std", "count")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing, where it was seen first. `frame` counts from the episode's begin."""

    code: str
    severity: Severity
    text: str
    key: str | None = None
    episode: int | None = None
    frame: int | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found; `more` counts findings beyond those listed, by code."""

    dataset: str
    version: str
    episodes: int
    frames: int
    pictures: int  # looked at
    findings: list[Finding]
    more: dict[str, int] = {}

    @property
    def errors(self) -> int:
        """How many of the findings are errors."""
        return self.count("error")

    def count(self, severity: Severity) -> int:
        """How many of the findings are of one severity."""
        return sum(finding.severity == severity for finding in self.findings)


def check(root: Path | str, *, every: int = 1, progress: Progress | None = None) -> Report:
    """Look at a dataset from end to end.

    Args:
        every: look at each so many pictures of an episode; 0 looks at none.
    Raises:
        NotFound: there is no dataset.
    """
    try:
        dataset = Dataset(root)
    except NotFound:
        raise
    except BadMessage as error:
        found = Finding(code="empty" if isinstance(error, Empty) else "unreadable", severity="error", text=str(error))
        return Report(dataset=Path(root).name, version="", episodes=0, frames=0, pictures=0, findings=[found])
    try:
        return _Check(dataset, every, progress or (lambda done, total: None)).run()
    finally:
        dataset.close()


class _Check:
    def __init__(self, dataset: Dataset, every: int, tell: Progress) -> None:
        self.dataset = dataset
        self.every = every
        self.tell = tell
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.unusable: set[str] = set()  # columns whose numbers are not all numbers
        self.broken: set[int] = set()  # files that cannot be read
        self.ended: dict[str, list[int]] = {}  # episodes whose last frame is marked, by mark
        self.done = self.pictures = 0
        self.numeric = [
            key for key, f in dataset.features.items() if key not in dataset.cameras.values() and f["dtype"] != "string"
        ]
        looks = len(dataset.cameras) if every else 0
        self.total = len(dataset.episodes) * (1 + looks) + len(self.numeric) + 1

    def run(self) -> Report:
        self.schemas()
        for number in range(len(self.dataset.rows.tables)):
            self.table(number)
        self.lengths()
        for key in self.numeric:
            self.statistics(key)
            self.step()
        self.picture_statistics()
        self.shift()
        self.step()
        if self.every:
            self.look()
        more = {code: count - LISTED for code, count in self.counts.items() if count > LISTED}
        ranked = sorted(self.findings, key=lambda found: get_args(Severity).index(found.severity))
        return Report(
            dataset=self.dataset.root.name,
            version=self.dataset.version,
            episodes=len(self.dataset.episodes),
            frames=len(self.dataset),
            pictures=self.pictures,
            findings=ranked,
            more=more,
        )

    def add(self, code: str, severity: Severity, text: str, **where: Any) -> None:
        self.counts[code] += 1
        if self.counts[code] <= LISTED:
            self.findings.append(Finding(code=code, severity=severity, text=text, **where))

    def step(self) -> None:
        self.done += 1
        self.tell(self.done, self.total)

    def schemas(self) -> None:
        """Features and columns, of every file."""
        for number, table in enumerate(self.dataset.rows.tables):
            try:
                columns = self.dataset.rows.columns(number)
            except BadMessage as error:
                self.add("unreadable", "error", str(error), episode=self.dataset.episode_of(table.begin))
                self.broken.add(number)
                continue
            first = self.dataset.episode_of(table.begin)
            wanted = {key for key, feature in self.dataset.features.items() if feature["dtype"] != "video"}
            for key in sorted(wanted - set(columns.names)):
                self.add("features", "error", f"{table.name}: no column {key}, which {INFO} names", key=key, episode=first)
            for key in sorted(set(columns.names) - set(self.dataset.features)):
                self.add(
                    "features", "warning", f"{table.name}: column {key}, which {INFO} does not name", key=key, episode=first
                )

    def table(self, number: int) -> None:
        """The rows of one file, episode by episode."""
        table = self.dataset.rows.tables[number]
        if number in self.broken:
            return
        try:
            for episode, columns in by_episode(self.dataset, self.numeric, number):
                self.episode(episode, columns)
                self.step()
        except BadMessage as error:
            self.broken.add(number)
            self.add("unreadable", "error", str(error), episode=self.dataset.episode_of(table.begin))

    def episode(self, number: int, columns: dict[str, np.ndarray]) -> None:
        episode, fps = self.dataset.episodes[number], self.dataset.fps
        length = episode.end - episode.begin
        for key, values in columns.items():
            declared = self.dataset.features[key]["dtype"]
            if str(values.dtype) != declared and number == 0:
                self.add("dtype", "warning", f"{key} is {values.dtype} in the files, {INFO} says {declared}", key=key)
            if values.dtype.kind == "f" and not (finite := np.isfinite(values.reshape(length, -1)).all(1)).all():
                self.unusable.add(key)
                frame, count = int(np.flatnonzero(~finite)[0]), int((~finite).sum())
                text = f"{key} is not finite in {count} of {length} frames"
                self.add("not_finite", "error", text, key=key, episode=number, frame=frame)
            if key in ("next.done", "next.success") and bool(values.ravel()[-1]):
                self.ended.setdefault(key, []).append(number)
        counting = {"frame_index": 0, "index": episode.begin}
        expected = {key: np.arange(begin, begin + length) for key, begin in counting.items()} | {
            "episode_index": np.full(length, number)
        }
        for key, values in expected.items():
            if key in columns and (wrong := np.flatnonzero(columns[key].ravel() != values)).size:
                frame = int(wrong[0])
                text = f"{key} is {columns[key].ravel()[frame]}, expected {values[frame]}"
                self.add("counting", "error", text, key=key, episode=number, frame=frame)
        if "timestamp" in columns:
            times = columns["timestamp"].ravel().astype(np.float64)
            steps = np.diff(times, prepend=-1 / fps)  # the first frame is at 0
            if (wrong := np.flatnonzero(~(np.abs(steps * fps - 1) < JITTER))).size:
                frame = int(wrong[0])
                before = times[frame - 1] if frame else 0.0
                jumps = counted(wrong.size, "jump")
                text = f"time goes from {before:.3f} to {times[frame]:.3f} s, a frame takes {1 / fps:.3f} s; {jumps}"
                self.add("time_jump", "error", text, key="timestamp", episode=number, frame=frame)
        numbers = columns.get("task_index", np.zeros(0)).ravel()
        if (wrong := np.flatnonzero(~np.isin(numbers, list(self.dataset.tasks.values())))).size:
            text = f"task_index {numbers[wrong[0]]} is not in meta/tasks"
            self.add("task", "error", text, key="task_index", episode=number, frame=int(wrong[0]))

    def lengths(self) -> None:
        """Episodes that end early, by their length or by the mark that others end with."""
        lengths = np.array([episode.end - episode.begin for episode in self.dataset.episodes])
        middle = float(np.median(lengths))
        for number in np.flatnonzero((lengths == 1) | (lengths * SHORT < middle)):
            severity: Severity = "error" if lengths[number] == 1 else "warning"
            text = f"{counted(int(lengths[number]), 'frame')}, the median of all episodes is {middle:g}"
            self.add("cut_short", severity, text, episode=int(number), frame=int(lengths[number]) - 1)
        for key, ended in self.ended.items():
            if len(lengths) / 2 <= len(ended) < len(lengths):  # where few succeed, the others need not have been cut
                for number in sorted(set(range(len(lengths))) - set(ended)):
                    text = f"the last frame has no {key}, that of {counted(len(ended), 'other episode')} has"
                    self.add("cut_short", "warning", text, key=key, episode=number, frame=int(lengths[number]) - 1)

    def statistics(self, key: str) -> None:
        """Of numbers: constants, and what meta states against what is so."""
        if self.broken or key in self.unusable:
            return
        try:
            found = over(lambda: (columns[key] for _, columns in self.dataset.numbers([key])))
        except (BadMessage, KeyError):
            return  # told already
        if key in (STATE, ACTION) or (key not in INDEX and self.dataset.features[key]["dtype"].startswith("float")):
            for d, (low, high, q01, q99) in enumerate(zip(*(found[n] for n in ("min", "max", "q01", "q99")), strict=True)):
                if low == high:
                    self.add("constant", "warning", f"{key}[{d}] is {low:g} in every frame", key=key)
                elif q01 == q99 and not key.startswith("next."):  # a reward is rare, and normalised by nobody
                    text = f"{key}[{d}] is {q01:g} in 98 of 100 frames: q01 = q99; do not normalise it by quantiles"
                    self.add("quantiles_equal", "warning", text, key=key)
        if key not in INDEX:
            self.stated(key, found)

    def stated(self, key: str, found: Statistic) -> None:
        declared = self.declared().get(key, {})
        self.missing(key, declared, (*BASIC, *QUANTILES) if self.dataset.version == layout_v30.VERSION else BASIC)
        scale = np.maximum(found["max"] - found["min"], 1e-6)
        wrong: dict[str, np.ndarray] = {}  # exact ones first
        for name in (*BASIC[:-1], *QUANTILES):
            if name not in declared:
                continue
            values = np.asarray(declared[name], np.float64).ravel()
            off = np.abs(values - found[name]) / scale if values.size == scale.size else np.full(scale.size, np.inf)
            if not (off <= (CLOSE_QUANTILE if name in QUANTILES else CLOSE)).all():
                wrong[name] = values
        if wrong:
            name, *others = wrong
            too = f" ({', '.join(others)} too)" if others else ""
            text = f"meta states a {name} of {_few(wrong[name])}, it is {_few(found[name])}{too}"
            severity: Severity = "warning" if name in QUANTILES else "error"
            self.add("statistics", severity, f"{text}; `nexus data convert` computes all anew", key=key)

    def picture_statistics(self) -> None:
        for key in self.dataset.cameras.values():
            declared = self.declared().get(key, {})
            self.missing(key, declared, STATISTICS if self.dataset.version == layout_v30.VERSION else BASIC)
            try:
                high = float(np.max(declared.get("max", 0.0)))
            except (TypeError, ValueError):
                high = np.inf
            if not high <= 1.0:
                self.add("statistics", "error", f"meta states a max of {high:g}, expected values in [0, 1]", key=key)

    def missing(self, key: str, declared: dict[str, Any], wanted: tuple[str, ...]) -> None:
        absent = [name for name in wanted if name not in declared]
        if absent:
            text = f"meta has no {', '.join(absent)}; `nexus data convert` computes all anew"
            self.add("statistics_missing", "error", text, key=key)

    def declared(self) -> dict[str, dict[str, Any]]:
        if not hasattr(self, "_declared"):
            try:
                self._declared = {k: v for k, v in self.dataset.layout.declared().items() if isinstance(v, dict)}
            except BadMessage as error:
                self._declared = {}
                self.add("statistics_missing", "error", str(error))
        return self._declared

    def shift(self) -> None:
        """Actions that stand beside another frame's observation."""
        if self.broken or self.unusable & {STATE, ACTION}:
            return

        def episodes() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
            for number, columns in by_episode(self.dataset, [STATE, ACTION]):
                length = len(columns[STATE])
                yield number, columns[STATE].reshape(length, -1), columns[ACTION].reshape(length, -1)

        try:
            found = alignment(episodes)
        except (BadMessage, KeyError):
            return  # told already
        says = {
            -1: "the motion before it: actions stand one frame too late",
            1: "the motion after the next: one frame too early",
        }
        if found.unsure:
            text = f"whether actions stand beside their own observations was not judged: {found.unsure}"
            self.add("alignment", "notice", text, key=ACTION)
        if found.lag:
            where = f"in all episodes but {_listed(found.odd)}" if found.odd else "in all episodes"
            text = f"{where}, an action explains {says[found.lag]}; or the robot answers that much later"
            self.add("shifted", "error" if found.lag < 0 else "warning", text, key=ACTION, frame=0)
        for number, lag in found.odd.items():
            length = self.dataset.episodes[number].end - self.dataset.episodes[number].begin
            text = f"an action explains {says.get(lag, 'its own motion')}, unlike in the other episodes"
            sure: Severity = "error" if length >= SURELY else "warning"
            self.add("shifted", sure, text, key=ACTION, episode=number, frame=0)

    def look(self) -> None:
        """Every picture is decoded: sizes, black ones, films that end early."""
        for key in self.dataset.cameras.values():
            for number, episode in enumerate(self.dataset.episodes):
                black: list[int] = []
                for frame in range(0, episode.end - episode.begin, self.every):
                    try:
                        picture = self.dataset.image(key, episode.begin + frame)
                    except BadMessage as error:
                        self.add("picture", "error", str(error), key=key, episode=number, frame=frame)
                        break
                    self.pictures += 1
                    if picture.max() <= DARK:
                        black.append(frame)
                self.film(key, number)
                if black:
                    self.add("black", "error", counted(len(black), "black picture"), key=key, episode=number, frame=black[0])
                self.step()

    def film(self, key: str, number: int) -> None:
        """A film of v2 is one episode's alone: what it has too many tells that pictures and rows were cut differently."""
        episode = self.dataset.episodes[number]
        if self.dataset.features[key]["dtype"] != "video" or self.dataset.version == layout_v30.VERSION:
            return
        name, length = episode.films[key].path, episode.end - episode.begin
        if name in self.dataset.films and (frames := self.dataset.films.count(name)) > length:
            text = f"{name}: {counted(frames, 'picture')} for {counted(length, 'row')}; are they of the same moments?"
            self.add("film_length", "warning", text, key=key, episode=number, frame=length)


def by_episode(dataset: Dataset, keys: list[str], table: int | None = None) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Columns of one episode after the other, of the whole dataset or of one of its files; the longest episode is held."""
    parts: list[dict[str, np.ndarray]] = []
    number = dataset.episode_of(dataset.rows.tables[table or 0].begin)
    for begin, columns in dataset.rows.stream(keys, table):
        length, at = len(next(iter(columns.values()))), begin
        while at < begin + length:
            end = min(dataset.episodes[number].end, begin + length)
            parts.append({key: values[at - begin : end - begin] for key, values in columns.items()})
            at = end
            if at == dataset.episodes[number].end:
                yield number, parts[0] if len(parts) == 1 else {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
                parts, number = [], number + 1


def counted(number: int, what: str) -> str:
    """`1 frame`, `2 frames`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(episodes: Iterable[int]) -> str:
    first = sorted(episodes)
    return ", ".join(map(str, first[:8])) + (", …" if len(first) > 8 else "")


def _few(values: np.ndarray) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:4])
    return f"[{shown}{', …' if len(values) > 4 else ''}]"
