"""THE loop: take a message, run its handler, turn the outcome into an answer. Readable in five minutes; everything else calls it.

    Done             acknowledged, confirmed by the server
    Retry            handed back with a delay; at the last delivery it becomes a dead letter
    Reject           dead letter, then terminated
    raised Refused   as Reject        raised NexusError   as Retry with a growing delay
    raised anything  logged whole under an error id, then as Retry
    undecodable      dead letter at once: reading it again will not help
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nexus_bus.bus.delivery import Delivery
from nexus_bus.bus.outcomes import Done, Outcome, Reject, Retry
from nexus_bus.bus.topology import Durable
from nexus_bus.errors import BadMessage, NexusError, Refused, Unavailable

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

Handler = Callable[[Delivery], Awaitable[Outcome]]
BadCallback = Callable[[Delivery, BadMessage], Awaitable[None]]


async def consume(
    bus: "Bus",
    durable: Durable,
    handler: Handler,
    *,
    concurrency: int,
    stop: asyncio.Event,
    on_bad: BadCallback | None,
    grace: float,
) -> None:
    """Handle messages until `stop`, at most `concurrency` at a time; then finish what runs, within `grace` seconds."""
    puller = await bus.pull(durable, batch=concurrency)
    slots = asyncio.Semaphore(concurrency)
    running: set[asyncio.Task[None]] = set()

    async def one(delivery: Delivery) -> None:
        try:
            await _handle(bus, durable, handler, delivery, on_bad)
        finally:
            slots.release()

    while not stop.is_set():
        await slots.acquire()
        taken = await puller.get(1, wait=0.25)
        if not taken:
            slots.release()
            continue
        task = asyncio.create_task(one(taken[0]))
        running.add(task)
        task.add_done_callback(running.discard)
    await puller.stop()
    if running:
        _, late = await asyncio.wait(running, timeout=grace)
        for task in late:  # unanswered: delivered again to somebody else after ack_wait
            task.cancel()
        if late:
            bus.log.warning("unfinished work is left for redelivery", consumer=durable.name, messages=len(late))


async def _handle(bus: "Bus", durable: Durable, handler: Handler, delivery: Delivery, on_bad: BadCallback | None) -> None:
    keeping = asyncio.create_task(_keep(delivery, durable.ack_wait / 3))
    try:
        outcome = await _outcome(bus, handler, delivery, on_bad)
        keeping.cancel()
        await _answer(durable, delivery, outcome)
    except Unavailable as error:  # the answer did not reach the server: the message comes again, and its effect is idempotent
        bus.log.warning("not confirmed; it will be delivered again", msg_id=delivery.msg_id, error=str(error))
    finally:
        keeping.cancel()


async def _outcome(bus: "Bus", handler: Handler, delivery: Delivery, on_bad: BadCallback | None) -> Outcome:
    try:
        delivery.decode()
    except BadMessage as error:
        bus.log.warning("undecodable message", subject=delivery.subject, error=str(error))
        if on_bad is not None:
            await on_bad(delivery, error)
        return Reject(str(error))
    try:
        return await handler(delivery)
    except Refused as error:
        return Reject(str(error))
    except NexusError as error:
        return Retry(min(30.0, 0.25 * 2**delivery.num_delivered), str(error))
    except Exception:  # a fault of ours: one message must not end the worker; the log has all of it under the id
        error_id = uuid.uuid4().hex[:12]
        bus.log.exception("handler failed", error_id=error_id, subject=delivery.subject, msg_id=delivery.msg_id)
        return Retry(min(30.0, 0.25 * 2**delivery.num_delivered), f"internal error {error_id}")


async def _answer(durable: Durable, delivery: Delivery, outcome: Outcome) -> None:
    match outcome:
        case Done():
            await delivery.ack()
        case Retry(delay, reason):
            if 0 < durable.max_deliver <= delivery.num_delivered:
                await delivery.reject(f"given up after {delivery.num_delivered} deliveries: {reason}")
            else:
                await delivery.nak(delay)
        case Reject(reason):
            await delivery.reject(reason)


async def _keep(delivery: Delivery, every: float) -> None:
    """Tell the server that a long handler still works on it."""
    while True:
        await asyncio.sleep(every)
        await delivery.in_progress()
