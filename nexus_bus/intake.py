"""A job's records on one trainer: those that wait for their batch, those at work, those to acknowledge, those given up.

Between the Training Queue and the seat. A batch is complete when each of its records is here or dead; a record that cannot be
learned is found by its batch's turns (learning/poison.py), committed as dead by the seat, and then becomes a dead letter.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nexus_bus.bus import Delivery, Puller, training_durable
from nexus_bus.errors import BadMessage, Unavailable
from nexus_bus.learning.poison import Doubts
from schemas.plan import JobState
from schemas.policy import DeadRecord

if TYPE_CHECKING:
    from nexus_bus.worker import Context

NUMBERS = re.compile(r"(?:train/)?(\d{1,9})(?:/(\d{1,9}))?(?:/again/\d+)*")  # batch and index, in what follows the job in an id
BARREN = 3  # batches of which nothing could be learned, one after another: then it is not the records
LOST = 200  # records of one job that could not be learned: then it is not the records either


@dataclass(kw_only=True, eq=False)
class Intake:
    """Records of one job."""

    context: "Context"
    tenant: str
    job: str
    state: JobState
    needed: int  # records per batch
    learned: int = 0  # batches learned, committed or not
    committed: int = 0
    waiting: dict[int, dict[int, tuple[Any, Delivery]]] = field(default_factory=dict)  # batch → index → record, or its error
    uncommitted: list[Delivery] = field(default_factory=list)
    current: list[Delivery] = field(default_factory=list)  # of the step at hand
    messages: list[Any] = field(default_factory=list)  # and what they say
    trial: bool = False  # the step at hand is to be rolled back
    doubts: Doubts = field(default_factory=Doubts)
    guilty: dict[int, str] = field(default_factory=dict)  # index → reason: of the next batch, to be given up before its turn
    dying: list[tuple[Delivery, DeadRecord]] = field(default_factory=list)  # given up, not dead letters yet
    barren: int = 0  # batches in a row of which nothing was learned
    puller: Puller | None = None
    receiver: asyncio.Task[None] | None = None

    async def receive(self, arrived: Callable[[], None]) -> None:
        """Move records from the queue into their batches, until cancelled; tell when the next batch is complete."""
        puller = self.puller = await self._pull()
        while True:
            for delivery in await puller.get(64, wait=1.0):
                try:
                    await self.admit(delivery)
                except Unavailable as error:  # what it was answered with did not arrive: it comes again
                    self.context.log.warning("a record goes back", tenant=self.tenant, job=self.job, error=str(error))
                    await delivery.nak(1.0)
                if self.ready():
                    arrived()

    async def _pull(self) -> Puller:
        """Begin to receive, as soon as the server is there: first of all what the last holder of the lease left behind."""
        durable = training_durable(self.tenant, self.job)
        while True:
            try:
                await self.context.bus.recall(durable.stream, durable.name)
                return await self.context.bus.pull(durable, batch=64)
            except Unavailable as error:
                self.context.log.warning("records wait for the bus", tenant=self.tenant, job=self.job, error=str(error))

    async def admit(self, delivery: Delivery) -> None:
        """Put one record into its batch. A learned one is acknowledged again, and so is one that is dead already."""
        try:
            message: Any = delivery.decode()
            place = message.batch, getattr(message, "index", 0)
        except BadMessage as error:
            message, place = error, self._place(delivery.msg_id)
        dead = self.doubts.dead.get(place)
        if dead is not None and dead.seq == delivery.seq:  # whoever gave it up did not live to write the letter
            await self.bury(delivery, dead)
        elif dead is not None and dead.msg_id == delivery.msg_id:
            await delivery.ack()
        elif dead is not None:  # sent once more by an operator: records are learned in their order or not at all
            await self.bury(delivery, dead_record(place, delivery, f"batch {place[0]} was learned without it"))
        elif isinstance(message, BadMessage):
            await self._unreadable(place, message, delivery)
        elif place[0] < self.committed:
            await delivery.ack()
        else:
            self.put(message, delivery)

    def put(self, message: Any, delivery: Delivery) -> None:
        """Keep a record for its batch; of a redelivered one the newer delivery is the one to acknowledge."""
        index = getattr(message, "index", 0)
        if message.batch < self.learned:
            self.uncommitted = [d for d in self.uncommitted if d.seq != delivery.seq] + [delivery]
        else:
            self.waiting.setdefault(message.batch, {})[index] = (message, delivery)

    async def _unreadable(self, place: tuple[int, int], error: BadMessage, delivery: Delivery) -> None:
        """One that stands for a record of a batch to come is given up with its batch; any other at once."""
        batch, index = place
        expected = self.learned <= batch < self.state.plan.batches and index < self.needed
        if expected and index not in self.waiting.get(batch, {}):
            self.waiting.setdefault(batch, {})[index] = (error, delivery)
        else:
            await self.bury(delivery, dead_record(place, delivery, str(error)))

    def _place(self, msg_id: str) -> tuple[int, int]:
        """Batch and index by the id of a record that cannot be read; (-1, 0) where it does not say."""
        found = NUMBERS.fullmatch(msg_id.removeprefix(f"{self.tenant}/{self.job}/"))
        return (int(found[1]), int(found[2] or 0)) if found else (-1, 0)

    def ready(self) -> bool:
        """Whether the next batch, in order, is complete: each of its records is here, or dead."""
        here = len(self.waiting.get(self.learned, {})) + self.doubts.gone(self.learned)
        return self.learned < self.state.plan.batches and here >= self.needed

    def hollow(self) -> bool:
        """Whether nothing is left of the next batch, which is complete: all of its records are dead."""
        return not self.waiting.get(self.learned)

    def able(self) -> bool:
        """Whether the next batch is complete, and sorted out: what is left of it may be learned."""
        return self.ready() and not self.hollow() and not self.condemned()

    def suspected(self) -> bool:
        """Whether the next batch failed before."""
        return self.doubts.suspects(self.learned)

    def samples(self) -> int:
        """What the next batch will ask of the backbone: samples, or decisions of its episodes."""
        batch = self.waiting.get(self.learned, {})
        return sum(len(getattr(message, "samples", None) or getattr(message, "steps", ())) for message, _ in batch.values())

    def condemned(self) -> dict[int, str]:
        """Records of the next batch, which is complete, that are not to be learned, each with the reason."""
        batch = self.waiting.get(self.learned, {})
        unreadable = {index: str(message) for index, (message, _) in batch.items() if isinstance(message, BadMessage)}
        return self.doubts.condemned(self.learned, sorted(batch)) | unreadable | self.guilty

    def begin(self) -> None:
        """Decide what the next step takes: the next batch, or as a trial some of its records, in order of their index."""
        batch = self.waiting[self.learned]
        records, self.trial = self.doubts.begin(self.learned, sorted(batch))
        self.messages = [batch[index][0] for index in records]
        self.current = [batch[index][1] for index in records]

    def ended(self, error: Exception | None) -> bool:
        """How the step ended; whether something was learned."""
        self.guilty = self.doubts.ended(error)
        return error is None and not self.trial

    def skip(self) -> None:
        """Pass over the next batch, which is hollow."""
        self.waiting.pop(self.learned, None)
        self.learned += 1
        self.barren += 1
        self.current = []

    def fault(self) -> str:
        """Why the job cannot go on, if records are given up one after another; else ""."""
        last = next(reversed(self.doubts.dead.values()), None)
        if last is None or (self.barren < BARREN and len(self.doubts.dead) < LOST):
            return ""
        what = f"{BARREN} batches in a row" if self.barren >= BARREN else f"{LOST} records"
        return f"batch {last.batch}: {last.reason} ({what} could not be learned)"

    def held(self) -> Iterator[Delivery]:
        """Every delivery that must not be redelivered now."""
        yield from self.uncommitted
        yield from (delivery for delivery, _ in self.dying)
        for batch in self.waiting.values():
            for _, delivery in batch.values():
                yield delivery

    async def bury(self, delivery: Delivery, dead: DeadRecord) -> None:
        """Tell the tenant, then to the dead letters. In this order: a crash in between repeats both, under the same ids."""
        self.context.log.warning("record given up", tenant=self.tenant, job=self.job, record=dead.msg_id, reason=dead.reason)
        await self.context.event(
            "record.dead", self.tenant, job=self.job, key=f"dead/{dead.seq}", message=f"{dead.msg_id}: {dead.reason}",
            data={"record": dead.msg_id, "reason": dead.reason},
        )  # fmt: skip
        await delivery.reject(dead.reason)


def dead_record(place: tuple[int, int], delivery: Delivery, reason: str) -> DeadRecord:
    """A record of a batch, as it is written down when it is given up."""
    return DeadRecord(batch=place[0], index=place[1], msg_id=delivery.msg_id, seq=delivery.seq, reason=reason[:500])
