"""A rollout worker and the Environment Service: a session whose worker is gone is noticed, its episode is played elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import structlog

from nexus_bus import config, registry
from nexus_bus.bus import Bus, Durable, EmbeddedServer, Incoming, ensure_tenant, rollout_durable
from nexus_bus.errors import EnvironmentFault
from nexus_bus.worker import Context, Pulse
from schemas.control import JobReport
from schemas.environment import SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec
from schemas.rollout import RolloutOrder
from workers import rollout

REPORTS = Durable("JOBS", "reports", ("job.report.*.*",))
ORDER = RolloutOrder(
    tenant="acme", job="grasp", purpose="before", batch=0, index=3, policy="grasp@0", greedy=True, seed=11, noise_seed=1,
    environment=EnvironmentSpec(id="tabletop", task="touch"), action=ActionSpec(size=1, low=[0.0], high=[1.0]),
    observation=ObservationSpec(cameras={}, state_size=1), max_steps=5, execute=1,
)  # fmt: skip


class House:
    """An environment worker on a connection of its own. What it is asked to do, it does or never answers."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.bus: Any = None
        self.opened: list[str] = []
        self.resets: list[tuple[int, int]] = []  # (seed, trial)
        self.opening: Any = None  # an event that an open waits for
        self.stuck = False  # a reset is never answered
        self.fault: Exception | None = None

    async def start(self) -> "House":
        self.bus = await Bus.connect(self.url, name=self.name)
        await self.bus.serve("env.open", self.open, queue="environment", tenant="*")
        return self

    async def open(self, request: SessionOpen, incoming: Incoming) -> SessionOpened:
        tenant, name = incoming.tokens["tenant"], request.session or ""
        await self.bus.serve("env.session", self.call, tenant=tenant, session=name)
        self.opened.append(name)
        if self.opening is not None:
            await self.opening.wait()
        return SessionOpened(session=name, subject=f"env.session.{tenant}.{name}", worker=self.name, version="1")

    async def call(self, request: SessionCall, _incoming: Incoming) -> SessionReply:
        if request.op == "reset":
            self.resets.append((request.seed, request.trial))
            if self.stuck:
                await asyncio.Event().wait()
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
        return SessionReply(terminated=True, end="success")

    async def die(self) -> None:
        """As a process does: its connection is cut, and nobody says goodbye."""
        await self.bus.client.close()


@pytest.fixture
async def line(bus: Bus, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """`await line(...)`: a rollout worker that would wait for ever, and environment workers as they are started."""
    # Nor does its order come a second time because the machine stalls.
    patient_durable = lambda tenant, sessions: replace(rollout_durable(tenant, sessions), ack_wait=30.0)  # noqa: E731
    monkeypatch.setattr(rollout, "rollout_durable", patient_durable)
    stop, running = asyncio.Event(), list[tuple[asyncio.Task[None], Bus]]()
    houses: list[House] = []

    async def house(name: str) -> House:
        houses.append(await House(server.url, name).start())
        return houses[-1]

    await bus.kv("registry").put(registry.tenant_key("acme"), {})
    await ensure_tenant(bus, "acme")
    own = await Bus.connect(server.url, name="rollout-0")
    patient = {"call_timeout_s": 3600.0, "open_timeout_s": 3600.0}
    settings = config.load("rollout", flags=patient).value
    context = Context("rollout", "rollout-0", own, settings, stop, Pulse(), structlog.get_logger(), "here")
    running.append((asyncio.create_task(rollout.main(context)), own))
    yield house
    stop.set()
    for task, connection in running:
        await task
        await connection.close()
    for one in houses:
        await one.bus.close()


async def played(bus: Bus) -> JobReport:
    """The report of the episode."""
    puller = await bus.pull(REPORTS)
    found = await puller.get(1, wait=30)
    await puller.stop()
    assert found, "no report came"
    return found[0].decode()


async def submit(bus: Bus) -> None:
    await bus.publish("rollout.run", ORDER, msg_id="order", tenant="acme", job="grasp")


async def test_an_episode_whose_environment_worker_dies_in_a_call_is_played_again_elsewhere(
    bus: Bus, line: Any, eventually: Any
) -> None:
    first: House = await line("environment-0")
    first.stuck = True
    await submit(bus)
    await eventually(lambda: first.resets)
    second: House = await line("environment-1")
    await first.die()
    assert (await played(bus)).episode is not None
    assert second.resets == first.resets == [(11, 3)], "the same seed and trial"


async def test_a_session_that_is_being_opened_by_a_worker_that_dies_is_opened_elsewhere(
    bus: Bus, line: Any, eventually: Any
) -> None:
    first: House = await line("environment-0")
    first.opening = asyncio.Event()
    await submit(bus)
    await eventually(lambda: first.opened)
    second: House = await line("environment-1")
    await first.die()
    assert (await played(bus)).episode is not None
    assert second.resets == [(11, 3)]
    assert second.opened != first.opened


async def test_a_slow_worker_is_waited_for(bus: Bus, line: Any, eventually: Any) -> None:
    slow: House = await line("environment-0")
    slow.opening = asyncio.Event()
    await submit(bus)
    await eventually(lambda: slow.opened)
    await asyncio.sleep(1.5)  # several looks at whether it is still there
    slow.opening.set()
    assert (await played(bus)).episode is not None
    assert len(slow.opened) == 1


async def test_a_fault_of_the_simulator_is_told_to_its_job_and_the_episode_played_again(bus: Bus, line: Any) -> None:
    house: House = await line("environment-0")
    house.fault = EnvironmentFault("reset: the arm left the room")
    await submit(bus)
    assert (await played(bus)).episode is not None
    assert house.resets == [(11, 3), (11, 3)]
    told = [item.message async for item in bus.tail("event", since="all", follow=False, tenant="acme", job="grasp")]
    assert [(event.type, event.data["cause"]) for event in told] == [("episode.retried", "simulator")]
    assert told[0].message == "episode before/0/3 is played again: reset: the arm left the room"
