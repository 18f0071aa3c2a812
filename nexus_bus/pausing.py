"""The master's hand on jobs that rest: a tenant's pause and resume, and the end of a device budget.

A pause is a phase: the trainer commits and gives the seat up, orders to play episodes are taken back, records wait where they
are. What was under way is still counted. On resuming, what was taken back is handed out anew, and the job ends in the same
weights as if it had never rested.
"""

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from nexus_bus import progress, registry
from nexus_bus.admission import Limits, Roster, running
from nexus_bus.audit import audit
from nexus_bus.bus import Bus
from nexus_bus.errors import BadJob, Conflict, NexusError, NotFound, Refused
from schemas.job import JobPause, JobResume
from schemas.plan import TERMINAL, JobState

if TYPE_CHECKING:
    from nexus_bus.bus import Entry
    from nexus_bus.worker import Context

BILLED = frozenset({"inference", "training"})  # kinds that a device budget is about


class Spending:
    """Device-seconds that jobs have on record, followed for those that were asked about."""

    def __init__(self, bus: Bus) -> None:
        """Follows nobody yet."""
        self._bus = bus
        self._sums: dict[tuple[str, str], float] = {}
        self._following: dict[tuple[str, str], asyncio.Task[None]] = {}

    def of(self, tenant: str, job: str) -> float:
        """What is known by now; from the first call on it is followed."""
        task = self._following.get((tenant, job))
        if task is None or task.done():
            self._sums[tenant, job] = 0.0
            self._following[tenant, job] = asyncio.create_task(self._follow(tenant, job))
        return self._sums[tenant, job]

    def forget(self, tenant: str, job: str) -> None:
        """Follow it no more."""
        if (task := self._following.pop((tenant, job), None)) is not None:
            task.cancel()

    async def _follow(self, tenant: str, job: str) -> None:
        try:
            async for item in self._bus.tail("usage", since="all", tenant=tenant, job=job):
                if item.message.kind in BILLED:
                    self._sums[tenant, job] += item.message.device_s
        except NexusError as error:  # begun anew when asked again
            self._bus.log.warning("a budget cannot be followed", tenant=tenant, job=job, error=str(error))


class Pausing:
    """Everything the master does with jobs that rest."""

    def __init__(self, context: "Context", roster: Roster, limits: Limits) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.roster, self.limits = roster, limits
        self.spending = Spending(context.bus)

    async def handle(self, order: JobPause | JobResume, tenant: str, submission: str) -> None:
        """Do what a tenant asks for, or say why not."""
        action = "pause" if isinstance(order, JobPause) else "resume"
        try:
            if isinstance(order, JobPause):
                said = await self.pause(tenant, order.job, order.reason or "paused by the tenant", submission)
            else:
                said = await self.resume(tenant, order, submission)
        except Refused as error:
            await audit(self.bus, tenant, action, order.job, "refused", str(error), key=submission)
            await self.context.event(
                "job.refused", tenant, job=order.job, key=f"refused/{submission}", submission=submission, message=str(error)
            )
            return
        await audit(self.bus, tenant, action, order.job, "ok", said, key=submission)

    async def check(self, state: JobState) -> bool:
        """Whether a running job was paused just now, since its device budget is used up."""
        budget, tenant, job = state.plan.spec.budget.device_s, state.plan.tenant, state.plan.spec.name
        if budget is None or state.phase in ("waiting", "paused"):
            return False
        budget += state.added_device_s
        if (used := self.spending.of(tenant, job)) <= budget:
            return False
        why = f"budget.device_s: {used:.1f} of {budget:g} s are used; `nexus resume {job} --add-device-s N` goes on from here"
        key = f"{state.submission}/{state.resumed}"
        await self.pause(tenant, job, why, key)
        await audit(self.bus, tenant, "budget", job, "ok", why, key=key)
        return True

    async def pause(self, tenant: str, job: str, reason: str, submission: str) -> str:
        """Let a job rest; the reason it has now. One that rests already keeps its reason.

        Raises:
            NotFound: there is no such job.
            BadJob: it has ended.
        """
        while (entry := await self._entry(tenant, job)).value.phase != "paused":
            if entry.value.phase in TERMINAL:
                raise BadJob(f"job: {job!r} is {entry.value.phase} already")
            # Before it is written: once it is, somebody may resume it and hand the orders out anew.
            await self.bus.purge("rollout.run", tenant=tenant, job=job)
            limited = entry.value.plan.spec.budget.device_s is not None
            device_s = self.spending.of(tenant, job) if limited else 0.0
            state = progress.pause(entry.value, reason, time.time(), device_s)
            if await self._written(entry, state):
                break
        state = (await self._entry(tenant, job)).value
        self.spending.forget(tenant, job)
        await self.context.event(
            "job.paused", tenant, job=job, key=f"paused/{submission}", submission=submission, message=state.reason
        )
        return state.reason

    async def resume(self, tenant: str, order: JobResume, submission: str) -> str:
        """Go on where a job stopped; a sentence about it. One that was resumed by this very message stays as it is.

        Raises:
            NotFound: there is no such job.
            BadJob: it does not rest, or it would run over a limit at once; the text names it.
        """
        job = order.job
        while True:
            entry = await self._entry(tenant, job)
            state = entry.value
            if state.resumed_by == submission:
                break
            if state.phase != "paused":
                raise BadJob(f"job: {job!r} is {state.phase}, not paused")
            budget = state.plan.spec.budget.device_s
            left = budget + state.added_device_s + order.add_device_s - state.device_s if budget is not None else 1.0
            if left <= 0:
                raise BadJob(f"budget.device_s: {job!r} has used {-left:.1f} s more than it has; --add-device-s gives it more")
            if state.paused != "waiting" and running((await self.roster.of(tenant)).values()) >= self.limits.jobs:
                raise BadJob(f"max_jobs: {self.limits.jobs} jobs of yours run, as many as may at once; wait, or pause one")
            happening = progress.resume(state, time.time(), order.add_device_s)
            happening.state = msgspec.structs.replace(happening.state, resumed_by=submission)
            for name, msg_id, message in happening.orders:
                await self.bus.publish(name, message, msg_id=msg_id, tenant=tenant, job=job)
            if await self._written(entry, happening.state):
                state = happening.state
                break
        said = f"goes on with {state.phase}"
        await self.context.event(
            "job.resumed", tenant, job=job, key=f"resumed/{submission}", submission=submission, message=said
        )
        return said

    async def _entry(self, tenant: str, job: str) -> "Entry[JobState]":
        entry = await self.kv.get(registry.job_key(tenant, job), JobState)
        if entry is None:
            raise NotFound(f"job: no job {job!r}")
        return entry

    async def _written(self, entry: "Entry[JobState]", state: JobState) -> bool:
        try:
            key = registry.job_key(state.plan.tenant, state.plan.spec.name)
            self.roster.note(state, await self.kv.update(key, state, entry.revision))
        except Conflict:  # something happened to it first: look again
            return False
        return True
