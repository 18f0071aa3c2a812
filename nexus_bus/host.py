"""One host: an embedded server and worker processes, started, watched and ended together (`nexus up`).

It restarts what the Health Manager asks for (`host.order`), and the Health Manager itself. A child that ends is told on
`health.exit`; whether it comes back is decided there, because only there is known what a crash loop is. How many workers of a
role there are is decided by `host.scale` (`nexus scale`) and, if it is on, the autoscaler.

Killed  the children and the server end with it (parent-death signal). The next `nexus up` on the same home goes on.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from nexus_bus.audit import audit, caller
from nexus_bus.autoscale import MOST, Autoscaler, Bounds
from nexus_bus.bus import Bus, Card, EmbeddedServer, Incoming, Presence, ensure_topology
from nexus_bus.children import Child
from nexus_bus.clock import now
from nexus_bus.errors import NexusError, NotFound, Refused, Unavailable
from nexus_bus.failures import classify, ending, oom_kills
from nexus_bus.homes import held, keep_counts
from nexus_bus.spare import ROLES as HEAVY
from nexus_bus.spare import Spare
from nexus_bus.tenants import tenants_of
from schemas.base import PROVIDER
from schemas.control import Ack, Heartbeat, ProcessExit, ProcessOrder, Role, Scaled, ScaleOrder
from schemas.events import Event, EventType
from schemas.subjects import subject

ROLES: tuple[Role, ...] = ("master", "health", "gateway", "environment", "inference", "trainer", "rollout")
GRACE_S = 12.0  # SIGTERM to SIGKILL; a worker gives itself less
HEALTH_SILENT_S, HEALTH_STARTING_S = 7.0, 60.0
LOOK_S = 0.5
FIRST_SPARE_S = 20.0  # the workers load first
TELL_S = 5.0  # to get an event stored

CLI = 3  # words of a command before those of `nexus`

# Libraries read these as they load; the same everywhere, so that results do not depend on who was started how.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MKL_CBWR": "AUTO,STRICT", "PYTHONUNBUFFERED": "1"}

Say = Callable[[str], None]
Command = Callable[[Role, str, str], Sequence[str]]  # role, worker, url → argv


def worker_command(role: Role, worker: str, url: str) -> Sequence[str]:
    """How a worker process is started."""
    return [sys.executable, "-m", "nexus_bus.cli", "worker", role, "--name", worker, "--url", url]


def host_id() -> str:
    """A legal name for this supervisor: the machine's, and the process's, since several may run on one machine."""
    suffix = f"-{os.getpid()}"
    machine = socket.gethostname().lower()
    legal = "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "-" for c in machine).strip("-_") or "host"
    return legal[: 63 - len(suffix)] + suffix


class Supervisor:
    """Starts children, tells of their ends, follows orders about them."""

    def __init__(
        self,
        home: Path,
        url: str,
        *,
        creds: Path | None = None,
        say: Say = lambda _: None,
        command: Command = worker_command,
        grace: float = GRACE_S,
        autoscale: Mapping[Role, Bounds] | None = None,
        spare: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Logs go to `home/logs`; `say` gets one line for people per thing that happened; `grace` is in seconds.

        `creds` are the provider's, for itself and the workers; without, those of the environment. The workers find `settings`
        in theirs.
        """
        self.home, self.url, self.say, self.command, self.grace = home, url, say, command, grace
        self.creds, self.settings = creds, dict(settings or {})
        self.host = host_id()
        self.autoscale = dict(autoscale or {})
        self._spare = Spare(home / "logs" / "spare.log", self._environment()) if spare else None
        self.children: dict[str, Child] = {}
        self._bus: Bus | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._sizing = asyncio.Lock()
        self._oom: deque[int] = deque([oom_kills()], maxlen=3)
        self._closing = False
        self._health: dict[str, tuple[int, float]] = {}  # health worker → (pid, monotonic time of its last heartbeat)

    async def run(self, counts: Mapping[Role, int], stop: asyncio.Event) -> None:
        """Start `counts` workers per role, serve until `stop`, then drain and end them all.

        Raises:
            Unavailable: the bus does not answer.
        """
        bus = self._bus = await Bus.connect(self.url, name=self.host, creds=self.creds)
        services = [
            await bus.serve("host.order", self.order, host=self.host),
            await bus.serve("host.scale", self.scale, host=self.host),
            await Presence(bus, self._card(), self._stats).start(),
            await bus.subscribe("health.beat", self.beat, role="health", worker="*"),
        ]
        beside = [asyncio.create_task(self._look())]
        try:
            await ensure_topology(bus)
            async with self._sizing:
                for role, count in counts.items():
                    await self._more(role, count)
            if self.autoscale:
                beside.append(asyncio.create_task(Autoscaler(bus, self.autoscale, self._of, self._size).run()))
            await stop.wait()
        finally:
            self._closing = True
            for task in beside:
                task.cancel()
            if self._spare is not None:
                await self._spare.stop()
            await self._end_all()
            for service in services:
                await service.stop()
            await bus.close()

    async def order(self, order: ProcessOrder, _incoming: Incoming) -> Ack:
        """Restart or stop one child.

        Raises:
            NotFound: no such child here.
            Unavailable: it is another process by now, or was started too often lately.
        """
        child = self.children.get(order.worker)
        if child is None:
            raise NotFound(f"worker: {self.host} has no {order.worker!r}; it has {', '.join(sorted(self.children))}")
        async with child.lock:
            if order.pid and order.pid != child.pid:
                raise Unavailable(f"pid: {order.worker} is process {child.pid} by now, not {order.pid}")
            if order.action == "stop":
                await self._drain(child)
                self.say(f"{child.name} stopped: {order.reason}")
            elif child.stopped and order.pid:
                raise NotFound(f"worker: {order.worker} was told to stop")  # by who watched it before
            else:
                child.allow()
                child.stopped = False
                await self._end(child, signal.SIGKILL)  # it is wedged or gone: what it held is redelivered
                await self._start(child)
                self.say(f"{child.name} restarted as process {child.pid}: {order.reason}")
        return Ack()

    async def beat(self, message: Heartbeat, _tokens: dict[str, str]) -> None:
        """A Health Manager lives. One that has just come up learns of the ends that nobody heard."""
        if message.state != "running":
            return
        known = self._health.get(message.worker)
        self._health[message.worker] = (message.pid, time.monotonic())
        if known is None or known[0] != message.pid:
            await self._tell_again()

    async def _tell_again(self) -> None:
        for child in list(self.children.values()):  # others come and go meanwhile
            if child.ended is not None and child.role != "health" and not child.stopped:
                await self._tell(child.ended)

    # How many there are

    async def scale(self, order: ScaleOrder, incoming: Incoming) -> Scaled:
        """Run so many workers of these roles from now on, and after a restart on this home. They start and drain meanwhile.

        Raises:
            Refused: more than a host runs.
        """
        for role, count in order.counts.items():
            if count > MOST:
                raise Refused(f"counts.{role}: {count} is more than the {MOST} that one host runs; use another host")
        if self._bus is not None and not self._closing:
            detail = " ".join(f"{role}={count}" for role, count in order.counts.items()) + f" on {self.host}"
            await audit(self._bus, PROVIDER, "scale", "", "ok", detail, key=f"{time.time_ns()}", caller=caller(incoming))
            keep_counts(self.home, order.counts)
            for role, count in order.counts.items():
                self._beside(self._size(role, count, order.reason or "by order"))
        return Scaled(counts=self._counts() | order.counts)

    def _of(self, role: Role) -> tuple[int, bool]:
        """How many of a role are to run, and whether one of them crashes."""
        found = [child for child in self.children.values() if child.role == role and not child.stopped]
        return len(found), any(child.crashing for child in found)

    def _counts(self) -> dict[Role, int]:
        return {role: self._of(role)[0] for role in ROLES}

    async def _size(self, role: Role, count: int, reason: str) -> None:
        """Start or drain until so many of a role are left: of the youngest names first, all of those at once."""
        async with self._sizing:
            there = sorted((c for c in self.children.values() if c.role == role and not c.stopped), key=lambda c: c.index)
            if len(there) == count or self._closing:
                return
            self.say(f"{role}: {len(there)} → {count} workers, {reason}")
            await self._more(role, count - len(there))
            leaving = there[count:]
            for child in leaving:
                child.stopped = True  # from now on nobody counts it, and nobody revives it
        message = f"{role} on {self.host}: {len(there)} → {count}, {reason}"
        self._beside(self._event("worker.scaled", message, role=role, before=len(there), after=count))
        await asyncio.gather(*(self._leave(child) for child in leaving))

    async def _more(self, role: Role, count: int) -> None:
        for _ in range(count):
            index = next(i for i in range(len(self.children) + 1) if f"{role}-{i}" not in self.children)
            child = self.children[f"{role}-{index}"] = Child(role, f"{role}-{index}", self.home / "logs")
            await self._start(child)

    async def _leave(self, child: Child) -> None:
        async with child.lock:
            await self._drain(child)
        self.children.pop(child.name, None)

    async def _drain(self, child: Child) -> None:
        """It finishes or hands back what it holds, and nobody is to miss it."""
        child.stopped = True
        await self._end(child, signal.SIGTERM)
        code = child.process.returncode if child.process is not None else 0
        end = ProcessExit(role=child.role, worker=child.name, host=self.host, pid=child.pid, returncode=code or 0, ordered=True)
        await self._tell(end)

    async def _event(self, kind: EventType, message: str, **data: str | int) -> None:
        if self._bus is None:
            return
        event = Event(type=kind, tenant=PROVIDER, time=now(), message=message, data={"host": self.host, **data})
        name = f"event/{PROVIDER}/_/{kind}/{self.host}/{time.time_ns()}"
        try:
            await self._bus.publish("event", event, msg_id=name, deadline=TELL_S, tenant=PROVIDER, job="_")
        except Unavailable as error:
            self.say(f"nobody could be told of it: {error}")

    # Being found

    def _card(self) -> Card:
        about = {"role": "host", "worker": self.host, "host": self.host, "pid": str(os.getpid()), "home": str(self.home)}
        return Card("host", about, subject("host.order", host=self.host), "Supervises the workers of one machine.")

    def _stats(self) -> tuple[int, Any]:
        children = {c.name: {"pid": c.pid, "running": c.running, "stopped": c.stopped} for c in self.children.values()}
        counts = self._counts()
        spare = self._spare is not None and self._spare.ready
        return sum(counts.values()), {"counts": counts, "children": children, "spare": spare}

    async def _tell(self, ended: ProcessExit) -> None:
        if self._bus is not None:
            await self._bus.cast("health.exit", ended, host=self.host)

    # Processes

    async def _start(self, child: Child) -> None:
        if self._closing:
            raise Unavailable(f"{self.host} is ending")
        command = self.command(child.role, child.name, self.url)
        spare = self._spare if child.role in HEAVY else None
        process = spare.take(child.name, command[CLI:], child.log) if spare is not None else None
        self._beside(self._watch(child, await child.start(command, self._environment(), process)))
        if spare is not None:
            spare.start(FIRST_SPARE_S)

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    def _environment(self) -> dict[str, str]:
        given = ENVIRONMENT | os.environ | self.settings | {"NEXUS_HOST": self.host, "NEXUS_HOME": str(self.home)}
        return given | ({"NEXUS_CREDS": str(self.creds)} if self.creds is not None else {})

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Tell of the end of one process; the Health Manager itself comes back from here."""
        code = await process.wait()
        if child.ours or self._closing:
            return
        words = child.words() if code != -signal.SIGKILL else ""  # it had no time for any
        cause = classify(code, words, out_of_memory=oom_kills() > self._oom[0])
        child.ended = ProcessExit(
            role=child.role, worker=child.name, host=self.host, pid=process.pid, returncode=code, cause=cause, words=words
        )
        self.say(f"{child.name} (process {process.pid}) {ending(code)}, {cause}{f': {words}' if words else ''}")
        await self._tell(child.ended)
        if child.role == "health":  # nobody else tells of it, or brings it back
            facts = {"role": child.role, "worker": child.name, "pid": process.pid, "cause": cause}
            self._beside(self._event("worker.lost", f"{child.name} (process {process.pid}), {cause}: {ending(code)}", **facts))
            await self._revive(child)

    async def _revive(self, child: Child) -> None:
        delay = min(10.0, 0.2 * 2 ** max(0, len(child.starts) - 1))
        while not self._closing:
            await asyncio.sleep(delay)
            async with child.lock:
                if child.running or child.stopped or self._closing:
                    return
                try:
                    child.allow()
                    await self._start(child)
                except Unavailable:
                    delay = 10.0
                    continue
                self.say(f"{child.name} restarted as process {child.pid}")
            message = f"{child.name} is back as process {child.pid}"
            await self._event("worker.restarted", message, role=child.role, worker=child.name)
            return

    async def _look(self) -> None:
        """A Health Manager that hangs is found here, as nobody else would."""
        back = time.monotonic()  # when the server was last away: nobody's heartbeats arrive then, and that is no fault
        while True:
            await asyncio.sleep(LOOK_S)
            self._oom.append(oom_kills())
            clock = time.monotonic()
            if self._bus is None or not self._bus.up.is_set():
                back = clock
            else:  # what was told may have come to nobody: the server was away, or the Health Manager on its way back
                await self._tell_again()
            for child in self.children.values():
                if child.role != "health" or not child.running or not child.starts:
                    continue
                pid, heard = self._health.get(child.name, (0, 0.0))
                speaks = pid == child.pid
                silent = clock - max(back, heard if speaks else child.starts[-1])
                if silent > (HEALTH_SILENT_S if speaks else HEALTH_STARTING_S) and child.process is not None:
                    self._health.pop(child.name, None)
                    child.process.kill()

    async def _end(self, child: Child, signum: signal.Signals) -> None:
        if not await child.end(signum, self.grace):
            self.say(f"{child.name} did not end within {self.grace:g} s and was killed")

    async def _end_all(self) -> None:
        async def end(child: Child) -> None:
            async with child.lock:  # one that is just being started is there then
                await self._end(child, signal.SIGTERM)

        async with self._sizing:
            everyone = list(self.children.values())
        await asyncio.gather(*map(end, everyone))
        await asyncio.gather(*self._watches, return_exceptions=True)


async def up(
    home: Path,
    counts: Mapping[Role, int],
    *,
    port: int | None = None,
    say: Say = lambda _: None,
    autoscale: Mapping[Role, Bounds] | None = None,
    spare: bool = True,
) -> None:
    """Server and workers on one home (an absolute path), until SIGINT, SIGTERM or SIGHUP; then workers first, the server last.

    Raises:
        Unavailable: the home is in use, or the server does not start.
    """
    with held(home):
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, stop.set)
        server = EmbeddedServer(home / "nats", port=port).start()
        keeping = asyncio.create_task(_keep(server, say))
        try:
            async with tenants_of(server.url, server.authority) as tenants:
                await tenants.refresh()  # what an older version of ours told it
            (home / "url").write_text(server.url)
            workers = ", ".join(f"{count} {role}" if count > 1 else role for role, count in counts.items() if count)
            say(f"server at {server.url}; starting {workers}; logs in {home / 'logs'}")
            supervisor = Supervisor(home, server.url, creds=server.creds, say=say, autoscale=autoscale, spare=spare)
            await supervisor.run(counts, stop)
        finally:
            keeping.cancel()
            (home / "url").unlink(missing_ok=True)
            server.stop()
            say("stopped")


async def _keep(server: EmbeddedServer, say: Say) -> None:
    """Start the server again when it crashes: same store, same port, so that everybody finds it."""
    while True:
        await asyncio.sleep(LOOK_S)
        if (code := server.ended) is None:
            continue
        say(f"nats-server ended with code {code}; starting it again")
        server.stop()
        while not server.pid:
            try:
                server.start()
            except NexusError as error:
                say(str(error))
                await asyncio.sleep(2.0)
