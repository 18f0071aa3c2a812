"""Simulators in a child process: many sessions, one child, and nothing that it does reaches the parent's loop."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from fake_simulator import SPEC, Fake

from nexus_bus.envs.child import Child
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.envs.wire import Request
from nexus_bus.errors import BadJob, BadMessage, ContractError, EnvironmentFault, NotFound
from nexus_bus.tensors import decode_image, from_tensor, to_tensor
from schemas.environment import SessionCall
from schemas.job import EnvironmentSpec

GRID = EnvironmentSpec(id="minigrid", task="goto", options={"image_size": 32})


@pytest.fixture
async def host() -> AsyncIterator[SimulatorHost]:
    one = await SimulatorHost.start()
    yield one
    await one.stop()


def reset(seed: int = 0) -> SessionCall:
    return SessionCall(op="reset", seed=seed)


def step(actions: np.ndarray) -> SessionCall:
    return SessionCall(op="step", actions=to_tensor(np.asarray(actions, np.float32)))


async def test_an_episode_through_the_host(host: SimulatorHost) -> None:
    session = await host.open(GRID)
    reply = await host.call(session, reset(3))
    assert reply.observation is not None
    assert reply.observation.instruction.startswith("go to ")
    assert decode_image(reply.observation.images["grid"]).shape == (32, 32, 3)
    assert from_tensor(reply.observation.state).shape == (4,)
    while reply.end == "running":
        reply = await host.call(session, step((await host.expert(session))[None]))
    assert (reply.end, reply.terminated, reply.successes) == ("success", True, [True])
    assert reply.device_s > 0
    picture = await host.call(session, SessionCall(op="render"))
    assert picture.image is not None
    await host.call(session, SessionCall(op="close"))  # the lease ends, the simulator stays for the next one
    with pytest.raises(BadMessage, match="reset first"):
        await host.call(session, step(np.zeros((1, 7))))
    assert (await host.call(session, reset())).steps == 0
    await host.close(session)
    with pytest.raises(NotFound, match=f"{session} is not open"):
        await host.call(session, reset())


async def test_many_sessions_at_once_keep_their_answers_apart(host: SimulatorHost) -> None:
    sessions = await asyncio.gather(*(host.open(GRID) for _ in range(6)))
    together = await asyncio.gather(*(host.call(session, reset(seed)) for seed, session in enumerate(sessions)))
    alone = [await host.call(sessions[0], reset(seed)) for seed in range(6)]
    assert [reply.observation for reply in together] == [reply.observation for reply in alone]


async def test_refusals_cross_the_pipe_as_what_they_are(host: SimulatorHost) -> None:
    with pytest.raises(NotFound, match="there are tabletop"):
        await host.open(EnvironmentSpec(id="kitchen", task="cook"))
    with pytest.raises(BadJob, match=r"options\.image_size"):
        await host.open(EnvironmentSpec(id="minigrid", task="goto", options={"image_size": 1}))
    session = await host.open(GRID)
    await host.call(session, reset())
    with pytest.raises(ContractError, match="nan is not finite"):
        await host.call(session, step(np.full((1, 7), np.nan)))
    with pytest.raises(BadMessage, match="a step needs them"):
        await host.call(session, SessionCall(op="step"))
    assert (await host.call(session, step(np.zeros((1, 7))))).steps == 1


async def test_a_wedged_simulator_is_killed_and_every_waiting_call_is_told() -> None:
    host = await SimulatorHost.start(call_timeout=0.3)
    session = await host.open(GRID)
    os.kill(host.pid, signal.SIGSTOP)
    results = await asyncio.gather(*(host.call(session, reset()) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [EnvironmentFault] * 3
    assert "no answer to reset within 0.3 s" in str(results[0])
    assert not host.alive
    with pytest.raises(EnvironmentFault):
        await host.call(session, reset())
    await host.stop()
    assert not psutil.pid_exists(host.pid)


async def test_the_limit_counts_from_when_a_call_begins_not_from_when_it_waits() -> None:
    host = await SimulatorHost.start(call_timeout=20.0)
    session = await host.open(GRID)
    begin = time.monotonic()
    await asyncio.gather(*(host.call(session, reset(i)) for i in range(20)))
    each = (time.monotonic() - begin) / 20
    host._call_timeout = limit = max(3.0, 50 * each)
    begin = time.monotonic()
    await asyncio.gather(*(host.call(session, reset(i)) for i in range(int(1.5 * limit / each))))
    assert host.alive  # although the last one waited for longer than one call may take
    await host.stop()


async def test_a_killed_child_is_a_fault_and_others_go_on(host: SimulatorHost) -> None:
    other = await SimulatorHost.start()
    session = await other.open(GRID)
    os.kill(other.pid, signal.SIGSTOP)  # or it would have answered all of them, where this process has to wait for its turn
    waiting = asyncio.gather(*(other.call(session, reset(i)) for i in range(50)), return_exceptions=True)
    await asyncio.sleep(0)
    os.kill(other.pid, signal.SIGKILL)
    results = await waiting
    assert isinstance(results[-1], EnvironmentFault)
    assert "ended by SIGKILL" in str(results[-1])
    assert not other.alive
    await other.stop()
    assert (await host.call(await host.open(GRID), reset())).end == "running"


async def test_a_caller_that_gives_up_does_not_shift_the_answers(host: SimulatorHost) -> None:
    session = await host.open(GRID)
    given_up = asyncio.create_task(host.call(session, reset(1)))
    await asyncio.sleep(0)
    given_up.cancel()
    reply = await host.call(session, reset(2))
    with contextlib.suppress(asyncio.CancelledError):
        await given_up
    assert reply.observation == (await host.call(session, reset(2))).observation


async def test_stopping_ends_the_child_and_its_folder(host: SimulatorHost) -> None:
    await host.open(GRID)
    await host.stop()
    await host.stop()
    assert not psutil.pid_exists(host.pid)
    assert not Path(host._folder).exists()  # noqa: ASYNC240 - one look


def test_the_child_dies_with_its_parent() -> None:
    code = (
        "import asyncio, time\n"
        "from nexus_bus.envs.host import SimulatorHost\n"
        "async def main():\n"
        "    host = await SimulatorHost.start(); print(host.pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    os.kill(child.pid, signal.SIGSTOP)  # even one that is wedged
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_where_in_our_code_a_fault_was_is_nobodys_business_and_in_their_own_it_is_theirs(fake: type[Fake]) -> None:
    fake.fault = RuntimeError("joint left the room")
    said = []
    for child in (Child(), Child(own=True)):
        child.answer(Request(1, "open", spec=SPEC))
        child.answer(Request(1, "call", call=reset()))
        said.append(child.answer(Request(1, "call", call=step(np.zeros((1, 2))))).message)
    assert said[0] == "step: RuntimeError: joint left the room"
    assert said[1].startswith(f"{said[0]} (fake_simulator.py, line ")


def test_a_fault_closes_its_own_session_only(fake: type[Fake]) -> None:
    child = Child()
    for number in (1, 2):
        assert child.answer(Request(number, "open", spec=SPEC)).code == ""
        child.answer(Request(number, "call", call=reset()))
    fake.fault = RuntimeError("gone")
    answer = child.answer(Request(1, "call", call=step(np.zeros((1, 2)))))
    fake.fault = None
    assert (answer.code, answer.message) == ("environment_fault", "step: RuntimeError: gone")
    assert list(child.sessions) == [2]
    assert child.answer(Request(2, "call", call=step(np.zeros((1, 2))))).code == ""
    assert child.answer(Request(1, "call", call=reset())).code == "not_found"


@pytest.mark.gl
async def test_the_tabletop_draws_in_the_child(host: SimulatorHost) -> None:
    spec = EnvironmentSpec(id="tabletop", task="touch")
    one, other = await host.open(spec), await host.open(spec)
    first = await host.call(one, reset(4))
    saved = await host.save(one)
    assert (await host.restore(other, saved)).observation == first.observation
    here, there = await host.call(one, step(np.ones((5, 3)))), await host.call(other, step(np.ones((5, 3))), "raw")
    assert here.observation is not None
    assert there.observation is not None
    np.testing.assert_array_equal(
        decode_image(here.observation.images["front"]), decode_image(there.observation.images["front"])
    )
