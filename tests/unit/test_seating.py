"""Which job gets the next seat."""

import asyncio
from types import SimpleNamespace
from typing import Any

from nexus_bus import registry
from nexus_bus.plan import compile_plan
from nexus_bus.seating import Seating
from schemas.job import EnvironmentSpec, HeadSpec, JobSpec
from schemas.plan import JobState


def waiting(tenant: str, name: str, submitted: str, priority: int = 0) -> tuple[str, JobState]:
    environment = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1})
    spec = JobSpec(kind="rl", name=name, head=HeadSpec(horizon=2), environment=environment, priority=priority)
    state = JobState(plan=compile_plan(spec, tenant), phase="training", submission=name, submitted=submitted)
    return registry.job_key(tenant, name), state


def test_a_tenants_own_jobs_go_by_priority_then_age_and_no_priority_passes_another_tenant():
    context: Any = SimpleNamespace(bus=SimpleNamespace(kv=lambda _: None), name="trainer-0")
    seating = Seating(context, 4, 6.0, *[Any] * 2, asyncio.Event())  # type: ignore[arg-type]  # neither computes
    seating.jobs = dict(
        [
            waiting("acme", "old", "1"),
            waiting("acme", "new", "4"),
            waiting("acme", "urgent", "5", priority=7),
            waiting("acme", "later", "0", priority=-1),
            waiting("globex", "only", "6"),
        ]
    )
    names = [key.rpartition(".")[2] for key in seating.queue()]
    assert [name for name in names if name != "only"] == ["urgent", "old", "new", "later"]
    assert names.index("only") < 2, "a tenant without a seat is next, however urgent the other's jobs are"
