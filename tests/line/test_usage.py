"""Every device-second of the workers themselves has an owner, and no record is lost or made twice by a crash."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import structlog

from nexus_bus import config, registry, rollup, usage
from nexus_bus.bus import Bus, ensure_job
from nexus_bus.clock import now
from nexus_bus.errors import Unavailable
from nexus_bus.ledger import Ledger
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.checkpoint import adapter_bytes, weights_bytes
from nexus_bus.models.contract import build_contract
from nexus_bus.models.slots import build_module
from nexus_bus.plan import compile_plan
from nexus_bus.seat import Seat
from nexus_bus.tensors import encode_image, to_tensor
from nexus_bus.worker import Context, Pulse
from schemas.environment import Observation
from schemas.job import DataSpec, EnvironmentSpec, HeadSpec, JobSpec, LoraSpec, Sft
from schemas.plan import JobState
from schemas.policy import ActionSpec, ObservationSpec, PolicyVersion, TrainingState
from schemas.training import TrainingBatch, TrainingSample
from schemas.usage import Usage
from tests.conftest import Eventually
from tests.line.test_inference import TENANT, Asker
from workers.inference import Inference
from workers.trainer import Trainer

pytestmark = pytest.mark.timeout(300)

RUN_S = 3.0
TOUCH = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1})


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")


@pytest.fixture(autouse=True)
def resident(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the backbone loaded."""
    monkeypatch.setenv("NEXUS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Backbone, "load", lambda *_, **__: backbone)


def context(bus: Bus, role: Any, **flags: Any) -> Context:
    settings, log = config.load(role, flags=flags).value, cast(Any, structlog.get_logger())
    return Context(role, f"{role}-0", bus, settings, asyncio.Event(), Pulse(), log, "here")


async def records(bus: Bus) -> list[Usage]:
    return [item.message async for item in bus.tail("usage", since="all", follow=False, tenant="*", job="*")]


async def seconds(bus: Bus) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for used in await records(bus):
        sums[f"{used.tenant}/{used.job}"] += used.device_s
    return sums


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a device was asked for its idle time: up to then every second of it has an owner."""
    times: list[float] = []
    idle = usage.Device.idle

    def noted(device: usage.Device) -> float:
        found = idle(device)
        times.append(time.perf_counter())
        return found

    monkeypatch.setattr(usage.Device, "idle", noted)
    return times


async def stopped(worker: Inference | Trainer, running: "asyncio.Task[None]") -> None:
    worker.context.stop.set()
    await asyncio.wait_for(running, 60)


async def begun(worker: Inference | Trainer) -> "asyncio.Task[None]":
    running = asyncio.create_task(worker.run())
    while worker.context.pulse.state != "running":
        assert not running.done(), running.result()
        await asyncio.sleep(0.01)
    return running


def job(name: str, tenant: str, steps: int = 1000) -> JobState:
    spec = JobSpec(
        kind="sft", name=name, head=HeadSpec(horizon=2), environment=TOUCH, data=DataSpec(dataset="d"),
        algorithm=Sft(steps=steps, batch_size=4, publish_every=1000),
    )  # fmt: skip
    return JobState(plan=compile_plan(spec, tenant), phase="training", submission=name, submitted=name, issued=steps)


def batch(state: JobState, number: int, samples: int) -> TrainingBatch:
    rng, plan = np.random.default_rng(number), state.plan
    (camera, shape), *_ = plan.observation.cameras.items()
    made = [
        TrainingSample(
            observation=Observation(
                images={camera: encode_image(rng.integers(0, 256, shape, dtype=np.uint8), "raw")},
                state=to_tensor(rng.normal(size=plan.observation.state_size).astype(np.float32)),
                instruction="touch the red block",
            ),
            actions=to_tensor(rng.uniform(-1, 1, (2, plan.action.size)).astype(np.float32)),
            action_is_pad=to_tensor(np.zeros(2, np.bool_)),
        )
        for _ in range(samples)
    ]
    name = plan.spec.name
    return TrainingBatch(id=f"{name}/{number}", tenant=plan.tenant, job=name, batch=number, samples=made)


async def put(bus: Bus, state: JobState) -> None:
    await ensure_job(bus, state.plan.tenant, state.plan.spec.name)
    await bus.kv("registry").put(registry.job_key(state.plan.tenant, state.plan.spec.name), state)


async def feed(bus: Bus, state: JobState, numbers: range, samples: int = 4) -> None:
    tenant, name = state.plan.tenant, state.plan.spec.name
    for number in numbers:
        message = batch(state, number, samples)
        await bus.publish("train.batch", message, msg_id=f"{tenant}/{message.id}", tenant=tenant, job=name)


async def test_shares_of_an_inference_worker_and_its_idle_time_are_its_life(
    bus: Bus, backbone: Backbone, looked: list[float]
) -> None:
    asker = await Asker(bus, backbone).open()
    await asker.publish("pick")
    started = time.perf_counter()
    worker = Inference(context(bus, "inference", canary_every=7))
    running = await begun(worker)
    scene = 0
    while time.perf_counter() < started + RUN_S or scene < 16:  # enough for a canary, however slow it goes
        await asyncio.gather(*(asker.ask("pick@0", scene + i) for i in range(3)))
        scene += 2  # one of three is known already
    await stopped(worker, running)
    whole, sums = looked[-1] - worker.compute._opened, await seconds(bus)
    assert sum(sums.values()) == pytest.approx(whole, rel=0.03)
    owners = {f"{TENANT}/pick", "provider/idle", "provider/loading", "provider/canary"}
    assert set(sums) - {"provider/repeated"} == owners  # some come again where the machine stood still
    assert min(sums.values()) > 0
    assert sum(used.requests for used in await records(bus) if used.job != "repeated") == len(asker.replies)


async def speaker(asker: Asker, backbone: Backbone) -> None:
    """Publish `speak@0`, whose answers are decoded token by token."""
    lora = LoraSpec(rank=2)
    contract = build_contract(
        backbone=backbone.info,
        head=HeadSpec(type="fast", horizon=2, options={"levels": 15}),
        action=ActionSpec(size=2, low=[-1.0, -1.0], high=[1.0, 1.0]),
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=1),
        lora=lora,
    )
    put = asker.bus.blobs.put
    version = PolicyVersion(
        id="speak@0", tenant=TENANT, job="speak", n=0, parent=None, contract=contract, created=now(),
        weights=await put(weights_bytes(build_module(contract, backbone.shape, seed=0))),
        adapter=await put(adapter_bytes(backbone.adapter(lora))),
    )  # fmt: skip
    await asker.bus.kv("registry").put(registry.policy_key(TENANT, "speak", 0), version)


async def test_answers_that_take_many_steps_are_paid_for_whole(bus: Bus, backbone: Backbone, looked: list[float]) -> None:
    asker = await Asker(bus, backbone).open()
    await speaker(asker, backbone)
    await asker.publish("pick")
    started = time.perf_counter()
    worker = Inference(context(bus, "inference", canary_every=0))
    running = await begun(worker)
    while time.perf_counter() < started + RUN_S:
        await asyncio.gather(asker.ask("speak@0", 1), asker.ask("speak@0", 2), asker.ask("pick@0", 1))
    await stopped(worker, running)
    whole, sums = looked[-1] - worker.compute._opened, await seconds(bus)
    assert sum(sums.values()) == pytest.approx(whole, rel=0.03)
    assert sums[f"{TENANT}/speak"] > sums[f"{TENANT}/pick"] > 0


async def test_a_known_picture_costs_no_forward_and_a_long_prompt_more_than_a_short_one(bus: Bus, backbone: Backbone) -> None:
    asker = await Asker(bus, backbone).open()
    await asker.publish("pick")
    worker = Inference(context(bus, "inference", canary_every=0))
    running = await begun(worker)
    first = await asker.ask("pick@0", 1)
    await asker.ask("pick@0", 2)
    known = [await asker.ask("pick@0", 1) for _ in range(5)]
    assert min(reply.device_s for reply in known) < first.device_s
    together = await asyncio.gather(*(asker.ask("pick@0", scene) for scene in (1, 10, 11, 12)))
    if all(reply.group == 4 for reply in together):
        assert together[0].device_s < min(reply.device_s for reply in together[1:])
    await stopped(worker, running)


async def test_shares_of_a_trainer_and_its_idle_time_are_its_life(
    bus: Bus, eventually: Eventually, looked: list[float]
) -> None:
    states = [job("pick", "acme"), job("place", "globex")]
    for state in states:
        await put(bus, state)
    started = time.perf_counter()
    worker = Trainer(context(bus, "trainer", commit_every=5, canary_every=7))
    running = await begun(worker)
    number = 0
    while time.perf_counter() < started + RUN_S or number < 8:
        for samples, state in zip((2, 6), states, strict=True):
            await feed(bus, state, range(number, number + 1), samples)
        number += 1
        await asyncio.sleep(0.02)
    await eventually(lambda: all(seat.learned == number for seat in worker.seats.values()), within=120)
    await stopped(worker, running)
    whole, sums = looked[-1] - worker.compute._opened, await seconds(bus)
    assert sum(sums.values()) == pytest.approx(whole, rel=0.03)
    assert set(sums) == {"acme/pick", "globex/place", "provider/idle", "provider/loading", "provider/canary"}
    assert sums["globex/place"] > sums["acme/pick"], "three times the samples"
    assert sum(used.records for used in await records(bus)) == 2 * number


async def test_usage_is_published_by_the_next_holder_if_the_last_one_died_after_its_commit(
    bus: Bus, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = job("pick", "acme")
    await put(bus, state)
    account = Seat._account

    async def dies(seat: Seat, **options: Any) -> None:
        if seat.committed == 2:
            raise Unavailable("killed between commit and usage")
        await account(seat, **options)

    monkeypatch.setattr(Seat, "_account", dies)
    first = Trainer(context(bus, "trainer", commit_every=1))
    running = await begun(first)
    await feed(bus, state, range(2))
    with pytest.raises(Unavailable):
        await running
    monkeypatch.setattr(Seat, "_account", account)
    assert [used.steps for used in await records(bus) if used.steps] == [1]

    async def held() -> None:
        holder = Trainer(context(bus, "trainer", commit_every=1))
        running = await begun(holder)
        await eventually(lambda: holder.seats)
        await stopped(holder, running)

    await held()
    await held()  # and by the one after it no more
    trained = [used for used in await records(bus) if used.steps]
    assert [(used.steps, used.records) for used in trained] == [(1, 1), (1, 1)]
    entry = await bus.kv("registry").get(registry.state_key("acme", "pick"), TrainingState)
    assert entry is not None
    assert sum(used.device_s for used in trained) == pytest.approx(entry.value.device_s)
    monkeypatch.setattr(rollup, "MANY", 1)
    await rollup.Rollup(bus).sweep()
    config = (await bus.js.stream_info("USAGE")).config
    config.duplicate_window = 0.1  # as if minutes had gone by: the server does not know the record's id any more
    await bus.js.update_stream(config)
    await held()  # nor once the log was added up, and the record's id is forgotten with it
    ledger = Ledger(("job", "kind"))
    for used in await records(bus):
        ledger.take(used)
    (row,) = [row for row in ledger.rows() if (row["job"], row["kind"]) == ("pick", "training")]
    assert (row["steps"], row["records"]) == (2, 2)


async def test_requests_whose_record_was_not_stored_are_answered_again_on_the_provider(
    bus: Bus, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker = await Asker(bus, backbone).open()
    await asker.publish("pick")
    monkeypatch.setattr(usage, "EVERY_S", 60.0)
    first = Inference(context(bus, "inference", canary_every=0))
    running = await begun(first)
    assert (await asker.ask("pick@0")).error == ""
    running.cancel()  # as if killed: nothing is flushed
    monkeypatch.setattr(first.used, "flush", _nothing)
    await asyncio.gather(running, return_exceptions=True)
    monkeypatch.setattr(usage, "EVERY_S", 0.2)
    second = Inference(context(bus, "inference", canary_every=0))
    running = await begun(second)
    ends = time.monotonic() + 60
    while "provider/repeated" not in await seconds(bus):
        assert time.monotonic() < ends
        await asyncio.sleep(0.1)
    await stopped(second, running)
    assert f"{TENANT}/pick" not in await seconds(bus)


def _nothing() -> Awaitable[None]:
    return asyncio.sleep(0)


async def test_a_cancelled_job_pays_for_what_it_had_not_committed(bus: Bus, eventually: Eventually) -> None:
    state = job("pick", "acme")
    await put(bus, state)
    worker = Trainer(context(bus, "trainer", commit_every=1000))
    running = await begun(worker)
    await feed(bus, state, range(3))
    await eventually(lambda: any(seat.learned == 3 for seat in worker.seats.values()))
    owed = next(iter(worker.seats.values())).used
    assert owed is not None
    await put(bus, msgspec.structs.replace(state, phase="cancelled"))
    await eventually(lambda: not worker.seats)
    await stopped(worker, running)
    assert (await seconds(bus))["acme/pick"] >= owed.device_s
