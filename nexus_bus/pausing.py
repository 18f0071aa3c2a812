"""The master's hand on jobs that rest: a tenant's pause and resume, the end of a device budget, and the tenant's limits.

A pause is a phase: the trainer commits and gives the seat up, orders to play episodes or to record are taken back, records wait
where they are. What was under way is still counted. On resuming, what was taken back is handed out anew, and the job ends in
the same weights as if it had never rested.

Whoever paused a job resumes it: the tenant, where it asked for the pause or the job's own budget is used up; the master, where
a limit of the tenant stopped all of its jobs (see quotas.py). A tenant that pauses a job which rests already because of a
limit takes it over, and then it stays where it is when the limit is raised. An evaluation that failed or was cancelled may be
resumed as well: it plays what is missing.
"""

import time
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from nexus_bus import progress, registry
from nexus_bus.admission import Limits, held, rests, stops
from nexus_bus.audit import audit
from nexus_bus.bus import Bus, Entry
from nexus_bus.errors import BadJob, Conflict, NotFound, Refused, Unavailable
from nexus_bus.quotas import Quotas
from nexus_bus.roster import Roster
from nexus_bus.states import hand_out
from schemas.job import JobPause, JobResume
from schemas.plan import TERMINAL, JobState, Limit
from schemas.policy import PolicyVersion

if TYPE_CHECKING:
    from nexus_bus.worker import Context


class Pausing:
    """Everything the master does with jobs that rest."""

    def __init__(self, context: "Context", roster: Roster, quotas: Quotas) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.roster, self.quotas, self.spending = roster, quotas, quotas.spending

    async def handle(self, order: JobPause | JobResume, tenant: str, submission: str) -> None:
        """Do what a tenant asks for, or say why not."""
        action = "pause" if isinstance(order, JobPause) else "resume"
        try:
            if isinstance(order, JobPause):
                said = await self.pause(tenant, order.job, order.reason or "paused by the provider", submission)
            else:
                said = await self.resume(tenant, order, submission)
        except Refused as error:
            await audit(self.bus, tenant, action, order.job, "refused", str(error), key=submission)
            await self.context.event(
                "job.refused", tenant, job=order.job, key=f"refused/{submission}", submission=submission, message=str(error)
            )
            return
        await audit(self.bus, tenant, action, order.job, "ok", said, key=submission)

    def due(self, state: JobState, limits: Limits) -> bool:
        """Whether a job runs whose tenant, or whose own device budget, has come to its end."""
        if state.phase in TERMINAL or state.phase in ("waiting", "paused"):
            return False
        budget, tenant, job = state.plan.spec.budget.device_s, state.plan.tenant, state.plan.spec.name
        spent = budget is not None and self.spending.of(tenant, job).device_s > budget + state.added_device_s
        return spent or limits.bar(state) is not None

    async def check(self, state: JobState, limits: Limits) -> None:
        """Let a job rest that is due to."""
        if not self.due(state, limits):
            return
        if (bar := limits.bar(state)) is not None:
            await self.hold(state, bar.limit, bar.why)
            return
        tenant, job = state.plan.tenant, state.plan.spec.name
        budget = (state.plan.spec.budget.device_s or 0.0) + state.added_device_s
        used = self.spending.of(tenant, job).device_s
        why = f"budget.device_s: {used:.1f} of {budget:g} s are used; `nexus resume {job} --add-device-s N` goes on from here"
        key = f"{state.submission}/{state.resumed}"
        await self.pause(tenant, job, why, key)
        await audit(self.bus, tenant, "budget", job, "ok", why, key=key)

    async def hold(self, state: JobState, limit: Limit, why: str) -> None:
        """Let a job rest because of a limit of its tenant; one that rests because of another is told of this one."""
        tenant, job, key = state.plan.tenant, state.plan.spec.name, f"{state.submission}/{state.resumed}/{limit}"
        said = await self.pause(tenant, job, rests(why), key, limit)
        await audit(self.bus, tenant, "limit", job, "ok", said, key=key)

    async def release(self, state: JobState) -> None:
        """Go on with a job that rested because of a limit of its tenant, which allows it now."""
        tenant, job, key = state.plan.tenant, state.plan.spec.name, f"{state.submission}/{state.resumed}/limit"
        while held((entry := await self._entry(tenant, job)).value):
            if await self._went_on(entry, key):
                said = await self._resumed(tenant, job, key, "your limits allow it again: it ")
                await audit(self.bus, tenant, "limit", job, "ok", said, key=key)
                return

    async def pause(self, tenant: str, job: str, reason: str, submission: str, limit: Limit = "") -> str:
        """Let a job rest; the reason it has now. One that rests already keeps its reason, unless that is a limit; one that was
        paused by this very message, and may have been resumed since, stays as it is.

        Raises:
            NotFound: there is no such job.
            BadJob: it has ended.
        """
        while (entry := await self._entry(tenant, job)).value.paused_by != submission:
            state = entry.value
            if state.phase in TERMINAL:
                raise BadJob(f"job: {job!r} is {state.phase} already")
            if state.phase == "paused":
                if state.limit and state.limit != limit:
                    state = msgspec.structs.replace(state, reason=reason, limit=limit)
                reason = state.reason
            else:
                # Before it is written: once it is, somebody may resume it and hand the orders out anew.
                for name in ("rollout.run", "rollout.own", "env.prepare"):
                    await self.bus.purge(name, tenant=tenant, job=job, environment="*")
                limited = state.plan.spec.budget.device_s is not None
                device_s = self.spending.of(tenant, job).device_s if limited else 0.0
                state = msgspec.structs.replace(progress.pause(state, reason, time.time(), device_s), limit=limit)
            if await self._written(entry, msgspec.structs.replace(state, paused_by=submission)):
                break
        self.spending.forget(tenant, job)
        await self.context.event(
            "job.paused", tenant, job=job, key=f"paused/{submission}", submission=submission, message=reason
        )
        return reason

    async def resume(self, tenant: str, order: JobResume, submission: str) -> str:
        """Go on where a job stopped; a sentence about it. One that was resumed by this very message stays as it is.

        Raises:
            NotFound: there is no such job, or the version that it evaluated is gone.
            BadJob: it does not rest, or it would run over a limit at once; the text names it.
            Unavailable: it is an evaluation that has just ended.
        """
        job = order.job
        while (entry := await self._entry(tenant, job)).value.resumed_by != submission:
            state = await self._reopened(entry.value)
            if state.phase != "paused":
                raise BadJob(f"job: {job!r} is {state.phase}, not paused")
            budget = state.plan.spec.budget.device_s
            left = budget + state.added_device_s + order.add_device_s - state.device_s if budget is not None else 1.0
            if left <= 0:
                raise BadJob(f"budget.device_s: {job!r} has used {-left:.1f} s more than it has; --add-device-s gives it more")
            if state.paused != "waiting":  # else it stands in line again
                why = stops(state, await self.roster.of(tenant), await self.quotas.of(tenant))
                if why:
                    raise BadJob(why)
            if state is not entry.value:  # or who plays would take its orders for those of one that has ended, and give them up
                await self._written(entry, state)
            elif await self._went_on(entry, submission, order.add_device_s):
                break
        return await self._resumed(tenant, job, submission)

    async def _reopened(self, state: JobState) -> JobState:
        """An evaluation that failed or was cancelled keeps its episodes, and may go on with those that are missing."""
        if state.plan.spec.kind != "eval" or state.phase not in ("failed", "cancelled"):
            return state
        if not state.closed:  # what its end takes away must not be what is handed out anew
            raise Unavailable(f"job: {state.plan.spec.name!r} has just ended and is not closed yet")
        name, _, n = state.init.partition("@")
        if state.init:
            version = await self.kv.get(registry.policy_key(state.plan.tenant, name, int(n)), PolicyVersion)
            if version is None or version.value.retired:
                raise NotFound(f"init: {state.init} was retired meanwhile; its weights are gone")
        since = datetime.fromisoformat(state.ended).timestamp() if state.ended else time.time()
        paused = "evaluating_after" if state.started else "waiting"
        return msgspec.structs.replace(
            state, phase="paused", paused=paused, paused_at=since, closed=False, ended="", limit="", queued=0
        )

    async def _went_on(self, entry: Entry[JobState], submission: str, added_device_s: float = 0.0) -> bool:
        """Hand out anew what a pause took back; False if something happened to the job first."""
        happening = progress.resume(entry.value, time.time(), added_device_s)
        await hand_out(self.bus, happening)
        return await self._written(entry, msgspec.structs.replace(happening.state, resumed_by=submission, limit=""))

    async def _resumed(self, tenant: str, job: str, submission: str, because: str = "") -> str:
        said = f"{because}goes on with {(await self._entry(tenant, job)).value.phase}"
        await self.context.event(
            "job.resumed", tenant, job=job, key=f"resumed/{submission}", submission=submission, message=said
        )
        return said

    async def _entry(self, tenant: str, job: str) -> Entry[JobState]:
        entry = await self.kv.get(registry.job_key(tenant, job), JobState)
        if entry is None:
            raise NotFound(f"job: no job {job!r}")
        return entry

    async def _written(self, entry: Entry[JobState], state: JobState) -> bool:
        try:
            key = registry.job_key(state.plan.tenant, state.plan.spec.name)
            self.roster.note(state, await self.kv.update(key, state, entry.revision))
        except Conflict:  # something happened to it first: look again
            return False
        return True
