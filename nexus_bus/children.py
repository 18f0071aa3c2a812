"""One supervised process: how it starts, how it ends, and what its log says of that. Beside the host, which decides when."""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from nexus_bus.bus import die_with_parent
from nexus_bus.errors import Unavailable
from nexus_bus.failures import last_words
from schemas.control import ProcessExit, Role

STARTS_PER_MINUTE = 10  # of one child; beyond it an order to restart is refused
LOOPING = 3  # starts within a minute, from which on it counts as crashing
LOG_BYTES = 8 << 20  # a log larger than this is put aside when its worker starts


@dataclass
class Child:
    """A worker of this host."""

    role: Role
    name: str
    logs: Path  # directory
    process: asyncio.subprocess.Process | None = None
    ended: ProcessExit | None = None  # how it ended, while it is not running
    ours: bool = False  # its end was our doing, so it is not news
    stopped: bool = False  # by order: it stays down
    starts: deque[float] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _log_from: int = 0  # bytes that were in the log before this process

    @property
    def pid(self) -> int:
        """Of the running process, or of the last one."""
        return self.process.pid if self.process is not None else 0

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.returncode is None

    @property
    def index(self) -> int:
        """Its number among those of its role."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdecimal() else 0

    @property
    def crashing(self) -> bool:
        """Whether it is down without having been told to, or was started too often lately to be trusted."""
        return not self.stopped and (self.ended is not None or self._lately() >= LOOPING)

    def allow(self) -> None:
        """Raises Unavailable if it was started too often lately."""
        if self._lately() >= STARTS_PER_MINUTE:
            raise Unavailable(f"{self.name} was started {len(self.starts)} times within a minute; see its log")

    def _lately(self) -> int:
        while self.starts and time.monotonic() - self.starts[0] > 60.0:
            self.starts.popleft()
        return len(self.starts)

    @property
    def log(self) -> Path:
        """What it writes."""
        return self.logs / f"{self.name}.log"

    async def start(
        self, argv: Sequence[str], environment: Mapping[str, str], spare: asyncio.subprocess.Process | None = None
    ) -> asyncio.subprocess.Process:
        """Start the process, unless a `spare` one has become it; what it writes goes to its log."""
        self.starts.append(time.monotonic())
        with self._log() as log:
            self._log_from = os.fstat(log.fileno()).st_size
            self.process = spare or await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the host alone, and it ends the children in order
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        self.ended, self.ours = None, False
        return self.process

    async def end(self, signum: signal.Signals, grace: float) -> bool:
        """End the process; False if it had to be killed because it did not follow within `grace` seconds."""
        process = self.process
        if process is None or process.returncode is not None:
            return True
        self.ours = True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        try:
            await asyncio.wait_for(process.wait(), grace)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return False
        return True

    def words(self) -> str:
        """The last that this process wrote about its end."""
        return last_words(self.log, self._log_from)

    def _log(self) -> IO[bytes]:
        path = self.log
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path.open("ab")
