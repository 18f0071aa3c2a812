"""Data that every tenant may read: named by anybody, recorded by nobody, and encoded once for all."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator

import msgspec
import pytest

from nexus_bus.client import Client
from nexus_bus.errors import BadJob
from schemas.job import DataSpec, EnvironmentSpec, ExpertSpec, HeadSpec, JobSpec, Sft
from tests.line.conftest import Service, ended, known

pytestmark = [pytest.mark.gl, pytest.mark.timeout(300)]

TOUCH = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1, "max_steps": 12, "reward": "dense"})


def job(name: str, data: DataSpec) -> JobSpec:
    head, algorithm = HeadSpec(type="oft", horizon=4), Sft(steps=12, batch_size=8, warmup_steps=0)
    return JobSpec(
        kind="sft",
        name=name,
        head=head,
        environment=TOUCH,
        data=data,
        algorithm=algorithm,
        seed=1,
    )


@pytest.fixture
async def shared(service: Service, client: Client) -> str:
    """A public dataset, put there by the provider."""
    name = f"shelf-{uuid.uuid4().hex[:8]}"
    await client.submit(job(name, DataSpec(expert=ExpertSpec(episodes=3))))
    assert (await ended(client, name)).phase == "completed"
    shutil.copytree(service.home / "datasets" / "acme" / name, service.home / "datasets" / "public" / name)
    return f"public/{name}"


@pytest.fixture
async def other(service: Service) -> AsyncIterator[Client]:
    connected = await Client.connect(service.url, "globex")
    await known(connected)
    yield connected
    await connected.close()


async def test_two_tenants_learn_from_public_data_and_share_its_features(
    service: Service, client: Client, other: Client, shared: str
) -> None:
    features = service.home / "features"
    for who, name in ((client, "of-acme"), (other, "of-globex")):
        await who.submit(job(name, DataSpec(dataset=shared)))
        state = await ended(who, name)
        assert state.phase == "completed", state.reason
        assert state.frames > 10
    kept = [path.name for path in (features / "public").rglob("*") if path.is_file()]
    assert 0 < len(kept) <= state.frames, "a frame is kept once, for both"
    assert not (features / "globex").exists(), "and nobody keeps it as their own"
    weights = [(await who.policies(name))[-1].weights.sha256 for who, name in ((client, "of-acme"), (other, "of-globex"))]
    assert weights[0] == weights[1], "the same seed and data end in the same weights, encoded or found"


async def test_nobody_records_into_public_data(client: Client) -> None:
    with pytest.raises(BadJob, match="recorded by none"):
        await client.submit(job("vandal", DataSpec(dataset="public/mine", expert=ExpertSpec(episodes=1))))


async def test_public_data_that_does_not_exist_is_said_when_the_job_is_sent(client: Client) -> None:
    name = f"none-{uuid.uuid4().hex[:8]}"
    with pytest.raises(BadJob, match=r"^data\.dataset: the provider has put no 'public/nothing-here' there"):
        await client.submit(job(name, DataSpec(dataset="public/nothing-here")))
    assert await client.job(name) is None


async def test_nobody_is_called_public(service: Service, client: Client) -> None:
    with pytest.raises(BadJob, match="reserved"):
        await Client.connect(service.url, "public")
    document = msgspec.json.encode(job("mine", DataSpec(dataset="public/shelf")))
    name = f"public-{uuid.uuid4().hex[:8]}"
    given = {"Nats-Msg-Id": name, "Content-Type": "application/json"}
    await client.bus.publisher.send("job.submit.public", document, given, 5.0)
    async with asyncio.timeout(10):
        async for item in client.bus.tail("event", since="all", tenant="public", job="*"):
            if item.message.submission == name:
                assert item.message.type == "job.refused"
                assert "reserved" in item.message.message
                break
