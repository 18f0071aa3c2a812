"""A trainer that slept through the loss of its lease and wakes up: whoever has the slot now goes on, and it changes nothing."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus, EmbeddedServer, discover
from ops.bench.fairness_rig import Rig, rig
from schemas.control import Lease
from schemas.policy import PolicyVersion, TrainingState
from tests.conftest import Eventually

pytestmark = pytest.mark.timeout(240)

STEPS, SIZE = 120, 4
SETTINGS = {"lease_s": "3", "commit_every": "5", "cache_dir": "none", "slot_dir": "none", "canary_every": "0"}


@asynccontextmanager
async def trainer(bus: Bus, server: EmbeddedServer, home: Path, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One in a process of its own, from the moment it is ready."""
    flags = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    with (home / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.cli", "worker", "trainer", "--name", name, "--url", server.url, *flags,
            env=os.environ | {"NEXUS_HOME": str(home)}, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with asyncio.timeout(90):
            while not any(
                one.about["worker"] == name and one.data["state"] == "running" for one in await discover(bus, "trainer")
            ):
                assert process.returncode is None, (home / f"{name}.log").read_text()
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0, (home / f"{name}.log").read_text()


async def outcome(bus: Bus, job: str) -> tuple[TrainingState, str]:
    """Where training of a job stands, and the hash of its newest version's weights."""
    kv = bus.kv("registry")
    state = await kv.get(registry.state_key("acme", job), TrainingState)
    assert state is not None
    version = await kv.get(registry.policy_key("acme", job, state.value.version), PolicyVersion)
    assert version is not None
    return state.value, version.value.weights.sha256


async def submit(house: Rig, job: str) -> None:
    house.scenes = 0  # the same samples for each job
    await house.submit("acme", job, STEPS, SIZE)


async def test_a_stale_trainer_that_wakes_up_cannot_commit(
    bus: Bus, server: EmbeddedServer, tmp_path: Path, eventually: Eventually
) -> None:
    async with rig(bus) as house, trainer(bus, server, tmp_path, "trainer-a") as sleeper:
        await submit(house, "undisturbed")
        await house.done("acme", "undisturbed")

        await submit(house, "stolen")
        kv = bus.kv("registry")

        async def learned(more: int) -> bool:
            found = await kv.get(registry.state_key("acme", "stolen"), TrainingState)
            return found is not None and found.value.batches >= more

        await eventually(lambda: learned(10), within=60)
        sleeper.send_signal(signal.SIGSTOP)
        before, _ = await outcome(bus, "stolen")
        assert before.batches < STEPS

        async with trainer(bus, server, tmp_path, "trainer-b"):
            await eventually(lambda: learned(before.batches + 5), within=60)
            sleeper.send_signal(signal.SIGCONT)
            await house.done("acme", "stolen")
            state, weights = await outcome(bus, "stolen")
            lease = await bus.kv("leases").get(registry.slot_key("acme", "stolen"), Lease)
        assert lease is not None
        assert (lease.value.epoch, state.epoch) == (2, 2), "the slot changed hands once, and its second holder committed"
        assert lease.value.holder == "trainer-b"
        assert (state.batches, state.records) == (STEPS, STEPS), "each batch was learned once"
        assert weights == (await outcome(bus, "undisturbed"))[1]
        assert "lost" in (tmp_path / "trainer-a.log").read_text()

        await submit(house, "after")
        await house.done("acme", "after")
        assert (await outcome(bus, "after"))[1] == weights, "it goes on as good as new"
