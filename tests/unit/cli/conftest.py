"""The command line in this process, on a real server with the tenants' door and a master before it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
import structlog

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.cli import main
from nexus_bus.config import MasterConfig
from nexus_bus.worker import Context, Pulse
from workers.master import Master

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands set up logging for their process; here that process is everybody's."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def settings() -> MasterConfig:
    """The master's."""
    return MasterConfig()


@pytest.fixture
async def nexus(
    server: EmbeddedServer,
    bus: Bus,
    gateway: Any,
    settings: MasterConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> AsyncIterator[Run]:
    """`await nexus("policies", "pick")`, as acme: exit code, what was printed, what was said about errors. A master serves."""
    monkeypatch.setenv("NEXUS_URL", server.url)
    monkeypatch.setenv("NEXUS_TENANT", "acme")
    monkeypatch.delenv("NEXUS_CONFIG", raising=False)
    monkeypatch.setattr("nexus_bus.logs.start", lambda *_: None)  # logging is the process's, and other tests are in it
    log = cast(Any, structlog.get_logger())
    context = Context("master", "master-0", bus, settings, asyncio.Event(), Pulse(), log, "host")
    master = Master(context)
    await master.quotas.allowances.load()
    serving = asyncio.create_task(master.serve())

    async def run(*words: object) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, [str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    yield run
    context.stop.set()
    await serving
