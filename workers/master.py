"""Master: compiles job documents into plans, admits them, owns job state, hands out work and closes jobs.

Reads   JOBS (job.*, policy.import, policy.pin), registry (jobs, policy versions), USAGE of jobs with a budget, blobs.
Writes  registry (jobs; imported, pinned and retired versions), ROLLOUT (orders), EVENTS, AUDIT, USAGE (what is stored); makes
        and removes a job's consumers; deletes blobs of retired versions.
Killed  at any moment: an order is handed out before the state that counts it is written, and both carry ids, so the
        redelivered message does the same again. Several masters may run: states change by compare-and-set.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Iterable
from typing import Any

import msgspec

from nexus_bus import admission, initial, progress, registry, worker
from nexus_bus.admission import Limits, Roster
from nexus_bus.audit import audit
from nexus_bus.bus import Bus, Delivery, Done, Durable, Outcome, Retry, ensure_job, ensure_tenant, remove_job
from nexus_bus.clock import now
from nexus_bus.config import MasterConfig
from nexus_bus.errors import BadMessage, Conflict, Refused, Unavailable
from nexus_bus.pausing import Pausing
from nexus_bus.plan import compile_plan
from nexus_bus.policies import Policies
from nexus_bus.stored import Stored
from nexus_bus.worker import Context
from schemas.base import NAME_PATTERN, PUBLIC
from schemas.control import JobReport, Role
from schemas.events import EventType
from schemas.job import JobCancel, JobPause, JobResume, JobSpec
from schemas.plan import TERMINAL, JobState, Phase
from schemas.policy import PolicyImport, PolicyPin, TrainingState

ROLE: Role = "master"

FILTERS = (
    *("job.submit.*", "job.cancel.*", "job.pause.*", "job.resume.*", "job.report.*.*"),
    *("policy.import.*", "policy.pin.*"),
)
DURABLE = Durable(stream="JOBS", name="master", filters=FILTERS, max_deliver=10)
TICK_S = 1.0
SWEEP_S = 30.0
_NAME = re.compile(NAME_PATTERN)
PROGRESS_S = 0.2  # at most one progress event per job in this time

SAID = 2000  # characters of a refusal
_ENDING: dict[str, EventType] = {"completed": "job.completed", "failed": "job.failed", "cancelled": "job.cancelled"}


class Master:
    """Handles one message after another; everything it knows is in the registry."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.policies = Policies(context)
        self.stored = Stored(context)
        self.settings: MasterConfig = context.config or MasterConfig()
        self.limits = Limits(self.settings.max_jobs, self.settings.max_queued)
        self.roster = Roster(context.bus)
        self.pausing = Pausing(context, self.roster, self.limits)
        self.progressed: dict[str, float] = {}  # job key → when its last progress event went out

    async def handle(self, delivery: Delivery) -> Outcome:
        """One order of a tenant, or report of a worker."""
        self.context.pulse.progress += 1
        message, tenant = delivery.message, delivery.tenant
        if tenant == PUBLIC:
            await self.given_up(delivery, f"tenant: {tenant!r} is reserved for what every tenant may read; choose another name")
        elif isinstance(message, JobSpec):
            await self.submit(message, tenant, delivery.msg_id)
        elif isinstance(message, JobCancel):
            await self.end(tenant, message.job, "cancelled", message.reason or "cancelled by the tenant")
        elif isinstance(message, JobPause | JobResume):
            await self.pausing.handle(message, tenant, delivery.msg_id)
        elif isinstance(message, JobReport):
            try:
                await self.report(tenant, message)
            except Conflict:
                return Retry(0.05, "another master changed the job first", counts=False)
        elif isinstance(message, PolicyImport | PolicyPin):
            await self.policy(message, tenant, delivery.msg_id)
        return Done()

    async def refuse_undecodable(self, delivery: Delivery, error: BadMessage) -> None:
        """A document that does not decode still gets its clear event."""
        await self.given_up(delivery, str(error))

    async def given_up(self, delivery: Delivery, reason: str) -> None:
        """The sender hears of what cannot be handled; a job whose report is lost would wait for ever, so it fails by name."""
        if delivery.row.name == "job.report":
            await self.end(delivery.tenant, delivery.tokens["job"], "failed", f"a report about the job was lost: {reason}")
        else:
            kind = "policy.refused" if delivery.row.name.startswith("policy.") else "job.refused"
            await self._refused(delivery.tenant, "_", delivery.msg_id, reason, kind)

    async def policy(self, order: PolicyImport | PolicyPin, tenant: str, submission: str) -> None:
        """Take in a policy from elsewhere, or pin one, or say why not."""
        importing = isinstance(order, PolicyImport)
        job = order.name if importing else order.policy.partition("@")[0]
        action: EventType = "policy.imported" if importing else "policy.pinned" if order.pinned else "policy.unpinned"
        try:
            if importing:
                said = await self.policies.take_in(tenant, order)
                await self._known(tenant)
            else:
                await self.policies.pin(tenant, order.policy, order.pinned)
                said = order.policy
        except Refused as error:
            await self._refused(tenant, job, submission, str(error), "policy.refused")
            return
        await audit(self.bus, tenant, action, job, "ok", said, key=submission)
        await self.context.event(action, tenant, job=job, key=f"{action}/{submission}", submission=submission, message=said)

    async def submit(self, spec: JobSpec, tenant: str, submission: str) -> None:
        """Compile, admit and begin a job, or say why not."""
        key = registry.job_key(tenant, spec.name)
        known = await self.kv.get(key, JobState)
        if known is not None and known.value.submission != submission:
            await self._refused(tenant, spec.name, submission, f"name: a job {spec.name!r} exists already; choose another name")
            return
        if known is None and await self.policies.imported(tenant, spec.name):
            why = f"name: {spec.name}@0 was imported under this name; choose another name"
            await self._refused(tenant, spec.name, submission, why)
            return
        if known is None and (why := admission.refusal(await self.roster.of(tenant), self.limits)):
            await self._refused(tenant, spec.name, submission, why)
            return
        try:
            given = await initial.named(self.kv, self.policies, tenant, spec)
            plan = await asyncio.to_thread(compile_plan, spec, tenant, given, self.settings.base)
        except Refused as error:
            await self._refused(tenant, spec.name, submission, str(error))
            return
        wall = plan.spec.budget.wall_s
        data = plan.spec.data
        state = JobState(
            plan=plan,
            phase="waiting",
            submission=submission,
            submitted=now(),
            dataset=(data.dataset or spec.name) if data else "",
            deadline=time.time() + wall if wall else None,
        )
        await self._known(tenant)
        if known is None:
            self.roster.note(state, await self.kv.create(key, state))
        await audit(self.bus, tenant, "submit", spec.name, "accepted", spec.kind, key=submission)
        await self.context.event(
            "job.accepted", tenant, job=spec.name, key=f"accepted/{submission}", submission=submission,
            message=f"{spec.kind} job accepted: {' → '.join(plan.phases)}",
        )  # fmt: skip
        await self._try_begin(tenant, spec.name)

    async def _known(self, tenant: str) -> None:
        """Make inference workers serve a tenant."""
        await ensure_tenant(self.bus, tenant)
        await self.kv.put(registry.tenant_key(tenant), msgspec.Raw(msgspec.json.encode({"name": tenant})))

    async def report(self, tenant: str, report: JobReport) -> None:
        """Move a job on by what a worker reports."""
        if report.kind == "failed":
            await self.end(tenant, report.job, "failed", report.reason)
            return
        key = registry.job_key(tenant, report.job)
        entry = await self.kv.get(key, JobState)
        if entry is None:
            self.context.log.warning("report about an unknown job", tenant=tenant, job=report.job)
            return
        happening = progress.advance(entry.value, report)
        await self._apply(tenant, key, entry.revision, entry.value, happening)
        await self._announce_progress(tenant, happening.state, report)

    async def end(self, tenant: str, job: str, phase: Phase, reason: str) -> None:
        """Put a job into a terminal phase. Repeating it changes nothing."""
        key = registry.job_key(tenant, job)
        while (entry := await self.kv.get(key, JobState)) is not None and entry.value.phase not in TERMINAL:
            state = msgspec.structs.replace(entry.value, phase=phase, paused=None, reason=reason, ended=now())
            try:
                self.roster.note(state, await self.kv.update(key, state, entry.revision))
            except Conflict:
                continue
            await self._closed(tenant, state)
            return
        if entry is None:
            await self._refused(tenant, job, f"cancel-{time.time_ns()}", f"job: no job {job!r}")

    async def tick(self) -> None:
        """Begin what waited, end what ran out of its wall budget, finish closing what a killed master left."""
        entries = (await self.kv.entries("job.", JobState)).values()
        for entry in entries:
            self.roster.note(entry.value, entry.revision)
        for entry in entries:
            await self._carefully(entry.value.plan.spec.name, self._look(entry.value))
        for tenant in {entry.value.plan.tenant for entry in entries}:
            for job in admission.next_ones(await self.roster.of(tenant), self.limits):
                await self._carefully(job, self._try_begin(tenant, job))

    async def _carefully(self, job: str, work: Awaitable[None]) -> None:
        """One job that cannot be closed or begun must not keep the others waiting."""
        try:
            await work
        except Conflict:  # another master was faster; the next tick sees what it wrote
            pass
        except Refused as error:
            self.context.log.warning("a job could not be looked at", job=job, error=str(error))

    async def sweep(self) -> None:
        """Remove what is queued for jobs and tenants that nobody serves (it came after its job's end, or of no job at all),
        and the weights of versions that no retention keeps.
        """
        queued = {stream: await self.bus.queued(stream) for stream in ("TRAINING", "INFERENCE")}  # before the jobs are read
        tenants = set(await self.kv.keys("tenant."))
        for on in queued["INFERENCE"]:
            if registry.tenant_key(on.split(".")[2]) not in tenants:
                await self._drop("INFERENCE", on, queued)
        for on in queued["TRAINING"]:
            tenant, job = on.split(".")[2:]
            named = _NAME.match(tenant) and _NAME.match(job)
            entry = await self.kv.get(registry.job_key(tenant, job), JobState) if named else None
            if entry is None or entry.value.closed:
                await self._drop("TRAINING", on, queued)
        await self.policies.sweep()
        await self.stored.sweep()

    async def _drop(self, stream: str, on: str, queued: dict[str, dict[str, int]]) -> None:
        self.context.log.warning("removed what nobody serves", subject=on, messages=queued[stream][on])
        await self.bus.drop(stream, on)

    async def _look(self, state: JobState) -> None:
        tenant, job = state.plan.tenant, state.plan.spec.name
        if state.closed or state.phase == "paused":
            return
        if state.phase in TERMINAL:
            await self._closed(tenant, state)
        elif state.deadline is not None and time.time() > state.deadline:
            await self.end(tenant, job, "failed", f"budget.wall_s: {state.plan.spec.budget.wall_s:g} s are used up")
        else:
            await self.pausing.check(state)

    async def _try_begin(self, tenant: str, job: str) -> None:
        key = registry.job_key(tenant, job)
        entry = await self.kv.get(key, JobState)
        if entry is None or entry.value.phase != "waiting":
            return
        init = entry.value.plan.spec.init
        resolved = ""
        if init is not None:
            try:
                resolved = await initial.resolved(self.kv, tenant, init) or ""
                if resolved:
                    await self.policies.living(tenant, resolved)
            except Refused as error:
                await self.end(tenant, job, "failed", str(error))
                return
            if not resolved:
                return  # its parent job is still running
        own = await self.roster.of(tenant)
        if place := admission.place(entry.value, own, self.limits):
            if not entry.value.queued:
                await self._queue(key, entry.revision, entry.value, place, own.values())
            return
        if entry.value.plan.spec.kind != "eval":
            await ensure_job(self.bus, tenant, job)
        state = msgspec.structs.replace(entry.value, init=resolved, started=now(), reason="", queued=0, estimate_s=0.0)
        await self._apply(tenant, key, entry.revision, entry.value, progress.leave(state))

    async def _queue(self, key: str, revision: int, state: JobState, place: int, own: Iterable[JobState]) -> None:
        """Put a job in the line; it says so once, and its place moves up by itself."""
        seconds = admission.estimate(place, own, self.limits)
        why = admission.waits(place, seconds, self.limits)
        state = msgspec.structs.replace(state, queued=place, estimate_s=seconds, reason=why)
        self.roster.note(state, await self.kv.update(key, state, revision))
        tenant, job = state.plan.tenant, state.plan.spec.name
        await audit(self.bus, tenant, "submit", job, "queued", why, key=state.submission)
        data: dict[str, Any] = {"place": place, "estimate_s": seconds}
        await self.context.event("job.queued", tenant, job=job, key=f"queued/{state.submission}", message=why, data=data)

    async def _apply(self, tenant: str, key: str, revision: int, before: JobState, happening: progress.Happening) -> None:
        state = happening.state
        job = state.plan.spec.name
        await asyncio.gather(
            *(self.bus.publish(name, order, msg_id=msg_id, tenant=tenant, job=job) for name, msg_id, order in happening.orders)
        )
        if state == before:
            return
        if state.phase in TERMINAL:
            state = msgspec.structs.replace(state, ended=now())
        self.roster.note(state, await self.kv.update(key, state, revision))
        if happening.score is not None:
            score = happening.score
            await self.context.event(
                "eval.completed", tenant, job=job, key=f"eval/{before.paused or before.phase}", score=score,
                message=f"{score.policy}: {score.successes}/{score.episodes} succeeded ({score.low:.2f}–{score.high:.2f})",
            )  # fmt: skip
        if state.phase != before.phase and state.phase not in TERMINAL:
            await self.context.event("job.phase", tenant, job=job, key=f"phase/{state.phase}", message=state.phase)
        if state.phase in TERMINAL:
            await self._closed(tenant, state)

    async def _closed(self, tenant: str, state: JobState) -> None:
        job = state.plan.spec.name
        for name in ("rollout.run", "env.feed", "env.prepare"):
            await self.bus.purge(name, tenant=tenant, job=job)
        if state.plan.spec.kind != "eval":
            await remove_job(self.bus, tenant, job)
        data: dict[str, Any] = {**state.scores, "version": state.version}
        trained = await self.kv.get(registry.state_key(tenant, job), TrainingState)
        if trained is not None:
            data["records"] = trained.value.records
        reason = state.reason or state.phase
        await self.context.event(
            _ENDING[state.phase], tenant, job=job, key=f"ended/{state.submission}", message=reason, data=data
        )
        await audit(self.bus, tenant, state.phase, job, "ok", state.reason, key=state.submission)
        self.pausing.spending.forget(tenant, job)
        key = registry.job_key(tenant, job)
        entry = await self.kv.get(key, JobState)
        if entry is not None and not entry.value.closed:
            state = msgspec.structs.replace(entry.value, closed=True)
            self.roster.note(state, await self.kv.update(key, state, entry.revision))
        for name in admission.next_ones(await self.roster.of(tenant), self.limits):  # what waited for this one
            await self._try_begin(tenant, name)

    async def _announce_progress(self, tenant: str, state: JobState, report: JobReport) -> None:
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

    async def _refused(self, tenant: str, job: str, submission: str, why: str, kind: EventType = "job.refused") -> None:
        why = why if len(why) <= SAID else f"{why[:SAID]} …"  # it may repeat what the tenant wrote
        action = "submit" if kind == "job.refused" else "policy"
        await audit(self.bus, tenant, action, job, "refused", why, key=submission)
        await self.context.event(kind, tenant, job=job, key=f"refused/{submission}", submission=submission, message=why)


def total(state: JobState) -> int:
    """Units of work of the current phase, for a progress bar."""
    if state.phase in ("evaluating_before", "evaluating_after") and state.plan.spec.evaluation is not None:
        return state.plan.spec.evaluation.episodes
    return state.plan.batches if state.phase == "training" else 1


async def main(context: Context) -> None:
    """Serve until told to stop."""
    master = Master(context)

    async def ticks() -> None:
        swept = time.monotonic()
        while not context.stop.is_set():
            try:
                await master.tick()
                if (clock := time.monotonic()) >= swept + SWEEP_S:
                    swept = clock
                    await master.sweep()
            except Unavailable as error:  # the bus comes back, and budgets and waiting jobs are looked at again
                context.log.warning("jobs could not be looked at", error=str(error))
            await asyncio.sleep(TICK_S)

    consuming = context.bus.consume(
        DURABLE, master.handle, concurrency=1, stop=context.stop, on_bad=master.refuse_undecodable, on_dead=master.given_up
    )
    tasks = {asyncio.create_task(consuming), asyncio.create_task(ticks())}
    context.pulse.state = "running"
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:  # one that failed ends the process, which the health manager starts anew
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def run(**options: Any) -> int:
    """Entry point of `nexus worker master`."""
    return worker.run(ROLE, main, **options)
