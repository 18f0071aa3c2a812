"""One host: an embedded server and worker processes, started, watched and ended together (`nexus up`).

It restarts what the Health Manager asks for (`host.order`), and the Health Manager itself. A child that ends is told on
`health.exit`; whether it comes back is decided there, because only there is known what a crash loop is.

Killed  the children and the server end with it (parent-death signal). The next `nexus up` on the same home goes on.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from nexus_bus.bus import Bus, EmbeddedServer, Incoming, die_with_parent, ensure_topology
from nexus_bus.errors import NexusError, NotFound, Unavailable
from schemas.control import Ack, Heartbeat, ProcessExit, ProcessOrder, Role

ROLES: tuple[Role, ...] = ("master", "health", "environment", "inference", "trainer", "rollout")
GRACE_S = 12.0  # SIGTERM to SIGKILL; a worker gives itself less
STARTS_PER_MINUTE = 10  # of one child; beyond it an order to restart is refused
LOG_BYTES = 8 << 20  # a log larger than this is put aside when its worker starts
HEALTH_SILENT_S, HEALTH_STARTING_S = 15.0, 60.0
LOOK_S = 0.5

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


@dataclass
class Child:
    """One supervised process."""

    role: Role
    name: str
    process: asyncio.subprocess.Process | None = None
    ended: ProcessExit | None = None  # how it ended, while it is not running
    ours: bool = False  # its end was our doing, so it is not news
    stopped: bool = False  # by order: it stays down
    starts: deque[float] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pid(self) -> int:
        """Of the running process, or of the last one."""
        return self.process.pid if self.process is not None else 0

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Starts children, tells of their ends, follows orders about them."""

    def __init__(
        self, home: Path, url: str, *, say: Say = lambda _: None, command: Command = worker_command, grace: float = GRACE_S
    ) -> None:
        """Logs go to `home/logs`; `say` gets one line for people per thing that happened; `grace` is in seconds."""
        self.home, self.url, self.say, self.command, self.grace = home, url, say, command, grace
        self.host = host_id()
        self.children: dict[str, Child] = {}
        self._bus: Bus | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._closing = False
        self._health: dict[str, tuple[int, float]] = {}  # health worker → (pid, monotonic time of its last heartbeat)

    async def run(self, counts: Mapping[Role, int], stop: asyncio.Event) -> None:
        """Start `counts` workers per role, serve until `stop`, then drain and end them all.

        Raises:
            Unavailable: the bus does not answer.
        """
        bus = self._bus = await Bus.connect(self.url, name=self.host)
        services = [
            await bus.serve("host.order", self.order, host=self.host),
            await bus.subscribe("health.beat", self.beat, role="health", worker="*"),
        ]
        looking = asyncio.create_task(self._look())
        try:
            await ensure_topology(bus)
            for role, count in counts.items():
                for index in range(count):
                    child = Child(role, f"{role}-{index}")
                    self.children[child.name] = child
                    await self._start(child)
            await stop.wait()
        finally:
            self._closing = True
            looking.cancel()
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
            child.stopped = order.action == "stop"
            if child.stopped:
                await self._end(child, signal.SIGTERM)
                self.say(f"{child.name} stopped: {order.reason}")
            else:
                self._allow(child)
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
            for child in self.children.values():
                if child.ended is not None and child.role != "health" and not child.stopped:
                    await self._tell(child.ended)

    async def _tell(self, ended: ProcessExit) -> None:
        if self._bus is not None:
            await self._bus.cast("health.exit", ended, host=self.host)

    # Processes

    def _allow(self, child: Child) -> None:
        now = time.monotonic()
        while child.starts and now - child.starts[0] > 60.0:
            child.starts.popleft()
        if len(child.starts) >= STARTS_PER_MINUTE:
            raise Unavailable(f"{child.name} was started {len(child.starts)} times within a minute; see its log")

    async def _start(self, child: Child) -> None:
        if self._closing:
            raise Unavailable(f"{self.host} is ending")
        child.starts.append(time.monotonic())
        with self._log(child.name) as log:
            child.process = await asyncio.create_subprocess_exec(
                *self.command(child.role, child.name, self.url),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ENVIRONMENT | os.environ | {"NEXUS_HOST": self.host, "NEXUS_HOME": str(self.home)},
                start_new_session=True,  # Ctrl-C reaches us alone, and we end the children in order
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        child.ended, child.ours = None, False
        watch = asyncio.create_task(self._watch(child, child.process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _log(self, worker: str) -> IO[bytes]:
        path = self.home / "logs" / f"{worker}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path.open("ab")

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Tell of the end of one process; the Health Manager itself comes back from here."""
        code = await process.wait()
        if child.ours or self._closing:
            return
        child.ended = ProcessExit(role=child.role, worker=child.name, host=self.host, pid=process.pid, returncode=code)
        self.say(f"{child.name} (process {process.pid}) ended with code {code}")
        await self._tell(child.ended)
        if child.role == "health":
            await self._revive(child)

    async def _revive(self, child: Child) -> None:
        delay = min(10.0, 0.2 * 2 ** max(0, len(child.starts) - 1))
        while not self._closing:
            await asyncio.sleep(delay)
            async with child.lock:
                if child.running or child.stopped or self._closing:
                    return
                try:
                    self._allow(child)
                    await self._start(child)
                except Unavailable:
                    delay = 10.0
                    continue
                self.say(f"{child.name} restarted as process {child.pid}")
                return

    async def _look(self) -> None:
        """A Health Manager that hangs is found here, as nobody else would."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for child in self.children.values():
                if child.role != "health" or not child.running or not child.starts:
                    continue
                pid, heard = self._health.get(child.name, (0, 0.0))
                silent = now - heard > HEALTH_SILENT_S if pid == child.pid else now - child.starts[-1] > HEALTH_STARTING_S
                # While the server is away nobody's heartbeats arrive: that is no fault of the worker.
                if silent and child.process is not None and self._bus is not None and self._bus.up.is_set():
                    self._health.pop(child.name, None)
                    child.process.kill()

    async def _end(self, child: Child, signum: signal.Signals) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        child.ours = True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        try:
            await asyncio.wait_for(process.wait(), self.grace)
        except TimeoutError:
            self.say(f"{child.name} did not end within {self.grace:g} s and was killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._end(child, signal.SIGTERM) for child in self.children.values()))
        await asyncio.gather(*self._watches, return_exceptions=True)


# One service per home


@contextlib.contextmanager
def held(home: Path) -> Iterator[None]:
    """Own a home directory: its lock ends with the process, so a pid file left by a crash misleads nobody.

    Raises:
        Unavailable: another process owns it; says which and what to do.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "up.pid").open("a+") as file:
        for attempt in range(3):  # a look by `running_up` holds the lock for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt == 2:
                    raise Unavailable(already(home, _pid(home))) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def already(home: Path, pid: int | None) -> str:
    """What is said to a second `up`."""
    return f"a service runs on {home} already (process {pid}); use it, or end it with `nexus down --home {home}`"


def running_up(home: Path) -> int | None:
    """Process id of the `nexus up` that owns this home now, or None."""
    try:
        with (home / "up.pid").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return _pid(home)
    return None


def _pid(home: Path) -> int | None:
    text = (home / "up.pid").read_text().strip()
    return int(text) if text.isdecimal() else None


async def up(home: Path, counts: Mapping[Role, int], *, port: int | None = None, say: Say = lambda _: None) -> None:
    """Server and workers on one home (an absolute path), until SIGINT, SIGTERM or SIGHUP; then workers first, the server last.

    Raises:
        Unavailable: the home is in use, or the server does not start.
    """
    with held(home):
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, stop.set)
        server = EmbeddedServer(home / "nats", port=port).start()
        keeping = asyncio.create_task(_keep(server, say))
        try:
            (home / "url").write_text(server.url)
            workers = ", ".join(f"{count} {role}" if count > 1 else role for role, count in counts.items() if count)
            say(f"server at {server.url}; starting {workers}; logs in {home / 'logs'}")
            await Supervisor(home, server.url, say=say).run(counts, stop)
        finally:
            keeping.cancel()
            (home / "url").unlink(missing_ok=True)
            server.stop()
            say("stopped")


async def _keep(server: EmbeddedServer, say: Say) -> None:
    """Start the server again when it crashes: same store, same port, so that everybody finds it."""
    while True:
        await asyncio.sleep(LOOK_S)
        code = server.ended
        if code is None:
            continue
        say(f"nats-server ended with code {code}; starting it again")
        server.stop()
        while True:
            try:
                server.start()
                break
            except NexusError as error:
                say(str(error))
                await asyncio.sleep(2.0)
