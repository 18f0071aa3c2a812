"""Whatever a simulator does, its host says what it was, the others live, and the parent's loop goes on."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest
from fake_simulator import MISDEEDS

from nexus_bus.envs.host import SimulatorHost
from nexus_bus.envs.host import held as held_by
from nexus_bus.errors import BadJob, EnvironmentFault, NotFound
from nexus_bus.tensors import decode_image, from_tensor, to_tensor
from schemas.environment import SessionCall
from schemas.job import EnvironmentSpec

SPEC = EnvironmentSpec(id="own", task="default", image_encoding="raw")
TARGET = "fake_simulator:make_unruly"
MB = 1 << 20


def doing(misdeed: str) -> SessionCall:
    return SessionCall(op="step", actions=to_tensor(np.array([[MISDEEDS.index(misdeed)]], np.float32)))


async def ready(**options: float) -> tuple[SimulatorHost, int]:
    host = await SimulatorHost.start(own=TARGET, **options)  # type: ignore[arg-type]
    session = await host.open(SPEC)
    await host.call(session, SessionCall(op="reset", seed=1))
    return host, session


@pytest.fixture
async def host() -> AsyncIterator[tuple[SimulatorHost, int]]:
    one, session = await ready()
    yield one, session
    await one.stop()


async def fault_of(host: SimulatorHost, session: int, misdeed: str) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        await host.call(session, doing(misdeed))
    return str(caught.value)


@pytest.mark.parametrize(
    ("misdeed", "said"),
    [
        ("segfault", "ended by SIGSEGV"),
        ("exits", "ended with code 3: license server not found"),
        ("forks", "ended with code 4"),  # although its own child keeps the socket open
    ],
)
async def test_a_simulator_that_dies_is_told_with_its_last_words(
    host: tuple[SimulatorHost, int], misdeed: str, said: str
) -> None:
    one, session = host
    assert said in await fault_of(one, session, misdeed)
    assert not one.alive


async def test_a_simulator_that_makes_no_progress_is_ended() -> None:
    host, session = await ready()
    host._call_timeout = 0.5
    assert "no answer to step within 0.5 s" in await fault_of(host, session, "hang")
    assert not host.alive
    await host.stop()
    assert not psutil.pid_exists(host.pid)


@pytest.mark.parametrize("misdeed", ["memory", "hires"])
async def test_a_simulator_that_eats_memory_is_ended_while_the_loop_goes_on(misdeed: str) -> None:
    host, session = await ready()
    host._memory = psutil.Process(host.pid).memory_info().rss + 200 * MB
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    turning = asyncio.create_task(turn())
    said = await fault_of(host, session, misdeed)
    turning.cancel()
    assert "of memory, more than its limit of" in said
    assert turns > 5
    await host.stop()
    await ended(host.pid)


FAMILY = """
import os, sys, time
kept = b"x" * (200 << 20)
if os.fork():
    print("forked", flush=True)
time.sleep(60)
"""


def test_what_processes_of_a_simulator_share_counts_once() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        held = held_by(psutil.Process(parent.pid), limit=300 * MB)
        os.killpg(parent.pid, signal.SIGKILL)
    assert 200 * MB < held < 300 * MB


async def test_what_a_simulator_prints_disturbs_nobody_and_its_owner_sees_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    one, session = await ready()  # here: what it writes to is settled when it starts
    reply = await one.call(session, doing("prints"))
    assert reply.steps == 1
    assert (one._folder / "stderr").stat().st_size > 0
    await one.stop()
    out, err = capfd.readouterr()
    assert out == ""
    assert sum(line.startswith("noise") for line in err.splitlines()) == 2000


async def test_noise_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexus_bus.envs.host.NOISE", 1000)
    monkeypatch.setattr("nexus_bus.envs.host.WATCH_S", 0.02)
    host, session = await ready()
    await host.call(session, doing("prints"))
    async with asyncio.timeout(30):
        while (host._folder / "stderr").stat().st_size:
            await asyncio.sleep(0.01)
    monkeypatch.setattr("nexus_bus.envs.host.NOISE", 4 * MB)  # or its last words might be noise too
    await host.call(session, doing("prints"))
    assert "ended with code 3: license server not found" in await fault_of(host, session, "exits")
    await host.stop()


async def test_a_simulator_that_asks_gets_nothing_and_goes_on(host: tuple[SimulatorHost, int]) -> None:
    one, session = host
    assert (await one.call(session, doing("asks"))).steps == 1


@pytest.mark.parametrize(("misdeed", "said"), [("raises", "joint left the room"), ("nan", "state is not finite")])
async def test_a_fault_costs_its_own_session_alone(host: tuple[SimulatorHost, int], misdeed: str, said: str) -> None:
    one, session = host
    other = await one.open(SPEC)
    await one.call(other, SessionCall(op="reset", seed=2))
    fault = await fault_of(one, session, misdeed)
    assert said in fault
    assert fault.endswith(", in raises)") is (misdeed == "raises")  # whose code it is, is told where
    assert (await one.call(other, doing("none"))).steps == 1
    with pytest.raises(NotFound):
        await one.call(session, doing("none"))


def members(group: int) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found


async def ended(group: int) -> None:
    """Wait until nothing of a process group is left; its head has to be gone already."""
    async with asyncio.timeout(30):
        while left := members(group):
            assert group not in left
            await asyncio.sleep(0.02)


async def test_what_a_simulator_started_ends_with_its_host(host: tuple[SimulatorHost, int]) -> None:
    one, session = host
    group = one.pid
    await fault_of(one, session, "forks")
    await one.stop()
    await ended(group)


async def test_nonsense_from_a_child_is_a_fault(host: tuple[SimulatorHost, int]) -> None:
    one, session = host
    one._answers.data_received(b"\xff\xff\xff\xff")  # a length of 4 GB
    assert "answered nonsense" in await fault_of(one, session, "none")


async def test_lerobots_contract_is_taken_as_it_is(host: tuple[SimulatorHost, int]) -> None:
    one, session = host
    known = await one.describe(SPEC)
    assert known.observation.cameras == {"wrist": (8, 8, 3), "front": (8, 8, 3)}
    assert (known.observation.state_size, known.action.high, known.max_steps) == (2, [len(MISDEEDS)], 40)
    assert known.instructions == ["behave"]
    reply = await one.call(session, SessionCall(op="reset", seed=5))
    assert reply.observation is not None
    assert reply.observation.instruction == "behave"
    pictures = {name: decode_image(picture) for name, picture in reply.observation.images.items()}
    np.testing.assert_array_equal(pictures["front"], pictures["wrist"][::-1])
    actions = to_tensor(np.zeros((64, 1), np.float32))
    reply = await one.call(session, SessionCall(op="step", actions=actions))
    assert (reply.steps, reply.end, reply.successes[-1]) == (30, "success", True)
    assert from_tensor(reply.observation.state).tolist() == [30.0, 0.5]  # type: ignore[union-attr]


async def test_an_env_hub_of_vectors_gives_a_task_for_each() -> None:
    host = await SimulatorHost.start(own="fake_simulator:make_hub")
    with pytest.raises(NotFound, match=r"there are drawer/0, drawer/1"):
        await host.open(EnvironmentSpec(id="own", task="door/0"))
    session = await host.open(EnvironmentSpec(id="own", task="drawer/1", options={"max_steps": 3}))
    await host.call(session, SessionCall(op="reset"))
    reply = await host.call(session, SessionCall(op="step", actions=to_tensor(np.zeros((5, 1), np.float32))))
    assert (reply.truncated, reply.end, reply.steps) == (True, "time_limit", 3)
    assert reply.observation is not None  # the final one, for the bootstrap
    await host.stop()


@pytest.mark.parametrize(
    ("target", "kind", "said"),
    [
        ("nowhere:make", NotFound, r"No module named 'nowhere'; give module:callable"),
        ("fake_simulator:nothing", NotFound, r"has no attribute 'nothing'; give module:callable"),
        ("fake_simulator:make_nothing", BadJob, r"^--env: it gave NoneType, expected a Gymnasium environment"),
        (
            "fake_simulator:make_unplugged",
            EnvironmentFault,
            r"OSError: no arm on port 7 \(.*fake_simulator.py, line \d+, in make_",
        ),
        ("fake_simulator:make_leaves", EnvironmentFault, r"--env fake_simulator:make_leaves: SystemExit: 3 \("),
        ("fake_simulator:make_unseeing", BadJob, r"^--env: the state after reset\(\) of default is \[nan, 0\.5\]"),
        (
            "fake_simulator:make_ancient",
            BadJob,
            r"^--env: reset\(\) of default gave dict, expected Gymnasium's \(observation, info",
        ),
    ],
)
async def test_what_cannot_be_loaded_is_told_in_one_line(target: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        await SimulatorHost.start(own=target)
    assert "\n" not in str(caught.value)


async def test_a_session_that_fails_and_cannot_be_closed_leaves_the_others(host: tuple[SimulatorHost, int]) -> None:
    one, first = host
    second = await one.open(SPEC)
    await one.call(second, SessionCall(op="reset"))
    for misdeed, said in (("leaves", "SystemExit: 5"), ("raises", "joint left the room")):
        failing = await one.open(SPEC)
        await one.call(failing, SessionCall(op="reset"))
        await one.call(failing, doing("stuck"))
        assert said in await fault_of(one, failing, misdeed)
    assert (await one.call(first, doing("none"))).steps == 1
    assert one.alive


async def test_a_camera_that_fails_is_a_fault_and_not_the_jobs_mistake(host: tuple[SimulatorHost, int]) -> None:
    assert "expected uint8" in await fault_of(*host, "grey")


def test_what_cannot_be_served_is_refused() -> None:
    import gymnasium

    from nexus_bus.envs.own import _by_task

    with pytest.raises(BadJob, match="expected a Gymnasium environment"):
        _by_task(object())
    several = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 2)
    with pytest.raises(BadJob, match=r"SyncVectorEnv of 2; expected one"):
        _by_task(several)
    several.close()
