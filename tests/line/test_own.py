"""A job in a tenant's own environment, which a process with nothing but the tenant's credentials serves: to the end."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.client import Client
from nexus_bus.tenants import tenants_of
from tests.conftest import Eventually
from tests.line.conftest import Service, ended
from tests.own_worker import own_worker

pytestmark = pytest.mark.timeout(400)

JOB: dict[str, Any] = {
    "kind": "rl", "name": "spot", "environment": {"id": "own-arm", "task": "default", "options": {"max_steps": 16}},
    "algorithm": {"name": "ppo", "updates": 2, "episodes_per_update": 4}, "evaluation": {"episodes": 4},
}  # fmt: skip


async def said(client: Client, kind: str) -> list[str]:
    """What a job was told in events of this kind."""
    return [event.message async for event in client.events("spot", follow=False) if event.type == kind]


async def cancelled_while_away(client: Client, service: Service, creds: Path, eventually: Eventually) -> None:
    """A job that ends while its robot is away does not move it when it is back."""
    async with own_worker(service.url, creds, "--as", "arm"):
        await client.submit(JOB | {"name": "gone", "evaluation": {"episodes": 40}})
        await eventually(lambda: client.episodes("gone"), within=60)
    await client.cancel("gone")
    await ended(client, "gone")
    async with own_worker(service.url, creds, "--as", "arm"):
        played = await client.episodes("gone")
        await client.submit(JOB | {"name": "next", "algorithm": {"name": "ppo", "updates": 1, "episodes_per_update": 4}})
        await ended(client, "next")
    assert '"job":"gone"' not in creds.with_suffix(".log").read_text()
    assert await client.episodes("gone") == played


async def test_it_waits_for_a_robot_that_went_away_and_ends_with_scores(
    service: Service, tmp_path: Path, eventually: Eventually
) -> None:
    async with tenants_of(service.url, Path(os.environ["NEXUS_AUTHORITY"])) as operator:
        creds = tmp_path / "robotics.creds"
        creds.write_text((await operator.add("robotics")).creds)
    async with await Client.connect(service.url, creds=creds) as client:
        async with own_worker(service.url, creds, "--as", "arm") as dying:
            await client.submit(JOB)

            async def trains() -> bool:
                state = await client.job("spot")
                return state is not None and state.phase == "training"

            await eventually(trains, within=60)
            dying.send_signal(signal.SIGKILL)
            await dying.wait()
        told = await eventually(lambda: said(client, "environment.left"), within=60)
        assert told == ["own-arm: no worker of yours serves it now; orders to play in it wait until one does"]
        state = await client.job("spot")
        assert state is not None
        assert state.phase == "training", "nobody else may play in it"
        async with own_worker(service.url, creds, "--as", "arm", "--sessions", "2"):
            state = await ended(client, "spot")
            assert (state.phase, state.version) == ("completed", 2), state.reason
        assert await said(client, "environment.joined") == ["own-arm: a worker of yours serves it again"]
        await cancelled_while_away(client, service, creds, eventually)
        episodes = await client.episodes("spot")
        assert len(episodes) == 8
        assert {"two_joint_arm" in episode.simulator for episode in episodes} == {True}
        assert {episode.length <= 16 for episode in episodes} == {True}
        report = await client.report("spot")
        assert "not checked" in str(report), "a robot need not repeat itself, and the report says so"
        usage = [record async for record in client.usage("spot")]
        assert sum(record.simulator_s for record in usage) == 0, "the tenant's own machine is not the provider's to charge for"
