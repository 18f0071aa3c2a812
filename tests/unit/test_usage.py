"""Every second has an owner: the compute thread's time, records stored before anything is acknowledged, prices."""

import asyncio
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nexus_bus import config, pricing
from nexus_bus.errors import Refused, Unavailable
from nexus_bus.ledger import Ledger
from nexus_bus.models.cache import EncodeStats
from nexus_bus.pricing import Prices
from nexus_bus.split import split
from nexus_bus.usage import MANY, Device, Tally
from schemas.usage import Usage

PRICES = Prices(currency="EUR", device_s=0.01, session_s=0.001, stored_gb_day=2.0)


class Log:
    """A bus that keeps what is published, by its id, unless it is away."""

    def __init__(self) -> None:
        self.away = False
        self.stored: dict[str, Usage] = {}
        self.order: list[str] = []
        self.log = SimpleNamespace(warning=lambda *_, **__: None)

    async def publish(self, name: str, entry: Usage, *, msg_id: str, tenant: str, job: str) -> None:
        assert (name, tenant, job) == ("usage", entry.tenant, entry.job)
        self.stored[msg_id] = entry  # it may be stored although nobody hears of it
        self.order.append("record")
        if self.away:
            raise Unavailable("no answer from the server")

    def delivery(self, tenant: str = "acme", num_delivered: int = 1) -> Any:
        async def ack() -> None:
            self.order.append("ack")

        return SimpleNamespace(tenant=tenant, num_delivered=num_delivered, ack=ack, seq=1)

    def seconds(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for used in self.stored.values():
            owner = f"{used.tenant}/{used.job}"
            sums[owner] = sums.get(owner, 0.0) + used.device_s
        return sums


def tally(log: Log) -> Tally:
    return Tally(log, "trainer-0", "training")  # type: ignore[arg-type]  # a bus as far as it is used


async def test_owners_and_idle_time_add_up_to_the_threads_life() -> None:
    log = Log()
    used = tally(log)
    device, ends = Device(used, "compute"), [0.0]
    idle = device.idle

    def noted() -> float:
        found = idle()
        ends[0] = time.perf_counter()
        return found

    device.idle = noted  # type: ignore[method-assign]  # up to its last look every second has an owner
    loop = asyncio.get_running_loop()
    for turn in range(6):
        await loop.run_in_executor(device.of("acme", "pick"), time.sleep, 0.03)
        await loop.run_in_executor(device.of("globex", "place"), time.sleep, 0.01)
        await asyncio.sleep(0.02)
        if turn % 2:
            await used.flush()
    await used.flush()
    whole, seconds = ends[0] - device._opened, log.seconds()
    assert sum(seconds.values()) == pytest.approx(whole, abs=0.05)  # less than any of the three
    assert seconds["acme/pick"] >= 6 * 0.03
    assert seconds["globex/place"] >= 6 * 0.01
    assert seconds["provider/idle"] >= 6 * 0.02
    device.shutdown()


async def test_work_under_way_is_neither_idle_nor_charged_yet() -> None:
    log, begun, gate = Log(), threading.Event(), threading.Event()
    used = tally(log)
    device = Device(used, "compute")

    def work() -> None:
        begun.set()
        gate.wait()

    running = asyncio.get_running_loop().run_in_executor(device.of("acme", "pick"), work)
    await asyncio.to_thread(begun.wait)
    await used.flush()
    before = log.seconds()["provider/idle"]
    await asyncio.sleep(0.05)
    await used.flush()
    assert log.seconds()["provider/idle"] == pytest.approx(before)
    gate.set()
    await running
    await used.flush()
    assert log.seconds()["acme/pick"] >= 0.05
    device.shutdown()


async def test_work_that_fails_is_charged_too() -> None:
    log = Log()
    used = tally(log)
    device = Device(used, "compute")

    def fail() -> None:
        time.sleep(0.02)
        raise MemoryError

    with pytest.raises(MemoryError):
        await asyncio.get_running_loop().run_in_executor(device.of("acme", "pick"), fail)
    await used.flush()
    assert log.seconds()["acme/pick"] >= 0.02
    device.shutdown()


async def test_nothing_is_acknowledged_before_its_record_is_stored() -> None:
    log = Log()
    used = tally(log)
    for _ in range(3):
        delivery = log.delivery()
        used.charge(delivery, "pick", 0.5, group=3)
        used.settle([delivery])
    await used.flush()
    assert log.order == ["record", "ack", "ack", "ack"]
    (entry,) = log.stored.values()
    assert (entry.device_s, entry.requests, entry.group_sum) == (1.5, 3, 9)


async def test_a_record_whose_storing_was_not_confirmed_is_repeated_under_its_id() -> None:
    log = Log()
    used, delivery = tally(log), log.delivery()
    used.charge(delivery, "pick", 0.5, group=1)
    used.settle([delivery])
    log.away = True
    with pytest.raises(Unavailable):
        await used.flush()
    used.charge(late := log.delivery(), "pick", 0.25, group=1)
    used.settle([late])
    log.away = False
    await used.flush()
    assert log.order == ["record", "record", "ack"]
    await used.flush()
    assert log.seconds() == {"acme/pick": 0.75}, "once each, the later one in a record of its own"
    assert log.order[3:] == ["record", "ack"]


async def test_what_is_answered_again_after_a_crash_is_the_providers() -> None:
    log = Log()
    used = tally(log)
    used.charge(log.delivery(num_delivered=2), "pick", 0.5, group=1)
    await used.flush()
    assert log.seconds() == {"provider/repeated": 0.5}, "no tenant pays twice"


async def test_a_crowd_does_not_wait_for_the_second_to_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexus_bus.usage.EVERY_S", 60.0)
    log = Log()
    used = tally(log)
    publishing = asyncio.create_task(used.publish())
    await asyncio.sleep(0)
    used.charge(delivery := log.delivery(), "pick", 0.1, group=1)
    used.settle([delivery] * MANY)
    async with asyncio.timeout(30):  # half of EVERY_S
        while log.order.count("ack") < MANY:
            await asyncio.sleep(0.005)
    assert log.order.index("ack") > 0, "the record first"
    publishing.cancel()


def test_shares_add_up_to_what_was_measured() -> None:
    assert split(12.0, [1.0, 2.0, 3.0]) == [2.0, 4.0, 6.0]
    assert split(3.0, [0.0, 0.0, 0.0]) == [1.0, 1.0, 1.0]
    assert split(1.0, []) == []


def test_a_forward_is_shared_out_by_tokens_and_what_is_known_costs_nothing() -> None:
    long, short, known = ("acme", "a"), ("globex", "b"), ("acme", "c")
    rows, tokens = {long: 1, short: 1}, {long: 90, short: 30}
    stats = EncodeStats(total=4, unique=3, hits=1, forward_s=12.0, groups=1, forwarded=rows, tokens=tokens)
    everybody = {long: 2, short: 1, known: 1}
    assert stats.share({long: 1}, everybody) == 4.5, "two asked for it"
    assert stats.share({long: 1, known: 1}, everybody) == 4.5
    assert stats.share({short: 1}, everybody) == 3.0
    assert stats.share({known: 1}, everybody) == 0.0


def record(tenant: str, job: str, kind: Any, time: str, **numbers: Any) -> Usage:
    return Usage(tenant=tenant, job=job, worker="w", kind=kind, time=f"{time}+00:00", **numbers)


RECORDS = [
    record("acme", "pick", "training", "2026-11-01T10:00:00", device_s=10.0, records=5, steps=5, group_sum=10),
    record("acme", "pick", "inference", "2026-11-01T23:59:59", device_s=2.0, requests=4, group_sum=8),
    record("acme", "pick", "inference", "2026-11-02T00:00:01", device_s=1.0, requests=1, group_sum=1),
    record("acme", "pick", "environment", "2026-11-02T10:00:00", session_s=100.0, simulator_s=30.0, steps=50),
    record("globex", "place", "training", "2026-11-02T10:00:00", device_s=4.0),
    record("provider", "idle", "training", "2026-11-02T10:00:00", device_s=86.0),
]


def sums(
    *by: str, since: datetime | None = None, records: list[Usage] = RECORDS, prices: Prices | None = None
) -> list[dict[str, Any]]:
    ledger = Ledger(by, since, datetime(2026, 11, 3, tzinfo=UTC), prices)
    for used in records:
        ledger.take(used)
    return ledger.rows()


def test_usage_is_summed_by_what_is_asked_for() -> None:
    assert [(row["tenant"], row["device_s"]) for row in sums("tenant")] == [("acme", 13), ("globex", 4), ("provider", 86)]
    assert [(row["kind"], row["requests"]) for row in sums("kind")] == [("environment", 0), ("inference", 5), ("training", 0)]
    acme = [row for row in sums("tenant", "day") if row["tenant"] == "acme"]
    assert [(row["day"], row["device_s"]) for row in acme] == [("2026-11-01", 12.0), ("2026-11-02", 1.0)]
    late = sums("tenant", since=datetime(2026, 11, 2, tzinfo=UTC))
    assert [(row["tenant"], row["device_s"]) for row in late] == [("acme", 1), ("globex", 4), ("provider", 86)]


def test_prices_apply_to_tenants_and_not_to_the_provider() -> None:
    cost = {row["tenant"]: row["cost"] for row in sums("tenant", prices=PRICES)}
    assert cost == pytest.approx({"acme": 0.13 + 0.1, "globex": 0.04, "provider": 0.0})
    assert sum(row["cost"] for row in sums("day", prices=PRICES)) == pytest.approx(0.27), "whatever it is summed by"
    assert "cost" not in sums("tenant")[0]


def test_what_is_stored_counts_until_it_changes() -> None:
    gauges = [
        record("acme", "pick", "storage", "2026-11-01T00:00:00", stored_bytes=10**9),
        record("acme", "pick", "storage", "2026-11-01T12:00:00", stored_bytes=10**9),  # repeated, as after a restart
        record("acme", "pick", "storage", "2026-11-02T12:00:00", stored_bytes=3 * 10**9),
        record("acme", "gone", "storage", "2026-11-01T00:00:00", stored_bytes=10**9),
        record("acme", "gone", "storage", "2026-11-01T06:00:00", stored_bytes=0),
    ]
    rows = {(row["job"], row["day"]): row["stored_gb_day"] for row in sums("job", "day", records=gauges)}
    assert rows == pytest.approx({("pick", "2026-11-01"): 1.0, ("pick", "2026-11-02"): 2.0, ("gone", "2026-11-01"): 0.25})
    late = sums("job", since=datetime(2026, 11, 2, 12, tzinfo=UTC), records=gauges, prices=PRICES)
    assert [(row["job"], row["stored_gb_day"], row["cost"]) for row in late] == [("pick", 1.5, 3.0)]


def test_prices_are_read_from_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nexus.toml"
    file.write_text('[prices]\ncurrency = "EUR"\ndevice_s = 0.01\n[master]\nmax_jobs = 3\n')
    monkeypatch.setenv("NEXUS_CONFIG", str(file))
    assert pricing.load() == Prices(currency="EUR", device_s=0.01)
    assert config.load("master").value.max_jobs == 3, "the same file is the workers'"
    monkeypatch.delenv("NEXUS_CONFIG")
    assert pricing.load() is None


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("device_s = 0.01", "currency"),
        ('currency = "EUR"\ndevice_s = -1', "device_s"),
        ('currency = "EUR"\ndevice_s = "much"', "device_s"),
        ('currency = "EUR"\ndevice_h = 1', "device_h"),
        ('currency = "EUR', "nexus.toml"),
    ],
)
def test_a_price_that_is_none_is_refused_by_its_name(tmp_path: Path, table: str, names: str) -> None:
    file = tmp_path / "nexus.toml"
    file.write_text(f"[prices]\n{table}\n")
    with pytest.raises(Refused, match=names):
        pricing.load(file)
