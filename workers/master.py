"""Master: compiles job documents into plans, admits them, owns job state, hands out work and closes jobs.

Reads   JOBS (job.submit, job.cancel, job.report, policy.import, policy.pin), registry (jobs, policy versions), blobs.
Writes  registry (jobs; imported, pinned and retired versions), ROLLOUT (orders), EVENTS, AUDIT; makes and removes a job's
        consumers; deletes blobs of retired versions.
Killed  at any moment: an order is handed out before the state that counts it is written, and both carry ids, so the
        redelivered message does the same again. Several masters may run: states change by compare-and-set.
"""

import asyncio
import re
import time
from typing import Any

import msgspec

from nexus_bus import progress, registry, worker
from nexus_bus.bus import Bus, Delivery, Done, Durable, Outcome, Retry, ensure_job, ensure_tenant, remove_job
from nexus_bus.clock import now
from nexus_bus.errors import BadMessage, Conflict, NotFound, Refused, Unavailable
from nexus_bus.plan import compile_plan
from nexus_bus.policies import Policies
from nexus_bus.worker import Context
from schemas.base import NAME_PATTERN, PUBLIC
from schemas.control import JobReport, Role
from schemas.events import EventType
from schemas.job import JobCancel, JobSpec
from schemas.plan import TERMINAL, JobState, Phase
from schemas.policy import PolicyImport, PolicyPin, PolicyVersion, TrainingState
from schemas.usage import Audit

ROLE: Role = "master"

FILTERS = ("job.submit.*", "job.cancel.*", "job.report.*.*", "policy.import.*", "policy.pin.*")
DURABLE = Durable(stream="JOBS", name="master", filters=FILTERS, max_deliver=10)
TICK_S = 1.0
SWEEP_S = 30.0
_NAME = re.compile(NAME_PATTERN)
PROGRESS_S = 0.2  # at most one progress event per job in this time

_ENDING: dict[str, EventType] = {"completed": "job.completed", "failed": "job.failed", "cancelled": "job.cancelled"}


class Master:
    """Handles one message after another; everything it knows is in the registry."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.policies = Policies(context)
        self.progressed: dict[str, float] = {}  # job key → when its last progress event went out

    async def handle(self, delivery: Delivery) -> Outcome:
        """One submission, cancellation or report."""
        self.context.pulse.progress += 1
        message, tenant = delivery.message, delivery.tenant
        if tenant == PUBLIC:
            await self.given_up(delivery, f"tenant: {tenant!r} is reserved for what every tenant may read; choose another name")
        elif isinstance(message, JobSpec):
            await self.submit(message, tenant, delivery.msg_id)
        elif isinstance(message, JobCancel):
            await self.end(tenant, message.job, "cancelled", message.reason or "cancelled by the tenant")
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
        await self._audit(tenant, action, job, "ok", said)
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
        try:
            given = await self._given(tenant, spec)
            plan = await asyncio.to_thread(compile_plan, spec, tenant, init=given)
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
            await self.kv.create(key, state)
        await self._audit(tenant, "submit", spec.name, "accepted", spec.kind)
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
            state = msgspec.structs.replace(entry.value, phase=phase, reason=reason, ended=now())
            try:
                await self.kv.update(key, state, entry.revision)
            except Conflict:
                continue
            await self._closed(tenant, state)
            return
        if entry is None:
            await self._refused(tenant, job, f"cancel-{time.time_ns()}", f"job: no job {job!r}")

    async def tick(self) -> None:
        """Begin what waited, end what ran out of its wall budget, finish closing what a killed master left."""
        for key in await self.kv.keys("job."):
            try:
                await self._look(key)
            except Conflict:  # another master was faster; the next tick sees what it wrote
                continue
            except Refused as error:  # one job that cannot be read or closed must not keep the others waiting
                self.context.log.warning("a job could not be looked at", key=key, error=str(error))

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

    async def _drop(self, stream: str, on: str, queued: dict[str, dict[str, int]]) -> None:
        self.context.log.warning("removed what nobody serves", subject=on, messages=queued[stream][on])
        await self.bus.drop(stream, on)

    async def _look(self, key: str) -> None:
        entry = await self.kv.get(key, JobState)
        if entry is None or entry.value.closed:
            return
        state = entry.value
        tenant, job = state.plan.tenant, state.plan.spec.name
        if state.phase in TERMINAL:
            await self._closed(tenant, state)
        elif state.deadline is not None and time.time() > state.deadline:
            await self.end(tenant, job, "failed", f"budget.wall_s: {state.plan.spec.budget.wall_s:g} s are used up")
        elif state.phase == "waiting":
            await self._try_begin(tenant, job)

    async def _try_begin(self, tenant: str, job: str) -> None:
        key = registry.job_key(tenant, job)
        entry = await self.kv.get(key, JobState)
        if entry is None or entry.value.phase != "waiting":
            return
        init = entry.value.plan.spec.init
        resolved = ""
        if init is not None:
            try:
                resolved = await self._resolve(tenant, init) or ""
                if resolved:
                    await self.policies.living(tenant, resolved)
            except Refused as error:
                await self.end(tenant, job, "failed", str(error))
                return
            if not resolved:
                return  # its parent job is still running
        if entry.value.plan.spec.kind != "eval":
            await ensure_job(self.bus, tenant, job)
        state = msgspec.structs.replace(entry.value, init=resolved, started=now())
        await self._apply(tenant, key, entry.revision, entry.value, progress.leave(state))

    async def _given(self, tenant: str, spec: JobSpec) -> PolicyVersion | JobSpec | None:
        """What `init` names: a version that exists, or the spec of a job that has still to make it."""
        if spec.init is None:
            return None
        job, _, n = spec.init.partition("@")
        parent = await self.kv.get(registry.job_key(tenant, job), JobState)
        if parent is None:
            return await self.policies.living(tenant, f"{job}@{0 if n == 'latest' else n}")  # imported, or not there
        if n != "latest" and parent.value.version >= int(n):
            return await self.policies.living(tenant, spec.init)
        if parent.value.version >= 0:
            found = await self.kv.get(registry.policy_key(tenant, job, parent.value.version), PolicyVersion)
            if n == "latest" and found is not None:
                return found.value
        if parent.value.phase in TERMINAL:
            newest = parent.value.version
            raise NotFound(f"init: job {job!r} is {parent.value.phase} and has no version {n}; its newest is {newest}")
        return parent.value.plan.spec

    async def _resolve(self, tenant: str, init: str) -> str | None:
        """The version `init` stands for, or None while the job that makes it still runs."""
        job, _, n = init.partition("@")
        parent = await self.kv.get(registry.job_key(tenant, job), JobState)
        if parent is None:
            return f"{job}@{0 if n == 'latest' else n}"
        state = parent.value
        if n != "latest":
            if state.version >= int(n):
                return init
            if state.phase in TERMINAL:
                raise NotFound(f"init: job {job!r} ended as {state.phase} with {state.version} as its newest version, not {n}")
            return None
        if state.phase not in TERMINAL:
            return None
        if state.version < 0:
            raise NotFound(f"init: job {job!r} ended as {state.phase} and published no version")
        return f"{job}@{state.version}"

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
        await self.kv.update(key, state, revision)
        if happening.score is not None:
            score = happening.score
            await self.context.event(
                "eval.completed", tenant, job=job, key=f"eval/{before.phase}", score=score,
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
        await self._audit(tenant, state.phase, job, "ok", state.reason)
        key = registry.job_key(tenant, job)
        entry = await self.kv.get(key, JobState)
        if entry is not None and not entry.value.closed:
            await self.kv.update(key, msgspec.structs.replace(entry.value, closed=True), entry.revision)
        for key in await self.kv.keys(registry.job_key(tenant, "")):  # what waited for this one
            entry = await self.kv.get(key, JobState)
            if entry is not None and entry.value.phase == "waiting":
                await self._try_begin(tenant, entry.value.plan.spec.name)

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
        await self._audit(tenant, "submit" if kind == "job.refused" else "policy", job, "refused", why)
        await self.context.event(kind, tenant, job=job, key=f"refused/{submission}", submission=submission, message=why)

    async def _audit(self, tenant: str, action: str, job: str, outcome: str, detail: str) -> None:
        entry = Audit(tenant=tenant, action=action, job=job, outcome=outcome, detail=detail, time=now())
        await self.bus.publish("audit", entry, msg_id=f"{tenant}/{action}/{job}/{outcome}/{time.time_ns()}", tenant=tenant)


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
