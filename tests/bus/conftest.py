"""What the tests of the bus share: killing the server, messages to send, and counting what a stream holds."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pushing import tenant, worker

from nexus_bus.bus import Bus, Durable, EmbeddedServer
from nexus_bus.bus.consume import Handler
from nexus_bus.client import Client
from schemas.job import JobCancel
from workers import environment
from workers.gateway import Gateway

QUEUE = Durable("JOBS", "test", ("job.cancel.*",), ack_wait=15.0, max_deliver=3)


class Crash:
    """What may happen to a server."""

    def __init__(self, server: EmbeddedServer) -> None:
        """Of this server."""
        self.server = server

    def kill(self) -> None:
        """As the kernel would do it."""
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def restart(self) -> None:
        """Again on the same port, with the same data."""
        self.server.start()

    def freeze(self) -> None:
        """It holds its connections and says nothing."""
        process = psutil.Process(self.server.pid)
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def thaw(self) -> None:
        """It goes on."""
        os.kill(self.server.pid, signal.SIGCONT)


@pytest.fixture
def crash(server: EmbeddedServer) -> Iterator[Crash]:
    """Ways to hurt the server of this test."""
    crash = Crash(server)
    yield crash
    if server.pid:
        crash.thaw()


@pytest.fixture
def put(bus: Bus) -> Callable[..., Awaitable[None]]:
    """`await put("a", "b", tenant="acme")` queues cancellations of jobs of these names, for QUEUE."""

    async def put(*jobs: str, tenant: str = "acme") -> None:
        await asyncio.gather(
            *(bus.publish("job.cancel", JobCancel(job=job), msg_id=f"{tenant}/{job}", tenant=tenant) for job in jobs)
        )

    return put


@pytest.fixture
def held(bus: Bus) -> Callable[[str], Awaitable[int]]:
    """`await held("JOBS")`: messages in a stream."""

    async def held(stream: str) -> int:
        return int(json.loads((await bus.ask(f"$JS.API.STREAM.INFO.{stream}")).data)["state"]["messages"])

    return held


@pytest.fixture
async def consuming(bus: Bus) -> AsyncIterator[Callable[..., asyncio.Task[None]]]:
    """`consuming(handler, …)` runs the loop on QUEUE until the test ends."""
    stop, tasks = asyncio.Event(), list[asyncio.Task[None]]()

    def start(handler: Handler, durable: Durable = QUEUE, **options: Any) -> asyncio.Task[None]:
        options.setdefault("stop", stop)
        task = asyncio.create_task(bus.consume(durable, handler, **options))
        tasks.append(task)
        return task

    yield start
    stop.set()
    await asyncio.gather(*tasks)


# A tenant who brings datasets, and a worker that keeps them


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where environment workers keep datasets."""
    return tmp_path / "datasets"


@pytest.fixture
async def acme(server: EmbeddedServer, gateway: Gateway) -> AsyncIterator[Client]:
    """A tenant with an account, through the gateway."""
    async with tenant(server) as client:
        yield client


@pytest.fixture
async def served(server: EmbeddedServer, root: Path) -> AsyncIterator[environment.Environment]:
    """An environment worker of this process."""
    async with worker(server.url, root) as serving:
        yield serving
