"""Work that nobody serves does not stay on the queues: it would fill them for everybody."""

import asyncio
from typing import Any, cast

import structlog

from nexus_bus import registry
from nexus_bus.bus import Bus, ensure_durable, ensure_tenant, own_durable
from nexus_bus.worker import Context, Pulse
from schemas.job import JobSpec
from schemas.plan import JobState, Plan
from schemas.policy import ActionSpec, ObservationSpec
from schemas.tenant import TenantPhase, TenantRecord
from schemas.training import TrainingBatch
from workers.master import Master


def state(job: str, *, closed: bool) -> JobState:
    plan = Plan(
        tenant="acme", spec=JobSpec(kind="sft", name=job), phases=["waiting"], roles=[], subjects={}, max_steps=1, execute=1,
        action=ActionSpec(size=1, low=[0.0], high=[1.0]), observation=ObservationSpec(cameras={}, state_size=1),
        instructions=[], batches=1,
    )  # fmt: skip
    return JobState(plan=plan, phase="completed" if closed else "training", submission="s", submitted="now", closed=closed)


def master(bus: Bus) -> Master:
    context = Context("master", "master-0", bus, None, asyncio.Event(), Pulse(), cast(Any, structlog.get_logger()), "host")
    return Master(context)


async def test_the_master_removes_batches_of_ended_and_unknown_jobs_and_keeps_those_of_running_ones(bus: Bus) -> None:
    kv = bus.kv("registry")
    await kv.put(registry.job_key("acme", "runs"), state("runs", closed=False))
    await kv.put(registry.job_key("acme", "ended"), state("ended", closed=True))
    for job in ("runs", "ended", "unknown"):
        batch = TrainingBatch(id=f"{job}/0", tenant="acme", job=job, batch=0, samples=[])
        await bus.publish("train.batch", batch, msg_id=job, tenant="acme", job=job)
    await bus.publisher.send("train.batch.ACME.x", b"{}", {}, 30.0)
    assert len(await bus.queued("TRAINING")) == 4
    await master(bus).sweep()
    assert await bus.queued("TRAINING") == {"train.batch.acme.runs": 1}


async def test_the_master_removes_queues_and_consumers_of_tenants_that_are_gone(bus: Bus) -> None:
    await bus.kv("registry").put(registry.tenant_key("acme"), {})
    for tenant in ("acme", "gone"):
        await ensure_tenant(bus, tenant)
        await bus.publisher.send(f"infer.request.{tenant}", b"{}", {}, 30.0)
        for name in ("rollout.run", "env.feed", "env.prepare"):
            await bus.publisher.send(f"{name}.{tenant}.pick", b"{}", {}, 30.0)
    await bus.publisher.send("rollout.run.ACME.x", b"{}", {}, 30.0)
    await master(bus).sweep()
    assert await bus.queued("INFERENCE") == {"infer.request.acme": 1}
    assert await bus.queued("ROLLOUT") == {f"{name}.acme.pick": 1 for name in ("rollout.run", "env.feed", "env.prepare")}
    depths = await bus.depths()
    assert (set(depths["INFERENCE"]), set(depths["ROLLOUT"])) == ({"infer-acme"}, {"rollout-acme", "data-acme"})


async def test_a_tenant_whose_robot_stands_before_its_first_job_keeps_its_consumer(bus: Bus) -> None:
    phases: dict[str, TenantPhase] = {"acme": "active", "left": "removed"}
    for tenant, phase in phases.items():
        record = TenantRecord(name=tenant, account="A" * 56, created="now", phase=phase)
        await bus.kv("registry").put(registry.account_key(tenant), record)
        await ensure_durable(bus, own_durable(tenant, "own", 1))
    await master(bus).sweep()
    assert set((await bus.depths())["ROLLOUT"]) == {"own-acme=own"}
