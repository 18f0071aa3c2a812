"""A seat given up in the middle of a commit, one that finds a version it did not make, one that cannot be made ready."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load, save

from nexus_bus.bus import Bus, Durable
from nexus_bus.bus.blobs import Blobs
from nexus_bus.errors import Unavailable
from nexus_bus.learning.parking import Parking
from nexus_bus.leases import Leases
from nexus_bus.models.backbone import Backbone
from nexus_bus.plan import compile_plan
from nexus_bus.seat import Seat
from schemas.job import DataSpec, HeadSpec, JobSpec, Sft
from schemas.plan import JobState
from tests.conftest import Eventually
from tests.line.test_poison import finished, trained, weights
from tests.line.test_usage import TOUCH, begun, context, feed, put, records, resident, stopped  # noqa: F401 - a fixture too
from workers.trainer import Trainer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")


def job(name: str, steps: int, publish_every: int = 1000) -> JobState:
    spec = JobSpec(
        kind="sft", name=name, head=HeadSpec(horizon=2), environment=TOUCH, data=DataSpec(dataset="d"),
        algorithm=Sft(steps=steps, batch_size=4, warmup_steps=0, publish_every=publish_every),
    )  # fmt: skip
    return JobState(plan=compile_plan(spec, "acme"), phase="training", submission=name, submitted=name, issued=steps)


async def test_a_job_that_is_cancelled_during_a_commit_pays_once(
    bus: Bus, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = job("pick", 1000)
    await put(bus, state)
    worker = Trainer(context(bus, "trainer", commit_every=1))
    writing, written, store = asyncio.Event(), asyncio.Event(), Blobs.put

    async def slow(blobs: Blobs, *content: Any, **options: Any) -> Any:
        if any(seat.learned == 2 for seat in worker.seats.values()):
            writing.set()
            await written.wait()
        return await store(blobs, *content, **options)

    monkeypatch.setattr(Blobs, "put", slow)
    running = await begun(worker)
    await feed(bus, state, range(2))
    await asyncio.wait_for(writing.wait(), 60)
    await put(bus, msgspec.structs.replace(state, phase="cancelled"))
    await eventually(lambda: not worker.seats)
    written.set()
    await stopped(worker, running)
    committed = await trained(bus, state)
    assert committed is not None
    assert committed.batches == 1
    assert sum(used.steps for used in await records(bus)) == 1, "the second is paid for by its seconds, as it was given up"


async def test_a_version_that_a_dead_holder_left_is_gone_on_with_though_the_replay_gives_another(
    bus: Bus, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = job("pick", 3, publish_every=1)
    await put(bus, state)
    publish = Seat._publish

    async def dies(seat: Seat, n: int, module: bytes, adapter: bytes | None) -> bool:
        if n != 2:
            return await publish(seat, n, module, adapter)
        other = {name: tensor * 1.001 if tensor.is_floating_point() else tensor for name, tensor in load(module).items()}
        await publish(seat, n, save(other), adapter)
        raise Unavailable("killed between version and commit")

    monkeypatch.setattr(Seat, "_publish", dies)
    its = await Bus.connect(bus.url)
    running = await begun(Trainer(context(its, "trainer", commit_every=1)))
    await feed(bus, state, range(3))
    with pytest.raises(Unavailable):
        await asyncio.wait_for(running, 60)
    await its.client.close()  # as of a process that is gone
    left = await weights(bus, state, 2)
    monkeypatch.setattr(Seat, "_publish", publish)
    worker = Trainer(context(bus, "trainer", commit_every=1))
    running = await begun(worker)
    done = await finished(bus, state, eventually)
    await stopped(worker, running)
    assert done.version == 3
    assert await weights(bus, state, 2) == left, "others may have acted with it"


async def test_a_slot_that_cannot_be_made_ready_ends_its_own_job_and_no_other(
    bus: Bus, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = job("large", 2), job("small", 2)
    opened = Seat.open

    async def fails(within: Any, state: JobState, *rest: Any) -> Seat:
        if state.plan.spec.name == "large":
            raise RuntimeError("not enough memory: you tried to allocate 1099511627776 bytes")
        return await opened(within, state, *rest)

    monkeypatch.setattr(Seat, "open", fails)
    worker = Trainer(context(bus, "trainer", commit_every=1))
    reports = await bus.pull(Durable("JOBS", "reports", ("job.report.*.*",)), batch=64)
    running = await begun(worker)
    await put(bus, large)
    await put(bus, small)
    await feed(bus, small, range(2))
    await finished(bus, small, eventually)

    async def told() -> str:
        got = [delivery.message for delivery in await reports.get(64, wait=0.1)]
        return next((report.reason for report in got if report.kind == "failed"), "")

    reason = await eventually(told)
    assert "its slot could not be made ready on trainer-0, 3 times" in reason
    assert "allocate" not in reason, "whose memory it is stays the provider's"
    await stopped(worker, running)
    await reports.stop()


async def test_slots_that_come_back_after_a_restart_keep_to_the_bound(
    bus: Bus, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = [job(name, 1000) for name in ("one", "two", "three")]
    for held in range(2):
        worker = Trainer(context(bus, "trainer", commit_every=1))
        if held:
            monkeypatch.setattr("nexus_bus.learning.parking.Parking.__init__", _tight(tmp_path))
        running = await begun(worker)
        for state in states:
            await put(bus, state)
        await eventually(lambda worker=worker: len(worker.seats) == len(states))
        if held:
            parking = worker.seating.parking
            assert parking.parked == len(states) - 1, "the newest is in memory, the others wait elsewhere"
        await stopped(worker, running)


def _tight(directory: Path) -> Any:
    begin = Parking.__init__

    def tight(parking: Parking, *_: Any, **__: Any) -> None:
        begin(parking, 1, 0, directory / "parked")

    return tight


async def test_giving_up_a_lease_leaves_one_that_was_taken_since(bus: Bus) -> None:
    leases = Leases(bus, "trainer-0", 60.0)
    first = await leases.take("acme", "pick")
    second = await leases.take("acme", "pick")
    assert first is not None
    assert second is not None
    await leases.drop(first)
    assert await leases.renew("acme", "pick")
    assert await Leases(bus, "trainer-1", 60.0).take("acme", "pick") is None
    await leases.drop(second)
    assert await Leases(bus, "trainer-1", 60.0).take("acme", "pick") is not None
