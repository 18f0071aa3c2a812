"""A tenant's program holds a simulator through the gateway: typed replies, arrays, saved episodes, and leases that end."""

import asyncio
import inspect
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout
from playing import playing, shown, simulators

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.headers import PROBE
from nexus_bus.client import Client, observed
from nexus_bus.client.sessions import Session
from nexus_bus.client.sync import Client as SyncClient
from nexus_bus.client.sync import Session as SyncSession
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadMessage, ContractError, EnvironmentFault, NotFound
from schemas.environment import SessionReply
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec
from tests.conftest import Eventually

SPEC = EnvironmentSpec(id="minigrid", task="goto", options={"image_size": 32, "max_steps": 10})
KNOWN = describe(SPEC)
ACTIONS = np.linspace(KNOWN.action.low, KNOWN.action.high, 4)


@pytest.fixture
async def acme(bus: Bus, server: EmbeddedServer, gateway: Any, eventually: Eventually) -> AsyncIterator[Client]:
    """A tenant; a gateway and an environment worker serve."""
    async with playing(bus, server.url, SPEC, eventually):
        yield Client(bus, "acme")


async def test_what_a_policy_must_fit_is_told_without_a_session(acme: Client) -> None:
    found = await acme.environment(SPEC)
    assert (found.action, found.observation, found.max_steps) == (KNOWN.action, KNOWN.observation, 10)
    assert (found.instructions, found.simulator, found.success) == (KNOWN.instructions, KNOWN.simulator, KNOWN.success)
    with pytest.raises(NotFound, match="no task 'fly'"):
        await acme.environment(EnvironmentSpec(id="minigrid", task="fly"))
    assert simulators() == set()


async def test_an_episode_is_played_from_its_reset_to_its_end(acme: Client) -> None:
    async with acme.session(SPEC) as session:
        assert session.found == await acme.environment(SPEC)
        reply = await session.reset(seed=3)
        seen = observed(reply)
        assert seen.images["grid"].shape == (32, 32, 3)
        assert seen.images["grid"].dtype == np.uint8
        assert (seen.state.shape, seen.state.dtype) == ((4,), np.float32)
        assert seen.instruction == "go to the purple box"
        np.testing.assert_array_equal(await session.render(), seen.images["grid"])
        executed = []
        while reply.end == "running":
            reply = await session.step(ACTIONS)
            executed.append(len(reply.rewards))
        assert executed == [4, 4, 2], "the last chunk is cut at the limit"
        assert (reply.truncated, reply.end, reply.steps) == (True, "time_limit", 10)
        with pytest.raises(BadMessage, match="reset first"):
            await session.step(ACTIONS)
        assert shown(await session.reset(seed=3)) == shown(await session.reset(3, trial=0))
        assert shown(await session.reset(3, trial=1)) != shown(await session.reset(3, trial=0))


async def test_actions_that_do_not_fit_are_refused_and_the_episode_goes_on(acme: Client) -> None:
    async with acme.session(SPEC) as session:
        await session.reset(seed=0)
        for wrong, text in (
            (ACTIONS[0], r"shape \[7\]"),
            (ACTIONS[:, :3], r"shape \[4, 3\], expected \[1\.\.64, 7\]"),
            (ACTIONS * np.nan, "not finite"),
        ):
            with pytest.raises(ContractError, match=text):
                await session.step(wrong)
        assert (await session.step(ACTIONS)).steps == 4
        for seed, trial, text in (
            (2**70, 0, "seed: 1180591620717411303424; expected a whole number, 0 to 2^53"),
            (-1, 0, "seed: -1; expected"),
            (0.5, 0, "seed: 0.5; expected"),
            (0, -1, "trial: -1; expected"),
        ):
            with pytest.raises(BadMessage, match=re.escape(text)):
                await session.reset(seed, trial)  # type: ignore[arg-type]  # as a program without types does
        assert shown(await session.reset(np.int64(7))) == shown(await session.reset(7))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"action\.size: the environment has 7, the policy expects 3"):
        async with acme.session(SPEC, action=ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3)):
            pass
    with pytest.raises(BadMessage, match="lease_s"):
        async with acme.session(SPEC, lease_s=4000):
            pass


async def test_a_reply_without_an_observation_is_no_array() -> None:
    with pytest.raises(BadMessage, match="observation: none in this reply"):
        observed(SessionReply())


@pytest.mark.gl
async def test_a_saved_episode_goes_on_in_another_session(acme: Client) -> None:
    spec = EnvironmentSpec(id="tabletop", task="touch", options={"image_size": 32})
    actions = np.full((2, 3), 0.25)
    async with acme.session(spec) as one, acme.session(spec) as other:
        await one.reset(seed=1)
        before = await one.step(actions)
        state = await one.save()
        after = await one.step(actions)
        restored = await other.restore(state)
        assert shown(restored) == shown(before)
        assert restored.steps == 2
        assert shown(await other.step(actions)) == shown(after)
        with pytest.raises(BadMessage, match=r"state: 7 bytes that are not a saved session .* give what save\(\) of the same"):
            await other.restore(b"nothing")


async def test_a_session_is_given_back_at_the_end_and_by_an_error_too(acme: Client) -> None:
    held = list[Session]()

    async def fail() -> None:
        async with acme.session(SPEC) as session:
            held.append(session)
            await session.reset(seed=0)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    with pytest.raises(NotFound, match="is over or never was"):
        await held[0].reset(seed=0)
    async with acme.session(SPEC) as session:
        await session.close()
        await session.close()
        with pytest.raises(NotFound, match="is over or never was"):
            await session.reset(seed=0)


async def test_a_session_nobody_calls_ends_after_its_lease_and_one_with_a_long_lease_stays(
    acme: Client, eventually: Eventually
) -> None:
    async with acme.session(SPEC, lease_s=1.0) as short, acme.session(SPEC, lease_s=3600) as long:
        await long.reset(seed=0)

        async def over() -> bool:
            """Looked at without a call, which would keep it."""
            try:
                await acme.bus.client.request(f"env.session.acme.{short.id}", b"", timeout=1, headers={PROBE: "1"})
            except NoRespondersError:
                return True
            except NatsTimeout:  # it was taken down this moment
                pass
            return False

        await eventually(over)
        with pytest.raises(NotFound, match="is over or never was"):
            await short.reset(seed=0)
        assert (await long.step(ACTIONS)).steps == 4


async def test_a_simulator_that_dies_is_a_fault_and_another_session_plays_the_same(acme: Client) -> None:
    async with acme.session(SPEC) as session:
        before = await session.reset(seed=5)
        (child,) = simulators()
        child.kill()
        with pytest.raises(EnvironmentFault, match="SIGKILL"):
            await session.step(ACTIONS)
    async with acme.session(SPEC) as session:
        assert shown(await session.reset(seed=5)) == shown(before)


async def test_nobody_steps_the_session_of_another(acme: Client) -> None:
    async with acme.session(SPEC) as session:
        session._client = acme.for_tenant("globex")
        with pytest.raises(NotFound, match="is over or never was"):
            await session.reset(seed=0)


async def test_the_same_without_async(acme: Client, server: EmbeddedServer) -> None:
    def program() -> tuple[list[int], tuple[bytes, ...]]:
        with SyncClient(server.url, "acme") as client:
            assert client.environment(SPEC).max_steps == 10
            with client.session(SPEC, lease_s=30) as session:
                first = reply = session.reset(seed=3)
                np.testing.assert_array_equal(session.render(), observed(reply).images["grid"])
                executed = []
                while reply.end == "running":
                    reply = session.step(ACTIONS)
                    executed.append(len(reply.rewards))
            with pytest.raises(NotFound, match="is over or never was"):
                session.reset(0)
            return executed, shown(first)

    executed, first = await asyncio.to_thread(program)
    assert executed == [4, 4, 2]
    async with acme.session(SPEC) as session:
        assert shown(await session.reset(seed=3)) == first


@pytest.mark.parametrize(("asynchronous", "blocking"), [(Client, SyncClient), (Session, SyncSession)])
def test_the_blocking_classes_have_every_method_with_the_same_parameters(asynchronous: type, blocking: type) -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        named = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
        return {name: [*inspect.signature(one).parameters] for name, one in named.items() if callable(one)}

    expected = methods(asynchronous)
    expected.pop("connect", None)  # a blocking client connects when it is made
    assert methods(blocking) == expected
