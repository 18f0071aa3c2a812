"""Who sits where: which jobs a trainer holds seats for, by leases, evenly among tenants. Beside the trainer's steps.

A seat is taken and given up between two steps; what was learned by then is committed, the rest goes back to the queue.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from nexus_bus import registry
from nexus_bus.errors import Conflict, NexusError, Refused
from nexus_bus.fair import gives_way, in_turns
from nexus_bus.leases import Leases
from nexus_bus.seat import Seat
from nexus_bus.usage import Device, Tally
from nexus_bus.worker import Context
from schemas.base import PROVIDER
from schemas.control import JobReport
from schemas.plan import TERMINAL, JobState

ACTIVE = frozenset({"preparing", "evaluating_before", "training"})
TICK_S = 1.0
TRIES = 3  # of making a job's slot ready, where something goes wrong that nobody foresaw


class Seating:
    """The seats of one trainer."""

    def __init__(self, context: Context, slots: int, lease_s: float, compute: Device, used: Tally, wake: asyncio.Event) -> None:
        """So many seats at most; `wake` is set when something is to be done about one between two steps."""
        self.context = context
        self.kv = context.bus.kv("registry")
        self.leases = Leases(context.bus, context.name, lease_s)
        self.jobs: dict[str, JobState] = {}
        self.seats: dict[str, Seat] = {}  # who was in a step least recently comes first
        self.leaving = ""  # the seat that is given up before the next step, for a job of another tenant
        self.stumbled = Counter[str]()  # jobs whose slots could not be made ready, and how often
        self.changed = asyncio.Event()  # a job wants a seat, or a seat is free
        self.backbone: Any = None  # once it is loaded
        self.parking: Any = None
        self.complete: Callable[[], None] = wake.set  # called when the next batch of a seat is complete
        self.slots, self.compute, self.used, self.wake = slots, compute, used, wake

    async def watch(self) -> None:
        """Follow the registry's jobs; release seats that are wanted no more."""
        async for key, entry in self.kv.watch("job.", JobState):
            if entry is None or entry.value.phase in TERMINAL:
                self.jobs.pop(key, None)
                self.stumbled.pop(key, None)
            else:
                self.jobs[key] = entry.value
            if self.wanted(key) != (key in self.seats):
                self.wake.set()  # a paused job is committed first, between two steps
                if entry is None or entry.value.phase != "paused":
                    await self.release(key)
                self.changed.set()

    def wanted(self, key: str) -> bool:
        """Whether a job is to have a seat now."""
        state = self.jobs.get(key)
        return state is not None and state.phase in ACTIVE and state.plan.spec.kind != "eval"

    async def usher(self) -> None:
        """Seat jobs that wait, one after another, when something changed; and look again at leases that others hold."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), TICK_S)
            self.changed.clear()
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
        """Jobs that wait for a seat. The next is of the tenant with the fewest seats, and of its jobs the one of the highest
        priority; of equal ones, the oldest."""
        jobs = sorted(self.jobs, key=lambda key: (-self.jobs[key].plan.spec.priority, self.jobs[key].submitted))
        waiting = ((registry.tenant_of(key), key) for key in jobs if key not in self.seats and self.wanted(key))
        return deque(in_turns(waiting, Counter(seat.tenant for seat in self.seats.values())))

    async def place(self, key: str, state: JobState) -> bool:
        """Seat a job if there is room. In a full house it waits, unless a tenant has two seats more than its own: that one
        gives up the seat of its newest job, which is committed as it stands and waits in its turn. So seats come out even
        among tenants whose jobs want them. False: nobody behind this job can be seated either.
        """
        tenant, job = state.plan.tenant, state.plan.spec.name
        if len(self.seats) < self.slots:
            await self.seat(key, state)
            if not self.wanted(key):  # cancelled meanwhile
                await self.release(key)
            return True
        leaving = gives_way({held: (seat.tenant, seat.state.submitted) for held, seat in self.seats.items()}, tenant)
        if self.leaving or not leaving:
            return False
        if await self.leases.take(tenant, job) is not None:  # else it sits with another trainer
            self.leaving = leaving
            self.wake.set()
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
            await report_failed(self.context, tenant, job, str(error))
            await self.leases.drop(lease)
            return
        except Conflict as error:
            self.context.log.warning("slot taken by another while it was made ready", job=job, error=str(error))
            await self.leases.drop(lease)
            return
        except NexusError:
            raise
        except Exception:  # out of memory, or a fault of ours: the others' seats are not to end with it
            self.context.log.exception("slot cannot be made ready", tenant=tenant, job=job)
            self.stumbled[key] += 1
            if self.stumbled[key] >= TRIES:
                why = (
                    f"its slot could not be made ready on {self.context.name}, {TRIES} times; the provider's log has the reason"
                )
                await report_failed(self.context, tenant, job, why)
            await self.leases.drop(lease)
            return
        self.stumbled.pop(key, None)
        self.seats[key] = seat
        seat.receiver = asyncio.create_task(seat.receive(self.complete))
        self.context.log.info("slot taken", tenant=tenant, job=job, epoch=lease.epoch, learned=seat.learned)
        self.context.pulse.gauges["slots"] = len(self.seats)

    async def renew(self, seat: Seat) -> bool:
        """Hold a seat's lease for another while, and note what it learns; False if it is lost, and then so is the seat."""
        if await self.leases.renew(seat.tenant, seat.job, seat.doubts.attempts(orderly=self.context.stop.is_set())):
            return True
        self.context.log.warning("lease lost", tenant=seat.tenant, job=seat.job)
        await self.release(registry.job_key(seat.tenant, seat.job))
        return False

    async def release(self, key: str) -> None:
        """Give a slot up; what was not learned goes back to the queue."""
        seat = self.seats.pop(key, None)
        if seat is None:
            return
        seat.gone = True
        if seat.used is not None:  # never committed: learned again elsewhere, unless the job has ended
            self.used.add(*((PROVIDER, "repeated") if key in self.jobs else (seat.tenant, seat.job)), seat.used.device_s)
        await seat.close()
        await self.leases.drop(seat.lease, seat.doubts.attempts(orderly=True))
        self.context.log.info("slot released", tenant=seat.tenant, job=seat.job, learned=seat.learned)
        self.context.pulse.gauges["slots"] = len(self.seats)


async def report_failed(context: Context, tenant: str, job: str, reason: str) -> None:
    """Tell the master; it ends the job and says so."""
    report = JobReport(job=job, kind="failed", reason=reason)
    await context.bus.publish("job.report", report, msg_id=f"{tenant}/{job}/failed/{time.time_ns()}", tenant=tenant, job=job)
