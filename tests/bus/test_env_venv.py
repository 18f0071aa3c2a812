"""A simulator in a virtual environment of its own, behind a real environment worker: a session like any other."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import structlog

from nexus_bus import config, registry
from nexus_bus.bus import Bus, EmbeddedServer, ensure_tenant
from nexus_bus.envs import recipes
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.tensors import decode_image, from_tensor, to_tensor
from nexus_bus.worker import Context, Pulse
from schemas.environment import SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec
from tests.conftest import Eventually
from workers import environment

SPEC = EnvironmentSpec(id="pusht", task="push", options={"image_size": 64, "max_steps": 10})
KNOWN = describe(SPEC)
MIDDLE = to_tensor(np.full((4, 2), 256.0, np.float32))


class Acme:
    """A tenant who plays."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def open(self, action: ActionSpec = KNOWN.action) -> SessionOpened:
        request = SessionOpen(tenant="acme", job="grasp", environment=SPEC, action=action, observation=KNOWN.observation)
        return await self.bus.request("env.open", request, timeout=60, tenant="acme")

    async def call(self, opened: SessionOpened, op: Any, **given: Any) -> SessionReply:
        call = SessionCall(op=op, **given)
        return await self.bus.request("env.session", call, timeout=60, tenant="acme", session=opened.session)

    async def episode(self, opened: SessionOpened, seed: int) -> list[SessionReply]:
        """All replies, from the reset to the end."""
        replies = [await self.call(opened, "reset", seed=seed)]
        while replies[-1].end == "running":
            replies.append(await self.call(opened, "step", actions=MIDDLE))
        return replies


@pytest.fixture
async def acme(bus: Bus, server: EmbeddedServer, eventually: Eventually) -> AsyncIterator[Acme]:
    """A tenant, and an environment worker that serves."""
    if wrong := recipes.check("pusht"):
        pytest.skip(f"pusht: {wrong} (NEXUS_ENVS or NEXUS_HOME says where)")
    await bus.kv("registry").put(registry.tenant_key("acme"), {})
    await ensure_tenant(bus, "acme")
    connection, stop = await Bus.connect(server.url, name="environment-0"), asyncio.Event()
    settings, log = config.load("environment").value, cast(Any, structlog.get_logger())
    context = Context("environment", "environment-0", connection, settings, stop, Pulse(), log, "here")
    running = asyncio.create_task(environment.main(context))
    await eventually(lambda: context.pulse.state == "running" or running.done())
    yield Acme(bus)
    stop.set()
    await running
    await connection.close()


def shown(reply: SessionReply) -> tuple[bytes, bytes]:
    """The picture and the state of a reply."""
    assert reply.observation is not None
    picture = decode_image(reply.observation.images["top"])
    return picture.tobytes(), from_tensor(reply.observation.state).tobytes()


async def test_a_session_of_a_simulator_in_its_own_venv_plays_an_episode_to_its_limit(acme: Acme) -> None:
    opened = await acme.open()
    assert opened.version == KNOWN.simulator
    assert "not installed" not in opened.version, "the version that counts is the one of its venv"
    first, *steps = await acme.episode(opened, seed=3)
    assert first.observation is not None
    assert first.observation.instruction == KNOWN.instructions[0]
    picture = decode_image(first.observation.images["top"])
    assert picture.shape == (64, 64, 3)
    assert picture.std() > 0
    assert from_tensor(first.observation.state).shape == (2,)
    assert [len(reply.rewards) for reply in steps] == [4, 4, 2], "the last chunk is cut at the limit"
    assert (steps[-1].truncated, steps[-1].end, steps[-1].steps) == (True, "time_limit", 10)
    assert all(len(reply.successes) == len(reply.rewards) for reply in steps)
    assert all(reply.device_s > 0 for reply in steps)


async def test_two_of_its_sessions_give_one_episode_for_one_seed_and_a_refusal_is_told_as_itself(acme: Acme) -> None:
    one, other = await asyncio.gather(acme.open(), acme.open())
    played = await asyncio.gather(acme.episode(one, 5), acme.episode(other, 5))
    assert [shown(reply) for reply in played[0]] == [shown(reply) for reply in played[1]]
    assert shown((await acme.episode(one, 6))[0]) != shown(played[0][0])
    with pytest.raises(BadMessage, match="time_limit"):
        await acme.call(one, "step", actions=MIDDLE)
    with pytest.raises(ContractError, match=r"action\.size: the environment has 2, the policy expects 3"):
        await acme.open(ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3))


async def test_a_closed_session_is_gone_and_its_simulator_serves_the_next(acme: Acme) -> None:
    first = await acme.open()
    before = await acme.episode(first, seed=1)
    await acme.call(first, "close")
    second = await acme.open()
    assert second.session != first.session
    with pytest.raises(BadMessage, match="reset first"):
        await acme.call(second, "step", actions=MIDDLE)
    assert [shown(reply) for reply in await acme.episode(second, seed=1)] == [shown(reply) for reply in before]


async def test_a_simulator_that_dies_while_nobody_plays_is_replaced_and_leaves_nothing(
    acme: Acme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = await acme.open()
    before = await acme.episode(first, seed=1)
    await acme.call(first, "close")
    (child,) = (one for one in psutil.Process().children() if "nexus_bus.envs.child" in one.cmdline())
    child.kill()
    await eventually(lambda: not psutil.pid_exists(child.pid))
    second = await acme.open()
    assert [shown(reply) for reply in await acme.episode(second, seed=1)] == [shown(reply) for reply in before]
    left = list(tmp_path.glob("nexus-simulator-*"))  # noqa: ASYNC240 - a look
    assert len(left) == 1, "the dead one's folder is gone"
