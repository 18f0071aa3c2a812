"""THE loop: what every worker with a queue runs. It takes messages as it has room, hands them to a handler, and answers them.

A handler returns an outcome or raises. Refused means the message is wrong and goes to the dead letters; Unavailable means
something it needs is away, and is waited for; anything else is a failed attempt. After `max_deliver` failed attempts the
message is a dead letter too. While a handler runs, the server is told so, and nobody else gets the message.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from opentelemetry import context as otel
from opentelemetry.propagate import extract

from nexus_bus import faults
from nexus_bus.bus.delivery import Delivery, Hold
from nexus_bus.bus.outcomes import Done, Outcome, Reject, Retry
from nexus_bus.bus.pull import OnDead, give_up
from nexus_bus.bus.topology import Durable
from nexus_bus.errors import BadMessage, NexusError, Refused, Unavailable

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

Handler = Callable[[Delivery], Awaitable[Outcome]]
OnBad = Callable[[Delivery, BadMessage], Awaitable[None]]

PATIENCE_S = 300.0  # how long a message waits here for what it needs, before that counts as a failed attempt
MAX_PAUSE_S = 30.0
TICK_S = 0.25  # how soon the loop sees `stop`


class Source(Protocol):
    """Where messages come from: a Puller, or Rounds over those of many."""

    async def get(self, n: int, wait: float) -> list[Delivery]:
        """Up to `n` messages; waits up to `wait` seconds for the first."""
        ...

    async def done(self, delivery: Delivery, seconds: float) -> None:
        """One of them is no longer in hand; it was for so long."""
        ...

    async def stop(self) -> None:
        """No more is wanted; what nobody took goes back."""
        ...


class Loop:
    """One consumer, one handler, at most `concurrency` messages in hand."""

    def __init__(
        self, bus: "Bus", durable: Durable, handler: Handler, stop: asyncio.Event, on_bad: OnBad | None, on_dead: OnDead | None
    ) -> None:
        """Use `Bus.consume`."""
        self.bus = bus
        self.durable = durable
        self.handler = handler
        self.stop = stop
        self.on_bad = on_bad
        self.on_dead = on_dead

    async def run(self, concurrency: int, grace: float) -> None:
        """Serve the consumer."""
        puller = await self.bus.pull(self.durable, batch=concurrency, counted=True, on_dead=self.on_dead)
        await self.serve(puller, concurrency, grace)

    async def serve(self, source: Source, concurrency: int | Callable[[], int], grace: float) -> None:
        """Until `stop` is set. Then no more is taken, handlers have `grace` seconds, and the rest is handed back.

        Args:
            concurrency: messages in hand at most; called anew each time, if some in hand only wait.
        """
        most = concurrency if callable(concurrency) else lambda: concurrency
        running: set[asyncio.Task[None]] = set()
        try:
            while not self.stop.is_set():
                if (room := most() - len(running)) <= 0:
                    await asyncio.wait(running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                    continue
                for delivery in await source.get(room, wait=TICK_S):
                    task = asyncio.create_task(self.in_turn(delivery, source))
                    running.add(task)
                    task.add_done_callback(running.discard)
        finally:
            await source.stop()
            if running:
                await asyncio.wait(running, timeout=grace)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def in_turn(self, delivery: Delivery, source: Source) -> None:
        """One message, and room for the next one."""
        began = time.monotonic()
        try:
            await self.one(delivery)
        except Unavailable as error:
            self.bus.log.warning("not answered; it will come again", msg_id=delivery.msg_id, error=str(error))
        except Exception:  # in `on_bad` or `on_dead`: it comes again after its ack_wait, and the loop goes on
            self.bus.log.exception("not answered; it will come again", msg_id=delivery.msg_id)
        finally:
            await source.done(delivery, time.monotonic() - began)

    async def one(self, delivery: Delivery) -> None:
        """One message, from decoding to its answer."""
        with Hold([delivery]):
            try:
                delivery.decode()
            except BadMessage as error:
                if self.on_bad is not None and delivery.named:
                    await self.on_bad(delivery, error)
                await delivery.reject(str(error))
                return
            try:
                outcome = await self.decide(delivery)
                waited_until = time.monotonic() + PATIENCE_S
                while isinstance(outcome, Retry) and not outcome.counts and time.monotonic() < waited_until:
                    if await self.stopped_within(outcome.delay):
                        break
                    outcome = await self.decide(delivery)
            except asyncio.CancelledError:
                await delivery.nak()  # the grace is over: somebody else may have it at once
                raise
            await self.answer(delivery, outcome)

    async def decide(self, delivery: Delivery) -> Outcome:
        """Run the handler in the trace of the message; turn what it raises into an outcome."""
        token = otel.attach(extract(delivery.headers))
        try:
            faults.at("before-handle", delivery.row.name)
            return await self.handler(delivery)
        except Refused as error:
            return Reject(str(error))
        except Unavailable as error:
            return Retry(0.5, str(error), counts=False)
        except NexusError as error:
            return Retry(self.pause(delivery), str(error))
        except Exception:  # a bug in a handler must cost one message an attempt, not the worker its loop
            error_id = uuid.uuid4().hex[:12]
            self.bus.log.exception("handler failed", error_id=error_id, msg_id=delivery.msg_id, subject=delivery.subject)
            return Retry(self.pause(delivery), f"internal error {error_id}")
        finally:
            otel.detach(token)

    async def answer(self, delivery: Delivery, outcome: Outcome) -> None:
        """The one place where an outcome becomes ack, nak or term."""
        faults.at("after-handle", delivery.row.name)
        match outcome:
            case Done():
                await delivery.ack()
            case Reject(reason=reason):
                await give_up(delivery, reason, self.on_dead)
            case Retry(counts=True, reason=reason) if 0 < self.durable.max_deliver <= delivery.num_delivered:
                await give_up(delivery, f"failed {delivery.num_delivered} times, at last: {reason}", self.on_dead)
            case Retry(delay=delay, reason=reason):
                self.bus.log.info("will be tried again", msg_id=delivery.msg_id, delay=delay, reason=reason)
                await delivery.nak(delay)

    async def stopped_within(self, seconds: float) -> bool:
        """Wait, unless told to stop."""
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @staticmethod
    def pause(delivery: Delivery) -> float:
        """Growing pauses between attempts: 0.25 s, 0.5 s, 1 s … at most 30 s."""
        return min(0.25 * 2 ** (delivery.num_delivered - 1), MAX_PAUSE_S)
