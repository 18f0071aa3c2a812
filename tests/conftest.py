"""Shared by all tests: a real server on a port of its own, a connection to it, and waiting for conditions."""

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from nexus_bus.bus import Bus, EmbeddedServer, ensure_topology
from nexus_bus.bus.authority import Authority
from nexus_bus.envs.rendering import probe
from nexus_bus.models import process
from nexus_bus.worker import Context, Pulse
from workers.gateway import Gateway

process.settings(1)  # before any test loads torch: one thread and one order of summation, however pytest was started

# One operator for all servers of the tests, made once: its provider's credentials open each of them, from child processes too.
os.environ["NEXUS_AUTHORITY"] = str(Path(tempfile.mkdtemp(prefix="nexus-authority-")))
Authority.at(Path(os.environ["NEXUS_AUTHORITY"]))
atexit.register(shutil.rmtree, os.environ["NEXUS_AUTHORITY"], ignore_errors=True)

settings.load_profile("ci")  # no deadline for an example, and the same examples every time: what fails once fails again

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

Eventually = Callable[..., Awaitable[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that draw are skipped, with the package to install, where nothing can draw."""
    drawing = [item for item in items if item.get_closest_marker("gl")]
    if drawing and probe().backend is None:
        for item in drawing:
            item.add_marker(pytest.mark.skip(reason=probe().advice))


PORTS = range(18_000, 32_000)  # below those that the kernel gives to whoever asks for any, which may be taken before we bind
_given: set[int] = set()


def free_port() -> int:
    """A port nobody listens on, and that this process was not given before."""
    while True:
        port = random.choice(PORTS)  # noqa: S311 - other runs of the tests take theirs from here, too
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(autouse=True)
def settings_kept() -> Iterator[None]:
    """What a command of ours put into the environment (`--creds` does) is no other test's."""
    before = {key: value for key, value in os.environ.items() if key.startswith("NEXUS_")}
    yield
    for key in [key for key in os.environ if key.startswith("NEXUS_")]:
        del os.environ[key]
    os.environ.update(before)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A nats-server of this test alone."""
    running = EmbeddedServer(tmp_path / "nats", port=free_port()).start()
    yield running
    running.stop()
    shutil.rmtree(running.directory)


@pytest.fixture
async def bus(server: EmbeddedServer) -> AsyncIterator[Bus]:
    """A connection to it, with all streams in place."""
    connection = await Bus.connect(server.url, name="test")
    await ensure_topology(connection)
    yield connection
    await connection.close()


@pytest.fixture
async def gateway(server: EmbeddedServer, bus: Bus) -> AsyncIterator[Gateway]:
    """The tenants' door, on a connection of its own."""
    connection = await Bus.connect(server.url, name="gateway-0")
    log = structlog.get_logger()
    context = Context("gateway", "gateway-0", connection, None, asyncio.Event(), Pulse(), log, "host")
    serving = Gateway(context)
    await serving.open()
    yield serving
    await connection.close()


@pytest.fixture
def eventually() -> Eventually:
    """`await eventually(condition, within=30)`: the first true value of a condition (plain or async), or a failure.

    The limit is for machines that do ten things at once: whoever waits for what comes at once waits no longer for it.
    """

    async def wait(condition: Callable[[], Any], within: float = 30.0) -> Any:
        ends = time.monotonic() + within
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            assert time.monotonic() < ends, f"not within {within} s"
            await asyncio.sleep(0.02)

    return wait
