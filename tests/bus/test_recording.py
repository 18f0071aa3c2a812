"""Recordings of the scripted expert, by real environment workers: they rest when their job does, and leave slots to others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from pushing import make, worker

from nexus_bus import recording, registry
from nexus_bus.bus import Bus, Durable, EmbeddedServer, ensure_tenant
from nexus_bus.client import Client
from nexus_bus.data.writer import partial, resting
from nexus_bus.plan import compile_plan
from schemas.control import JobReport
from schemas.environment import PrepareOrder
from schemas.job import EnvironmentSpec, ExpertSpec, JobSpec
from schemas.plan import JobState
from tests.conftest import Eventually
from workers import environment

pytestmark = pytest.mark.timeout(240)
TOUCH = EnvironmentSpec(id="tabletop", task="touch")
REPORTS = Durable("JOBS", "reports", ("job.report.*.*",))
Set = Callable[..., Awaitable[None]]
MANY = 250  # episodes: some seconds


@pytest.fixture
async def there(bus: Bus) -> Set:
    """`await there("acme", "pick", phase="paused")`: a job that is in this state, and its tenant."""

    async def there(tenant: str, job: str, **changes: object) -> None:
        await bus.kv("registry").put(registry.tenant_key(tenant), {})
        await ensure_tenant(bus, tenant)
        document = {
            "kind": "sft", "name": job, "environment": {"id": "tabletop", "task": "touch"}, "data": {"expert": {"episodes": 9}},
            "algorithm": {"name": "sft", "steps": 20},
        }  # fmt: skip
        state = JobState(
            plan=compile_plan(msgspec.convert(document, JobSpec), tenant), phase="data", submission="s", submitted="n"
        )
        await bus.kv("registry").put(registry.job_key(tenant, job), msgspec.structs.replace(state, **changes))

    return there


@pytest.fixture
async def reports(bus: Bus) -> AsyncIterator[dict[str, JobReport]]:
    """What was reported, by job."""
    found: dict[str, JobReport] = {}
    stop = asyncio.Event()

    async def note(delivery) -> environment.Outcome:
        found[delivery.tokens["job"]] = delivery.message
        return environment.Done()

    task = asyncio.create_task(bus.consume(REPORTS, note, stop=stop))
    yield found
    stop.set()
    await task


async def prepare(bus: Bus, tenant: str, job: str, resumed: int = 0, episodes: int = 0, **more: object) -> None:
    expert = ExpertSpec(episodes=episodes) if episodes else None
    order = PrepareOrder(tenant=tenant, job=job, dataset=job, environment=TOUCH, expert=expert, resumed=resumed)
    await bus.publish("env.prepare", order, msg_id=f"{tenant}/{job}/prepare/{resumed}", tenant=tenant, job=job)


async def test_a_recording_rests_with_its_job_and_goes_on_where_it_was(
    bus: Bus, server: EmbeddedServer, root: Path, there: Set, reports: dict[str, JobReport], eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(recording, "LOOK_S", 0.02)  # long before it is through
    path = root / "acme/pick"
    await there("acme", "pick")
    async with worker(server.url, root) as serving:
        await prepare(bus, "acme", "pick", episodes=MANY)
        await eventually(lambda: list(partial(path).glob("data/*/*")), within=60)
        await there("acme", "pick", phase="paused", paused="data")
        rest = await eventually(lambda: resting(path), within=30)
        assert 0 < rest.episodes < MANY
        await prepare(bus, "acme", "pick", episodes=MANY)  # of before the pause: it is late, and means nothing
        written = {one.name: one.stat().st_mtime_ns for one in partial(path).glob("data/*/*")}
        await prepare(bus, "acme", "pick", resumed=1, episodes=MANY)  # handed out before the state says so
        await there("acme", "pick", resumed=1)
        report = await eventually(lambda: reports.get("pick"), within=120)
        assert (report.kind, report.frames > 0) == ("prepared", True)
        dataset = await serving._dataset(path)
        assert len(dataset.episodes) == MANY
        kept = {one.name: one.stat().st_mtime_ns for one in path.glob("data/*/*")}
        assert {name: kept[name] for name in written} == written, "what was kept was not played again"
        assert not partial(path).exists()
        assert sorted(one.name for one in path.iterdir()) == ["data", "meta"]


async def test_recordings_of_one_tenant_leave_slots_to_others_and_end_with_their_jobs(
    bus: Bus, server: EmbeddedServer, root: Path, there: Set, reports: dict[str, JobReport], eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(recording, "SWEEP_S", 0.2)
    make(root / "globex/demo")
    jobs = [f"flood-{number}" for number in range(4)]
    for job in jobs:
        await there("acme", job)
    await there("globex", "demo")
    async with worker(server.url, root, feeds=2):
        for job in jobs:
            await prepare(bus, "acme", job, episodes=10_000)
        await eventually(lambda: list((root / "acme").glob(".*.partial")), within=60)
        await prepare(bus, "globex", "demo")
        await eventually(lambda: reports.get("demo"), within=60)
        assert len(list((root / "acme").glob(".*.partial"))) == 1, "a quarter of the slots, and at least one"
        for job in jobs:
            await there("acme", job, phase="cancelled")
        await eventually(lambda: not list((root / "acme").glob(".*.partial")), within=60)
    assert set(reports) == {"demo"}


async def test_a_recording_that_takes_too_much_memory_or_the_last_of_the_disk_fails_its_job_by_name(
    bus: Bus, server: EmbeddedServer, root: Path, there: Set, reports: dict[str, JobReport], eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await there("acme", "greedy")
    async with worker(server.url, root, memory_gb=0.01):
        await prepare(bus, "acme", "greedy", episodes=10_000)
        report = await eventually(lambda: reports.get("greedy"), within=60)
    assert "limit of 0.01 GB (memory_gb)" in report.reason
    monkeypatch.setattr("nexus_bus.uploads.RESERVE", 1 << 60)
    monkeypatch.setattr("nexus_bus.uploads.room", lambda _: 0)
    await there("acme", "full")
    async with worker(server.url, root):
        await prepare(bus, "acme", "full", episodes=10_000)
        report = await eventually(lambda: reports.get("full"), within=60)
    assert "the disk of the service is full" in report.reason


async def test_pictures_that_are_kept_encoded_are_bounded_by_their_bytes(
    acme: Client, served: environment.Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ENCODED_BYTES", 1000)
    monkeypatch.setattr(environment, "DATASETS", 1)
    dataset = await served._dataset(make(tmp_path / "one"))
    for index in range(12):
        assert served._images(dataset, index, "raw")
        assert sum(environment.weight(one) for one in served.encoded.values()) == served.encoded_bytes <= 1000
    assert len(served.encoded) == 5, "8 by 8 of three bytes"
    await served._dataset(make(tmp_path / "other"))
    assert (served.encoded_bytes, len(served.datasets)) == (0, 1), "another one took its place"
