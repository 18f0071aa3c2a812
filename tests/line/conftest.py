"""The whole service, once for all tests of the line: real server, real processes, the shipped backbone, real simulators."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nexus_bus.bus import ensure_topology
from nexus_bus.client import Client
from nexus_bus.serving import introduce
from schemas.plan import TERMINAL, JobState

START_S = 120.0


@dataclass(frozen=True)
class Service:
    """A running `nexus up`."""

    url: str
    home: Path

    def log(self, worker: str) -> str:
        """What a worker has logged so far."""
        return (self.home / "logs" / f"{worker}.log").read_text(errors="replace")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`nexus up` in a directory of its own, ended by SIGTERM."""
    home = tmp_path_factory.mktemp("service")
    with (home / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nexus_bus.cli", "up", "--home", str(home), "--rollout", "2"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, 
            env=os.environ | {"NEXUS_HOME": str(home), "NEXUS_HEALTH_MISSED": "20"},  # a busy machine is not a dead one
        )  # fmt: skip
    ends = time.monotonic() + START_S
    while not ((home / "url").is_file() and (home / "url").read_text().strip()):
        assert process.poll() is None, (home / "up.log").read_text()
        assert time.monotonic() < ends, (home / "up.log").read_text()
        time.sleep(0.05)
    yield Service((home / "url").read_text().strip(), home)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 0, (home / "up.log").read_text()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    """A tenant's connection."""
    connected = await Client.connect(service.url, "acme")
    await known(connected)
    yield connected
    await connected.close()


async def known(client: Client) -> None:
    """Make its tenant one that there is, beside those whom other tests add with an account."""
    await ensure_topology(client.bus)
    await introduce(client.bus, client.tenant)


async def ended(client: Client, job: str, within: float = 240.0) -> JobState:
    """Wait until a job is in a terminal phase."""
    ends = time.monotonic() + within
    while True:
        state = await client.job(job)
        if state is not None and state.phase in TERMINAL:
            return state
        assert time.monotonic() < ends, f"{job} is still {state.phase if state else 'unknown'}: {state}"
        await asyncio.sleep(0.2)
