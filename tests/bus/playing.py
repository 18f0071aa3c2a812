"""A tenant who plays in a simulator, over a real environment worker of this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import numpy as np
import psutil
import pytest
import structlog

from nexus_bus import config, registry
from nexus_bus.bus import Bus, ensure_tenant
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import EnvironmentFault
from nexus_bus.tensors import decode_image, from_tensor, to_tensor
from nexus_bus.worker import Context, Pulse
from schemas.environment import SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec
from tests.conftest import Eventually
from workers import environment


class Player:
    """A tenant, who gives the same four actions again and again."""

    def __init__(self, bus: Bus, spec: EnvironmentSpec, pulse: Pulse) -> None:
        self.bus, self.spec, self.pulse = bus, spec, pulse
        self.known = describe(spec)
        action = self.known.action
        reach = np.linspace(action.low, action.high, 9, dtype=np.float32)
        self.actions = to_tensor(reach[[4, 5, 4, 5]])  # around the middle

    async def open(self, action: ActionSpec | None = None) -> SessionOpened:
        asked = SessionOpen(
            tenant="acme", job="grasp", environment=self.spec, action=action or self.known.action,
            observation=self.known.observation,
        )  # fmt: skip
        return await self.bus.request("env.open", asked, timeout=60, tenant="acme")

    async def call(self, opened: SessionOpened, op: Any, **given: Any) -> SessionReply:
        call = SessionCall(op=op, **given)
        return await self.bus.request("env.session", call, timeout=60, tenant="acme", session=opened.session)

    async def step(self, opened: SessionOpened) -> SessionReply:
        return await self.call(opened, "step", actions=self.actions)

    async def episode(self, opened: SessionOpened, seed: int) -> list[SessionReply]:
        """All replies, from the reset to the end."""
        replies = [await self.call(opened, "reset", seed=seed)]
        while replies[-1].end == "running":
            replies.append(await self.step(opened))
        return replies


@asynccontextmanager
async def playing(bus: Bus, url: str, spec: EnvironmentSpec, eventually: Eventually, **settings: Any) -> AsyncIterator[Player]:
    """A tenant, and an environment worker that serves, with these settings."""
    await bus.kv("registry").put(registry.tenant_key("acme"), {})
    await ensure_tenant(bus, "acme")
    connection, stop, pulse = await Bus.connect(url, name="environment-0"), asyncio.Event(), Pulse()
    loaded, log = config.load("environment", flags=settings).value, cast(Any, structlog.get_logger())
    context = Context("environment", "environment-0", connection, loaded, stop, pulse, log, "here")
    running = asyncio.create_task(environment.main(context))
    await eventually(lambda: pulse.state == "running" or running.done())
    try:
        yield Player(bus, spec, pulse)
    finally:
        stop.set()
        await running
        await connection.close()


def shown(reply: SessionReply) -> tuple[bytes, ...]:
    """The pictures and the state of a reply, to the bit."""
    assert reply.observation is not None
    pictures = (decode_image(image).tobytes() for image in reply.observation.images.values())
    return (from_tensor(reply.observation.state).tobytes(), *pictures)


def simulators() -> set[psutil.Process]:
    """Processes of simulators that this one has started."""
    found = set[psutil.Process]()
    for one in psutil.Process().children():
        with suppress(psutil.Error):  # it ended this very moment
            if "nexus_bus.envs.child" in one.cmdline():
                found.add(one)
    return found


async def one_process_dies_in_a_call(player: Player, eventually: Eventually) -> None:
    """What a worker with two processes owes a tenant: the loss of one costs its own session a fault, and nothing else."""
    first = await player.open()
    (dying,) = simulators()
    second = await player.open()
    (living,) = simulators() - {dying}
    alone = {seed: await player.episode(second, seed) for seed in (5, 6)}

    await player.call(first, "reset", seed=5)
    replies = [await player.call(second, "reset", seed=6)]
    await player.step(first)
    dying.suspend()  # so that it is killed in a call, and not between two
    lost = asyncio.create_task(player.step(first))
    await eventually(lambda: player.pulse.busy == 1)
    replies.append(await player.step(second))  # nor does it wait for the other process
    assert not lost.done()
    dying.kill()
    with pytest.raises(EnvironmentFault, match="ended by SIGKILL"):
        await lost
    while replies[-1].end == "running":
        replies.append(await player.step(second))
    assert [shown(reply) for reply in replies] == [shown(reply) for reply in alone[6]]
    assert [reply.rewards for reply in replies] == [reply.rewards for reply in alone[6]]

    again = await player.open()
    assert again.session != first.session
    assert [shown(reply) for reply in await player.episode(again, 5)] == [shown(reply) for reply in alone[5]]
    assert living in simulators()
    assert len(simulators()) == 2
    assert dying not in simulators()
