"""Every second of a compute thread has an owner. Beside the line, in inference workers, trainers and environment workers.

`Device` is the thread: it knows when it worked and when it was idle. `Tally` adds up what each job owes, and publishes it
every second or so; whatever was answered meanwhile is acknowledged only then, so that no result goes without its record.
"""

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal, ParamSpec, TypeVar

from nexus_bus.bus import Bus, Delivery
from nexus_bus.clock import now
from nexus_bus.errors import Unavailable
from schemas.base import PROVIDER
from schemas.usage import Usage

T = TypeVar("T")
P = ParamSpec("P")

EVERY_S = 1.0
MANY = 256  # answers that wait for their record: it is published at once then


@dataclass
class _Used:
    device_s: float = 0.0
    requests: int = 0
    group_sum: int = 0
    steps: int = 0
    session_s: float = 0.0
    simulator_s: float = 0.0


@dataclass(frozen=True)
class _Batch:
    """Records under way, and the deliveries to acknowledge once they are stored."""

    entries: list[tuple[str, Usage]]
    answered: list[Delivery]


class Tally:
    """What each (tenant, job) used of a worker since the last record. `add` may be called from any thread."""

    def __init__(self, bus: Bus, worker: str, kind: Literal["inference", "training", "environment"]) -> None:
        """In the name of a worker."""
        self._bus, self._worker = bus, worker
        self._kind: Literal["inference", "training", "environment"] = kind
        self._used: dict[tuple[str, str], _Used] = {}
        self._answered: list[Delivery] = []
        self._batch: _Batch | None = None  # taken and not yet stored
        self._lock = threading.Lock()
        self._flushing = asyncio.Lock()
        self._many = asyncio.Event()
        self.device: Device | None = None  # whose idle time goes into the records

    def add(self, tenant: str, job: str, device_s: float = 0.0, **counts: float) -> None:
        """Note device time, and counts by their names in a record."""
        with self._lock:
            used = self._used.setdefault((tenant, job), _Used())
            used.device_s += device_s
            for name, count in counts.items():
                setattr(used, name, getattr(used, name) + count)

    def charge(self, delivery: Delivery, job: str, device_s: float, group: int) -> None:
        """Note a request that was handled in a group of that size.

        One that is handled again, since a worker died with it, may be on record already: that is the provider's, and no tenant
        pays twice.
        """
        owner = (delivery.tenant, job) if delivery.num_delivered == 1 else (PROVIDER, "repeated")
        self.add(*owner, device_s, requests=1, group_sum=group)

    def settle(self, answered: Iterable[Delivery]) -> None:
        """Acknowledge these once what they used is on record."""
        self._answered += answered
        if len(self._answered) >= MANY:
            self._many.set()

    async def publish(self) -> None:
        """Publish it again and again, whether or not the server is there at the time."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._many.wait(), EVERY_S)
            try:
                await self.flush()
            except Unavailable as error:
                self._bus.log.warning("usage waits for the bus", error=str(error))

    async def flush(self) -> None:
        """Publish it now, then acknowledge. What fails is kept, and the next call repeats it under the same ids.

        Raises:
            Unavailable: the server takes no records.
        """
        async with self._flushing:
            batch = self._batch = self._batch or self._take()
            publish = self._bus.publish
            await asyncio.gather(
                *(publish("usage", one, msg_id=msg_id, tenant=one.tenant, job=one.job) for msg_id, one in batch.entries)
            )
            self._batch = None
            for error in await asyncio.gather(*(delivery.ack() for delivery in batch.answered), return_exceptions=True):
                if error is not None and not isinstance(error, Unavailable):  # else it comes again
                    raise error

    def _take(self) -> _Batch:
        self._many.clear()
        answered, self._answered = self._answered, []
        if self.device is not None:
            self.add(PROVIDER, "idle", self.device.idle())
        with self._lock:
            used, self._used = self._used, {}
        name, at = uuid.uuid4().hex, now()
        entries = [
            (
                f"{tenant}/{job}/{self._kind}/{name}",
                Usage(tenant=tenant, job=job, worker=self._worker, kind=self._kind, time=at, **asdict(one)),
            )
            for (tenant, job), one in used.items()
        ]
        return _Batch(entries, answered)


class Device(ThreadPoolExecutor):
    """The compute thread of a worker. What it does through `of` is charged to an owner; the rest charges whoever submits it."""

    def __init__(self, tally: Tally, name: str) -> None:
        """Its idle time goes into the records of `tally`."""
        super().__init__(max_workers=1, thread_name_prefix=name)
        self._tally = tally
        self._opened = time.perf_counter()
        self._began: float | None = None  # of what runs now
        self._busy_s = self._said_s = 0.0
        self._lock = threading.Lock()
        tally.device = self

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As any executor."""
        return super().submit(self._timed, fn, *args, **kwargs)

    def of(self, tenant: str, job: str) -> Executor:
        """This thread, on somebody's account."""
        return _Owned(self, lambda device_s: self._tally.add(tenant, job, device_s))

    def idle(self) -> float:
        """Seconds without work since the last call."""
        with self._lock:
            clock = time.perf_counter()
            running = clock - self._began if self._began is not None else 0.0
            whole = clock - self._opened - self._busy_s - running
            idle, self._said_s = whole - self._said_s, whole
        return idle

    def _timed(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        began = time.perf_counter()
        with self._lock:
            self._began = began
        try:
            return fn(*args, **kwargs)
        finally:
            with self._lock:
                self._busy_s, self._began = self._busy_s + time.perf_counter() - began, None


class _Owned(Executor):
    def __init__(self, device: Device, charge: Callable[[float], None]) -> None:
        self._device, self._charge = device, charge

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        def charged() -> T:
            began = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self._charge(time.perf_counter() - began)

        return self._device.submit(charged)
