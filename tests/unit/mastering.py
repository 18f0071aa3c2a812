"""What the tests of budgets, of the line and of tenants' limits share: a master on a real server, and jobs for it."""

import asyncio
import time
from typing import Any, cast

import msgspec
import structlog

from nexus_bus import registry
from nexus_bus.bus import Bus
from nexus_bus.clock import now
from nexus_bus.config import MasterConfig
from nexus_bus.envs.catalog import describe
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.plan import compile_plan
from nexus_bus.worker import Context, Pulse
from schemas.base import BlobRef
from schemas.events import Event
from schemas.job import (
    Budget,
    DataSpec,
    EnvironmentSpec,
    EvaluationSpec,
    ExpertSpec,
    HeadSpec,
    JobSpec,
    Ppo,
    Sft,
)
from schemas.plan import JobState, Phase
from schemas.policy import PolicyVersion
from schemas.tenant import TenantRecord
from schemas.usage import Audit, Usage
from workers.master import Master

TOUCH = EnvironmentSpec(id="tabletop", task="touch")
TENANT = "acme"


def rl(phase: Phase = "training", name: str = "touch", **fields: Any) -> JobState:
    """An RL job as the registry holds it."""
    spec = JobSpec(
        kind="rl", name=name, head=HeadSpec(horizon=4), environment=TOUCH, budget=Budget(wall_s=100.0),
        algorithm=Ppo(updates=4, episodes_per_update=3, staleness=1), evaluation=EvaluationSpec(episodes=4),
        priority=fields.pop("priority", 0),
    )  # fmt: skip
    return JobState(plan=compile_plan(spec, TENANT), phase=phase, submission="s", submitted="now", version=0, **fields)


def sft(name: str = "touch", device_s: float | None = None, **fields: Any) -> JobSpec:
    """A training job that begins with its data."""
    return JobSpec(
        kind="sft", name=name, environment=TOUCH, data=DataSpec(expert=ExpertSpec(episodes=5)),
        algorithm=Sft(steps=200), budget=Budget(device_s=device_s), **fields,
    )  # fmt: skip


def evaluation(name: str, **fields: Any) -> JobSpec:
    """An eval job of the version that `keep` puts there."""
    return JobSpec(kind="eval", name=name, init="kept@0", environment=TOUCH, evaluation=EvaluationSpec(episodes=3), **fields)


async def keep(bus: Bus, n: int = 0, size: int = 100, **fields: Any) -> None:
    """A version `kept@<n>` of that size, as a trainer publishes it."""
    known = describe(TOUCH)
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"), head=HeadSpec(horizon=4), action=known.action, observation=known.observation
    )
    version = PolicyVersion(
        id=f"kept@{n}", tenant=TENANT, job="kept", n=n, parent=None, contract=contract, created=now(),
        weights=BlobRef(sha256=f"{n:064d}", size=size), **fields,
    )  # fmt: skip
    await bus.kv("registry").put(registry.policy_key(TENANT, "kept", n), version)


def master(bus: Bus, **settings: Any) -> Master:
    """One that serves nothing by itself."""
    log = cast(Any, structlog.get_logger())
    return Master(Context("master", "master-0", bus, MasterConfig(**settings), asyncio.Event(), Pulse(), log, "host"))


async def allow(bus: Bus, *masters: Master, phase: str = "active", reason: str = "", **limits: Any) -> None:
    """Set the tenant's limits, as the provider does, and let these masters know them."""
    record = {"name": TENANT, "account": "A" * 56, "created": now(), "phase": phase, "reason": reason, "limits": limits}
    await bus.kv("registry").put(registry.account_key(TENANT), msgspec.convert(record, TenantRecord))
    for served in masters:
        await served.quotas.allowances.load()


async def looks(served: Master) -> None:
    """One look at all jobs, once it is known what was used and kept."""
    ends = time.monotonic() + 30
    while not (await served.quotas.of(TENANT)).sure:
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)
    await served.tick()


async def job(bus: Bus, name: str = "touch") -> JobState:
    """As the registry holds it."""
    entry = await bus.kv("registry").get(registry.job_key(TENANT, name), JobState)
    assert entry is not None
    return entry.value


async def phases(bus: Bus, names: str) -> list[str]:
    """Of jobs with names of one letter."""
    return [(await job(bus, name)).phase for name in names]


async def use(bus: Bus, seconds: float, name: str = "touch", kind: Any = "training", **fields: Any) -> None:
    """Put so many device-seconds on record."""
    given = {"time": "2026-11-01T00:00:00+00:00"} | fields
    entry = Usage(tenant=TENANT, job=name, worker="w", kind=kind, device_s=seconds, **given)
    await bus.publish("usage", entry, msg_id=f"{name}/{kind}/{seconds}/{fields}", tenant=TENANT, job=name)


async def events(bus: Bus, name: str) -> list[Event]:
    """Of one job, so far."""
    return [item.message async for item in bus.tail("event", since="all", follow=False, tenant=TENANT, job=name)]


async def decisions(bus: Bus) -> list[Audit]:
    """About the tenant, so far."""
    return [item.message async for item in bus.tail("audit", since="all", follow=False, tenant=TENANT)]
