"""Who may begin, who waits at which place and for what: pure, and as the master does it."""

import math
from typing import Any

import msgspec
import pytest

from nexus_bus import registry
from nexus_bus.admission import Bar, Limits, Past, estimate, left, line, next_ones, refusal, running, stops, verdicts, waits
from nexus_bus.bus import Bus
from schemas.job import JobSpec
from schemas.plan import JobState, Limit, Phase
from tests.unit.mastering import evaluation, events, job, keep, master, phases, rl, sft

LIMITS = Limits(jobs=2, queued=3)


def jobs(*begun: tuple[Phase, int], **fields: Any) -> dict[str, JobState]:
    """a, b, c … in these phases, at these places in the line when they came."""
    return {
        name: msgspec.structs.replace(
            rl(phase, name, **fields), submitted=f"2026-11-01T00:00:{i:02d}", queued=queued, limit="jobs" if queued else ""
        )
        for i, (name, (phase, queued)) in enumerate(zip("abcdefgh", begun, strict=False))
    }


def evals(state: JobState) -> JobState:
    """The same as a job that trains nothing."""
    plan = msgspec.structs.replace(state.plan, spec=msgspec.structs.replace(state.plan.spec, kind="eval"))
    return msgspec.structs.replace(state, plan=plan)


def past(*closed: JobState) -> Past:
    """What these left."""
    found = Past()
    for state in closed:
        found.add(left(state))
    return found


def places(own: dict[str, JobState], limits: Limits = LIMITS) -> dict[str, tuple[Limit, int]]:
    return {name: (verdict.limit, verdict.place) for name, verdict in verdicts(own, limits).items()}


# Whose turn it is


def test_as_many_run_as_may_and_those_beyond_wait_in_their_order() -> None:
    begun: list[tuple[Phase, int]] = [("training", 0), ("paused", 0), ("completed", 0), ("preparing", 0)]
    own = jobs(*begun, ("waiting", 1), ("waiting", 2), ("waiting", 0))
    assert running(own.values()) == 2, "one that rests holds no place"
    assert line(own.values()) == ["e", "f"]
    assert places(own) == {"e": ("jobs", 1), "f": ("jobs", 2)}
    assert verdicts(own, LIMITS, own["g"])["g"].place == 3
    assert next_ones(own, LIMITS) == ["g"], "it waits for another job, as far as is known"
    own["a"] = msgspec.structs.replace(own["a"], phase="completed")
    assert places(own) == {"e": ("", 0), "f": ("jobs", 1)}
    assert next_ones(own, LIMITS) == ["e", "g"]


def test_the_line_goes_by_priority_then_by_age() -> None:
    own = jobs(*[("waiting", 1)] * 4)
    own["c"] = msgspec.structs.replace(rl("waiting", "c", priority=5), submitted="2026-11-01T00:00:02", queued=1)
    own["a"] = msgspec.structs.replace(rl("waiting", "a", priority=-1), submitted="2026-11-01T00:00:00", queued=1)
    assert line(own.values()) == ["c", "b", "d", "a"]
    late = msgspec.structs.replace(rl("waiting", "z", priority=100), submitted="2026-12-01")
    full = Limits(jobs=1, queued=9)
    assert [name for name, verdict in verdicts(own, full, late).items() if not verdict.limit] == ["z"]


def test_evaluations_pass_training_jobs_that_wait_for_a_slot() -> None:
    own = jobs(("training", 0), ("waiting", 1), ("waiting", 2), ("waiting", 3), ("waiting", 4))
    own |= {"d": evals(own["d"]), "e": evals(own["e"])}
    assert places(own, Limits(jobs=2, queued=9, slots=1)) == {
        "b": ("slots", 1), "c": ("slots", 2), "d": ("", 0), "e": ("jobs", 3),
    }  # fmt: skip
    assert places(own, Limits(jobs=9, queued=9, slots=2))["b"] == ("", 0)


def test_what_a_limit_let_rest_goes_on_before_the_line() -> None:
    own = jobs(("paused", 0), ("waiting", 1), ("paused", 0))
    own["c"] = msgspec.structs.replace(own["c"], limit="device_s")
    assert places(own, Limits(jobs=1, queued=9)) == {"c": ("", 0), "b": ("jobs", 1)}, "whom its tenant paused is left alone"


def test_a_bar_stops_everybody_and_one_on_training_lets_evaluations_pass() -> None:
    own = jobs(("waiting", 1), ("waiting", 2))
    own["b"] = evals(own["b"])
    everybody = Limits(jobs=9, queued=9, bars=(Bar("money", "limits.money: all is used"),))
    assert places(own, everybody) == {"a": ("money", 1), "b": ("money", 2)}
    assert next_ones(own, everybody) == ["a", "b"], "they are told that it is not for a place any more that they wait"
    training = Limits(jobs=9, queued=9, bars=(Bar("stored_bytes", "limits.stored_bytes: full", training=True),))
    assert places(own, training) == {"a": ("stored_bytes", 1), "b": ("", 0)}


def test_a_long_line_is_told_in_parts_what_it_waits_for_now() -> None:
    waiting = rl("waiting", queued=1, limit="jobs")
    own: dict[str, JobState] = {}
    for i in range(200):
        spec = msgspec.structs.replace(waiting.plan.spec, name=f"j{i}")
        own[f"j{i}"] = msgspec.structs.replace(waiting, plan=msgspec.structs.replace(waiting.plan, spec=spec))
    barred = Limits(jobs=9, queued=999, bars=(Bar("device_s", "limits.device_s: all is used"),))
    told = 0
    while some := next_ones(own, barred):
        assert len(some) < 100, "the other tenants' jobs are looked at in between"
        own |= {name: msgspec.structs.replace(own[name], limit="device_s") for name in some}
        told += len(some)
    assert told == 200


# What is said


def test_a_full_line_is_said_with_its_limit() -> None:
    assert refusal(jobs(("waiting", 1), ("waiting", 2)), LIMITS) == ""
    full = jobs(("waiting", 1), ("waiting", 2), ("waiting", 3))
    assert refusal(full, LIMITS).startswith("max_queued: 3 jobs of yours wait already, at most 3 may")
    own = Limits(jobs=2, queued=3, queued_by="limits.queued")
    assert refusal(full, own).startswith("limits.queued: 3 jobs of yours")


def test_the_estimate_goes_by_what_jobs_took() -> None:
    times = {"started": "2026-11-01T00:00:00+00:00", "ended": "2026-11-01T00:01:00+00:00"}
    failed = rl("failed", started="2026-11-01T00:00:00+00:00", ended="2026-11-01T09:00:00+00:00")
    own = jobs(("training", 0), ("training", 0), *[("waiting", 1)] * 3)
    found = list(verdicts(own, LIMITS).values())
    assert {estimate(verdict, past(rl("completed"), failed), LIMITS, {}) for verdict in found} == {0.0}
    planned = own["a"].plan.estimates["device_s"]
    assert planned > 0, "of the first jobs somebody has there is only the plan to go by"
    assert [estimate(verdict, past(), LIMITS, own) for verdict in found] == [planned, planned, 2 * planned]
    took = past(rl("completed", **times), failed)
    assert [estimate(verdict, took, LIMITS, own) for verdict in found] == [60.0, 60.0, 120.0]
    assert waits(found[2], 120.0).endswith("may run at once; place 3 in the line, in about 2 min")
    assert waits(found[0], 60.0).endswith("place 1 in the line, in about 60 s")
    assert waits(found[0], 0.0).endswith("place 1 in the line")


def test_the_estimate_for_a_slot_goes_by_what_training_jobs_took() -> None:
    minute = {"started": "2026-11-01T00:00:00+00:00", "ended": "2026-11-01T00:01:00+00:00"}
    own = jobs(("training", 0), ("waiting", 1), ("waiting", 2))
    took = past(rl("completed", **minute), evals(rl("completed", **minute | {"ended": "2026-11-01T01:00:00+00:00"})))
    limits = Limits(jobs=9, queued=9, slots=1)
    assert [estimate(verdict, took, limits, own) for verdict in verdicts(own, limits).values()] == [60.0, 120.0]


def test_nobody_can_say_when_a_budget_is_raised() -> None:
    own = jobs(("waiting", 1))
    took = past(rl("completed", started="2026-11-01T00:00:00+00:00", ended="2026-11-01T00:01:00+00:00"))
    limits = Limits(jobs=9, queued=9, bars=(Bar("money", "limits.money: all is used"),))
    verdict = verdicts(own, limits)["a"]
    assert waits(verdict, estimate(verdict, took, limits, own)) == "limits.money: all is used; place 1 in the line"


def test_why_a_job_may_not_run_this_moment_says_what_to_do() -> None:
    own = jobs(("training", 0), ("paused", 0))
    assert stops(own["b"], own, LIMITS) == ""
    assert stops(own["b"], own, Limits(jobs=1, queued=1)).endswith("may run at once; wait, or pause one")
    assert stops(own["b"], own, Limits(jobs=9, queued=1, slots=1)).startswith("limits.slots: at most 1 of your")


@pytest.mark.parametrize("priority", [101, -101, 2**63, 0.5, "high"])
def test_a_priority_that_is_none_is_refused_by_name(priority: Any) -> None:
    text = msgspec.json.encode({"kind": "sft", "name": "a", "priority": priority}).decode()
    with pytest.raises(msgspec.ValidationError, match="priority"):
        msgspec.json.decode(text, type=JobSpec)


# The master


async def test_jobs_begin_in_their_order_as_others_end(bus: Bus) -> None:
    served = master(bus, max_jobs=1)
    for name in "abc":
        await served.submit(sft(name), "acme", f"s/{name}")
    assert await phases(bus, "abc") == ["data", "waiting", "waiting"]
    await served.states.end("acme", "a", "cancelled", "enough")
    assert await phases(bus, "bc") == ["data", "waiting"]
    assert ((await job(bus, "b")).reason, (await job(bus, "b")).queued, (await job(bus, "b")).limit) == ("", 0, "")
    fresh = master(bus, max_jobs=2)  # one that was started anew knows them all
    await fresh.tick()
    assert await phases(bus, "bc") == ["data", "data"]


async def test_the_highest_priority_begins_next(bus: Bus) -> None:
    served = master(bus, max_jobs=1)
    for name, priority in (("a", 0), ("b", -3), ("c", 0), ("d", 7)):
        await served.submit(sft(name, priority=priority), "acme", f"s/{name}")
    assert "place 1 in the line" in (await job(bus, "d")).reason, "whoever came before it"
    begun: list[str] = []
    while len(begun) < 4:
        at_work = [name for name in "abcd" if (await job(bus, name)).phase == "data"]
        begun += at_work
        await served.states.end("acme", at_work[0], "cancelled", "enough")
    assert begun == ["a", "d", "c", "b"]


async def test_another_tenant_does_not_wait(bus: Bus) -> None:
    served = master(bus, max_jobs=1, max_queued=1)
    for name in "ab":
        await served.submit(sft(name), "acme", f"s/{name}")
    await served.submit(sft("a"), "globex", "s/globex")
    entry = await bus.kv("registry").get(registry.job_key("globex", "a"), JobState)
    assert entry is not None
    assert entry.value.phase == "data"


async def test_jobs_that_wait_for_one_that_fails_all_end(bus: Bus) -> None:
    served = master(bus)
    await served.submit(sft("a"), "acme", "s/a")
    children = [f"b{i}" for i in range(60)]
    for name in children:
        await served.submit(sft(name, init="a@latest"), "acme", f"s/{name}")
    await served.states.end("acme", "a", "failed", "its data is not there")
    assert {(await job(bus, name)).phase for name in children} == {"failed"}
    assert (await job(bus, "b7")).reason.startswith("init: job 'a' ended as failed")


async def test_a_job_in_the_line_is_told_once(bus: Bus) -> None:
    await keep(bus)
    served = master(bus, max_jobs=1)
    for spec in (evaluation("a"), evaluation("b")):
        await served.submit(spec, "acme", f"s/{spec.name}")
    for _ in range(3):
        await served.tick()
    said = [(event.type, event.message, event.data) for event in await events(bus, "b") if event.type == "job.queued"]
    planned = (await job(bus, "a")).plan.estimates["device_s"]
    why = f"max_jobs: at most 1 of your jobs may run at once; place 1 in the line, in about {math.ceil(planned)} s"
    assert said == [("job.queued", why, {"place": 1, "estimate_s": planned, "limit": "jobs"})]
