"""Orders to play episodes and to prepare data: by turns, within a tenant's sessions, on real workers and a real server."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import structlog

from nexus_bus import config, registry
from nexus_bus.bus import (
    Bus,
    Delivery,
    Done,
    Durable,
    EmbeddedServer,
    data_durable,
    ensure_durable,
    ensure_tenant,
    ensure_topology,
    remove_tenant,
    rollout_durable,
)
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import Unavailable
from nexus_bus.serving import AHEAD, Serving
from nexus_bus.sessions import Process, Sessions
from nexus_bus.worker import Context, Pulse
from schemas.control import Role
from schemas.environment import PrepareOrder, SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec
from schemas.rollout import RolloutOrder
from schemas.tenant import TenantLimits, TenantRecord
from tests.conftest import Eventually
from workers import environment, rollout

SCENE = EnvironmentSpec(id="tabletop", task="touch")
ACTION = ActionSpec(size=1, low=[0.0], high=[1.0])
SEEN = ObservationSpec(cameras={}, state_size=1)


class Stage:
    """What every episode or preparation comes to: it begins, and ends when the test lets one go, the oldest first."""

    def __init__(self) -> None:
        self.begun: list[str] = []  # tenants, in the order of their turns
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def play(self, tenant: str) -> None:
        self.begun.append(tenant)
        self.now[tenant] += 1
        self.most[tenant] = max(self.most[tenant], self.now[tenant])
        gate = asyncio.get_running_loop().create_future()
        self.waiting.append((tenant, gate))
        await gate
        self.now[tenant] -= 1

    def let_go(self, tenant: str = "") -> None:
        found = next(one for one in self.waiting if one[0] == (tenant or one[0]))
        self.waiting.remove(found)
        found[1].set_result(None)


class House:
    """Workers of one role, each with a connection of its own; a simulator of which every episode ends when it is let go."""

    def __init__(self, bus: Bus, url: str, eventually: Eventually) -> None:
        self.bus, self.url, self.eventually = bus, url, eventually
        self.stage = Stage()
        self.stop = asyncio.Event()
        self.running: list[tuple[asyncio.Task[None], Bus]] = []

    async def simulate(self) -> None:
        async def opened(_request: SessionOpen, incoming: Any) -> SessionOpened:
            return SessionOpened(session="s", subject=f"env.session.{incoming.tokens['tenant']}.s", worker="w", version="1")

        async def called(request: SessionCall, incoming: Any) -> SessionReply:
            if request.op == "reset":
                await self.stage.play(incoming.tokens["tenant"])
            return SessionReply(terminated=True)

        self.services = [
            await self.bus.serve("env.open", opened, tenant="*"),
            await self.bus.serve("env.session", called, tenant="*", session="*"),
        ]

    async def worker(self, role: Role, module: ModuleType, **flags: Any) -> None:
        bus = await Bus.connect(self.url, name=f"{role}-{len(self.running)}")
        settings: Any = config.load(role, flags=flags).value
        context = Context(role, bus.name, bus, settings, self.stop, Pulse(), structlog.get_logger(), "here")
        self.running.append((asyncio.create_task(module.main(context)), bus))

    async def served(self, concurrency: int) -> Serving:
        """What a rollout worker takes its orders by, of which the test sees more."""
        bus = await Bus.connect(self.url, name=f"serving-{len(self.running)}")
        serving = Serving(
            bus, lambda tenant, limits: rollout.rollout_durable(tenant, limits.sessions), batch=concurrency + AHEAD
        )

        async def handle(delivery: Delivery) -> Done:
            await self.stage.play(delivery.tenant)
            return Done()

        work = serving.consume(handle, stop=self.stop, concurrency=concurrency)
        self.running.append((asyncio.create_task(work), bus))
        return serving

    async def tenant(self, name: str, **limits: Any) -> None:
        """Make a tenant known, or give it other limits."""
        kv = self.bus.kv("registry")
        record = TenantRecord(name=name, account="A" * 56, created="now", limits=TenantLimits(**limits))
        await kv.put(registry.account_key(name), record)
        await kv.put(registry.tenant_key(name), {"name": name})

    async def order(self, tenant: str, numbers: range) -> None:
        await asyncio.gather(*(self._order(tenant, number) for number in numbers))

    async def _order(self, tenant: str, number: int) -> None:
        order = RolloutOrder(
            tenant=tenant, job="pick", purpose="before", batch=0, index=number, policy="pick@0", environment=SCENE,
            action=ACTION, observation=SEEN, seed=0, noise_seed=0, greedy=True, max_steps=1, execute=1,
        )  # fmt: skip
        await self.bus.publish("rollout.run", order, msg_id=f"{tenant}/{number}", tenant=tenant, job="pick")

    async def at_hand(self, consumer: str, count: int) -> None:
        """Wait until so many of a tenant's orders are with workers, by the server's account."""

        async def there() -> bool:
            return (await self.bus.depths())["ROLLOUT"].get(consumer, (0, 0))[1] == count

        await self.eventually(there)

    async def turns(self, count: int) -> list[str]:
        """Let so many go, one after another; whose turn it was in their places."""
        before = len(self.stage.begun)
        for i in range(count):
            self.stage.let_go()
            await self.eventually(lambda i=i: len(self.stage.begun) > before + i)
        return self.stage.begun[before:]

    async def empty(self) -> None:
        """Let all go until nothing is queued."""

        async def none_left() -> bool:
            while self.stage.waiting:
                self.stage.let_go()
            return not await self.bus.queued("ROLLOUT")

        await self.eventually(none_left, within=30)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held stays with its holder: after a stall of a second or two it would come again, and be counted twice."""

    def durable(tenant: str, sessions: int | None = None) -> Durable:
        return replace(rollout_durable(tenant, sessions), ack_wait=30.0)

    monkeypatch.setattr(rollout, "rollout_durable", durable)


@pytest.fixture
async def house(bus: Bus, server: EmbeddedServer, eventually: Eventually) -> AsyncIterator[House]:
    made = House(bus, server.url, eventually)
    await made.simulate()
    yield made
    made.stop.set()
    while made.stage.waiting:
        made.stage.let_go()
    for task, _ in made.running:
        await asyncio.wait_for(task, 60)
    for _, connection in made.running:
        await connection.close()


async def test_the_one_order_of_a_tenant_is_next_and_not_behind_three_hundred_of_another(house: House) -> None:
    for tenant in ("loud", "quiet"):
        await house.tenant(tenant)
    await house.order("loud", range(300))
    await house.worker("rollout", rollout, concurrency=1)
    await house.eventually(lambda: house.stage.begun == ["loud"])
    await house.order("quiet", range(1))
    await house.at_hand("rollout-quiet", 1)
    assert await house.turns(3) == ["quiet", "loud", "loud"]


async def test_the_server_keeps_a_tenant_to_its_sessions_over_all_workers_and_learns_of_other_limits(house: House) -> None:
    await house.tenant("acme", sessions=2)
    await house.tenant("free")
    await house.order("acme", range(40))
    for _ in range(2):
        await house.worker("rollout", rollout, concurrency=8)
    await house.at_hand("rollout-acme", 2)
    await house.eventually(lambda: house.stage.now["acme"] == 2)
    await house.order("free", range(6))
    await house.eventually(lambda: house.stage.now["free"] == 6)  # while the other waits for its own
    for _ in range(6):
        house.stage.let_go("free")
    await house.eventually(lambda: house.stage.now["free"] == 0)
    await house.turns(6)
    assert house.stage.most["acme"] == 2

    await house.tenant("acme", sessions=5)
    await house.eventually(lambda: house.stage.now["acme"] == 5)
    await house.at_hand("rollout-acme", 5)

    await house.tenant("acme", sessions=1)

    async def lowered() -> bool:
        return (await house.bus.js.consumer_info("ROLLOUT", "rollout-acme")).config.max_ack_pending == 1

    await house.eventually(lowered)
    while len(house.stage.waiting) > 1:  # what is in hand ends, and nothing takes its place
        house.stage.let_go()
    house.stage.most.clear()
    await house.at_hand("rollout-acme", 1)
    await house.eventually(lambda: house.stage.now["acme"] == 1)
    await house.turns(3)
    assert house.stage.most["acme"] == 1
    await house.empty()


async def test_a_weight_of_three_gets_three_turns_for_one_from_the_moment_it_is_set(house: House) -> None:
    for tenant in ("gold", "iron"):
        await house.tenant(tenant)
        await house.order(tenant, range(160))
    await house.worker("rollout", rollout, concurrency=4)
    await house.eventually(lambda: len(house.stage.begun) == 4)
    for tenant in ("gold", "iron"):  # the server gives out four and two more
        await house.at_hand(f"rollout-{tenant}", 6)
    equal = Counter((await house.turns(48))[16:])
    assert 0.6 <= equal["gold"] / equal["iron"] <= 1.7
    await house.tenant("gold", weight=3)
    served = Counter((await house.turns(96))[16:])
    assert 2 <= served["gold"] / served["iron"] <= 4.5


async def test_a_flood_of_data_to_prepare_does_not_hold_up_another_tenants(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.Environment, "prepare", lambda _, order: house.stage.play(order.tenant))
    for tenant, count in (("loud", 200), ("quiet", 1)):
        await house.tenant(tenant)
        for number in range(count):
            order = PrepareOrder(tenant=tenant, job=f"job-{number}", dataset="d", environment=SCENE)
            await house.bus.publish("env.prepare", order, msg_id=f"{tenant}/{number}", tenant=tenant, job=order.job)
            if tenant == "quiet":
                await house.at_hand("data-quiet", 1)
        if tenant == "loud":
            await house.worker("environment", environment, feeds=2)
            await house.eventually(lambda: house.stage.begun == ["loud"] * 2)
    assert (await house.turns(2))[0] == "quiet"


class Simulator:
    """A process that simulates nothing."""

    alive = True

    async def call(self, *_: Any) -> SessionReply:
        return SessionReply()


async def test_a_tenant_opens_no_more_sessions_than_its_limit(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def simulator(*_: Any) -> tuple[Process, Simulator, int]:
        return Process(asyncio.get_running_loop().create_future()), Simulator(), 1

    monkeypatch.setattr(Sessions, "_simulator", simulator)
    for service in house.services:
        await service.stop()
    await house.tenant("acme", sessions=1)
    await house.worker("environment", environment)
    known = describe(SCENE)

    async def opens(tenant: str) -> SessionOpened | None:
        request = SessionOpen(
            tenant=tenant, job="pick", environment=SCENE, action=known.action, observation=known.observation, lease_s=60
        )
        try:
            return await house.bus.request("env.open", request, timeout=30, tenant=tenant)
        except Unavailable as error:
            refused.append(str(error))
            return None

    refused: list[str] = []
    first = await house.eventually(lambda: opens("acme"))  # once it serves
    refused.clear()
    assert await opens("acme") is None
    assert refused == ["sessions: the tenant holds its limit of 1; close one, or try again once its lease is over"]
    assert await opens("free") is not None
    await house.bus.request("env.session", SessionCall(op="close"), timeout=30, tenant="acme", session=first.session)
    assert await opens("acme") is not None


async def test_a_tenant_that_is_removed_is_served_no_more_and_may_come_back(house: House) -> None:
    for tenant in ("acme", "other"):
        await house.tenant(tenant)
        await house.order(tenant, range(20))
    serving = await house.served(concurrency=2)
    for name in ("acme", "other"):
        await house.at_hand(f"rollout-{name}", 4)
    await house.bus.kv("registry").delete(registry.tenant_key("acme"))
    await house.eventually(lambda: serving.tenants == {"other"})
    await remove_tenant(house.bus, "acme")
    assert (await house.turns(8))[2:] == ["other"] * 6
    assert not {"rollout-acme", "data-acme"} & (await house.bus.depths())["ROLLOUT"].keys()
    await house.tenant("acme", sessions=1)
    await house.order("acme", range(100, 110))
    await house.at_hand("rollout-acme", 1)
    assert "acme" in await house.turns(4)


async def test_an_earlier_release_left_shared_consumers_and_nothing_of_theirs_is_lost(house: House) -> None:
    old = (
        Durable("ROLLOUT", "rollout", ("rollout.run.*.*",)),
        Durable("ROLLOUT", "environment", ("env.prepare.*.*", "env.feed.*.*")),
    )
    for durable in old:
        await ensure_durable(house.bus, durable)
    await house.order("acme", range(3))
    puller = await house.bus.pull(old[0], batch=1)
    assert len(await puller.get(1, wait=30)) == 1  # in work when that release ended
    await puller.stop()
    await ensure_topology(house.bus)
    await house.tenant("acme")
    await house.worker("rollout", rollout, concurrency=4)
    await house.eventually(lambda: len(house.stage.begun) == 3)
    assert set((await house.bus.depths())["ROLLOUT"]) == {"rollout-acme"}
    await house.empty()


async def test_making_a_tenants_consumers_again_leaves_its_limits_alone(bus: Bus) -> None:
    await ensure_durable(bus, rollout_durable("acme", 2))
    await asyncio.gather(*(ensure_tenant(bus, "acme") for _ in range(5)))
    assert (await bus.js.consumer_info("ROLLOUT", "rollout-acme")).config.max_ack_pending == 2
    info = await bus.js.consumer_info("ROLLOUT", "data-acme")
    assert tuple(info.config.filter_subjects) == data_durable("acme").filters
    await ensure_tenant(bus, "other")
    assert {"rollout-other", "data-other"} < (await bus.depths())["ROLLOUT"].keys()
