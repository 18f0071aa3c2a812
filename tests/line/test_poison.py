"""Promise 5 through a real trainer on a real server: a poison record becomes a dead letter, its job ends without it."""

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nexus_bus import registry
from nexus_bus.bus import Bus, Durable, headers
from nexus_bus.bus.dead import revive
from nexus_bus.clock import derive_seed
from nexus_bus.errors import Unavailable
from nexus_bus.learning.algorithms import Sft as SftAlgorithm
from nexus_bus.learning.group import GroupTrainer, Member
from nexus_bus.learning.poison import DIED
from nexus_bus.learning.start import begin_slot, work_of
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.checkpoint import weights_bytes
from nexus_bus.plan import compile_plan
from nexus_bus.seat import Seat
from nexus_bus.tensors import to_tensor
from schemas.job import DataSpec, HeadSpec, JobSpec, Ppo, Sft
from schemas.plan import JobState
from schemas.policy import PolicyVersion, TrainingState
from schemas.rollout import RolloutRecord, RolloutStep
from schemas.subjects import subject
from schemas.training import TrainingBatch
from tests.conftest import Eventually
from tests.line.test_usage import TOUCH, batch, begun, context, put, resident, stopped  # noqa: F401 - a fixture too
from workers.trainer import Trainer

pytestmark = pytest.mark.timeout(240)

HUGE = np.float32(3e38)  # finite, and no loss of it is


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")


def sft(name: str, tenant: str, steps: int) -> JobState:
    spec = JobSpec(
        kind="sft", name=name, head=HeadSpec(horizon=2), environment=TOUCH, data=DataSpec(dataset="d"),
        algorithm=Sft(steps=steps, batch_size=4, warmup_steps=0, publish_every=1000),
    )  # fmt: skip
    return JobState(plan=compile_plan(spec, tenant), phase="training", submission=name, submitted=name, issued=steps)


def instructed(message: TrainingBatch, instruction: str) -> TrainingBatch:
    """The same batch with another instruction, by which a test knows it again."""
    samples = [
        msgspec.structs.replace(one, observation=msgspec.structs.replace(one.observation, instruction=instruction))
        for one in message.samples
    ]
    return msgspec.structs.replace(message, samples=samples)


def overflowing(message: TrainingBatch) -> TrainingBatch:
    samples = [
        msgspec.structs.replace(one, actions=to_tensor(np.full(one.actions.shape, HUGE, np.float32))) for one in message.samples
    ]
    return msgspec.structs.replace(message, samples=samples)


async def send(bus: Bus, message: TrainingBatch | RolloutRecord, name: str = "") -> None:
    row = "train.batch" if isinstance(message, TrainingBatch) else "train.record"
    msg_id = name or f"{message.tenant}/{message.id}"
    await bus.publish(row, message, msg_id=msg_id, tenant=message.tenant, job=message.job)


async def trained(bus: Bus, state: JobState) -> TrainingState | None:
    entry = await bus.kv("registry").get(registry.state_key(state.plan.tenant, state.plan.spec.name), TrainingState)
    return entry.value if entry is not None else None


async def finished(bus: Bus, state: JobState, eventually: Eventually, within: float = 60.0) -> TrainingState:
    """Where a job stands when all its batches are learned or passed over."""

    async def done() -> TrainingState | None:
        found = await trained(bus, state)
        return found if found is not None and found.batches == state.plan.batches else None

    return await eventually(done, within=within)


async def weights(bus: Bus, state: JobState, n: int) -> str:
    entry = await bus.kv("registry").get(registry.policy_key(state.plan.tenant, state.plan.spec.name, n), PolicyVersion)
    assert entry is not None
    return entry.value.weights.sha256


def expected(state: JobState, backbone: Backbone, updates: Sequence[Sequence[Any]]) -> str:
    """Hash of the weights that these records give, and nothing else: no queue, no neighbours, no failed attempt."""
    slot, algorithm = begin_slot(state, backbone, derive_seed(state.plan.spec.seed, "slot"))
    for version, messages in enumerate(updates):
        slot.version = version
        done = GroupTrainer(backbone).run([Member(slot, algorithm, work_of(algorithm, list(messages), slot.contract))])[0]
        assert done.error is None
    return hashlib.sha256(weights_bytes(slot.module)).hexdigest()


async def letters(bus: Bus) -> list[Any]:
    return [item.message async for item in bus.tail("dead", since="all", follow=False)]


async def deaths(bus: Bus, tenant: str) -> list[Any]:
    events = [item.message async for item in bus.tail("event", since="all", follow=False, tenant=tenant, job="*")]
    return [event for event in events if event.type == "record.dead"]


async def left(bus: Bus) -> int:
    return sum((await bus.queued("TRAINING")).values())


async def test_a_batch_that_cannot_be_learned_is_a_dead_letter_and_the_job_ends_as_if_it_had_not_been(
    bus: Bus, backbone: Backbone, eventually: Eventually
) -> None:
    poisoned, neighbour = sft("pick", "acme", 6), sft("place", "globex", 6)
    batches = {n: batch(poisoned, n, 3) for n in range(6)}
    for state in (poisoned, neighbour):
        await put(bus, state)
    for n in range(6):
        await send(bus, overflowing(batches[n]) if n == 2 else batches[n])
        await send(bus, batch(neighbour, n, 2))
    worker = Trainer(context(bus, "trainer", commit_every=1000))
    running = await begun(worker)
    here, there = await finished(bus, poisoned, eventually), await finished(bus, neighbour, eventually)
    assert (here.records, here.step, len(here.dead)) == (5, 5, 1), "learned and dead are what was published"
    assert (there.records, there.step, there.dead) == (6, 6, [])
    assert await weights(bus, poisoned, 1) == expected(poisoned, backbone, [[batches[n]] for n in (0, 1, 3, 4, 5)])
    assert await weights(bus, neighbour, 1) == expected(neighbour, backbone, [[batch(neighbour, n, 2)] for n in range(6)])
    (letter,) = await letters(bus)
    assert letter.msg_id == "acme/pick/2"
    assert "loss" in letter.reason
    assert msgspec.msgpack.decode(letter.payload, type=TrainingBatch) == overflowing(batches[2]), "the original"
    (event,) = await deaths(bus, "acme")
    assert (event.job, event.data["record"], event.data["reason"]) == ("pick", "acme/pick/2", letter.reason)
    assert await deaths(bus, "globex") == []
    # Sent once more it comes too late, and says so.
    ((seq, letter),) = [(item.seq, item.message) async for item in bus.tail("dead", since="all", follow=False)]
    await revive(bus, letter, seq)
    await eventually(lambda: _count(bus, 2))
    assert (await letters(bus))[1].reason == "batch 2 was learned without it"
    await stopped(worker, running)
    assert await left(bus) == 0


async def _count(bus: Bus, number: int) -> bool:
    return len(await letters(bus)) == number


def episode(state: JobState, update: int, index: int) -> RolloutRecord:
    rng, plan = np.random.default_rng([update, index]), state.plan
    name = plan.spec.name
    seen = batch(state, 100 * update + index, 3).samples
    steps = [
        RolloutStep(
            observation=one.observation,
            actions=to_tensor(rng.normal(size=(2, plan.action.size)).astype(np.float32)),
            log_prob=float(-rng.uniform(1, 5)),
            value=float(rng.normal()),
            executed=2,
            rewards=[0.0, float(rng.uniform())],
            version=f"{name}@{update}",
            feature_id="",
        )
        for one in seen
    ]
    return RolloutRecord(
        id=f"{name}/train/{update}/{index}", tenant=plan.tenant, job=name, batch=update, index=index, policy=f"{name}@{update}",
        task="touch", seed=index, trial=index, steps=steps, terminated=True, truncated=False, end="success", success=True,
        episode_return=1.0, length=6,
    )  # fmt: skip


def rl(name: str, tenant: str, updates: int = 3, episodes: int = 4) -> JobState:
    spec = JobSpec(
        kind="rl", name=name, head=HeadSpec(horizon=2), environment=TOUCH,
        algorithm=Ppo(updates=updates, episodes_per_update=episodes, minibatch=4, epochs=2),
    )  # fmt: skip
    return JobState(plan=compile_plan(spec, tenant), phase="training", submission=name, submitted=name, issued=updates)


async def test_an_update_goes_on_without_the_episode_that_spoils_it_and_without_one_that_cannot_be_read(
    bus: Bus, backbone: Backbone, eventually: Eventually
) -> None:
    state = rl("grasp", "acme")
    await put(bus, state)
    records = {(u, i): episode(state, u, i) for u in range(3) for i in range(4)}
    worker = Trainer(context(bus, "trainer"))
    running = await begun(worker)
    for place, record in records.items():
        if place == (0, 2):
            steps = [msgspec.structs.replace(step, value=float(HUGE), rewards=[float(HUGE)] * 2) for step in record.steps]
            await send(bus, msgspec.structs.replace(record, steps=steps))
        elif place == (1, 3):
            given = {headers.MSG_ID: f"acme/{record.id}", headers.CONTENT_TYPE: "application/msgpack"}
            await bus.publisher.send(subject("train.record", tenant="acme", job="grasp"), b"\xc1", given, deadline=5.0)
        else:
            await send(bus, record)
    found = await finished(bus, state, eventually)
    assert (found.records, found.version, len(found.dead)) == (10, 3, 2)
    kept = [[records[u, i] for i in range(4) if (u, i) not in ((0, 2), (1, 3))] for u in range(3)]
    assert await weights(bus, state, 3) == expected(state, backbone, kept)
    await eventually(lambda: _count(bus, 2))
    assert {letter.msg_id for letter in await letters(bus)} == {"acme/grasp/train/0/2", "acme/grasp/train/1/3"}
    await stopped(worker, running)
    assert await left(bus) == 0


async def test_an_update_of_which_nothing_is_left_still_publishes_its_version(bus: Bus, eventually: Eventually) -> None:
    state = rl("grasp", "acme", updates=2, episodes=1)
    await put(bus, state)
    steps = [msgspec.structs.replace(step, log_prob=-float(HUGE)) for step in episode(state, 0, 0).steps]
    steps = [msgspec.structs.replace(step, value=float(HUGE), rewards=[float(HUGE)] * 2) for step in steps]
    await send(bus, msgspec.structs.replace(episode(state, 0, 0), steps=steps))
    await send(bus, episode(state, 1, 0))
    worker = Trainer(context(bus, "trainer"))
    running = await begun(worker)
    found = await finished(bus, state, eventually)
    assert (found.records, found.version, len(found.dead)) == (1, 2, 1)
    assert await weights(bus, state, 1) == await weights(bus, state, 0), "rollouts that are pinned to it find it"
    await stopped(worker, running)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("unforeseen")], ids=["memory", "other"])
async def test_what_breaks_the_shared_forward_costs_its_own_job_a_record(
    bus: Bus, backbone: Backbone, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    states = [sft("pick", "acme", 3), sft("place", "globex", 3), sft("push", "initech", 3)]
    encode = backbone.encode

    def breaks(looks: Any) -> Any:
        if any(look.prompt.instruction == "huge" for look in looks):
            raise error
        return encode(looks)

    monkeypatch.setattr(backbone, "encode", breaks)
    for state in states:
        await put(bus, state)
        for n in range(3):
            message = batch(state, 10 * len(state.plan.tenant) + n, 2)
            message = msgspec.structs.replace(message, id=f"{message.job}/{n}", batch=n)
            await send(bus, instructed(message, "huge") if (n, state.plan.tenant) == (1, "globex") else message)
    worker = Trainer(context(bus, "trainer", cache_dir="none"))
    running = await begun(worker)
    ends = [await finished(bus, state, eventually) for state in states]
    assert [(end.records, len(end.dead)) for end in ends] == [(3, 0), (2, 1), (3, 0)]
    await eventually(lambda: _count(bus, 1))
    (letter,) = await letters(bus)
    assert letter.msg_id == "globex/place/1"
    assert ("memory" in letter.reason) == isinstance(error, torch.OutOfMemoryError)
    assert "unforeseen" not in letter.reason, "what is not the tenant's own stays in the provider's log"
    await stopped(worker, running)


async def test_a_failure_that_passes_costs_nothing(
    bus: Bus, backbone: Backbone, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, failures = sft("pick", "acme", 4), [2]
    learn = SftAlgorithm.learn

    def now_and_then(self: Any, slot: Any, work: Any) -> Any:
        if slot.step == 2 and failures[0]:
            failures[0] -= 1
            raise RuntimeError("a hiccup of the device")
        return (yield from learn(self, slot, work))

    monkeypatch.setattr(SftAlgorithm, "learn", now_and_then)
    await put(bus, state)
    for n in range(4):
        await send(bus, batch(state, n, 2))
    worker = Trainer(context(bus, "trainer"))
    running = await begun(worker)
    found = await finished(bus, state, eventually)
    await stopped(worker, running)
    assert (found.records, found.dead) == (4, [])
    assert await weights(bus, state, 1) == expected(state, backbone, [[batch(state, n, 2)] for n in range(4)])


async def test_a_job_that_loses_every_record_fails_and_says_why(bus: Bus, eventually: Eventually) -> None:
    state = sft("pick", "acme", 10)
    await put(bus, state)
    for n in range(10):
        await send(bus, overflowing(batch(state, n, 2)))
    worker = Trainer(context(bus, "trainer"))
    reports = await bus.pull(Durable("JOBS", "reports", ("job.report.*.*",)), batch=64)
    running = await begun(worker)

    async def failed() -> str:
        got = [delivery.message for delivery in await reports.get(64, wait=0.1)]
        return next((report.reason for report in got if report.kind == "failed"), "")

    reason = await eventually(failed)
    assert "3 batches in a row" in reason
    assert "loss" in reason
    await stopped(worker, running)
    assert len(await letters(bus)) == 3, "the others may be learned by a job that does better"
    await reports.stop()


async def test_a_trainer_that_dies_between_commit_and_letter_loses_neither(
    bus: Bus, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = sft("pick", "acme", 3)
    await put(bus, state)
    for n in range(3):
        await send(bus, overflowing(batch(state, n, 2)) if n == 1 else batch(state, n, 2))
    bury = Seat.bury

    async def dies(*_: Any) -> None:
        raise Unavailable("killed before the letter")

    monkeypatch.setattr(Seat, "bury", dies)
    its = await Bus.connect(bus.url)
    running = await begun(Trainer(context(its, "trainer")))
    with pytest.raises(Unavailable):
        await asyncio.wait_for(running, 60)
    await its.client.close()  # as of a process that is gone
    monkeypatch.setattr(Seat, "bury", bury)
    assert await letters(bus) == []
    worker = Trainer(context(bus, "trainer"))
    running = await begun(worker)
    found = await finished(bus, state, eventually)
    await eventually(lambda: _count(bus, 1), within=30)
    assert (found.records, len(found.dead)) == (2, 1)
    assert len(await deaths(bus, "acme")) == 1
    await eventually(lambda: _empty(bus), within=30)
    await stopped(worker, running)


async def _empty(bus: Bus) -> bool:
    return await left(bus) == 0


DEADLY = """
import os, signal, sys
from nexus_bus.seat import Seat
from workers import trainer
decode = Seat.next_work
def dies(seat):
    for message in seat.messages:
        for one in getattr(message, "steps", None) or message.samples:
            if one.observation.instruction == "deadly":
                os.kill(os.getpid(), signal.SIGKILL)
    return decode(seat)
Seat.next_work = dies
sys.exit(trainer.run(name="trainer-0", url=sys.argv[1]))
"""


async def test_a_record_that_kills_its_trainer_three_times_is_given_up_at_the_fourth_start(
    bus: Bus, backbone: Backbone, eventually: Eventually, tmp_path: Path, server: Any
) -> None:
    deadly, neighbour = rl("grasp", "acme", updates=1), sft("place", "globex", 4)
    records = [episode(deadly, 0, i) for i in range(4)]
    seen = records[1].steps[0]
    worse = msgspec.structs.replace(seen, observation=msgspec.structs.replace(seen.observation, instruction="deadly"))
    for state in (deadly, neighbour):
        await put(bus, state)
    for i, record in enumerate(records):
        await send(bus, msgspec.structs.replace(record, steps=[worse, *record.steps[1:]]) if i == 1 else record)
    for n in range(4):
        await send(bus, batch(neighbour, n, 2))
    environment = os.environ | {"NEXUS_HOME": str(tmp_path / "home"), "NEXUS_TRAINER_CACHE_DIR": "none"}

    async def start() -> asyncio.subprocess.Process:
        with (tmp_path / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-c", DEADLY, server.url, env=environment, stdout=log, stderr=log
            )

    for _ in range(3):
        process = await start()
        assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL, (tmp_path / "log").read_text()
    process = await start()
    try:
        found, other = await finished(bus, deadly, eventually, 60), await finished(bus, neighbour, eventually, 30)
        await eventually(lambda: _count(bus, 1))
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert (found.records, len(found.dead), other.records, other.dead) == (3, 1, 4, [])
    (letter,) = await letters(bus)
    assert (letter.msg_id, letter.reason) == ("acme/grasp/train/0/1", DIED)
    assert await weights(bus, deadly, 1) == expected(deadly, backbone, [[records[i] for i in (0, 2, 3)]])
    assert await weights(bus, neighbour, 1) == expected(neighbour, backbone, [[batch(neighbour, n, 2)] for n in range(4)])
