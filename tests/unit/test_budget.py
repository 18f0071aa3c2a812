"""Budgets and limits: what a pause takes back and a resumption hands out, who may begin, and who waits at which place."""

import asyncio
from typing import Any, cast

import msgspec
import pytest
import structlog

from nexus_bus import progress, registry
from nexus_bus.admission import Limits, estimate, line, next_ones, place, refusal, running, waits
from nexus_bus.bus import Bus
from nexus_bus.config import MasterConfig
from nexus_bus.plan import compile_plan
from nexus_bus.retention import in_use
from nexus_bus.stored import Stored
from nexus_bus.worker import Context, Pulse
from schemas.base import BlobRef
from schemas.control import JobReport
from schemas.job import (
    Budget,
    DataSpec,
    EnvironmentSpec,
    EvaluationSpec,
    ExpertSpec,
    HeadSpec,
    JobPause,
    JobResume,
    JobSpec,
    Ppo,
    Sft,
)
from schemas.plan import JobState, Phase
from schemas.policy import TrainingState
from schemas.rollout import EpisodeResult
from schemas.usage import Usage
from tests.conftest import Eventually
from workers.master import Master

TOUCH = EnvironmentSpec(id="tabletop", task="touch")
LIMITS = Limits(jobs=2, queued=3)


def rl(phase: Phase = "training", name: str = "touch", **fields: Any) -> JobState:
    spec = JobSpec(
        kind="rl", name=name, head=HeadSpec(horizon=4), environment=TOUCH, budget=Budget(wall_s=100.0),
        algorithm=Ppo(updates=4, episodes_per_update=3, staleness=1), evaluation=EvaluationSpec(episodes=4),
    )  # fmt: skip
    return JobState(plan=compile_plan(spec, "acme"), phase=phase, submission="s", submitted="now", version=0, **fields)


def sft(name: str = "touch", device_s: float | None = None) -> JobSpec:
    return JobSpec(
        kind="sft", name=name, environment=TOUCH, data=DataSpec(expert=ExpertSpec(episodes=5)),
        algorithm=Sft(steps=200), budget=Budget(device_s=device_s),
    )  # fmt: skip


def episode(purpose: Any, index: int) -> JobReport:
    result = EpisodeResult(
        job="touch", purpose=purpose, batch=0, index=index, policy="touch@0", seed=1, success=True, episode_return=1.0,
        length=10, end="success", environment="tabletop",
    )  # fmt: skip
    return JobReport(job="touch", kind="episode", episode=result)


def learned(batches: int, kind: Any = "learned") -> JobReport:
    return JobReport(job="touch", kind=kind, batches=batches, version=batches)


def handed(happening: progress.Happening) -> list[tuple[int, int]]:
    return [(order.batch, order.index) for _, _, order in happening.orders]


def paused(state: JobState) -> JobState:
    return progress.pause(state, "a break", at=50.0, device_s=7.0)


# What a pause takes back, and what resuming hands out


def test_training_goes_on_with_what_was_not_learned_under_new_ids() -> None:
    begun = progress.enter(rl(), "training")
    state = progress.advance(begun.state, learned(1)).state
    going_on = progress.resume(paused(state), at=60.0, added_device_s=0.0)
    assert handed(going_on) == [(batch, index) for batch in (1, 2) for index in range(3)]
    assert going_on.state.phase == "training"
    before = {msg_id: order for _, msg_id, order in begun.orders}
    again = {msg_id: order for _, msg_id, order in going_on.orders}
    assert not before.keys() & again.keys(), "the queue would take the old ids for repetitions"
    by_place = {(order.batch, order.index): order for order in before.values()}
    for order in again.values():
        if (order.batch, order.index) in by_place:
            assert order == by_place[order.batch, order.index], "the same episode as it would have been"


def test_what_is_learned_during_a_pause_counts_and_is_followed_up_on_resuming() -> None:
    state = paused(progress.enter(rl(), "training").state)
    meanwhile = progress.advance(state, learned(2))
    assert (meanwhile.state.phase, meanwhile.state.done, meanwhile.orders) == ("paused", 2, [])
    going_on = progress.resume(meanwhile.state, at=60.0, added_device_s=0.0)
    assert handed(going_on) == [(batch, index) for batch in (2, 3) for index in range(3)]


def test_a_phase_that_ends_during_a_pause_is_followed_by_the_next_one_on_resuming() -> None:
    state = paused(progress.enter(rl(), "training").state)
    meanwhile = progress.advance(state, learned(4, "trained")).state
    assert (meanwhile.phase, meanwhile.paused) == ("paused", "evaluating_after")
    going_on = progress.resume(meanwhile, at=60.0, added_device_s=0.0)
    assert [(order.purpose, order.index) for _, _, order in going_on.orders] == [("after", index) for index in range(4)]


def test_an_evaluation_goes_on_with_the_trials_that_are_missing() -> None:
    state = progress.advance(progress.enter(rl(), "evaluating_before").state, episode("before", 2)).state
    state = progress.advance(paused(state), episode("before", 0)).state
    assert state.phase == "paused"
    going_on = progress.resume(state, at=60.0, added_device_s=0.0)
    assert [order.index for _, _, order in going_on.orders] == [1, 3]


def test_the_last_trial_may_come_in_during_a_pause() -> None:
    state = progress.enter(rl(), "evaluating_after").state
    for index in range(3):
        state = progress.advance(state, episode("after", index)).state
    end = progress.advance(paused(state), episode("after", 3))
    assert (end.state.phase, end.state.reason) == ("completed", "")
    assert end.score is not None
    assert end.score.episodes == 4


def test_wall_time_stands_still_during_a_pause() -> None:
    state = progress.resume(paused(rl(deadline=100.0)), at=80.0, added_device_s=5.0).state
    assert (state.deadline, state.added_device_s, state.reason, state.paused) == (130.0, 5.0, "", None)


def test_versions_that_a_resting_job_plays_are_kept() -> None:
    state = msgspec.structs.replace(progress.enter(rl(), "training").state, done=3, version=3)
    assert in_use([paused(state)]) == in_use([state]) == {"touch@2", "touch@3"}


# Who may begin


def jobs(*phases: tuple[Phase, int]) -> dict[str, JobState]:
    """a, b, c … in these phases, at these places in the line when they came."""
    return {
        name: msgspec.structs.replace(rl(phase, name), submitted=f"2026-11-01T00:00:{i:02d}", queued=queued)
        for i, (name, (phase, queued)) in enumerate(zip("abcdefgh", phases, strict=False))
    }


def test_as_many_run_as_may_and_those_beyond_wait_in_their_order() -> None:
    begun: list[tuple[Phase, int]] = [("training", 0), ("paused", 0), ("completed", 0), ("preparing", 0)]
    own = jobs(*begun, ("waiting", 1), ("waiting", 2), ("waiting", 0))
    assert running(own.values()) == 2, "one that rests holds no place"
    assert line(own.values()) == ["e", "f"]
    assert [place(own[name], own, LIMITS) for name in "efg"] == [1, 2, 3]
    assert next_ones(own, LIMITS) == ["g"], "it waits for another job, as far as is known"
    own["a"] = msgspec.structs.replace(own["a"], phase="completed")
    assert [place(own[name], own, LIMITS) for name in "efg"] == [0, 1, 2]
    assert next_ones(own, LIMITS) == ["e", "g"]


def test_a_full_line_is_said_with_its_limit() -> None:
    assert refusal(jobs(("waiting", 1), ("waiting", 2)), LIMITS) == ""
    said = refusal(jobs(("waiting", 1), ("waiting", 2), ("waiting", 3)), LIMITS)
    assert said.startswith("max_queued: 3 jobs of yours wait already, at most 3 may")


def test_the_estimate_goes_by_what_jobs_took() -> None:
    own = jobs(("completed", 0), ("failed", 0), ("training", 0))
    own["a"] = msgspec.structs.replace(own["a"], started="2026-11-01T00:00:00+00:00", ended="2026-11-01T00:01:00+00:00")
    assert [estimate(at, own.values(), LIMITS) for at in (1, 2, 3)] == [60.0, 60.0, 120.0]
    assert estimate(1, [], LIMITS) == 0.0
    assert waits(3, 120.0, LIMITS).endswith("place 3 in the line, in about 2 min")
    assert waits(1, 60.0, LIMITS).endswith("place 1 in the line, in about 60 s")
    assert waits(1, 0.0, LIMITS).endswith("place 1 in the line")


# The master


def master(bus: Bus, **settings: Any) -> Master:
    log = cast(Any, structlog.get_logger())
    return Master(Context("master", "master-0", bus, MasterConfig(**settings), asyncio.Event(), Pulse(), log, "host"))


async def job(bus: Bus, name: str) -> JobState:
    entry = await bus.kv("registry").get(registry.job_key("acme", name), JobState)
    assert entry is not None
    return entry.value


async def use(bus: Bus, seconds: float, name: str = "touch", kind: Any = "training") -> None:
    entry = Usage(tenant="acme", job=name, worker="w", kind=kind, device_s=seconds, time="2026-11-01T00:00:00+00:00")
    await bus.publish("usage", entry, msg_id=f"{name}/{kind}/{seconds}", tenant="acme", job=name)


async def test_jobs_begin_in_their_order_as_others_end(bus: Bus) -> None:
    served = master(bus, max_jobs=1)
    for name in "abc":
        await served.submit(sft(name), "acme", f"s/{name}")
    assert [(await job(bus, name)).phase for name in "abc"] == ["data", "waiting", "waiting"]
    await served.end("acme", "a", "cancelled", "enough")
    assert [(await job(bus, name)).phase for name in "bc"] == ["data", "waiting"]
    assert ((await job(bus, "b")).reason, (await job(bus, "b")).queued) == ("", 0)
    fresh = master(bus, max_jobs=2)  # one that was started anew knows them all
    await fresh.tick()
    assert [(await job(bus, name)).phase for name in "bc"] == ["data", "data"]


async def test_another_tenant_does_not_wait(bus: Bus) -> None:
    served = master(bus, max_jobs=1, max_queued=1)
    for name in "ab":
        await served.submit(sft(name), "acme", f"s/{name}")
    await served.submit(sft("a"), "globex", "s/globex")
    entry = await bus.kv("registry").get(registry.job_key("globex", "a"), JobState)
    assert entry is not None
    assert entry.value.phase == "data"


async def test_a_used_up_budget_pauses_once_and_more_of_it_goes_on(bus: Bus, eventually: Eventually) -> None:
    served = master(bus)
    await served.submit(sft(device_s=10.0), "acme", "s")
    await use(bus, 6.0)
    await use(bus, 100.0, kind="environment")  # no device of the provider's
    await served.tick()
    await eventually(lambda: served.pausing.spending.of("acme", "touch") == 6.0)
    await served.tick()
    assert (await job(bus, "touch")).phase == "data", "there is some left"
    await use(bus, 6.0, kind="inference")
    await eventually(lambda: served.pausing.spending.of("acme", "touch") == 12.0)
    for _ in range(2):
        await served.tick()
    state = await job(bus, "touch")
    assert (state.phase, state.paused, state.device_s) == ("paused", "data", 12.0)
    assert state.reason.startswith("budget.device_s: 12.0 of 10 s are used; `nexus resume touch --add-device-s N`")
    await served.pausing.handle(JobResume(job="touch", add_device_s=1.0), "acme", "too-little")
    assert (await job(bus, "touch")).phase == "paused"
    for _ in range(2):  # a redelivered order adds nothing
        await served.pausing.handle(JobResume(job="touch", add_device_s=5.0), "acme", "enough")
    state = await job(bus, "touch")
    assert (state.phase, state.added_device_s) == ("data", 5.0)
    await eventually(lambda: served.pausing.spending.of("acme", "touch") == 12.0)
    await served.tick()
    assert (await job(bus, "touch")).phase == "data"
    decided = [item.message async for item in bus.tail("audit", since="all", follow=False, tenant="acme")]
    assert [(entry.action, entry.outcome) for entry in decided] == [
        ("submit", "accepted"), ("budget", "ok"), ("resume", "refused"), ("resume", "ok"),
    ]  # fmt: skip


async def test_a_job_that_waits_may_rest_and_one_that_ended_may_not(bus: Bus) -> None:
    served = master(bus, max_jobs=1)
    for name in "ab":
        await served.submit(sft(name), "acme", f"s/{name}")
    await served.pausing.handle(JobPause(job="b"), "acme", "p")
    await served.end("acme", "a", "cancelled", "enough")
    assert (await job(bus, "b")).phase == "paused", "its turn passes by"
    await served.pausing.handle(JobResume(job="b"), "acme", "r")
    await served.tick()
    assert (await job(bus, "b")).phase == "data"
    await served.pausing.handle(JobPause(job="a"), "acme", "p2")
    assert (await job(bus, "a")).phase == "cancelled"
    events = [item.message async for item in bus.tail("event", since="all", follow=False, tenant="acme", job="a")]
    assert (events[-1].type, events[-1].message) == ("job.refused", "job: 'a' is cancelled already")


async def test_a_cancelled_job_that_rested_does_not_come_back(bus: Bus) -> None:
    served = master(bus)
    await served.submit(sft(), "acme", "s")
    await served.pausing.handle(JobPause(job="touch"), "acme", "p")
    await served.end("acme", "touch", "cancelled", "enough")
    await served.pausing.handle(JobResume(job="touch"), "acme", "r")
    assert (await job(bus, "touch")).phase == "cancelled"


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_budget_of_nothing_is_refused_and_a_small_one_is_not(seconds: float) -> None:
    if seconds:
        assert compile_plan(sft(device_s=seconds), "acme").spec.budget.device_s == seconds
    else:
        with pytest.raises(Exception, match=r"^budget\.device_s: 0 s"):
            compile_plan(sft(device_s=seconds), "acme")


async def test_what_is_stored_is_said_when_it_changes(bus: Bus) -> None:
    kv, served = bus.kv("registry"), master(bus)
    stored = Stored(served.context)
    await kv.put(registry.job_key("acme", "touch"), msgspec.structs.replace(rl(), dataset_bytes=1000))
    state = TrainingState(
        tenant="acme", job="touch", step=1, batches=1, records=1, version=0, epoch=1,
        state=BlobRef(sha256="0" * 64, size=50),
    )  # fmt: skip
    for size in (50, 50, 70):
        ref = BlobRef(sha256=f"{size:064d}", size=size)
        await kv.put(registry.state_key("acme", "touch"), msgspec.structs.replace(state, state=ref))
        stored.looked = float("-inf")
        await stored.sweep()
    found = [item.message async for item in bus.tail("usage", since="all", follow=False, tenant="*", job="*")]
    assert [(used.tenant, used.job, used.kind, used.stored_bytes) for used in found] == [
        ("acme", "touch", "storage", 1050),
        ("acme", "touch", "storage", 1070),
    ]
