"""The supervisor of one host: children start, end, come back on order, and never outlive it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from nexus_bus import autoscale, children, host
from nexus_bus.autoscale import Bounds
from nexus_bus.bus import Bus, EmbeddedServer, discover, ensure_tenant
from nexus_bus.errors import NotFound, Refused, Unavailable
from nexus_bus.homes import held, kept_counts, running_up
from nexus_bus.host import Supervisor, host_id
from schemas.control import Ack, Heartbeat, ProcessExit, ProcessOrder, Role, Scaled, ScaleOrder
from schemas.events import Event
from schemas.subjects import subject

pytestmark = pytest.mark.timeout(240)

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
DRAINS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'drained\\n'), sys.exit(0)))
print('up', flush=True)
time.sleep(600)
"""

FAILS = """
import signal, time
def fail(*_): raise MemoryError
signal.signal(signal.SIGUSR1, fail)
print('up', flush=True)
time.sleep(600)
"""

Start = Callable[..., Awaitable["Running"]]


class Running:
    """A supervisor at work, and what it has said."""

    def __init__(self, supervisor: Supervisor, bus: Bus, said: list[str], exits: list[ProcessExit]) -> None:
        self.supervisor, self.bus, self.said, self.exits = supervisor, bus, said, exits
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def pid(self, worker: str) -> int:
        return self.supervisor.children[worker].pid

    def up(self, worker: str) -> bool:
        """Whether its process has come as far as printing."""
        child = self.supervisor.children.get(worker)
        log = self.supervisor.home / "logs" / f"{worker}.log"
        return child is not None and child.running and log.is_file() and log.read_text().count("up") >= len(child.starts)

    def log(self, worker: str) -> str:
        return (self.supervisor.home / "logs" / f"{worker}.log").read_text()

    async def order(self, worker: str, action: str = "restart", pid: int = 0) -> Ack:
        order = ProcessOrder(worker=worker, action=action, reason="a test", pid=pid)  # type: ignore[arg-type]
        return await self.bus.request("host.order", order, timeout=30, host=self.supervisor.host)

    async def scale(self, **counts: int) -> Scaled:
        order = ScaleOrder(counts=counts, reason="a test")  # type: ignore[arg-type]
        return await self.bus.request("host.scale", order, timeout=30, host=self.supervisor.host)

    async def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            await self.task


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
async def start(server: EmbeddedServer, bus: Bus, tmp_path: Path, eventually: Any) -> AsyncIterator[Start]:
    """`await start({"rollout": 1}, DRAINS)`: a supervisor whose workers run that code."""
    started: list[Running] = []

    async def start(counts: Mapping[Role, int], code: str = SLEEPS, grace: float = 20.0, **options: Any) -> Running:
        said: list[str] = []
        exits: list[ProcessExit] = []

        async def note(message: ProcessExit, _tokens: dict[str, str]) -> None:
            exits.append(message)

        supervisor = Supervisor(
            tmp_path / "home",
            server.url,
            say=said.append,
            command=lambda *_: [sys.executable, "-c", code],
            grace=grace,
            **options,
        )
        running = Running(supervisor, bus, said, exits)
        started.append(running)
        await bus.subscribe("health.exit", note, host=supervisor.host)
        await bus.client.flush()
        running.task = asyncio.create_task(supervisor.run(counts, running.stop))
        names = [f"{role}-{index}" for role, count in counts.items() for index in range(count)]
        await eventually(lambda: all(running.up(name) for name in names), within=60)
        return running

    yield start
    for running in started:
        await running.end()


async def test_it_starts_what_it_is_told_and_ends_all_of_it(start: Start):
    running = await start({"rollout": 2, "trainer": 1}, DRAINS)
    pids = [running.pid(name) for name in ("rollout-0", "rollout-1", "trainer-0")]
    assert not any(gone(pid) for pid in pids)
    await running.end()
    assert all(gone(pid) for pid in pids)
    assert "drained" in running.log("trainer-0")
    assert running.exits == []  # an end of our own making is no news


async def test_who_does_not_drain_in_time_is_killed(start: Start):
    running = await start({"rollout": 1}, STUBBORN, grace=0.3)
    pid = running.pid("rollout-0")
    await running.end()
    assert gone(pid)
    assert running.said == ["rollout-0 did not end within 0.3 s and was killed"]


async def test_an_end_is_told_with_its_code(start: Start, eventually: Any):
    running = await start({"rollout": 1})
    pid = running.pid("rollout-0")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: running.exits)
    host_name = running.supervisor.host
    expected = ProcessExit(role="rollout", worker="rollout-0", host=host_name, pid=pid, returncode=-9, cause="killed")
    assert running.exits[0] == expected
    assert not running.supervisor.children["rollout-0"].running  # coming back is decided elsewhere


async def test_an_order_brings_back_who_ended(start: Start, eventually: Any):
    running = await start({"rollout": 1})
    pid = running.pid("rollout-0")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: running.exits)
    assert await running.order("rollout-0", pid=pid) == Ack()
    assert running.pid("rollout-0") != pid
    await eventually(lambda: running.up("rollout-0"))


async def test_an_order_replaces_who_is_wedged(start: Start, eventually: Any):
    running = await start({"rollout": 1}, STUBBORN, grace=0.3)
    pid = running.pid("rollout-0")
    await running.order("rollout-0", pid=pid)
    assert gone(pid)
    assert not running.said[0].startswith("rollout-0 did not end")  # no drain was waited for
    await eventually(lambda: running.up("rollout-0"))
    assert running.exits == []


async def test_an_order_about_an_earlier_process_changes_nothing(start: Start):
    running = await start({"rollout": 1})
    pid = running.pid("rollout-0")
    with pytest.raises(Unavailable, match="by now"):
        await running.order("rollout-0", pid=pid + 1)
    with pytest.raises(NotFound, match="has no 'rollout-7'; it has rollout-0"):
        await running.order("rollout-7")
    assert running.pid("rollout-0") == pid


async def test_a_stopped_worker_stays_down(start: Start):
    running = await start({"rollout": 1}, DRAINS)
    pid = running.pid("rollout-0")
    await running.order("rollout-0", "stop")
    assert gone(pid)
    assert "drained" in running.log("rollout-0")
    assert [(exit.worker, exit.ordered) for exit in running.exits] == [("rollout-0", True)], "nobody is to miss it"
    with pytest.raises(NotFound, match="told to stop"):
        await running.order("rollout-0", pid=pid)  # by who knew it before
    await running.order("rollout-0")
    assert running.supervisor.children["rollout-0"].running


async def test_a_crash_loop_is_not_fed(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(children, "STARTS_PER_MINUTE", 3)
    running = await start({"rollout": 1})
    await running.order("rollout-0")
    await running.order("rollout-0")
    with pytest.raises(Unavailable, match="started 3 times within a minute"):
        await running.order("rollout-0")
    assert running.supervisor.children["rollout-0"].running  # the refused order did not end it either


async def test_scaling_starts_and_drains(start: Start, eventually: Any):
    running = await start({"rollout": 2, "trainer": 1}, DRAINS)
    pids = {name: running.pid(name) for name in ("rollout-0", "rollout-1", "trainer-0")}
    promised = (await running.scale(rollout=3)).counts
    assert (promised["rollout"], promised["trainer"]) == (3, 1)
    await eventually(lambda: running.up("rollout-2"), within=60)
    assert {name: running.pid(name) for name in pids} == pids, "who was there stays"
    await running.scale(rollout=1, trainer=0)
    await eventually(lambda: list(running.supervisor.children) == ["rollout-0"], within=60)
    for name in ("rollout-1", "rollout-2", "trainer-0"):
        assert "drained" in running.log(name)
    assert gone(pids["rollout-1"])
    assert not gone(pids["rollout-0"])
    left = {"rollout-1", "rollout-2", "trainer-0"}
    await eventually(lambda: {exit.worker for exit in running.exits if exit.ordered} == left)
    assert kept_counts(running.supervisor.home) == {"rollout": 1, "trainer": 0}
    scaled = await eventually(lambda: events(running.bus, "worker.scaled", 3))
    changes = [event.message.partition(" on ")[0] for event in scaled]
    assert sorted(changes) == ["rollout", "rollout", "trainer"]
    asked = [item.message async for item in running.bus.tail("audit", follow=False, tenant="provider")]
    where = f"on {running.supervisor.host}"
    assert [one.detail for one in asked] == [f"rollout=3 {where}", f"rollout=1 trainer=0 {where}"]
    assert {(one.action, one.key) for one in asked} == {("scale", running.bus.key)}
    assert running.bus.key.startswith("U")


async def test_scaling_again_while_others_still_drain_gives_as_many_as_asked(start: Start, eventually: Any):
    running = await start({"rollout": 3}, STUBBORN, grace=1.0)
    await running.scale(rollout=1)
    await running.scale(rollout=3)
    await eventually(lambda: sum(not child.stopped for child in running.supervisor.children.values()) == 3)
    await eventually(lambda: len(running.supervisor.children) == 3, within=60)
    assert all(child.running for child in running.supervisor.children.values())


async def test_more_than_a_host_runs_is_refused(start: Start):
    running = await start({"rollout": 1})
    with pytest.raises(Refused, match=r"counts\.rollout: 1000 is more than the 64"):
        await running.scale(rollout=1000)


async def test_a_host_is_found_with_what_it_runs(start: Start, eventually: Any):
    running = await start({"rollout": 2})
    (found,) = await eventually(lambda: discover(running.bus, "host"))
    assert found.about["home"] == str(running.supervisor.home)
    assert found.data["counts"]["rollout"] == 2


async def test_an_end_is_told_with_the_last_words_of_its_log(start: Start, eventually: Any):
    running = await start({"rollout": 1}, FAILS)
    os.kill(running.pid("rollout-0"), signal.SIGUSR1)
    await eventually(lambda: running.exits)
    exit = running.exits[0]
    assert (exit.returncode, exit.cause, exit.words) == (1, "memory", "MemoryError")


async def test_the_autoscaler_brings_workers_for_what_waits(start: Start, monkeypatch: pytest.MonkeyPatch, eventually: Any):
    monkeypatch.setattr(autoscale, "LOOK_S", 0.05)
    monkeypatch.setattr(autoscale, "UP_S", 0.1)
    monkeypatch.setattr(autoscale, "SETTLE_S", 0.1)
    monkeypatch.setattr(autoscale, "DOWN_S", 0.5)
    monkeypatch.setitem(autoscale.QUEUES, "rollout", ("rollout", 2))
    running = await start({"rollout": 1}, DRAINS, autoscale={"rollout": Bounds(1, 2)})
    await ensure_tenant(running.bus, "acme")
    for job in "abc":
        await running.bus.publisher.send(f"rollout.run.acme.{job}", b"{}", {"Nats-Msg-Id": job}, 30.0)
    await eventually(lambda: running.up("rollout-1"), within=60)
    await asyncio.sleep(0.5)
    assert "rollout-2" not in running.supervisor.children
    await running.bus.drop("ROLLOUT", "rollout.run.acme.*")
    await eventually(lambda: list(running.supervisor.children) == ["rollout-0"], within=60)
    assert kept_counts(running.supervisor.home) == {}, "only what people choose is kept"
    before, after = [event.data["after"] for event in await eventually(lambda: events(running.bus, "worker.scaled", 2))]
    assert (before, after) == (2, 1)


async def events(bus: Bus, kind: str, count: int) -> list[Event]:
    """Those of a kind, once there are so many: what is told of a change comes a little after it."""
    items = bus.tail("event", since="all", follow=False, tenant="provider", job="*")
    found = [item.message async for item in items if item.message.type == kind]
    return found if len(found) >= count else []


async def test_the_health_manager_comes_back_without_an_order(start: Start, eventually: Any):
    running = await start({"health": 1})
    pid = running.pid("health-0")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: running.pid("health-0") != pid and running.up("health-0"))


async def test_a_health_manager_that_falls_silent_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch, eventually: Any):
    running = await start({"health": 1})
    pid = running.pid("health-0")
    await running.bus.cast("health.beat", beat("health-0", pid), role="health", worker="health-0")
    monkeypatch.setattr(host, "HEALTH_SILENT_S", 0.2)
    await eventually(lambda: running.pid("health-0") != pid and gone(pid))


def beat(worker: str, pid: int) -> Heartbeat:
    return Heartbeat(role="health", worker=worker, host="h", pid=pid, state="running", busy=False, progress=0, time=time.time())


async def test_an_end_is_told_until_somebody_acts(start: Start, eventually: Any):
    running = await start({"rollout": 1})
    os.kill(running.pid("rollout-0"), signal.SIGKILL)
    await eventually(lambda: len(running.exits) > 2)  # the Health Manager may be away, or the server between two of them
    assert all(told == running.exits[0] for told in running.exits)
    await running.order("rollout-0", pid=running.exits[0].pid)
    assert running.supervisor.children["rollout-0"].ended is None


async def test_a_large_log_is_put_aside(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(children, "LOG_BYTES", 1)
    running = await start({"rollout": 1})
    await running.order("rollout-0")
    logs = running.supervisor.home / "logs"
    assert (logs / "rollout-0.log.1").read_text() == "up\n"


async def test_children_end_with_a_supervisor_that_is_killed(server: EmbeddedServer, tmp_path: Path, eventually: Any):
    program = (
        "import asyncio, sys; from pathlib import Path; from nexus_bus.host import Supervisor;"
        f"s = Supervisor(Path({str(tmp_path)!r}), {server.url!r}, command=lambda *_: [sys.executable, '-c', {STUBBORN!r}]);"
        "asyncio.run(s.run({'rollout': 1}, asyncio.Event()))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=asyncio.subprocess.DEVNULL)
    try:
        log = tmp_path / "logs" / "rollout-0.log"
        await eventually(lambda: log.is_file() and "up" in log.read_text(), within=60)
        (child,) = psutil.Process(process.pid).children()
    finally:
        process.kill()
        await process.wait()
    await eventually(lambda: gone(child.pid))


def test_a_home_belongs_to_one_service(tmp_path: Path):
    home = tmp_path / "home"
    assert running_up(home) is None
    with held(home):
        assert running_up(home) == os.getpid()
        with pytest.raises(Unavailable, match=f"process {os.getpid()}.*nexus down"), held(home):
            pass
        assert running_up(home) == os.getpid()
    assert running_up(home) is None


def test_a_pid_file_left_by_a_crash_misleads_nobody(tmp_path: Path):
    (tmp_path / "up.pid").write_text("1")
    assert running_up(tmp_path) is None
    with held(tmp_path):
        assert running_up(tmp_path) == os.getpid()


def test_a_host_has_a_name_whatever_the_machine_is_called(monkeypatch: pytest.MonkeyPatch):
    for name in ("Rack 7.example.org", "ünïcode", "-", "x" * 200):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert subject("host.order", host=host_id()).endswith(f"-{os.getpid()}")
