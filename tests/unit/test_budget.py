"""Budgets of jobs, and jobs that rest: what a pause takes back and a resumption hands out, and what is said of it."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nexus_bus import progress, registry
from nexus_bus.bus import Bus
from nexus_bus.plan import compile_plan
from nexus_bus.retention import in_use
from nexus_bus.stored import Stored
from schemas.base import BlobRef
from schemas.control import JobReport
from schemas.job import JobPause, JobResume
from schemas.plan import JobState
from schemas.policy import TrainingState
from schemas.rollout import EpisodeResult
from schemas.tenant import ServiceTerms
from tests.conftest import Eventually
from tests.unit.mastering import decisions, job, master, rl, sft, use
from workers.master import Master


def spent(served: Master) -> float:
    return served.quotas.spending.of("acme", "touch").device_s


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


# The master


async def test_a_used_up_budget_pauses_once_and_more_of_it_goes_on(bus: Bus, eventually: Eventually) -> None:
    served = master(bus)
    await served.submit(sft(device_s=10.0), "acme", "s")
    await use(bus, 6.0)
    await use(bus, 100.0, kind="environment")  # no device of the provider's
    await served.tick()
    await eventually(lambda: spent(served) == 6.0)
    await served.tick()
    assert (await job(bus, "touch")).phase == "data", "there is some left"
    await use(bus, 6.0, kind="inference")
    await eventually(lambda: spent(served) == 12.0)
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
    await eventually(lambda: spent(served) == 12.0)
    await served.tick()
    assert (await job(bus, "touch")).phase == "data"
    assert [(entry.action, entry.outcome) for entry in await decisions(bus)] == [
        ("submit", "accepted"), ("budget", "ok"), ("resume", "refused"), ("resume", "ok"),
    ]  # fmt: skip


async def test_a_job_that_waits_may_rest_and_one_that_ended_may_not(bus: Bus) -> None:
    served = master(bus, max_jobs=1)
    for name in "ab":
        await served.submit(sft(name), "acme", f"s/{name}")
    await served.pausing.handle(JobPause(job="b"), "acme", "p")
    await served.states.end("acme", "a", "cancelled", "enough")
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
    await served.states.end("acme", "touch", "cancelled", "enough")
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


@pytest.mark.parametrize(("prices", "currency"), [("", ""), ('[prices]\ncurrency = "EUR"\n', "EUR")])
async def test_a_master_says_what_holds_where_a_tenant_has_no_limit_of_its_own(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, eventually: Eventually, prices: str, currency: str
) -> None:
    (tmp_path / "nexus.toml").write_text(prices)
    monkeypatch.setenv("NEXUS_CONFIG", str(tmp_path / "nexus.toml"))
    served = master(bus, max_jobs=3, max_queued=9)
    serving = asyncio.create_task(served.serve())

    async def said() -> ServiceTerms | None:
        entry = await bus.kv("registry").get(registry.SERVICE, ServiceTerms)
        return entry.value if entry is not None else None

    assert await eventually(said) == ServiceTerms(jobs=3, queued=9, currency=currency)
    served.context.stop.set()
    await serving
