"""Floods on a real server, through the real workers: another tenant's requests and jobs are served as its share says."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus
from nexus_bus.models.backbone import Backbone
from nexus_bus.pace import Curve
from ops.bench.fairness_rig import Rig, rig
from schemas.tenant import TenantLimits, TenantRecord
from tests.conftest import Eventually
from workers.inference import Ask, Inference
from workers.trainer import Trainer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")


@pytest.fixture
async def house(bus: Bus, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Rig]:
    """Tenants and master; workers take groups of eight at most."""
    monkeypatch.setenv("NEXUS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Backbone, "load", lambda *_, **__: backbone)
    monkeypatch.setattr(Backbone, "tune", lambda _, batch: Curve((1, 8), (0.01, 0.04)))
    async with rig(bus) as made:
        yield made


class Groups:
    """The tenants of each group that was run."""

    def __init__(self, serving: Inference, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tenants: list[list[str]] = []
        handle = serving.handle

        async def noted(asks: list[Ask]) -> None:
            self.tenants.append([ask.delivery.tenant for ask in asks])
            await handle(asks)

        monkeypatch.setattr(serving, "handle", noted)

    def first(self, tenant: str) -> int:
        """Number of the first group that a tenant is in."""
        return next((i for i, group in enumerate(self.tenants) if tenant in group), len(self.tenants))


async def test_a_flood_of_requests_holds_up_another_tenant_by_a_few_groups(
    house: Rig, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    for tenant in ("loud", "quiet"):
        await house.policy(tenant, backbone)
    async with house.worker("inference", batch=8, tenant_inflight=32) as serving:
        groups = Groups(serving, monkeypatch)
        flood = asyncio.create_task(house.ask_many("loud", 3000, at_once=1000))
        await eventually(lambda: len(groups.tenants) >= 10, within=60)
        await asyncio.wait_for(house.ask_many("quiet", 20, at_once=20), 60)
        took = groups.tenants[groups.first("quiet") :]
        assert not flood.done(), "the flood lasted all the while"
        served = Counter(tenant for group in took for tenant in group)
        assert served["quiet"] == 20
        assert len([group for group in took if "quiet" in group]) <= 8, "about half of each group"
        assert served["loud"] <= 3 * served["quiet"] + 16, "behind 3,000 requests it did not stand"
        assert Counter(delivery.tenant for delivery in serving.rounds._taken)["loud"] <= 32, "on their way, of one tenant"
        flood.cancel()


async def test_a_flood_of_what_is_refused_holds_up_nobody(house: Rig, backbone: Backbone, eventually: Eventually) -> None:
    for tenant in ("loud", "quiet"):
        await house.policy(tenant, backbone)

    async def nonsense() -> None:
        while True:
            assert "no such version" in (await house.ask("loud", "pick@7")).error

    async with house.worker("inference", batch=8, tenant_inflight=32) as serving:
        flood = [asyncio.create_task(nonsense()) for _ in range(200)]
        await eventually(lambda: serving.held)
        await asyncio.wait_for(house.ask_many("quiet", 20, at_once=5), 60)
        for task in flood:
            task.cancel()


async def weigh(bus: Bus, tenant: str, weight: float) -> None:
    """What `nexus tenant limit` writes."""
    record = TenantRecord(name=tenant, account="A" * 56, created="now", limits=TenantLimits(weight=weight))
    await bus.kv("registry").put(registry.account_key(tenant), record)


async def test_answers_go_by_the_tenants_weights_which_may_change_at_any_time(
    house: Rig, bus: Bus, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    await weigh(bus, "gold", 3)
    for tenant in ("gold", "iron"):
        await house.policy(tenant, backbone)
    async with house.worker("inference", batch=8, tenant_inflight=32) as serving:
        groups = Groups(serving, monkeypatch)
        floods = [asyncio.create_task(house.ask_many(tenant, 5000, at_once=200)) for tenant in ("gold", "iron")]

        async def ratio() -> float:
            """Of their answers in the next groups, once what is new has come to count."""
            begin = len(groups.tenants) + 20
            await eventually(lambda: len(groups.tenants) >= begin + 40, within=60)
            served = Counter(tenant for group in groups.tenants[begin : begin + 40] for tenant in group)
            return served["gold"] / served["iron"]

        assert 2 <= await ratio() <= 4.5
        await weigh(bus, "gold", 1)
        assert 0.6 <= await ratio() <= 1.7
        for flood in floods:
            assert not flood.done(), "the floods lasted all the while"
            flood.cancel()


class Steps:
    """The jobs of each step that was run."""

    def __init__(self, serving: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[list[tuple[str, str]]] = []
        learn = serving.learn

        def noted(seats: Sequence[Any]) -> Any:
            self.jobs.append([(seat.tenant, seat.job) for seat in seats])
            return learn(list(seats))

        monkeypatch.setattr(serving, "learn", noted)


async def test_a_flood_of_jobs_holds_up_another_tenants_job_by_its_share(
    house: Rig, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    async with house.worker("trainer", batch=8) as serving:
        steps = Steps(serving, monkeypatch)
        await asyncio.gather(*(house.submit("loud", f"job-{i}", steps=6, size=2) for i in range(40)))
        await eventually(lambda: len(steps.jobs) >= 3 and len(serving.seats) > 8, within=60)
        before = len(house.trained)
        await house.submit("quiet", "one", steps=10, size=2)
        await house.done("quiet", "one", within=90)
        assert len(house.trained) - before < 20, "its job did not wait for all of the other's"
        took = steps.jobs[next(i for i, jobs in enumerate(steps.jobs) if ("quiet", "one") in jobs) :]
        share = [sum(tenant == "loud" for tenant, _ in jobs) for jobs in took if ("quiet", "one") in jobs]
        assert max(share) <= 3, "a step takes four batches of two, however many are ready"
        assert sum(share) >= 10, "and is as full as that"
        assert len(took) <= 40, "nor did it miss its turns"


async def test_seats_of_a_full_house_come_out_even_and_what_gives_way_is_trained_all_the_same(
    house: Rig, eventually: Eventually
) -> None:
    async with house.worker("trainer", batch=8, slots=4) as serving:
        for i in range(6):
            await house.submit("loud", f"job-{i}", steps=60, size=1, queued=10)
        await eventually(lambda: len(serving.seats) == 4)
        await eventually(lambda: all(seat.learned for seat in serving.seats.values()))
        for i in range(3):
            await house.submit("quiet", f"job-{i}", steps=5, size=1, queued=0)
        await eventually(lambda: Counter(seat.tenant for seat in serving.seats.values()) == {"loud": 2, "quiet": 2})
        assert {seat.job for seat in serving.seats.values() if seat.tenant == "loud"} == {"job-0", "job-1"}, "the oldest stay"
        for i in range(3):
            await house.feed("quiet", f"job-{i}", range(5), size=1)
        for i in range(3):
            await house.done("quiet", f"job-{i}", within=60)
        await eventually(lambda: len(serving.seats) == 4)
        for i in range(6):
            await house.feed("loud", f"job-{i}", range(10, 60), size=1)
        for i in range(6):
            await house.done("loud", f"job-{i}", within=60)
