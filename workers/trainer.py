"""Trainer: takes slots, learns from the Training Queue in group batches, publishes policy versions.

Reads   registry (jobs), TRAINING (a durable consumer per job), blobs.
Writes  registry (policy versions, training states), blobs, JOBS (learned reports), EVENTS, USAGE, DEAD; leases.
Killed  records are acknowledged only after the state that learned them is committed, so whoever takes the slot resumes from
        the last commit and meets the same records again, in order of their batch number: the same weights come out. The lease
        says what it learned from: records that a trainer dies of three times are given up, see nexus_bus/learning/poison.py.
"""

import asyncio
import contextlib
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_bus import faults, registry, telemetry, worker
from nexus_bus.allowances import Allowances
from nexus_bus.errors import Conflict, Unreadable
from nexus_bus.fair import Shares, Turn, fill
from nexus_bus.models import process
from nexus_bus.pace import Pace
from nexus_bus.seat import Seat
from nexus_bus.seating import TICK_S, Seating, report_failed
from nexus_bus.usage import Device, Tally
from nexus_bus.worker import Context
from schemas.base import PROVIDER
from schemas.control import Role

if TYPE_CHECKING:
    from nexus_bus.learning.group import MemberResult

ROLE: Role = "trainer"

HOLD_S = 3.0  # below the consumer's ack_wait


class Trainer:
    """Seats jobs on slots, and steps all that are ready together."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.shares = Shares()
        self.allowances = Allowances(context.bus)
        self.used = Tally(context.bus, context.name, "training")  # besides what commits account for
        self.compute = Device(self.used, "step")
        self.arrived = asyncio.Event()
        self.seating = Seating(context, context.config.slots, context.config.lease_s, self.compute, self.used, self.arrived)
        self.seating.complete = self.complete
        self.seats = self.seating.seats
        self.backbone: Any = None
        self.group: Any = None
        self.parking: Any = None
        self.cache: Any = None
        self.pace: Any = None  # pace.Pace, once the backbone is measured

    async def run(self) -> None:
        """Serve until told to stop."""
        await self.load()
        await self.allowances.load()
        self.context.pulse.state = "running"
        seating, allowances = self.seating, self.allowances
        await worker.side_by_side(
            self.serve(), seating.watch(), seating.usher(), allowances.follow(), self.hold(), self.tick(), self.used.publish()
        )

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
        self.seating.backbone, self.seating.parking = self.backbone, self.parking
        self.context.log.info("backbone resident", base=settings.base, fingerprint=self.backbone.fingerprint[:12])

    # Learning

    def complete(self) -> None:
        """Somebody's next batch is."""
        self.pace.arrived(time.monotonic())
        self.arrived.set()

    async def serve(self) -> None:
        """Step whenever somebody's batch is complete, everybody whose batch is complete together."""
        while not self.context.stop.is_set():
            await self.make_room()
            await self.sort_out()
            if any(seat.able() for seat in self.seats.values()):
                await self.gather()
                await self.sort_out()
                for together in apart(self.members()):
                    await self.step(together)
                continue
            self.arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.arrived.wait(), 0.25)
        for key, seat in list(self.seats.items()):
            await self.commit(seat, force=True)
            await self.seating.release(key)
        await self.used.flush()

    async def sort_out(self) -> None:
        """Give up records that were found guilty, pass over batches of which nothing is left, end jobs that lose them all."""
        for key, seat in list(self.seats.items()):
            while seat.ready() and self.seats.get(key) is seat:
                if condemned := seat.condemned():
                    await self.guarded(seat, seat.give_up(condemned))
                elif not seat.hollow():
                    break
                else:
                    seat.skip()
                    await self.commit(seat)
                if reason := seat.fault():
                    await self.fail(seat, reason)

    async def make_room(self) -> None:
        """Give up seats of paused jobs, and one that another tenant is to have, between two steps: committed as they stand."""
        seating = self.seating
        leaving, seating.leaving = seating.leaving, ""
        for key in [key for key in self.seats if key == leaving or not seating.wanted(key)]:
            if key in self.seats:
                await self.commit(self.seats[key], force=True)
                await seating.release(key)
                seating.changed.set()

    async def gather(self) -> None:
        """B and T of the group batch: let neighbours complete their batches, while that pays."""
        closes = time.monotonic() + self.pace.bound
        while True:
            self.arrived.clear()
            held = sum(seat.samples() for seat in self.seats.values() if seat.able())
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
            if seat.able():
                ready[seat.tenant].append(key)
        for tenant in ready:
            self.shares.add(tenant, self.allowances.of(tenant).weight)
        sizes = {tenant: [self.seats[key].samples() for key in keys] for tenant, keys in ready.items()}
        chosen: list[tuple[Seat, Turn]] = []
        for turn in fill(self.shares, sizes, self.pace.batch, self.pace.curve.cost):
            key = ready[turn.key].popleft()
            seat = self.seats[key] = self.seats.pop(key)  # now the last in the order of steps
            chosen.append((seat, turn))
        return chosen

    async def step(self, members: list[tuple[Seat, Turn]]) -> None:
        """One grouped step: each seat's next batch, or a trial of it."""
        members = await self.noted(members)
        if not members:
            return
        seats = [seat for seat, _ in members]
        self.context.pulse.busy += 1
        start = time.time_ns()
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self.compute, self.learn, seats)
        finally:
            self.context.pulse.busy -= 1
        faults.at("after-compute")
        self.trace(seats, start, time.time_ns())
        for (seat, turn), outcome in zip(members, outcomes, strict=True):
            self.shares.settle(turn, outcome.device_s)
            self.context.pulse.progress += 1
            key, damaged = registry.job_key(seat.tenant, seat.job), isinstance(outcome.error, Unreadable)
            learned = not damaged and seat.ended(outcome.error)
            lost = self.seats.get(key) is not seat  # cancelled meanwhile, or taken over
            if lost or not learned:  # no commit will account for it
                self.used.add(seat.tenant, seat.job, outcome.device_s)
            if lost:
                continue
            if damaged:  # its job goes on from its last commit, here or elsewhere
                self.context.log.warning("slot lost", tenant=seat.tenant, job=seat.job, error=str(outcome.error))
                await self.seating.release(key)
            elif outcome.error is not None:
                what = {"batch": seat.learned, "trial": seat.trial, "exc_info": outcome.error}
                self.context.log.error("step failed", tenant=seat.tenant, job=seat.job, **what)
            elif learned:
                seat.note(outcome, tenants=len(seats))
                await self.commit(seat)
        self.pace.ran(max(1, sum(outcome.group for outcome in outcomes[:1])), sum(outcome.forward_s for outcome in outcomes))
        self.context.pulse.gauges.update(group_size=len(seats), parked=self.parking.parked)
        await self.alarm()

    async def noted(self, members: list[tuple[Seat, Turn]]) -> list[tuple[Seat, Turn]]:
        """Begin the turns, and note in the leases what is learned: if this process dies of it, the next one knows. Those whose
        lease is lost are left out."""
        here = [(seat, turn) for seat, turn in members if self.seats.get(registry.job_key(seat.tenant, seat.job)) is seat]
        for seat, _ in here:
            seat.begin()
        held = await asyncio.gather(*(self.seating.renew(seat) for seat, _ in here))
        begun = [pair for pair, kept in zip(here, held, strict=True) if kept]
        for _, turn in (pair for pair in members if pair not in begun):
            self.shares.settle(turn, None)
        return begun

    async def alarm(self) -> None:
        """Tell of samples that came out otherwise in a group than alone: a promise is broken on this machine."""
        for gap in self.group.canary.take():
            self.context.pulse.gauges["canary_gaps"] = self.context.pulse.gauges.get("canary_gaps", 0) + 1
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
        read_s = [0.0] * len(seats)
        for position, seat in enumerate(seats):
            if position in failed:
                continue
            began = time.perf_counter()
            try:
                members.append(seat.next_work())
            except Exception as error:  # noqa: BLE001 - whatever is wrong with its records, the others of the group go on
                failed[position] = MemberResult(None, error, 0.0, 0.0, 0, 0, None)
            read_s[position] = time.perf_counter() - began  # its pictures are its own, whatever comes of it
        results = iter(self.group.run(members))
        outcomes = [failed.get(position) or next(results) for position in range(len(seats))]
        outcomes = [replace(one, private_s=one.private_s + spent) for one, spent in zip(outcomes, read_s, strict=True)]
        self.used.add(PROVIDER, "canary", canary_s := self.group.canary.seconds - canary_s)
        return charged(outcomes, time.perf_counter() - started - canary_s)

    async def commit(self, seat: Seat, *, force: bool = False) -> None:
        """Commit a seat when it is due; a stale lease ends the seat, and nothing of it was published."""
        if seat.learned == seat.committed and not seat.uncommitted:
            return
        # First the note of what was being learned goes: it is learned, and what a commit dies of is no fault of a record.
        if (force or seat.due(self.context.config.commit_every)) and await self.seating.renew(seat):
            await self.guarded(seat, seat.commit())

    async def guarded(self, seat: Seat, commit: Awaitable[None]) -> None:
        """What commits a seat; one that is lost is released."""
        try:
            await commit
        except (Conflict, Unreadable) as error:
            self.context.log.warning("slot lost", tenant=seat.tenant, job=seat.job, error=str(error))
            if not seat.gone:  # else its job may have another one by now
                await self.seating.release(registry.job_key(seat.tenant, seat.job))

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

    async def fail(self, seat: Seat, reason: str) -> None:
        """A job that cannot go on gives its seat up, and the master ends it."""
        key = registry.job_key(seat.tenant, seat.job)
        await report_failed(self.context, seat.tenant, seat.job, reason)
        self.seating.jobs.pop(key, None)  # no seat until the master has heard of it
        await self.seating.release(key)

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
            for seat in list(self.seats.values()):
                if (receiver := seat.receiver) is not None and receiver.done() and not receiver.cancelled():
                    receiver.result()  # raises: a seat that receives nothing more would keep its job for ever
                await self.seating.renew(seat)


def apart(members: list[tuple[Seat, Turn]]) -> list[list[tuple[Seat, Turn]]]:
    """Those who go into one step together, then each whose batch failed before: it must not take others along."""
    together = [pair for pair in members if not pair[0].suspected()]
    return [together] * bool(together) + [[pair] for pair in members if pair[0].suspected()]


async def main(context: Context) -> None:
    """Serve until told to stop."""
    process.settings(context.config.threads)
    await Trainer(context).run()


def run(**options: Any) -> int:
    """Entry point of `nexus worker trainer`."""
    return worker.run(ROLE, main, **options)
