"""Master: compiles job documents into plans, admits them, owns job state, hands out work and closes jobs.

Reads   JOBS (job.*, policy.import, policy.pin: a durable consumer per tenant, served by turns), registry (accounts, jobs,
        policy versions), USAGE, blobs.
Writes  registry (jobs; imported, pinned and retired versions), ROLLOUT (orders), EVENTS, AUDIT, USAGE (what is stored, and
        sums in the place of old records); makes and removes a job's consumers; deletes blobs of retired versions.
Killed  at any moment: an order is handed out before the state that counts it is written, and both carry ids, so the
        redelivered message does the same again. Several masters may run: states change by compare-and-set.
"""

import asyncio
import re
import time
from collections.abc import Awaitable
from typing import Any

import msgspec

from nexus_bus import admission, initial, progress, registry, serving, worker
from nexus_bus.admission import Limits, Verdict
from nexus_bus.audit import audit
from nexus_bus.bus import Bus, Delivery, Done, Entry, Outcome, Retry, ensure_job, orders_durable
from nexus_bus.clock import now
from nexus_bus.config import MasterConfig
from nexus_bus.errors import BadMessage, Conflict, Refused, Unavailable
from nexus_bus.offers import Attendance, offered
from nexus_bus.pausing import Pausing
from nexus_bus.plan import compile_plan, names_own
from nexus_bus.policies import Policies
from nexus_bus.quotas import Quotas
from nexus_bus.rollup import Rollup
from nexus_bus.roster import Roster
from nexus_bus.serving import AHEAD, Serving
from nexus_bus.states import States
from nexus_bus.stored import Stored
from nexus_bus.worker import Context
from schemas.base import NAME_PATTERN, PUBLIC
from schemas.control import JobReport, Role
from schemas.events import EventType
from schemas.job import JobCancel, JobPause, JobResume, JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import PolicyImport, PolicyPin

ROLE: Role = "master"

TICK_S = 1.0
SWEEP_S = 30.0
_NAME = re.compile(NAME_PATTERN)


class Master:
    """Handles one message after another; everything it knows is in the registry."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.policies = Policies(context)
        self.stored = Stored(context)
        self.rollup = Rollup(context.bus)
        self.settings: MasterConfig = context.config or MasterConfig()
        self.roster = Roster(context.bus)
        self.quotas = Quotas(context.bus, self.roster, Limits(self.settings.max_jobs, self.settings.max_queued))
        self.quotas.allowances.changed.add(self.policies.look_again)
        self.pausing = Pausing(context, self.roster, self.quotas)
        self.states = States(context, self.roster, self.quotas.spending, self._move_up)
        self.moving: set[str] = set()  # tenants whose line is being looked at
        self.serving = Serving(
            context.bus, lambda tenant, _: orders_durable(tenant), batch=1 + AHEAD, on_bad=self.refuse_undecodable,
            on_dead=self.given_up, allowances=self.quotas.allowances,
        )  # fmt: skip

    async def serve(self) -> None:
        """Take orders and reports until told to stop: of each tenant in their order, of several tenants by turns."""
        await self.quotas.announce()
        await self.serving.consume(self.handle, stop=self.context.stop, concurrency=1)

    async def handle(self, delivery: Delivery) -> Outcome:
        """One order of a tenant, or report of a worker."""
        self.context.pulse.progress += 1
        message, tenant = delivery.message, delivery.tenant
        if tenant == PUBLIC:
            await self.given_up(delivery, f"tenant: {tenant!r} is reserved for what every tenant may read; choose another name")
        elif isinstance(message, JobSpec):
            await self.submit(message, tenant, delivery.msg_id)
        elif isinstance(message, JobCancel):
            await self.states.end(tenant, message.job, "cancelled", message.reason or "cancelled by the provider")
        elif isinstance(message, JobPause | JobResume):
            await self.pausing.handle(message, tenant, delivery.msg_id)
        elif isinstance(message, JobReport):
            try:
                await self.report(tenant, message)
            except Conflict:
                return Retry(0.05, "another master changed the job first", counts=False)
        elif isinstance(message, PolicyImport | PolicyPin):
            return await self.policy(message, tenant, delivery.msg_id)
        return Done()

    async def refuse_undecodable(self, delivery: Delivery, error: BadMessage) -> None:
        """A document that does not decode still gets its clear event."""
        await self.given_up(delivery, str(error))

    async def given_up(self, delivery: Delivery, reason: str) -> None:
        """The sender hears of what cannot be handled; a job whose report is lost would wait for ever, so it fails by name."""
        if delivery.row.name == "job.report":
            await self.states.end(
                delivery.tenant, delivery.tokens["job"], "failed", f"a report about the job was lost: {reason}"
            )
        else:
            kind = "policy.refused" if delivery.row.name.startswith("policy.") else "job.refused"
            await self.states.refuse(delivery.tenant, "_", delivery.msg_id, reason, kind)

    async def policy(self, order: PolicyImport | PolicyPin, tenant: str, submission: str) -> Outcome:
        """Take in a policy from elsewhere, or pin one, or say why not."""
        importing = isinstance(order, PolicyImport)
        job = order.name if importing else order.policy.partition("@")[0]
        action: EventType = "policy.imported" if importing else "policy.pinned" if order.pinned else "policy.unpinned"
        if importing:
            limits = await self.quotas.of(tenant)
            if not limits.sure:
                return Retry(1.0, "what the tenant keeps is still being counted")
            if why := admission.import_refusal(limits):
                await self.states.refuse(tenant, job, submission, why, "policy.refused")
                await self.policies.discard(order)
                return Done()
        try:
            if importing:
                said = await self.policies.take_in(tenant, order)
            else:
                await self.policies.pin(tenant, order.policy, order.pinned)
                said = order.policy
        except Refused as error:
            await self.states.refuse(tenant, job, submission, str(error), "policy.refused")
            if importing:
                await self.policies.discard(order)
            return Done()
        await audit(self.bus, tenant, action, job, "ok", said, key=submission)
        await self.context.event(action, tenant, job=job, key=f"{action}/{submission}", submission=submission, message=said)
        return Done()

    async def submit(self, spec: JobSpec, tenant: str, submission: str) -> None:
        """Compile, admit and begin a job, or say why not."""
        key = registry.job_key(tenant, spec.name)
        known = await self.kv.get(key, JobState)
        if known is not None and known.value.submission != submission:
            await self.states.refuse(
                tenant, spec.name, submission, f"name: a job {spec.name!r} exists already; choose another name"
            )
            return
        if known is None and (why := admission.refusal(await self.roster.of(tenant), await self.quotas.of(tenant))):
            await self.states.refuse(tenant, spec.name, submission, why)
            return
        if known is None and await self.policies.imported(tenant, spec.name):
            why = f"name: {spec.name}@0 was imported under this name; choose another name"
            await self.states.refuse(tenant, spec.name, submission, why)
            return
        try:
            given = await initial.named(self.kv, self.policies, tenant, spec)
            own = await offered(self.bus, tenant) if names_own(spec, given) else {}
            plan = await asyncio.to_thread(compile_plan, spec, tenant, given, self.settings.base, own)
        except Refused as error:
            await self.states.refuse(tenant, spec.name, submission, str(error))
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
        if known is None:
            self.roster.note(state, await self.kv.create(key, state))
        await audit(self.bus, tenant, "submit", spec.name, "accepted", spec.kind, key=submission)
        await self.context.event(
            "job.accepted", tenant, job=spec.name, key=f"accepted/{submission}", submission=submission,
            message=f"{spec.kind} job accepted: {' → '.join(plan.phases)}",
        )  # fmt: skip
        await self._try_begin(tenant, spec.name)

    async def report(self, tenant: str, report: JobReport) -> None:
        """Move a job on by what a worker reports."""
        if report.kind == "failed":
            await self.states.end(tenant, report.job, "failed", report.reason)
            return
        entry = await self.kv.get(registry.job_key(tenant, report.job), JobState)
        if entry is None:
            self.context.log.warning("report about an unknown job", tenant=tenant, job=report.job)
            return
        happening = progress.advance(entry.value, report)
        await self.states.apply(entry, happening)
        await self.states.say_progress(happening.state, report)

    async def tick(self) -> None:
        """Begin what waited, end what ran out of its wall budget, let rest and go on what its tenant's limits say, and finish
        closing what a killed master left.
        """
        await self._meet()
        for tenant in await self.roster.tenants():
            limits = await self.quotas.of(tenant)
            for state in list((await self.roster.of(tenant)).values()):
                await self._carefully(state.plan.spec.name, self._look(state, limits))
            await self._move_up(tenant)

    async def _meet(self) -> None:
        """Serve those who are not served and have something in the queue, from a program that does not ask the gateway. What
        came late of somebody who was removed is nobody's.
        """
        for on in await self.bus.queued("JOBS"):
            tenant = on.split(".")[2]
            if tenant in self.serving.tenants:
                continue
            record = self.quotas.allowances.record(tenant)
            if not _NAME.match(tenant) or (record is not None and record.phase == "removed"):
                self.context.log.warning("removed what nobody serves", subject=on)
                await self.bus.drop("JOBS", on)
            else:
                await serving.introduce(self.bus, tenant)

    async def _move_up(self, tenant: str) -> None:
        """Look at those of a tenant's jobs that may begin or go on now, or wait for something else than before."""
        if tenant in self.moving:  # one that fails at its beginning ends, and leads here again
            return
        self.moving.add(tenant)
        try:
            for job in admission.next_ones(await self.roster.of(tenant), await self.quotas.of(tenant)):
                await self._carefully(job, self._try_begin(tenant, job))
        finally:
            self.moving.discard(tenant)

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
        await serving.sweep(self.bus)
        queued = await self.bus.queued("TRAINING")  # before the jobs are read
        for on in queued:
            tenant, job = on.split(".")[2:]
            named = _NAME.match(tenant) and _NAME.match(job)
            entry = await self.kv.get(registry.job_key(tenant, job), JobState) if named else None
            if entry is None or entry.value.closed:
                self.context.log.warning("removed what nobody serves", subject=on, messages=queued[on])
                await self.bus.drop("TRAINING", on)
        await self.policies.sweep()
        await self.stored.sweep()
        await self.rollup.sweep()

    async def _look(self, state: JobState, limits: Limits) -> None:
        """What seems due is read again first: another master may have moved the job, and this one hear of it late."""
        if not self._due(state, limits):
            return
        tenant, job = state.plan.tenant, state.plan.spec.name
        entry = await self.kv.get(registry.job_key(tenant, job), JobState)
        if entry is None:
            return
        state = entry.value
        self.roster.note(state, entry.revision)
        if not self._due(state, limits):
            return
        if state.phase in TERMINAL:
            await self.states.close(state)
        elif _late(state):
            await self.states.end(tenant, job, "failed", f"budget.wall_s: {state.plan.spec.budget.wall_s:g} s are used up")
        else:
            await self.pausing.check(state, limits)

    def _due(self, state: JobState, limits: Limits) -> bool:
        """Whether a job is to be closed, to be ended or to rest."""
        if state.closed or state.phase == "paused":
            return False
        return state.phase in TERMINAL or _late(state) or self.pausing.due(state, limits)

    async def _try_begin(self, tenant: str, job: str) -> None:
        """Begin a waiting job or go on with one that rests because of a limit, or tell it what it waits for."""
        entry = await self.kv.get(registry.job_key(tenant, job), JobState)
        if entry is None or not (entry.value.phase == "waiting" or admission.held(entry.value)):
            return
        state, resolved = entry.value, entry.value.init
        if state.phase == "waiting" and (init := state.plan.spec.init) is not None:
            try:
                resolved = await initial.resolved(self.kv, tenant, init) or ""
                if resolved:
                    await self.policies.living(tenant, resolved)
            except Refused as error:
                await self.states.end(tenant, job, "failed", str(error))
                return
            if not resolved:
                return  # its parent job is still running
        own, limits = await self.roster.of(tenant), await self.quotas.of(tenant)
        if not limits.sure:
            return  # the next tick may know
        verdict = admission.verdicts(own, limits, state)[job]
        if verdict.limit:
            if verdict.limit != state.limit or not (state.queued or admission.held(state)):
                await self._stopped(entry, verdict, admission.estimate(verdict, await self.roster.past(tenant), limits, own))
        elif admission.held(state):
            await self.pausing.release(state)
        else:
            if admission.trains(state):
                await ensure_job(self.bus, tenant, job)
            state = msgspec.structs.replace(state, init=resolved, started=now(), reason="", queued=0, estimate_s=0.0, limit="")
            await self.states.apply(entry, progress.leave(state))

    async def _stopped(self, entry: Entry[JobState], verdict: Verdict, seconds: float) -> None:
        """Say what a job waits or rests for: once, and its place in the line moves up by itself."""
        state = entry.value
        if admission.held(state):
            await self.pausing.hold(state, verdict.limit, verdict.why)
            return
        why = admission.waits(verdict, seconds)
        now_queued = msgspec.structs.replace(state, queued=verdict.place, estimate_s=seconds, reason=why, limit=verdict.limit)
        await self.states.write(now_queued, entry.revision)
        tenant, job, submission = state.plan.tenant, state.plan.spec.name, state.submission
        if not state.queued:
            await audit(self.bus, tenant, "submit", job, "queued", why, key=submission)
        data: dict[str, Any] = {"place": verdict.place, "estimate_s": seconds, "limit": verdict.limit}
        key = f"queued/{submission}/{verdict.limit}"
        await self.context.event("job.queued", tenant, job=job, key=key, message=why, data=data)


def _late(state: JobState) -> bool:
    """Whether its wall budget is used up."""
    return state.deadline is not None and time.time() > state.deadline


async def main(context: Context) -> None:
    """Serve until told to stop."""
    master = Master(context)
    await master.quotas.allowances.load()  # nothing is decided without

    async def ticks() -> None:
        swept = time.monotonic()
        while True:  # as long as orders are taken
            try:
                await master.tick()
                if (clock := time.monotonic()) >= swept + SWEEP_S:
                    swept = clock
                    await master.sweep()
            except Unavailable as error:  # the bus comes back, and budgets and waiting jobs are looked at again
                context.log.warning("jobs could not be looked at", error=str(error))
            await asyncio.sleep(TICK_S)

    context.pulse.state = "running"
    await worker.side_by_side(master.serve(), ticks(), Attendance(context, master.roster).follow())


def run(**options: Any) -> int:
    """Entry point of `nexus worker master`."""
    return worker.run(ROLE, main, **options)
