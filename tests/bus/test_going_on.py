"""A job that rests and goes on, on a real server, whoever is killed in between: what comes a second time changes nothing."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from nexus_bus import registry
from nexus_bus.bus import Bus, Entry
from nexus_bus.client import Client
from nexus_bus.errors import Unavailable
from nexus_bus.pausing import Pausing
from schemas.job import EnvironmentSpec, JobPause, JobResume
from schemas.plan import JobState
from tests.bus.test_evaluations import ALL, Stage, acme, ended, recorded, spec, stage  # noqa: F401 - fixtures
from tests.conftest import Eventually
from tests.unit.mastering import TENANT, evaluation, events, job, keep, looks, master, rl
from workers import rollout
from workers.master import Master


async def put(bus: Bus, state: JobState) -> None:
    await bus.kv("registry").put(registry.job_key(TENANT, state.plan.spec.name), state)


async def begun(bus: Bus) -> Master:
    """A master, with an evaluation `score` under way."""
    await keep(bus)
    served = master(bus)
    await served.submit(evaluation("score"), TENANT, "s")
    await looks(served)
    assert (await job(bus, "score")).phase == "evaluating_after"
    return served


async def test_the_orders_of_an_ended_evaluation_that_goes_on_are_played_though_its_master_is_slow_or_dies(
    stage: Stage,  # noqa: F811 - the fixtures above
    acme: Client,  # noqa: F811
    bus: Bus,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, handed_out, written = Pausing._written, asyncio.Event(), asyncio.Event()

    async def late(self: Pausing, entry: Entry[JobState], state: JobState) -> bool:
        if state.resumed:  # its orders are out, and nothing says yet that it goes on
            handed_out.set()
            await written.wait()
        return await real(self, entry, state)

    monkeypatch.setattr(Pausing, "_written", late)
    await acme.submit(spec("score"))
    await acme.cancel("score", "enough")
    await ended(acme, "score", eventually)
    await stage.worker("rollout", rollout, concurrency=4)
    going_on = asyncio.create_task(acme.resume("score", timeout=60))
    await eventually(handed_out.is_set)

    async def played_or_given_up() -> bool:
        return await recorded(bus, "score") == ALL or bool(await bus.queued("DEAD"))

    await eventually(played_or_given_up, within=60)
    written.set()
    await going_on
    state = await ended(acme, "score", eventually)
    assert (state.phase, state.reason, state.scores["episodes_after"]) == ("completed", "", 10.0)


async def test_a_pause_that_comes_again_after_a_resume_changes_nothing(bus: Bus) -> None:
    served = await begun(bus)
    pause, resume = JobPause(job="score", reason="a break"), JobResume(job="score")
    await served.pausing.handle(pause, TENANT, "p")
    await served.pausing.handle(resume, TENANT, "r")
    await served.pausing.handle(pause, TENANT, "p")  # its master died before it was acknowledged
    assert (await job(bus, "score")).phase == "evaluating_after"
    await served.pausing.handle(pause, TENANT, "p2")
    assert (await job(bus, "score")).phase == "paused", "another one is another one"
    await served.pausing.handle(JobPause(job="score", reason="again"), TENANT, "p3")
    assert (await job(bus, "score")).reason == "a break", "who rests already keeps its reason"
    await served.pausing.handle(resume, TENANT, "r2")
    await served.pausing.handle(pause, TENANT, "p3")
    assert (await job(bus, "score")).phase == "evaluating_after"
    kinds = [event.type for event in await events(bus, "score") if event.type in ("job.paused", "job.resumed")]
    assert kinds == ["job.paused", "job.resumed", "job.paused", "job.paused", "job.resumed"]


async def test_an_evaluation_that_has_just_ended_goes_on_once_it_is_closed(bus: Bus) -> None:
    served = await begun(bus)
    await put(bus, replace(await job(bus, "score"), phase="cancelled", ended="2026-11-01T00:00:00+00:00"))
    with pytest.raises(Unavailable, match="'score' has just ended and is not closed yet"):
        await served.pausing.handle(JobResume(job="score"), TENANT, "r")
    await served.states.close(await job(bus, "score"))
    await served.pausing.handle(JobResume(job="score"), TENANT, "r")  # the order waits, and is looked at again
    state = await job(bus, "score")
    assert (state.phase, state.closed) == ("evaluating_after", False)
    assert await bus.queued("ROLLOUT") == {f"rollout.run.{TENANT}.score": 3}


async def test_a_job_on_an_environment_of_the_tenants_own_goes_on_there(bus: Bus) -> None:
    state: Any = rl("paused", paused="evaluating_after", reason="a break")
    own = replace(state.plan.spec, environment=EnvironmentSpec(id="own-arm", task="touch"))
    await put(bus, replace(state, plan=replace(state.plan, spec=own)))
    served = master(bus)
    await looks(served)
    await served.pausing.handle(JobResume(job="touch"), TENANT, "r")
    assert (await job(bus)).phase == "evaluating_after"
    assert await bus.queued("ROLLOUT") == {f"rollout.own.{TENANT}.own-arm.touch": 4}
