"""Trainer: takes slots, learns from the Training Queue in group batches, publishes policy versions.

Reads   registry (jobs), TRAINING (a durable consumer per job), blobs.
Writes  registry (policy versions, training states), blobs, JOBS (learned reports), EVENTS, USAGE; leases.
Killed  records are acknowledged only after the state that learned them is committed, so whoever takes the slot resumes from
        the last commit and meets the same records again, in order of their batch number: the same weights come out.
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_bus import registry, telemetry, worker
from nexus_bus.bus import Bus, Delivery, training_durable
from nexus_bus.errors import BadMessage, Conflict, NexusError, Refused, Unreadable
from nexus_bus.fair import Shares, Turn, fill, gives_way, in_turns
from nexus_bus.models import process
from nexus_bus.pace import Pace
from nexus_bus.seat import Leases, Seat
from nexus_bus.usage import Device, Tally
from nexus_bus.worker import PROVIDER, Context
from schemas.control import JobReport, Role
from schemas.plan import TERMINAL, JobState

if TYPE_CHECKING:
    from nexus_bus.learning.group import MemberResult

ROLE: Role = "trainer"

ACTIVE = frozenset({"preparing", "evaluating_before", "training"})
TICK_S = 1.0
HOLD_S = 3.0  # below the consumer's ack_wait


class Trainer:
    """Seats jobs on slots, and steps all that are ready together."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.leases = Leases(context.bus, context.name, context.config.lease_s)
        self.jobs: dict[str, JobState] = {}
        self.seats: dict[str, Seat] = {}  # who was in a step least recently comes first
        self.leaving = ""  # the seat that is given up before the next step, for a job of another tenant
        self.shares = Shares()
        self.used = Tally(context.bus, context.name, "training")  # besides what commits account for
        self.compute = Device(self.used, "step")
        self.arrived = asyncio.Event()
        self.seating = asyncio.Event()  # a job wants a seat, or a seat is free
        self.backbone: Any = None
        self.group: Any = None
        self.parking: Any = None
        self.cache: Any = None
        self.pace: Any = None  # pace.Pace, once the backbone is measured

    async def run(self) -> None:
        """Serve until told to stop."""
        await self.load()
        self.context.pulse.state = "running"
        await worker.side_by_side(self.serve(), self.watch(), self.usher(), self.hold(), self.tick(), self.used.publish())

    async def load(self) -> None:
        """Load torch and the backbone off the loop."""
        settings = self.context.config

        def work() -> None:
            from nexus_bus.learning.canary import Canary
            from nexus_bus.learning.group import GroupTrainer
            from nexus_bus.learning.parking import Parking
            from nexus_bus.models.backbone import Backbone
            from nexus_bus.models.cache import FeatureCache

            self.backbone = Backbone.load(settings.base, device=settings.device, profile=settings.profile)
            directory = Path(settings.cache_dir) if settings.cache_dir else None
            cache = self.cache = FeatureCache(directory, settings.cache_memory_bytes, settings.cache_disk_bytes)
            slot_dir = Path(settings.slot_dir) if settings.slot_dir else None
            self.pace = Pace(self.backbone.tune(settings.batch), settings.batch, settings.group_wait_ms / 1000)
            self.parking = Parking(settings.slot_bytes, settings.slot_host_bytes, slot_dir)
            self.group = GroupTrainer(self.backbone, cache, Canary(settings.canary_every))

        await asyncio.get_running_loop().run_in_executor(self.compute.of(PROVIDER, "loading"), work)
        self.context.log.info("backbone resident", base=settings.base, fingerprint=self.backbone.fingerprint[:12])

    # Which jobs to serve

    async def watch(self) -> None:
        """Follow the registry's jobs; release seats that are wanted no more."""
        async for key, entry in self.kv.watch("job.", JobState):
            if entry is None or entry.value.phase in TERMINAL:
                self.jobs.pop(key, None)
            else:
                self.jobs[key] = entry.value
            if self.wanted(key) != (key in self.seats):
                self.arrived.set()  # a paused job is committed first, between two steps
                if entry is None or entry.value.phase != "paused":
                    await self.release(key)
                self.seating.set()

    def wanted(self, key: str) -> bool:
        """Whether a job is to have a seat now."""
        state = self.jobs.get(key)
        return state is not None and state.phase in ACTIVE and state.plan.spec.kind != "eval"

    async def usher(self) -> None:
        """Seat jobs that wait, one after another, when something changed; and look again at leases that others hold."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.seating.wait(), TICK_S)
            self.seating.clear()
            line, passed = self.queue(), set[str]()
            while line and not self.context.stop.is_set():
                if (key := line.popleft()) in passed:
                    continue
                passed.add(key)
                if self.wanted(key) and not await self.place(key, self.jobs[key]):
                    break
                if key in self.seats:  # that took a while; somebody may have come whose turn is earlier
                    line = self.queue()

    def queue(self) -> deque[str]:
        """Jobs that wait for a seat. The next is of the tenant with the fewest seats, and of its jobs the oldest."""
        jobs = sorted(self.jobs, key=lambda key: self.jobs[key].submitted)
        waiting = ((registry.tenant_of(key), key) for key in jobs if key not in self.seats and self.wanted(key))
        return deque(in_turns(waiting, Counter(seat.tenant for seat in self.seats.values())))

    async def place(self, key: str, state: JobState) -> bool:
        """Seat a job if there is room. In a full house it waits, unless a tenant has two seats more than its own: that one
        gives up the seat of its newest job, which is committed as it stands and waits in its turn. So seats come out even
        among tenants whose jobs want them. False: nobody behind this job can be seated either.
        """
        tenant, job = state.plan.tenant, state.plan.spec.name
        if len(self.seats) < self.context.config.slots:
            await self.seat(key, state)
            if not self.wanted(key):  # cancelled meanwhile
                await self.release(key)
            return True
        leaving = gives_way({held: (seat.tenant, seat.state.submitted) for held, seat in self.seats.items()}, tenant)
        if self.leaving or not leaving:
            return False
        if await self.leases.take(tenant, job) is not None:  # else it sits with another trainer
            self.leaving = leaving
            self.arrived.set()
        return True

    async def seat(self, key: str, state: JobState) -> None:
        """Take the lease and make the slot ready; somebody else's lease is left alone."""
        tenant, job = state.plan.tenant, state.plan.spec.name
        lease = await self.leases.take(tenant, job)
        if lease is None:
            return
        try:
            own = self.compute.of(tenant, job)
            seat = await Seat.open(self.context, state, lease, self.backbone, own, self.parking)
        except Refused as error:
            await self.fail(tenant, job, str(error))
            await self.leases.drop(tenant, job)
            return
        except Conflict as error:
            self.context.log.warning("slot taken by another while it was made ready", job=job, error=str(error))
            await self.leases.drop(tenant, job)
            return
        self.seats[key] = seat
        seat.receiver = asyncio.create_task(self.receive(seat))
        self.context.log.info("slot taken", tenant=tenant, job=job, epoch=lease.epoch, learned=seat.learned)
        self.gauges()

    async def release(self, key: str) -> None:
        """Give a slot up; what was not learned goes back to the queue."""
        seat = self.seats.pop(key, None)
        if seat is None:
            return
        if seat.used is not None:  # never committed: learned again elsewhere, unless the job has ended
            self.used.add(*((PROVIDER, "repeated") if key in self.jobs else (seat.tenant, seat.job)), seat.used.device_s)
        await seat.close()
        await self.leases.drop(seat.tenant, seat.job)
        self.context.log.info("slot released", tenant=seat.tenant, job=seat.job, learned=seat.learned)
        self.gauges()

    async def receive(self, seat: Seat) -> None:
        """Move records from the queue into their batches."""
        durable = training_durable(seat.tenant, seat.job)
        puller = seat.puller = await self.bus.pull(durable, batch=64)
        while True:
            for delivery in await puller.get(64, wait=1.0):
                await self.admit(seat, delivery)

    async def admit(self, seat: Seat, delivery: Delivery) -> None:
        """Put one record into its batch; a learned one is acknowledged again, an unreadable one is a dead letter."""
        try:
            message: Any = delivery.decode()
        except BadMessage as error:
            await delivery.reject(str(error))
            await self.context.event("record.dead", seat.tenant, job=seat.job, key=delivery.msg_id, message=str(error))
            return
        if message.batch < seat.committed:
            await delivery.ack()
            return
        seat.put(message, delivery)
        if seat.ready():
            self.pace.arrived(time.monotonic())
            self.arrived.set()

    # Learning

    async def serve(self) -> None:
        """Step whenever somebody's batch is complete, everybody whose batch is complete together."""
        while not self.context.stop.is_set():
            await self.make_room()
            if any(seat.ready() for seat in self.seats.values()):
                await self.gather()
                await self.step(self.members())
                continue
            self.arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.arrived.wait(), 0.25)
        for key in list(self.seats):
            await self.commit(self.seats[key], force=True)
            await self.release(key)
        await self.used.flush()

    async def make_room(self) -> None:
        """Give up seats of paused jobs, and one that another tenant is to have, between two steps: committed as they stand."""
        leaving, self.leaving = self.leaving, ""
        for key in [key for key in self.seats if key == leaving or not self.wanted(key)]:
            if key in self.seats:
                await self.commit(self.seats[key], force=True)
                await self.release(key)
                self.seating.set()

    async def gather(self) -> None:
        """B and T of the group batch: let neighbours complete their batches, while that pays."""
        closes = time.monotonic() + self.pace.bound
        while True:
            self.arrived.clear()
            held = sum(seat.samples() for seat in self.seats.values() if seat.ready())
            patience = self.pace.patience(held, closes, time.monotonic())
            if patience <= 0:
                return
            try:
                await asyncio.wait_for(self.arrived.wait(), patience)
            except TimeoutError:
                continue

    def members(self) -> list[tuple[Seat, Turn]]:
        """Who goes into the next step, if more is ready than its B samples: tenants by their shares of device time, however
        many jobs they have, and of a tenant's jobs the one that waits longest.
        """
        ready: defaultdict[str, deque[str]] = defaultdict(deque)
        for key, seat in self.seats.items():
            if seat.ready():
                ready[seat.tenant].append(key)
        sizes = {tenant: [self.seats[key].samples() for key in keys] for tenant, keys in ready.items()}
        chosen: list[tuple[Seat, Turn]] = []
        for turn in fill(self.shares, sizes, self.pace.batch, self.pace.curve.cost):
            key = ready[turn.key].popleft()
            seat = self.seats[key] = self.seats.pop(key)  # now the last in the order of steps
            chosen.append((seat, turn))
        return chosen

    async def step(self, members: list[tuple[Seat, Turn]]) -> None:
        """One grouped step: each seat's next batch."""
        if not members:
            return
        seats = [seat for seat, _ in members]
        self.context.pulse.busy += 1
        start = time.time_ns()
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self.compute, self.learn, seats)
        finally:
            self.context.pulse.busy -= 1
        self.trace(seats, start, time.time_ns())
        for (seat, turn), outcome in zip(members, outcomes, strict=True):
            self.shares.settle(turn, outcome.device_s)
            self.context.pulse.progress += 1
            key = registry.job_key(seat.tenant, seat.job)
            if outcome.error is not None or self.seats.get(key) is not seat:  # no commit will account for it
                self.used.add(seat.tenant, seat.job, outcome.device_s)
            if self.seats.get(key) is not seat:
                continue  # cancelled, or lost to another trainer, while the step ran
            if isinstance(outcome.error, Unreadable):  # its job goes on from its last commit, here or elsewhere
                self.context.log.warning("slot lost", tenant=seat.tenant, job=seat.job, error=str(outcome.error))
                await self.release(key)
                continue
            if outcome.error is not None:
                self.context.log.error("step failed", tenant=seat.tenant, job=seat.job, exc_info=outcome.error)
                known = isinstance(outcome.error, NexusError)
                reason = str(outcome.error) if known else "the step failed; the provider's log has it"
                await self.fail(seat.tenant, seat.job, f"batch {seat.learned}: {reason}")
                await self.release(key)
                continue
            seat.note(outcome, tenants=len(seats))
            await self.commit(seat)
        self.pace.ran(max(1, sum(outcome.group for outcome in outcomes[:1])), sum(outcome.forward_s for outcome in outcomes))
        self.context.pulse.gauges.update(group_size=len(seats), parked=self.parking.parked)
        await self.alarm()

    async def alarm(self) -> None:
        """Tell of samples that came out otherwise in a group than alone: a promise is broken on this machine."""
        for gap in self.group.canary.take():
            numbers = {"error": gap.error, "tolerance": gap.tolerance, "group": gap.group}
            self.context.log.error("a grouped feature differs from the same one alone", feature_id=gap.feature_id, **numbers)
            await self.context.event(
                "canary.gap", PROVIDER, key=uuid.uuid4().hex, data={**numbers, "worker": self.context.name},
                message=f"feature {gap.feature_id[:12]}: {gap.error:.2g} away from the same sample alone",
            )  # fmt: skip
        self.context.pulse.gauges["canary_runs"] = self.group.canary.runs

    def learn(self, seats: list[Seat]) -> "list[MemberResult]":
        """Runs on the compute thread: decode everybody's records, then one grouped step. Results in the seats' order."""
        from nexus_bus.learning.group import MemberResult, charged

        started, canary_s = time.perf_counter(), self.group.canary.seconds
        lost = self.parking.use([seat.slot for seat in seats])
        members, failed = [], {position: MemberResult(None, error, 0.0, 0.0, 0, 0, None) for position, error in lost.items()}
        for position, seat in enumerate(seats):
            if position in failed:
                continue
            try:
                members.append(seat.next_work())
            except NexusError as error:
                failed[position] = MemberResult(None, error, 0.0, 0.0, 0, 0, None)
        results = iter(self.group.run(members))
        outcomes = [failed.get(position) or next(results) for position in range(len(seats))]
        self.used.add(PROVIDER, "canary", canary_s := self.group.canary.seconds - canary_s)
        return charged(outcomes, time.perf_counter() - started - canary_s)

    async def commit(self, seat: Seat, *, force: bool = False) -> None:
        """Commit a seat when it is due; a stale lease ends the seat, and nothing of it was published."""
        if not seat.uncommitted or not (force or seat.due(self.context.config.commit_every)):
            return
        try:
            await seat.commit()
        except (Conflict, Unreadable) as error:
            self.context.log.warning("slot lost", tenant=seat.tenant, job=seat.job, error=str(error))
            await self.release(registry.job_key(seat.tenant, seat.job))

    def trace(self, seats: list[Seat], start: int, end: int) -> None:
        """The grouped step as a span of its own, and in each record's trace: how long it waited, what it became part of."""
        members = [delivery for seat in seats for delivery in seat.current]
        links = [link for delivery in members if (link := telemetry.link_from(delivery.headers.get("traceparent", "")))]
        group = telemetry.record_span(
            "training.group", start, end, attributes={"tenants": len(seats), "records": len(members)}, links=links[:128]
        )
        group_link = telemetry.link_from(group)
        for seat in seats:
            for delivery in seat.current:
                parent = delivery.headers.get("traceparent", "")
                telemetry.record_span("training.queue", delivery.published_ns, start, parent=parent)
                telemetry.record_span(
                    "training.step", start, end, parent=parent, links=[group_link] if group_link else [],
                    attributes={"job": seat.job, "batch": seat.learned, "tenants": len(seats)},
                )  # fmt: skip

    async def fail(self, tenant: str, job: str, reason: str) -> None:
        """Tell the master; it ends the job and says so."""
        report = JobReport(job=job, kind="failed", reason=reason)
        await self.bus.publish("job.report", report, msg_id=f"{tenant}/{job}/failed/{time.time_ns()}", tenant=tenant, job=job)

    # Keeping what is held

    async def hold(self) -> None:
        """Keep records from being redelivered while their batch fills or their commit is not yet due."""
        while True:
            await asyncio.sleep(HOLD_S)
            for seat in list(self.seats.values()):
                for delivery in seat.held():
                    await delivery.in_progress()

    async def tick(self) -> None:
        """Renew leases, and measure."""
        while True:
            await asyncio.sleep(TICK_S)
            self.context.pulse.gauges.update(await asyncio.to_thread(self.cache.gauges))
            for key, seat in list(self.seats.items()):
                if not await self.leases.renew(seat.tenant, seat.job):
                    self.context.log.warning("lease lost", tenant=seat.tenant, job=seat.job)
                    await self.release(key)

    def gauges(self) -> None:
        """What the heartbeat shows."""
        self.context.pulse.gauges["slots"] = len(self.seats)


async def main(context: Context) -> None:
    """Serve until told to stop."""
    process.settings(context.config.threads)
    await Trainer(context).run()


def run(**options: Any) -> int:
    """Entry point of `nexus worker trainer`."""
    return worker.run(ROLE, main, **options)
