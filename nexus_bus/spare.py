"""A spare process: it has loaded the libraries that take seconds, and waits to be told which worker it is. Beside the host.

The host keeps one while it runs workers that compute, so that one that dies is back in the time that its backbone takes, and a
further one comes as quickly. It costs the memory of those libraries. One line of JSON on standard input says who to be; without
one, that is when the host ends, it ends too.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from nexus_bus.bus import die_with_parent
from schemas.control import Role

ROLES: tuple[Role, ...] = ("inference", "trainer")
MODULES = ("nexus_bus.models.backbone", "nexus_bus.learning.group", "nexus_bus.learning.start", "nexus_bus.answering")
LATER_S = 3.0  # before the next one is begun: the worker that has just started needs the processor more


class Told(msgspec.Struct):
    """Who to be."""

    name: str
    argv: list[str]  # of `nexus`
    log: str


class Spare:
    """The one that a host keeps. Without `start` there is none, and `take` says so."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """What it writes before it is somebody goes to `log`."""
        self.log, self.environment = log, environment
        self._process: asyncio.subprocess.Process | None = None
        self._coming: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether there is one, loading or loaded."""
        return self._process is not None and self._process.returncode is None

    def start(self, after: float = 0.0) -> None:
        """Begin one, so many seconds from now, unless there is one."""
        if self._coming is None or self._coming.done():
            self._coming = asyncio.create_task(self._begin(after))

    async def _begin(self, after: float) -> None:
        await asyncio.sleep(after)
        if self.ready:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "nexus_bus.spare",
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, env=dict(self.environment),
                start_new_session=True, preexec_fn=die_with_parent(signal.SIGKILL),
            )  # fmt: skip

    def take(self, name: str, argv: Sequence[str], log: Path) -> asyncio.subprocess.Process | None:
        """Make it a worker and begin another one later; None if there is none that lives."""
        process, self._process = self._process, None
        if self._coming is not None:
            self.start(LATER_S)
        if process is None or process.returncode is not None or process.stdin is None:
            return None
        try:
            process.stdin.write(msgspec.json.encode(Told(name, list(argv), str(log))) + b"\n")
            process.stdin.close()
        except OSError:  # it ended this very moment
            return None
        return process

    async def stop(self) -> None:
        """End it."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def main() -> int:
    """The process itself: load, wait, become a worker; its exit code."""
    from nexus_bus import cli, config
    from nexus_bus.models import process

    threads = {config.load(role).value.threads for role in ROLES}
    if len(threads) == 1:  # else only the worker knows, and libraries read it as they load
        process.settings(threads.pop())
        for module in MODULES:
            importlib.import_module(module)
    line = sys.stdin.readline()
    if not line:
        return 0
    told = msgspec.json.decode(line, type=Told)
    _become(told)
    return cli.main(told.argv)


def _become(told: Told) -> None:
    """Its output goes to the worker's log, and `top` shows the worker's name."""
    log = os.open(told.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(told.name[:15])


if __name__ == "__main__":
    sys.exit(main())
