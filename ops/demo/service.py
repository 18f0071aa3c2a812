"""The demo's own `nexus up`: a child that ends with it."""

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from nexus_bus.errors import Unavailable

START_S = 60.0
STOP_S = 30.0


class Service:
    """Server and workers in a fresh home directory, started on entry, drained and ended on exit."""

    def __init__(self, home: Path, console: Console, base: str | None = None) -> None:
        self.flags = ["--base", base] if base else []
        self.home = home
        self.console = console
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        shutil.rmtree(self.home, ignore_errors=True)  # the last demo's; a running one was refused before
        self.home.mkdir(parents=True)
        log = (self.home / "up.log").open("wb")
        # A session of its own: Ctrl-C reaches the demo alone, which then ends its service in order.
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.cli", "up", "--home", str(self.home), *self.flags,
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        try:
            self.url = await self._url()
        except BaseException:
            await self._stop()
            raise
        self.console.print(f"Server at {self.url}; logs in {self.home / 'logs'}.")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _url(self) -> str:
        clock = asyncio.get_running_loop().time
        ends = clock() + START_S
        while clock() < ends:
            if self.process is not None and self.process.returncode is not None:
                raise Unavailable(f"the service ended at once; see {self.home / 'up.log'}")
            if (self.home / "url").is_file() and (url := (self.home / "url").read_text().strip()):
                return url
            await asyncio.sleep(0.05)
        raise Unavailable(f"the service did not start within {START_S:g} s; see {self.home / 'up.log'}")

    async def _stop(self) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
