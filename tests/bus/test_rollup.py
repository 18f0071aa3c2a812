"""The log of usage stays short, and every sum over it the same: for bills, budgets, and whoever reads it meanwhile."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nexus_bus.bus import Bus
from nexus_bus.ledger import Ledger
from nexus_bus.pricing import Prices
from nexus_bus.rollup import MANY, Rollup
from nexus_bus.spending import Spending
from schemas.usage import Usage
from tests.conftest import Eventually

PRICES = Prices(currency="EUR", device_s=0.01, session_s=0.001, stored_gb_day=2.0)
NOW = datetime.now(UTC)


def used(number: int, job: str = "pick", at: datetime = NOW, **numbers: Any) -> Usage:
    numbers = {"kind": "inference", "device_s": 0.25, "requests": 2, "group_sum": 3} | numbers
    return Usage(tenant="acme", job=job, worker=f"w-{number % 3}", time=at.isoformat(), **numbers)


async def publish(bus: Bus, records: Sequence[Usage], name: str = "u") -> None:
    for number, one in enumerate(records):  # in order: what is stored counts from one record to the next
        await bus.publish("usage", one, msg_id=f"{one.job}/{name}/{number}", tenant=one.tenant, job=one.job)


async def rows(bus: Bus, *by: str, since: datetime | None = None) -> list[dict[str, Any]]:
    ledger = Ledger(by or ("tenant", "job", "kind", "day"), since, NOW + timedelta(hours=1), PRICES)
    async for item in bus.tail("usage", since="all", follow=False):
        ledger.take(item.message)
    return ledger.rows()


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(
        one.keys() == other.keys() and all(one[key] == pytest.approx(other[key]) for key in one)
        for one, other in zip(found, expected, strict=True)
    )


async def test_a_long_log_becomes_short_and_no_bill_changes(bus: Bus) -> None:
    month = [used(n, at=NOW - timedelta(hours=60 * (600 - n) / 60)) for n in range(600)]  # one an hour, the last one now
    kept = [
        used(n, kind="storage", device_s=0.0, requests=0, group_sum=0, stored_bytes=size * 10**9, at=NOW - timedelta(days=days))
        for n, (days, size) in enumerate(((20, 3), (12, 7), (4, 0), (2, 5)))
    ]
    other = [used(n, "place") for n in range(20)]
    await publish(bus, month)
    await publish(bus, kept, "kept")
    await publish(bus, other)
    by_day, by_kind = await rows(bus), await rows(bus, "kind")
    since = NOW.replace(minute=0, second=0, microsecond=0) - timedelta(hours=5)
    lately = await rows(bus, since=since)

    await Rollup(bus).sweep()
    assert await bus.queued("USAGE") == {"usage.acme.pick": 1, "usage.acme.place": 20}, "short logs are left alone"
    assert same(await rows(bus), by_day)
    assert same(await rows(bus, "kind"), by_kind)
    assert same(await rows(bus, since=since), lately), "what is recent is known to the hour"

    await publish(bus, [used(n) for n in range(MANY)], "more")
    by_day = await rows(bus)
    await Rollup(bus).sweep()
    assert (await bus.queued("USAGE"))["usage.acme.pick"] == 1
    assert same(await rows(bus), by_day), "sums are added up again"
    (day_s,) = {row["stored_gb_day"] for row in await rows(bus, "tenant")}
    assert day_s == pytest.approx(3 * 8 + 7 * 8 + 5 * 2 + 5 / 24)


async def test_nothing_is_lost_or_counted_twice_while_workers_write_and_others_add_up(bus: Bus, eventually: Eventually) -> None:
    """Two masters at once; a budget that is followed all the time, and one that begins in the middle."""
    early, late, stop = Spending(bus), Spending(bus), asyncio.Event()
    await publish(bus, [used(n) for n in range(MANY + 1)])
    await eventually(lambda: early.of("acme").known)

    async def write(lane: int) -> int:
        number = 0
        while not stop.is_set():
            await publish(bus, [used(number)], f"{lane}/{number}")
            number += 1
            await asyncio.sleep(0.02)  # workers write once a second
        return number

    async def add_up() -> None:
        rollup = Rollup(bus)
        for _ in range(10):
            await rollup.sweep()
            await rollup._add_up("usage.acme.pick")  # as if it had become long again

    lanes = [asyncio.create_task(write(lane)) for lane in range(4)]
    await asyncio.gather(add_up(), add_up())
    late.of("acme")
    await add_up()
    stop.set()
    count = MANY + 1 + sum(await asyncio.gather(*lanes))
    (row,) = await rows(bus, "tenant")
    assert (row["requests"], row["device_s"]) == (2 * count, pytest.approx(0.25 * count))
    await eventually(lambda: early.of("acme").device_s == pytest.approx(0.25 * count))
    await eventually(lambda: late.of("acme").known and late.of("acme").device_s == pytest.approx(0.25 * count))
    early.forget("acme")
    late.forget("acme")
    await Rollup(bus)._add_up("usage.acme.pick")
    assert (await bus.queued("USAGE")) == {"usage.acme.pick": 1}


async def test_a_reader_that_stops_in_the_middle_of_a_log_goes_on_with_the_sum(bus: Bus) -> None:
    """Pages are read one by one, and what is behind the first of them may be a sum by then."""
    await publish(bus, [used(n) for n in range(MANY + 1)])
    ledger, taken = Ledger(("tenant",), until=NOW), 0
    async for item in bus.tail("usage", since="all", follow=False):
        ledger.take(item.message)
        taken += 1
        if taken == 100:
            break
    await Rollup(bus).sweep()
    async for item in bus.tail("usage", since="all", follow=False):
        ledger.take(item.message)
    (row,) = ledger.rows()
    assert row["requests"] == 2 * (MANY + 1)
