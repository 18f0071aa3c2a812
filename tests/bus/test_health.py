"""The Health Manager: who is lost, why, who comes back, and who is left alone."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from nexus_bus.bus import Bus, Incoming
from nexus_bus.errors import NotFound, Unavailable
from nexus_bus.worker import Context, Pulse
from schemas.control import Ack, Heartbeat, ProcessExit, ProcessOrder, WorkersKnown, WorkersQuery
from schemas.events import Event
from workers import health
from workers.health import Health


class Clock:
    """Stands still until a test says how much time goes by: no test depends on how fast it runs."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Ward:
    """A Health Manager, a host that notes what it is told to do, and the events that come of it."""

    def __init__(self, bus: Bus, health: Health, clock: Clock) -> None:
        self.bus, self.health, self.clock = bus, health, clock
        self.orders: list[tuple[str, float]] = []
        self.refuse: Exception | None = None
        self.refused = 0

    async def order(self, order: ProcessOrder, _incoming: Incoming) -> Ack:
        if self.refuse is not None:
            self.refused += 1
            raise self.refuse
        self.orders.append((order.worker, time.monotonic()))
        return Ack()

    async def beat(self, worker: str = "trainer-0", pid: int = 1, **fields: Any) -> None:
        given = {"state": "running", "busy": False, "progress": 0, "host": "here", "role": "trainer"} | fields
        await self.health.beat(Heartbeat(worker=worker, pid=pid, time=time.time(), **given), {})

    async def exit(self, worker: str = "trainer-0", pid: int = 1, code: int = -9, **fields: Any) -> None:
        await self.health.exited(
            ProcessExit(role="trainer", worker=worker, host="here", pid=pid, returncode=code, **fields), {}
        )

    def later(self, seconds: float) -> None:
        """So much time goes by for the Health Manager."""
        self.clock.now += seconds

    async def told(self, kind: str = "worker.lost") -> list[Event]:
        items = self.bus.tail("event", since="all", follow=False, tenant="provider", job="*")
        return [item.message async for item in items if item.message.type == kind]


@pytest.fixture
async def ward(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`await ward(backoff_s=0.0)`: a Health Manager by these settings."""

    async def open_(**settings: Any) -> Ward:
        given = {
            "beat_s": 0.1, "missed": 3, "starting_s": 60.0, "wedged_s": 60.0, "backoff_s": 0.0, "loop_window_s": 60.0,
            "loop_limit": 5,
        } | settings  # fmt: skip
        log = structlog.get_logger()
        context = Context("health", "health-0", bus, SimpleNamespace(**given), asyncio.Event(), Pulse(), log, "here")
        clock = Clock()
        monkeypatch.setattr(health, "time", clock)
        ward = Ward(bus, Health(context), clock)
        await bus.serve("host.order", ward.order, host="here")
        await bus.serve("health.known", ward.health.known)
        return ward

    return open_


async def test_a_death_is_told_with_its_cause_and_the_worker_comes_back(ward: Any, eventually: Any):
    here: Ward = await ward()
    await here.beat()
    await here.exit(code=1, cause="numerics", words="FloatingPointError: loss is nan")
    await eventually(lambda: [name for name, _ in here.orders] == ["trainer-0"])
    (lost,) = await here.told()
    assert lost.message == "trainer-0 (process 1), numerics: ended with code 1: FloatingPointError: loss is nan"
    assert (lost.data["cause"], lost.data["role"], lost.data["worker"]) == ("numerics", "trainer", "trainer-0")
    await here.beat(pid=2, state="starting")
    (back,) = await here.told("worker.restarted")
    assert back.message == "trainer-0 is back as process 2"


async def test_silence_and_standing_still_are_told_apart(ward: Any, eventually: Any):
    here: Ward = await ward(wedged_s=0.5)
    await here.beat("trainer-0")
    for _ in range(6):
        await here.beat("trainer-1", pid=5, busy=True, progress=3)  # it lives, and does not move
        await here.health.look()
        here.later(0.12)
    await eventually(lambda: len(here.orders) == 2)
    assert {event.data["worker"]: event.data["cause"] for event in await here.told()} == {
        "trainer-0": "silent",
        "trainer-1": "wedged",
    }


async def test_who_moves_or_has_nothing_to_do_is_not_wedged(ward: Any):
    here: Ward = await ward(wedged_s=0.05, missed=1000)
    await here.beat("trainer-0", busy=False, progress=3)
    for progress in range(5):
        await here.beat("trainer-1", busy=True, progress=progress)
        here.later(0.04)
        await here.health.look()
    assert here.orders == []


async def test_a_crash_loop_slows_down_ends_and_is_tried_again_later(ward: Any, eventually: Any):
    here: Ward = await ward(backoff_s=0.05, loop_limit=3, loop_window_s=60.0)
    for pid in (1, 2, 3):
        await here.beat(pid=pid)
        await here.exit(pid=pid)
        await eventually(lambda pid=pid: len(here.orders) == pid)
    await here.beat(pid=4)
    await here.exit(pid=4)
    times = [at for _, at in here.orders]
    assert times[2] - times[1] > 0.15, "0, 0.05 and 0.15 s are waited"
    looping = [event for event in await here.told() if event.data.get("looping")]
    assert [event.message for event in looping] == ["trainer-0 ended 3 times in 60 s; left alone for a while"]
    (known,) = (await here.health.known(WorkersQuery(), SimpleNamespace())).workers  # type: ignore[arg-type]
    assert (known.state, known.restarts) == ("given up", 3)

    here.later(61.0)
    await here.health.look()
    await eventually(lambda: len(here.orders) == 4)


async def test_one_that_ends_before_it_says_a_word_is_brought_back_too(ward: Any, eventually: Any):
    here: Ward = await ward()
    await here.beat(pid=1)
    await here.exit(pid=1)
    await eventually(lambda: len(here.orders) == 1)
    await here.exit(pid=2, code=1, cause="broker")
    await here.exit(pid=2, code=1, cause="broker")  # its host tells it until somebody brings the worker back
    await eventually(lambda: len(here.orders) == 2)
    assert [(event.data["pid"], event.data["cause"]) for event in await here.told()] == [(1, "code"), (2, "broker")]
    await here.beat(pid=3)
    assert (here.health.workers["trainer-0"].pid, len(here.orders)) == (3, 2)


async def test_a_host_that_is_away_for_a_moment_is_told_again(ward: Any, eventually: Any):
    here: Ward = await ward()
    here.refuse = Unavailable("not connected yet")
    await here.beat()
    await here.exit()
    await eventually(lambda: here.refused > 1)
    here.refuse = None
    await eventually(lambda: [name for name, _ in here.orders] == ["trainer-0"])
    assert len(await here.told()) == 1


async def test_one_that_crashes_again_and_again_keeps_no_other_waiting(ward: Any, eventually: Any):
    here: Ward = await ward(backoff_s=30.0)
    for pid in (1, 2):
        await here.beat(pid=pid)
        await here.exit(pid=pid)  # the second restart waits for half a minute
    await here.beat("trainer-1", pid=7)
    await here.exit("trainer-1", pid=7)
    await eventually(lambda: [name for name, _ in here.orders] == ["trainer-0", "trainer-1"])


async def test_who_leaves_in_good_order_is_not_missed(ward: Any):
    here: Ward = await ward(missed=1, beat_s=0.01)
    await here.beat("trainer-0", pid=1)
    await here.beat("trainer-0", pid=1, state="draining", last=True)
    await here.beat("trainer-0", pid=1)  # one that was still on its way
    await here.beat("trainer-1", pid=2)
    await here.exit("trainer-1", pid=2, code=-9, ordered=True)  # it would not drain, but its end was wanted
    here.later(0.05)
    await here.health.look()
    assert (here.health.workers, here.orders, await here.told()) == ({}, [], [])
    await here.beat("trainer-0", pid=9)  # the next of that name is welcome
    assert list(here.health.workers) == ["trainer-0"]


async def test_who_left_in_good_order_without_having_been_told_to_comes_back(ward: Any, eventually: Any):
    """Somebody sent it SIGTERM, say. It drained and said that it leaves, but its host is to have as many as before."""
    here: Ward = await ward()
    await here.beat()
    await here.beat(state="draining", last=True)
    await here.exit(code=0)
    await eventually(lambda: [worker for worker, _ in here.orders] == ["trainer-0"])
    (lost,) = await here.told()
    assert "its host had not told it to" in lost.message


async def test_a_worker_that_its_host_has_stopped_is_forgotten(ward: Any, eventually: Any):
    here: Ward = await ward()
    here.refuse = NotFound("worker: it was told to stop")
    await here.beat()
    await here.exit()
    await eventually(lambda: not here.health.workers)


async def test_a_worker_without_a_host_is_lost_once_and_no_crash_loop(
    ward: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(health, "ORDER_S", 0.5)
    here: Ward = await ward(missed=1, beat_s=0.01, loop_limit=1)
    await here.beat("pod-a", host="elsewhere")
    here.later(0.05)
    await here.health.look()
    await eventually(lambda: here.health.workers["pod-a"].state == "lost")
    here.health.workers["pod-a"].again = 0.0
    await here.health.look()
    await eventually(lambda: here.health.workers["pod-a"].again > 0)
    (lost,) = await here.told()
    assert lost.data["cause"] == "silent"
    await here.beat("pod-a", pid=2, host="elsewhere")
    assert here.health.workers["pod-a"].state == "running"


async def test_it_tells_whom_it_knows(ward: Any, bus: Bus):
    here: Ward = await ward()
    await here.beat("trainer-1", pid=5, busy=True, progress=3)
    await here.beat("rollout-0", role="rollout")
    answer: WorkersKnown = await bus.request("health.known", WorkersQuery(), timeout=30)
    assert [(one.worker, one.role, one.busy, one.progress) for one in answer.workers] == [
        ("rollout-0", "rollout", False, 0),
        ("trainer-1", "trainer", True, 3),
    ]
