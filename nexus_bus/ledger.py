"""Usage records added up by tenant, job, kind and day. Pure; `nexus usage` shows it.

What is stored is a gauge: it counts from its record to the job's next one, so that GB-days come out whenever records were made.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from nexus_bus.pricing import Prices
from schemas.usage import Usage

SUMS = ("device_s", "session_s", "simulator_s", "requests", "records", "steps", "group_sum")
PROVIDER = "provider"
GAUGE = timedelta(hours=25)  # a gauge is repeated daily: so far before a time one looks for what it was then

Key = tuple[str, ...]


class Ledger:
    """Sums by the given dimensions. Records come in the order of the stream."""

    def __init__(
        self, by: Sequence[str], since: datetime | None = None, until: datetime | None = None, prices: Prices | None = None
    ) -> None:
        """From `since` on, up to `until`, by default now."""
        self.by, self.since, self.until, self.prices = by, since, until or datetime.now(UTC), prices
        self._sums: dict[Key, dict[str, float]] = defaultdict(lambda: dict.fromkeys((*SUMS, "stored_gb_day", "cost"), 0))
        self._gauges: dict[tuple[str, str], tuple[Usage, datetime]] = {}

    def take(self, used: Usage) -> None:
        """One record."""
        at = datetime.fromisoformat(used.time)
        if used.kind == "storage":
            if (before := self._gauges.get((used.tenant, used.job))) is not None:
                self._keep(*before, at)
            self._gauges[used.tenant, used.job] = used, at
        elif self.since is None or at >= self.since:
            sums = self._sums[self._key(used, at)]
            for name in SUMS:
                sums[name] += getattr(used, name)
            sums["cost"] += self._cost(used, used.device_s, used.session_s, 0.0)

    def rows(self) -> list[dict[str, Any]]:
        """The dimensions, the sums, and with prices what it costs."""
        for used, start in self._gauges.values():
            self._keep(used, start, self.until)
        self._gauges = {}
        rows = [dict(zip(self.by, key, strict=True)) | sums for key, sums in sorted(self._sums.items())]
        for row in rows:
            if self.prices is None:
                del row["cost"]
            else:
                row["currency"] = self.prices.currency
        return rows

    def _cost(self, used: Usage, device_s: float, session_s: float, stored_gb_day: float) -> float:
        if self.prices is None or used.tenant == PROVIDER:  # what nobody's job asked for costs nothing
            return 0.0
        return self.prices.cost(device_s, session_s, stored_gb_day)

    def _key(self, used: Usage, at: datetime) -> Key:
        values = {"tenant": used.tenant, "job": used.job, "kind": used.kind, "day": at.astimezone(UTC).date().isoformat()}
        return tuple(values[name] for name in self.by)

    def _keep(self, used: Usage, start: datetime, end: datetime) -> None:
        """So many bytes from `start` to `end`, day by day."""
        if used.stored_bytes == 0:
            return
        start = max(start, self.since) if self.since is not None else start
        while start < end:
            midnight = datetime.combine(start.astimezone(UTC).date() + timedelta(days=1), datetime.min.time(), UTC)
            stop = min(end, midnight)
            gb_days = used.stored_bytes / 1e9 * (stop - start).total_seconds() / 86_400
            sums = self._sums[self._key(used, start)]
            sums["stored_gb_day"] += gb_days
            sums["cost"] += self._cost(used, 0.0, 0.0, gb_days)
            start = stop
