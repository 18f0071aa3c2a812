"""The log of usage, kept short. The master's.

A worker writes a record a second for every job it works for, and one for its idle time: years of that fit into no stream, and
a log that forgets its oldest would make bills shorter. So what a job used is added up now and then into one record, which
takes the place of all before it in the same step of the server, provided that nothing was added meanwhile.
"""

import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from nexus_bus.bus import Bus
from nexus_bus.bus import headers as wire
from nexus_bus.bus.page import page
from nexus_bus.errors import Conflict
from nexus_bus.ledger import DAY, Span, Used, day, hour
from schemas.subjects import BY_NAME, parse
from schemas.usage import Usage, UsagePart

MANY = 500  # records of a job that are added up at once
FEW, REST_S = 8, 3600.0  # … and those that are after so long
KEPT = timedelta(days=400)  # as long as the stream keeps anything
PAGE = 256
TRIES = 5  # of one look; a job that is written faster has its turn at the next


class Rollup:
    """Looks at the log now and then."""

    def __init__(self, bus: Bus) -> None:
        """Rolls up nothing yet."""
        self._bus = bus
        self._rested = time.monotonic()

    async def sweep(self) -> None:
        """Add up what has become long. Any number of processes may do so at once.

        Raises:
            Unavailable: the server does not answer; what was not added up stays as it is.
        """
        most = MANY
        if (clock := time.monotonic()) >= self._rested + REST_S:
            most, self._rested = FEW, clock
        for on, count in (await self._bus.queued("USAGE")).items():
            if count > most:
                await self._add_up(on)

    async def _add_up(self, on: str) -> None:
        row, tokens = BY_NAME["usage"], parse(on)[1]
        at = datetime.now(UTC)
        used, last = Used(lambda time: _span(time, at)), 0
        for _ in range(TRIES):
            end = False
            while not end:
                found = await page(self._bus, row, on, after=last, limit=PAGE)
                for record in found.messages:
                    used.take(record)
                last, end = found.next, found.end
            whole = Usage(
                tenant=tokens["tenant"], job=tokens["job"], worker="master", kind="sum", time=at.isoformat(),
                earlier=records(used, at),
            )  # fmt: skip
            headers = {wire.ROLLUP: "sub", wire.EXPECTED_REVISION: str(last)}
            name = f"sum/{uuid.uuid4().hex}"
            try:
                await self._bus.publish("usage", whole, msg_id=name, headers=headers, tenant=whole.tenant, job=whole.job)
            except Conflict:  # something was added: it is read, too
                continue
            return


def records(used: Used, at: datetime) -> tuple[UsagePart, ...]:
    """What stands for all that was taken, oldest first; what is stored goes on as it was."""
    found: list[UsagePart] = []
    for (kind, begin), sums in sorted(used.sums.items(), key=lambda item: item[0][1]):
        if begin >= at - KEPT:
            last = used.last[kind, begin]
            time = max(begin, datetime.fromisoformat(last.time)).isoformat()  # what is stored may be so since long before
            numbers: dict[str, Any] = sums
            found.append(UsagePart(worker=last.worker, kind=last.kind, commit=used.commits[kind, begin], time=time, **numbers))
    if used.gauge is not None:
        gauge, since = used.gauge
        part = UsagePart(worker=gauge.worker, kind="storage", stored_bytes=gauge.stored_bytes, time=since.isoformat())
        found.append(part)
    return tuple(found)


def _span(time: datetime, at: datetime) -> Span:
    """By the hour yesterday and today, by the day before: seen from `at`."""
    return hour(time) if time >= day(at)[0] - DAY else day(time)
