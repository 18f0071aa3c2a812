"""One machine: the embedded server and every role as supervised child processes. What `nexus up` runs.

The supervisor starts and ends processes and says when one ended; whether a role is started again is the Health Manager's
decision, but for the Health Manager itself.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexus_bus import logs
from nexus_bus.bus import Bus, EmbeddedServer, Incoming, ensure_topology, tie_to_parent
from nexus_bus.errors import NotFound, Refused, Unavailable
from nexus_bus.worker import GRACE_S, host_name
from schemas.control import Ack, ProcessExit, ProcessOrder, Role

LOG_BYTES = 8 << 20
RESTARTS_A_MINUTE = 20  # of one process: above that a restart is refused, whoever asks
COUNTS: dict[Role, int] = {"master": 1, "health": 1, "environment": 1, "rollout": 1, "inference": 1, "trainer": 1}

# In force before torch is imported (measured: two contended threads wait actively for eight times as long).
PROCESS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MKL_CBWR": "AUTO,STRICT", "HF_HUB_OFFLINE": "1"}


@dataclass
class Child:
    """One supervised process."""

    role: Role
    name: str
    process: asyncio.subprocess.Process | None = None
    starts: list[float] = field(default_factory=list)
    wanted: bool = True
    waiter: asyncio.Task[None] | None = None


class Supervisor:
    """Starts, restarts and ends the workers of one host."""

    def __init__(self, home: Path, url: str, counts: Mapping[Role, int], flags: tuple[str, ...] = ()) -> None:
        """`flags` are passed to every worker."""
        self.home = home
        self.url = url
        self.flags = flags
        self.host = host_name()
        self.children = {
            f"{role}-{number}": Child(role, f"{role}-{number}") for role, count in counts.items() for number in range(count)
        }
        self.bus: Bus | None = None
        self.log = logs.get_logger()

    async def start(self) -> None:
        """Join the bus, make its streams, start every child."""
        (self.home / "logs").mkdir(parents=True, exist_ok=True)
        self.bus = await Bus.connect(self.url, name=f"host-{self.host}"[:63])
        await ensure_topology(self.bus)
        await self.bus.serve("host.order", self.order, host=self.host)
        for child in self.children.values():
            await self._spawn(child)

    async def order(self, message: ProcessOrder, _incoming: Incoming) -> Ack:
        """Restart or stop one child. An order about a process that is gone already only makes sure that there is one again."""
        child = self.children.get(message.worker)
        if child is None:
            raise NotFound(f"worker {message.worker!r} is not one of this host's: {', '.join(self.children)}")
        process = child.process
        if message.pid and process is not None and process.pid != message.pid and process.returncode is None:
            return Ack()  # that process was replaced already
        if message.action == "stop":
            child.wanted = False
            await self._end([child])
            return Ack()
        clock = time.monotonic()
        if len([t for t in child.starts if clock - t < 60]) > RESTARTS_A_MINUTE:
            raise Unavailable(
                f"{message.worker} was started {RESTARTS_A_MINUTE} times within a minute; see {self._log_path(child)}"
            )
        self.log.info("restarting", worker=child.name, reason=message.reason)
        if process is not None and process.returncode is None:
            process.kill()  # a wedged process does not drain
            await process.wait()
        await self._spawn(child)
        return Ack()

    async def _spawn(self, child: Child) -> None:
        path = self._log_path(child)
        if path.is_file() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        environment = {**os.environ, **PROCESS_ENVIRONMENT, "NEXUS_HOST": self.host, "NEXUS_HOME": str(self.home)}
        with path.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "nexus_bus.cli", "worker", child.role, "--name", child.name, "--url", self.url, *self.flags,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True, preexec_fn=tie_to_parent,
            )  # fmt: skip
        child.starts = [*child.starts[-RESTARTS_A_MINUTE:], time.monotonic()]
        child.waiter = asyncio.create_task(self._wait(child, child.process))

    async def _wait(self, child: Child, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not child.wanted or child.process is not process or self.bus is None:
            return
        self.log.warning("worker ended", worker=child.name, pid=process.pid, code=code)
        if child.role == "health":
            await asyncio.sleep(min(10.0, 0.25 * 2 ** min(6, len([t for t in child.starts if time.monotonic() - t < 60]))))
            await self._spawn(child)
            return
        ended = ProcessExit(role=child.role, worker=child.name, host=self.host, pid=process.pid, returncode=code)
        # Said until somebody acts: the Health Manager may be the one that is being restarted.
        while child.wanted and child.process is process:
            await self.bus.cast("health.exit", ended, host=self.host)
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """End every child: a drain first, SIGKILL after the grace. Health first, so that nothing is restarted meanwhile."""
        for child in self.children.values():
            child.wanted = False
        await self._end([c for c in self.children.values() if c.role == "health"])
        await self._end([c for c in self.children.values() if c.role != "health"])
        if self.bus is not None:
            await self.bus.close()

    async def _end(self, children: list[Child]) -> None:
        processes = [c.process for c in children if c.process is not None and c.process.returncode is None]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        waits = [asyncio.create_task(process.wait()) for process in processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=GRACE_S + 4)
            if late:
                for process in processes:
                    if process.returncode is None:
                        process.kill()
                await asyncio.wait(late)

    def _log_path(self, child: Child) -> Path:
        return self.home / "logs" / f"{child.name}.log"


def running_up(home: Path) -> int | None:
    """The process id of an `up` that runs in this home, or None."""
    pid_file = home / "up.pid"
    if not pid_file.is_file():
        return None
    try:
        pid = int(pid_file.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes() if Path("/proc").is_dir() else b"nexus"
        os.kill(pid, 0)
    except (ValueError, OSError):
        return None
    return pid if b"nexus" in command else None  # the number may be another program's by now


async def up(home: Path, counts: Mapping[Role, int], flags: tuple[str, ...] = (), say: Any = print) -> None:
    """Run server and workers until SIGTERM or SIGINT.

    Raises:
        Refused: one runs in this home already.
        Unavailable: the server did not start.
    """
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    if (pid := running_up(home)) is not None:
        raise Refused(f"{home} is served already by process {pid}; use it, or end it with `nexus down`")
    os.environ["NEXUS_HOME"] = str(home)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    server = EmbeddedServer(home / "nats").start()
    try:
        (home / "up.pid").write_text(str(os.getpid()))
        supervisor = Supervisor(home, server.url, counts, flags)
        try:
            await supervisor.start()
            (home / "url").write_text(server.url)
            say(f"up at {server.url} (home {home}); Ctrl-C ends it")
            await stop.wait()
            say("ending: workers drain, then the server")
        finally:
            await supervisor.stop()
    finally:
        server.stop()
        for name in ("url", "up.pid"):
            (home / name).unlink(missing_ok=True)
