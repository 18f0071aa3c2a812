"""Jobs that rest: they lose nothing, and end in the same bits as if they had never rested. Through the whole service."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus
from nexus_bus.client import Client
from nexus_bus.clock import now
from nexus_bus.errors import BadJob
from schemas.job import Budget, DataSpec, EnvironmentSpec, EvaluationSpec, ExpertSpec, HeadSpec, JobSpec, Ppo, Sft
from schemas.plan import TERMINAL, JobState, Phase
from schemas.tenant import TenantLimits, TenantRecord
from tests.line.conftest import Service, ended

pytestmark = [pytest.mark.gl, pytest.mark.timeout(300)]

STEPS = 1000  # seconds long: usage is on record, and the master looks, once a second
TOUCH = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1, "max_steps": 12, "reward": "dense"})


def sft(name: str, device_s: float | None = None) -> JobSpec:
    return JobSpec(
        kind="sft", name=name, head=HeadSpec(horizon=4), environment=TOUCH, data=DataSpec(expert=ExpertSpec(episodes=4)),
        algorithm=Sft(steps=STEPS, batch_size=8, publish_every=STEPS // 4), budget=Budget(device_s=device_s), seed=1,
    )  # fmt: skip


def rl(name: str) -> JobSpec:
    return JobSpec(
        kind="rl", name=name, head=HeadSpec(horizon=4), environment=TOUCH, seed=2,
        algorithm=Ppo(updates=5, episodes_per_update=6, minibatch=16), evaluation=EvaluationSpec(episodes=40),
    )  # fmt: skip


async def reaches(client: Client, job: str, *phases: Phase, done: int = 0, within: float = 240.0) -> JobState:
    """Wait until a job is in one of these phases, with so much of it done."""
    ends = time.monotonic() + within
    while True:
        state = await client.job(job)
        if state is not None and state.phase in phases and state.done >= done:
            return state
        assert state is None or state.phase not in TERMINAL, f"{job} has ended: {state.phase}, {state.reason}"
        assert time.monotonic() < ends, f"{job} is still {state.phase if state else 'unknown'}: {state}"
        await asyncio.sleep(0.01)


async def used(client: Client, job: str) -> float:
    """Device-seconds of a job."""
    return sum([record.device_s async for record in client.usage(job)])


async def weights(client: Client, job: str) -> list[str]:
    return [policy.weights.sha256 for policy in await client.policies(job)]


async def queued(client: Client, job: str) -> int:
    return (await client.bus.queued("ROLLOUT")).get(f"rollout.run.{client.tenant}.{job}", 0)


async def test_a_paused_job_goes_on_where_it_stopped_to_the_same_bits(client: Client) -> None:
    await client.submit(rl("never-rested"))
    await client.submit(rl("rested"))
    stops: list[tuple[Phase, int]] = [("evaluating_before", 2), ("training", 1), ("training", 3), ("evaluating_after", 2)]
    rested: list[Phase | None] = []
    for phase, done in stops:
        await reaches(client, "rested", phase, "evaluating_after", done=done)
        assert await client.pause("rested", "a break") == "a break"
        state = await reaches(client, "rested", "paused")
        assert state.reason == "a break"
        assert await queued(client, "rested") == 0, "nobody begins an episode for it"
        rested.append(state.paused)
        assert (await client.resume("rested")).startswith("goes on with ")
    state = await ended(client, "rested")
    assert (state.phase, state.reason) == ("completed", "")
    assert len(set(rested)) >= 2, f"it rested in different phases: {rested}"
    assert state.metrics["records"] == 5 * 6, "each of 5 updates learned its 6 episodes, once"
    assert (await ended(client, "never-rested")).phase == "completed"
    assert await weights(client, "rested") == await weights(client, "never-rested")
    other = await client.job("never-rested")
    assert other is not None
    assert state.scores == other.scores


async def test_a_device_budget_pauses_a_job_and_more_of_it_ends_it_in_the_same_bits(client: Client) -> None:
    await client.submit(sft("unlimited"))
    assert (await ended(client, "unlimited")).phase == "completed"
    budget = await used(client, "unlimited") / 20  # enough to begin with, on a slow machine too
    await client.submit(sft("limited", device_s=budget))
    state = await reaches(client, "limited", "paused", done=1)
    assert state.paused == "training"
    assert "budget.device_s" in state.reason
    assert "--add-device-s" in state.reason
    assert state.device_s > budget
    assert 0 < state.done < STEPS, "it stopped on the way"
    with pytest.raises(BadJob, match=r"budget\.device_s"):
        await client.resume("limited")
    await client.resume("limited", add_device_s=1000.0)
    assert (await ended(client, "limited")).phase == "completed"
    assert await weights(client, "limited") == await weights(client, "unlimited")


@pytest.fixture
async def limit(service: Service, client: Client) -> AsyncIterator[Callable[[float | None], Awaitable[None]]]:
    """`await limit(0.2)`: from now on the tenant may use so many device-seconds more; None: as many as it likes."""
    bus = await Bus.connect(service.url, name="provider")
    key = registry.account_key(client.tenant)
    before = await bus.kv("registry").get(key, TenantRecord)
    record = before.value if before is not None else TenantRecord(name=client.tenant, account="A" * 56, created=now())

    async def set_it(more_s: float | None) -> None:
        tail = bus.tail("usage", since="all", follow=False, tenant=client.tenant, job="*")
        used = sum([item.message.device_s async for item in tail])
        limits = TenantLimits(device_s=used + more_s if more_s is not None else None)
        await bus.kv("registry").put(key, msgspec.structs.replace(record, limits=limits))

    yield set_it
    await (bus.kv("registry").delete(key) if before is None else bus.kv("registry").put(key, record))
    await bus.close()


async def test_at_the_end_of_a_tenants_budget_its_jobs_rest_and_more_of_it_ends_them_in_the_same_bits(
    client: Client, limit: Callable[[float | None], Awaitable[None]]
) -> None:
    await client.submit(sft("free"))
    assert (await ended(client, "free")).phase == "completed"
    await limit(await used(client, "free") / 20)
    await client.submit(sft("barred"))
    state = await reaches(client, "barred", "paused", done=1)
    assert (state.limit, state.paused) == ("device_s", "training")
    assert state.reason.startswith("limits.device_s: ")
    with pytest.raises(BadJob, match=r"limits\.device_s"):
        await client.resume("barred")
    await client.submit(sft("late"))
    while not (late := await reaches(client, "late", "waiting")).queued:  # it is accepted first
        await asyncio.sleep(0.01)
    assert late.reason.startswith("limits.device_s: ")
    assert late.reason.endswith("place 1 in the line")
    await limit(None)
    for name in ("barred", "late"):
        assert (await ended(client, name)).phase == "completed", "nobody had to resume it"
        assert await weights(client, name) == await weights(client, "free")


async def test_what_cannot_rest_or_go_on_says_why(client: Client) -> None:
    await client.submit(sft("short"))
    with pytest.raises(BadJob, match="not paused"):
        await client.resume("short")
    await client.pause("short")
    await client.pause("short", "again")
    state = await reaches(client, "short", "paused")
    assert state.reason == "paused by the provider", "a second pause changes nothing"
    await client.cancel("short")
    assert (await ended(client, "short")).phase == "cancelled"
    with pytest.raises(BadJob, match="cancelled already"):
        await client.pause("short")


async def test_sessions_are_paid_for_by_the_second(client: Client) -> None:
    await client.submit(rl("sessions"))
    assert (await ended(client, "sessions")).phase == "completed"
    ends = time.monotonic() + 60
    while True:  # the last seconds are on record a moment after the job's end
        tail = client.bus.tail("usage", since="all", follow=False, tenant=client.tenant, job="sessions")
        used = [item.message async for item in tail]
        held = [one for one in used if one.kind == "environment"]
        if sum(one.steps for one in held) > 5 * 6:
            break
        assert time.monotonic() < ends
        await asyncio.sleep(0.1)
    assert 0 < sum(one.simulator_s for one in held) < sum(one.session_s for one in held)
    assert sum(one.device_s for one in held) == 0, "a simulator is no device of the model workers"
    assert {one.kind for one in used} >= {"environment", "inference", "training"}
    assert all(one.device_s > 0 for one in used if one.kind in ("inference", "training"))
