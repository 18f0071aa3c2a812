"""Job states as the master writes them: what follows from a happening, how a job ends, and what its tenant hears of it.

Every write is a compare-and-set, so that several masters may run. What is announced has ids, so that a master that died in
between says it again and nobody hears it twice.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from nexus_bus import progress, registry
from nexus_bus.audit import audit
from nexus_bus.bus import Bus, Entry, remove_job
from nexus_bus.clock import now
from nexus_bus.errors import Conflict
from nexus_bus.roster import Roster
from nexus_bus.spending import Spending
from schemas.control import JobReport
from schemas.events import EventType
from schemas.plan import TERMINAL, JobState, Phase
from schemas.policy import TrainingState
from schemas.rollout import RolloutOrder

if TYPE_CHECKING:
    from nexus_bus.worker import Context

PROGRESS_S = 0.2  # at most one progress event per job in this time
SAID = 2000  # characters of a refusal
_ENDING: dict[str, EventType] = {"completed": "job.completed", "failed": "job.failed", "cancelled": "job.cancelled"}


class States:
    """Writes them, and says so."""

    def __init__(self, context: "Context", roster: Roster, spending: Spending, freed: Callable[[str], Awaitable[None]]) -> None:
        """`freed` is told the tenant of a job that has ended: others may have waited for it."""
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.roster, self.spending, self.freed = roster, spending, freed
        self.progressed: dict[str, float] = {}  # job key → when its last progress event went out

    async def apply(self, entry: Entry[JobState], happening: progress.Happening) -> None:
        """Hand out what follows from a happening, then write it down. Raises Conflict if somebody changed the job first."""
        state, before = happening.state, entry.value
        tenant, job = state.plan.tenant, state.plan.spec.name
        await hand_out(self.bus, happening)
        if state == before:
            return
        if state.phase in TERMINAL:
            state = msgspec.structs.replace(state, ended=now(), limit="")
        await self.write(state, entry.revision)
        if happening.score is not None:
            score = happening.score
            await self.context.event(
                "eval.completed", tenant, job=job, key=f"eval/{before.paused or before.phase}", score=score,
                message=f"{score.policy}: {score.successes}/{score.episodes} succeeded ({score.low:.2f}–{score.high:.2f})",
            )  # fmt: skip
        if state.phase != before.phase and state.phase not in TERMINAL:
            await self.context.event("job.phase", tenant, job=job, key=f"phase/{state.phase}", message=state.phase)
        if state.phase in TERMINAL:
            await self.close(state)

    async def write(self, state: JobState, revision: int) -> None:
        """Write a state over the one of that revision. Raises Conflict."""
        key = registry.job_key(state.plan.tenant, state.plan.spec.name)
        self.roster.note(state, await self.kv.update(key, state, revision))

    async def end(self, tenant: str, job: str, phase: Phase, reason: str) -> None:
        """Put a job into a terminal phase. Repeating it changes nothing."""
        key = registry.job_key(tenant, job)
        while (entry := await self.kv.get(key, JobState)) is not None and entry.value.phase not in TERMINAL:
            state = msgspec.structs.replace(entry.value, phase=phase, paused=None, limit="", reason=reason, ended=now())
            try:
                await self.write(state, entry.revision)
            except Conflict:
                continue
            await self.close(state)
            return
        if entry is None:
            await self.refuse(tenant, job, f"cancel-{time.time_ns()}", f"job: no job {job!r}")

    async def close(self, state: JobState) -> None:
        """Remove what is queued for a job that has ended, announce it, and let others begin."""
        tenant, job = state.plan.tenant, state.plan.spec.name
        for name in ("rollout.run", "rollout.own", "env.feed", "env.prepare"):
            await self.bus.purge(name, tenant=tenant, job=job, environment="*")
        if state.plan.spec.kind != "eval":
            await remove_job(self.bus, tenant, job)
        data: dict[str, Any] = {**state.scores, "version": state.version}
        trained = await self.kv.get(registry.state_key(tenant, job), TrainingState)
        if trained is not None:
            data["records"] = trained.value.records
        reason = state.reason or state.phase
        key = f"{state.submission}/{state.resumed}" if state.resumed else state.submission  # an evaluation may end again
        await self.context.event(_ENDING[state.phase], tenant, job=job, key=f"ended/{key}", message=reason, data=data)
        await audit(self.bus, tenant, state.phase, job, "ok", state.reason, key=key)
        self.spending.forget(tenant, job)
        entry = await self.kv.get(registry.job_key(tenant, job), JobState)
        if entry is not None and not entry.value.closed:
            await self.write(msgspec.structs.replace(entry.value, closed=True), entry.revision)
        await self.freed(tenant)

    async def say_progress(self, state: JobState, report: JobReport) -> None:
        """An event for progress bars; of many episodes, now and then."""
        tenant = state.plan.tenant
        key, clock = registry.job_key(tenant, report.job), time.monotonic()
        if report.kind == "episode" and clock - self.progressed.get(key, 0.0) < PROGRESS_S:
            return
        self.progressed[key] = clock
        episode = report.episode
        data: dict[str, Any] = {
            "phase": state.phase,
            "done": state.done,
            "issued": state.issued,
            "total": total(state),
            "version": state.version,
            "successes": state.successes,
            **report.metrics,
        }
        if episode is not None:
            data |= {"purpose": episode.purpose, "batch": episode.batch, "index": episode.index, "success": episode.success}
        key = f"progress/{report.kind}/{state.phase}/{data.get('batch', report.batches)}/{data.get('index', 0)}/{state.done}"
        await self.context.event("job.progress", tenant, job=report.job, key=key, data=data)

    async def refuse(self, tenant: str, job: str, submission: str, why: str, kind: EventType = "job.refused") -> None:
        """Say why something is not done."""
        why = why if len(why) <= SAID else f"{why[:SAID]} …"  # it may repeat what the tenant wrote
        action = "submit" if kind == "job.refused" else "policy"
        await audit(self.bus, tenant, action, job, "refused", why, key=submission)
        await self.context.event(kind, tenant, job=job, key=f"refused/{submission}", submission=submission, message=why)


async def hand_out(bus: Bus, happening: progress.Happening) -> None:
    """Publish the orders that follow from a happening."""
    plan = happening.state.plan
    await asyncio.gather(
        *(
            bus.publish(name, order, msg_id=msg_id, tenant=plan.tenant, job=plan.spec.name, environment=_played(order))
            for name, msg_id, order in happening.orders
        )
    )


def total(state: JobState) -> int:
    """Units of work of the current phase, for a progress bar."""
    if state.phase in ("evaluating_before", "evaluating_after") and state.plan.spec.evaluation is not None:
        return state.plan.spec.evaluation.total
    return state.plan.batches if state.phase == "training" else 1


def _played(order: Any) -> str:
    """Where an order's episode is played; a subject has a token for it, if it is the tenant's own environment."""
    return order.environment.id if isinstance(order, RolloutOrder) else ""
