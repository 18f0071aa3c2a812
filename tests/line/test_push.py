"""A tenant with nothing but its credentials: records data on its own machine, pushes it, and trains from it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.client import Client
from nexus_bus.errors import Refused
from nexus_bus.tenants import tenants_of
from tests.line.conftest import Service, ended

pytestmark = [pytest.mark.gl, pytest.mark.timeout(300)]

TOUCH = {"id": "tabletop", "task": "touch", "options": {"blocks": 1, "max_steps": 12}}
JOB: dict[str, Any] = {
    "kind": "sft", "head": {"type": "oft", "horizon": 4}, "environment": TOUCH, "data": {"dataset": "mine"},
    "algorithm": {"name": "sft", "steps": 12, "batch_size": 8, "warmup_steps": 0}, "seed": 1,
}  # fmt: skip


async def nexus(creds: Path, *words: str) -> str:
    """A command on the tenant's machine, which knows of the service what its credentials say, and where it is."""
    provider = ("NEXUS_CREDS", "NEXUS_AUTHORITY", "NEXUS_URL", "NEXUS_HOME", "NEXUS_TENANT")
    alone = {key: value for key, value in os.environ.items() if key not in provider}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nexus_bus.cli", *words, cwd=creds.parent, env=alone, stdout=-1, stderr=-1
    )
    said, complaint = await child.communicate()
    assert child.returncode == 0, complaint.decode()
    return said.decode()


async def test_a_policy_is_trained_from_what_was_pushed(service: Service, tmp_path: Path) -> None:
    async with tenants_of(service.url, Path(os.environ["NEXUS_AUTHORITY"])) as operator:
        creds = tmp_path / "apart.creds"
        creds.write_text((await operator.add("apart")).creds)
    asked = ("--creds", str(creds), "--url", service.url)
    options = [word for key, value in TOUCH["options"].items() for word in ("-o", f"{key}={value}")]
    await nexus(creds, "data", "record", "tabletop", "demos", "--task", "touch", "--episodes", "3", *options)
    assert 'data = { dataset = "mine" }' in await nexus(creds, "data", "push", "demos", "--name", "mine", *asked)
    assert "mine " in await nexus(creds, "data", "list", *asked)
    async with await Client.connect(service.url, creds=creds) as client:
        await client.submit(JOB | {"name": "from-mine"})
        state = await ended(client, "from-mine")
        assert state.phase == "completed", state.reason
        (pushed,) = await client.datasets()
        assert state.frames == pushed.frames > 10
        weights = (await client.policies("from-mine"))[-1].weights.sha256

        # The same data recorded by the service itself ends in the same weights.
        recorded = JOB | {"name": "recorded", "data": {"expert": {"episodes": 3}}}
        await client.submit(recorded)
        state = await ended(client, "recorded")
        assert state.phase == "completed", state.reason
        assert (await client.policies("recorded"))[-1].weights.sha256 == weights
        assert [one.dataset for one in await client.datasets()] == ["mine", "recorded"]

        assert "mine: gone" in await nexus(creds, "data", "drop", "mine", *asked)
        with pytest.raises(Refused, match=r"^data\.dataset: you have no dataset 'mine'; there are recorded; bring it first"):
            await client.submit(JOB | {"name": "too-late"})


async def test_a_dataset_that_is_being_trained_from_stays(service: Service, tmp_path: Path) -> None:
    async with tenants_of(service.url, Path(os.environ["NEXUS_AUTHORITY"])) as operator:
        creds = tmp_path / "busy.creds"
        creds.write_text((await operator.add("busy")).creds)
    await nexus(creds, "data", "record", "tabletop", "mine", "--task", "touch", "--episodes", "2", "-o", "blocks=1")
    async with await Client.connect(service.url, creds=creds) as client:
        await client.push_dataset(tmp_path / "mine")
        await client.submit(JOB | {"name": "long", "algorithm": JOB["algorithm"] | {"steps": 100_000}})
        with pytest.raises(Refused, match="the job 'long' reads 'mine'"):
            await client.drop_dataset("mine")
        await client.cancel("long")
        await ended(client, "long")
        await client.drop_dataset("mine")
