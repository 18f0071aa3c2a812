"""Shared by all tests: a real server on a port of its own, a connection to it, and waiting for conditions."""

import asyncio
import atexit
import inspect
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

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

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

Eventually = Callable[..., Awaitable[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that draw are skipped, with the package to install, where nothing can draw."""
    drawing = [item for item in items if item.get_closest_marker("gl")]
    if drawing and probe().backend is None:
        for item in drawing:
            item.add_marker(pytest.mark.skip(reason=probe().advice))


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """`await eventually(condition, within=10)`: the first true value of a condition (plain or async), or a failure."""

    async def wait(condition: Callable[[], Any], within: float = 10.0) -> Any:
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
