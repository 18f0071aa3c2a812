"""Usage records added up: of one job by kind and span of time, and of many by tenant, job, kind and day. Pure.

What is stored is a gauge: it counts from its record to the job's next one, so that GB-days come out whenever records were made.
A record of kind `sum` stands for all earlier ones of its job (rollup.py makes it), so whoever adds up begins anew with it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from nexus_bus.pricing import Prices
from schemas.base import PROVIDER
from schemas.usage import Usage, UsagePart

SUMS = ("device_s", "session_s", "simulator_s", "requests", "records", "steps", "group_sum", "stored_gb_day")
GAUGE = timedelta(hours=25)  # a gauge is repeated daily: so far before a time one looks for what it was then
HOUR, DAY = timedelta(hours=1), timedelta(days=1)

Key = tuple[str, ...]
Sums = dict[str, float]
Span = tuple[datetime, datetime]  # from … up to


def hour(at: datetime) -> Span:
    """The hour that a time is in, in UTC."""
    begin = at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return begin, begin + HOUR


def day(at: datetime) -> Span:
    """The day, in UTC."""
    begin = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return begin, begin + DAY


class Used:
    """What one job used. Records come in the order of the stream."""

    def __init__(self, span: Callable[[datetime], Span], since: datetime | None = None) -> None:
        """By the spans of time that `span` tells, from `since` on."""
        self._span, self._since = span, since
        self.sums: dict[tuple[str, datetime], Sums] = {}  # by kind and beginning
        self.last: dict[tuple[str, datetime], UsagePart] = {}  # record in it
        self.commits: dict[tuple[str, datetime], int] = {}  # the latest: not every record of training is of a commit
        self.gauge: tuple[UsagePart, datetime] | None = None  # what is stored, since when

    def take(self, used: Usage) -> None:
        """One record."""
        if used.kind != "sum":
            self._add(used)
            return
        self.sums, self.last, self.commits, self.gauge = {}, {}, {}, None
        for earlier in used.earlier:
            self._add(earlier)

    def stored(self, end: datetime) -> float:
        """GB-days up to a time, all in all."""
        size, start = (self.gauge[0].stored_bytes, self.gauge[1]) if self.gauge is not None else (0, end)
        return sum(sums["stored_gb_day"] for sums in self.sums.values()) + size / 1e9 * max(0.0, (end - start) / DAY)

    def until(self, end: datetime) -> None:
        """Count what is stored up to a time, which no later record may be before."""
        if self.gauge is not None:
            used, start = self.gauge
            self._keep(used, start, end)
            self.gauge = used, max(start, end)

    def _add(self, used: UsagePart) -> None:
        at = datetime.fromisoformat(used.time)
        if used.kind == "storage" and not used.stored_gb_day:
            self.until(at)
            self.gauge = used, at
        elif self._since is None or at >= self._since:
            sums = self._of(used, at)
            for name in SUMS:
                sums[name] += getattr(used, name)

    def _of(self, used: UsagePart, at: datetime) -> Sums:
        key = used.kind, self._span(at)[0]
        self.last[key] = used
        self.commits[key] = max(self.commits.get(key, 0), used.commit)
        return self.sums.setdefault(key, dict.fromkeys(SUMS, 0))

    def _keep(self, used: UsagePart, start: datetime, end: datetime) -> None:
        """So many bytes from `start` to `end`, span by span."""
        start = max(start, self._since) if self._since is not None else start
        while used.stored_bytes and start < end:
            stop = min(end, self._span(start)[1])
            self._of(used, start)["stored_gb_day"] += used.stored_bytes / 1e9 * ((stop - start) / DAY)
            start = stop


class Ledger:
    """Sums by the given dimensions. Records come in the order of the stream."""

    def __init__(
        self, by: Sequence[str], since: datetime | None = None, until: datetime | None = None, prices: Prices | None = None
    ) -> None:
        """From `since` on, up to `until`, by default now."""
        self.by, self.since, self.until, self.prices = by, since, until or datetime.now(UTC), prices
        self._jobs: dict[tuple[str, str], Used] = {}

    def take(self, used: Usage) -> None:
        """One record."""
        owner = used.tenant, used.job
        if owner not in self._jobs:
            self._jobs[owner] = Used(day, self.since)
        self._jobs[owner].take(used)

    def rows(self) -> list[dict[str, Any]]:
        """The dimensions, the sums, and with prices what it costs."""
        found: defaultdict[Key, Sums] = defaultdict(lambda: dict.fromkeys((*SUMS, "cost"), 0))
        for (tenant, job), used in self._jobs.items():
            used.until(self.until)
            for (kind, begin), sums in used.sums.items():
                values = {"tenant": tenant, "job": job, "kind": kind, "day": begin.date().isoformat()}
                row = found[tuple(values[name] for name in self.by)]
                for name, number in sums.items():
                    row[name] += number
                if self.prices is not None and tenant != PROVIDER:  # what nobody's job asked for costs nothing
                    row["cost"] += self.prices.cost(sums["device_s"], sums["session_s"], sums["stored_gb_day"])
        rows = [dict(zip(self.by, key, strict=True)) | sums for key, sums in sorted(found.items())]
        for row in rows:
            if self.prices is None:
                del row["cost"]
            else:
                row["currency"] = self.prices.currency
        return rows
