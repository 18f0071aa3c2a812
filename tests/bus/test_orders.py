"""The master's queue on the real server: tenants are served by turns, those nobody introduced too, those removed no more."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus, Delivery, Done, Outcome
from nexus_bus.serving import introduce
from schemas.job import EnvironmentSpec, JobSpec, Ppo
from tests.unit.mastering import TENANT, allow, master
from workers.master import Master

MANY = 200


def job(name: str) -> JobSpec:
    return JobSpec(kind="rl", name=name, environment=EnvironmentSpec(id="tabletop", task="touch"), algorithm=Ppo(updates=1))


@dataclass
class Seen:
    """A master that serves, and of whom it took orders, one after another, once it may."""

    master: Master
    may: asyncio.Event = field(default_factory=asyncio.Event)
    taken: list[str] = field(default_factory=list)


@pytest.fixture
async def seen(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Seen]:
    async def handle(_self: Master, delivery: Delivery) -> Outcome:
        await seen.may.wait()
        seen.taken.append(delivery.tenant)
        return Done()

    monkeypatch.setattr(Master, "handle", handle)
    seen = Seen(master(bus))
    serving = asyncio.create_task(seen.master.serve())
    yield seen
    seen.master.context.stop.set()
    await serving


async def test_many_orders_of_one_tenant_stand_before_nobody_elses(bus: Bus, seen: Seen, eventually: Any) -> None:
    for tenant in ("flood", "other"):
        await introduce(bus, tenant)
    await asyncio.gather(
        *(bus.publish("job.submit", job(f"a-{n}"), msg_id=f"a/{n}", tenant="flood") for n in range(MANY)),
    )
    await bus.publish("job.submit", job("b"), msg_id="b", tenant="other")  # the last of all

    async def at_hand() -> bool:
        return (await bus.depths())["JOBS"].get("orders-other") == (0, 1)

    async def all_taken() -> bool:
        return len(seen.taken) >= MANY + 1  # what was held up may come a second time

    await eventually(at_hand)
    seen.may.set()
    await eventually(all_taken, within=60)
    assert seen.taken.index("other") <= 2  # behind what was in hand, and at most a turn


async def test_who_sends_orders_without_the_gateway_is_found(bus: Bus, seen: Seen, eventually: Any) -> None:
    await bus.publish("job.submit", job("a"), msg_id="a", tenant="stranger")
    await seen.master.tick()

    async def taken() -> bool:
        return seen.taken == ["stranger"]

    seen.may.set()
    await eventually(taken)


async def test_what_comes_late_of_a_tenant_who_was_removed_is_dropped(bus: Bus) -> None:
    served = master(bus)
    await allow(bus, served, phase="removed")
    await bus.publish("job.submit", job("late"), msg_id="late", tenant=TENANT)
    await served.tick()
    assert await bus.queued("JOBS") == {}
    assert await bus.kv("registry").keys(registry.tenant_key("")) == []
