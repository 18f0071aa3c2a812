"""A simulator in a virtual environment of its own, behind a real environment worker: a session like any other."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from playing import Player, one_process_dies_in_a_call, playing, shown, simulators

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.envs import recipes
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.tensors import decode_image, from_tensor
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec
from tests.conftest import Eventually

SPEC = EnvironmentSpec(id="pusht", task="push", options={"image_size": 64, "max_steps": 10})
KNOWN = describe(SPEC)
WRONG = ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3)


@pytest.fixture
async def acme(bus: Bus, server: EmbeddedServer, eventually: Eventually) -> AsyncIterator[Player]:
    """A tenant who plays, and an environment worker that serves with two processes a kind."""
    if wrong := recipes.check("pusht"):
        pytest.skip(f"pusht: {wrong} (NEXUS_ENVS or NEXUS_HOME says where)")
    async with playing(bus, server.url, SPEC, eventually, processes=2) as player:
        yield player


async def test_a_session_of_a_simulator_in_its_own_venv_plays_an_episode_to_its_limit(acme: Player) -> None:
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


async def test_two_of_its_sessions_give_one_episode_for_one_seed_and_a_refusal_is_told_as_itself(acme: Player) -> None:
    one, other = await asyncio.gather(acme.open(), acme.open())
    played = await asyncio.gather(acme.episode(one, 5), acme.episode(other, 5))
    assert [shown(reply) for reply in played[0]] == [shown(reply) for reply in played[1]]
    assert shown((await acme.episode(one, 6))[0]) != shown(played[0][0])
    with pytest.raises(BadMessage, match="time_limit"):
        await acme.step(one)
    with pytest.raises(ContractError, match=r"action\.size: the environment has 2, the policy expects 3"):
        await acme.open(WRONG)


async def test_a_closed_session_is_gone_and_its_simulator_serves_the_next(acme: Player) -> None:
    first = await acme.open()
    before = await acme.episode(first, seed=1)
    await acme.call(first, "close")
    second = await acme.open()
    assert second.session != first.session
    with pytest.raises(BadMessage, match="reset first"):
        await acme.step(second)
    assert [shown(reply) for reply in await acme.episode(second, seed=1)] == [shown(reply) for reply in before]


async def test_a_simulator_that_dies_while_nobody_plays_is_replaced_and_leaves_nothing(
    acme: Player, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = await acme.open()
    before = await acme.episode(first, seed=1)
    await acme.call(first, "close")
    (child,) = simulators()
    child.kill()
    await eventually(lambda: not psutil.pid_exists(child.pid))
    second = await acme.open()
    assert [shown(reply) for reply in await acme.episode(second, seed=1)] == [shown(reply) for reply in before]
    left = list(tmp_path.glob("nexus-simulator-*"))  # noqa: ASYNC240 - a look
    assert len(left) == 1, "the dead one's folder is gone"


async def test_a_process_that_is_killed_costs_its_own_session_a_fault_and_the_other_plays_on(
    acme: Player, eventually: Eventually
) -> None:
    await one_process_dies_in_a_call(acme, eventually)
