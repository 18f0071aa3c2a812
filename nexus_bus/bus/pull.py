"""A continuous pull: one long-lived request per consumer, renewed by us.

The stock `fetch(n)` can stall to its timeout with messages waiting (#986, #933). Here a request is always open as long as there
is room; it is renewed when half of it is used up, when the server ends it (404, 408, 409), when its idle heartbeats stay away,
and after a reconnect.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

from nats.errors import Error as NatsError

from nexus_bus.bus import headers as wire
from nexus_bus.bus.delivery import Delivery
from nexus_bus.bus.topology import Durable, ensure_durable
from nexus_bus.errors import Unavailable

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

# Who is cut off cannot end its request: so long the server delivers into the void, each message again after every ack_wait, and
# counts. A message must not be given up for that.
EXPIRES_S = 6.0
HEARTBEAT_S = 1.0
SILENCE_S = 2.5
START_S = 15.0
GONE = ("consumer deleted", "no responders", "consumer not found", "leadership change", "server shutdown")


class Request:
    """The open request of one consumer. Knows nothing of what the messages mean."""

    def __init__(self, bus: "Bus", stream: str, make: Callable[[], Awaitable[str]], room: Callable[[], int]) -> None:
        """`make` makes (or finds) the consumer and names it; `room` says how many messages may still come."""
        self._bus = bus
        self._stream = stream
        self._make = make
        self._room = room
        self._consumer = ""
        self._inbox = ""
        self._sub: Any = None
        self._outstanding = 0
        self._heard = 0.0
        self._lost = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.accept: Callable[[Any], None]  # called with every message

    async def start(self) -> None:
        """Ask for the first messages. Raises Unavailable if the stream is not there."""
        ends = time.monotonic() + START_S
        while True:
            try:
                await self._open()
                break
            except (NatsError, TimeoutError) as error:
                if time.monotonic() > ends:
                    raise Unavailable(f"no consumer on {self._stream}: {error!r}") from error
                await asyncio.sleep(0.2)
        self._watch = asyncio.create_task(self._look())
        self._bus.returned.add(self.reopen)

    async def stop(self) -> None:
        """Ask no more. When this returns, everything the server had sent was accepted."""
        self._bus.returned.discard(self.reopen)
        if self._watch is not None:
            self._watch.cancel()
        await self._end(self._sub)

    def reopen(self) -> None:
        """The request or its consumer is lost: make both anew, on an inbox of their own, so that the old ones end."""
        self._lost.set()

    async def renew(self) -> None:
        """Ask again when half of what was asked for has come."""
        room = self._room()
        if room > 0 and self._outstanding <= room // 2 and not self._lost.is_set():
            await self._ask(room - self._outstanding)

    async def _open(self) -> None:
        self._consumer = await self._make()
        self._inbox = self._bus.client.new_inbox()
        self._sub = await self._bus.client.take(self._inbox, self._on)
        self._outstanding = 0
        self._lost.clear()
        await self.renew()

    async def _ask(self, wanted: int) -> None:
        request = {"batch": wanted, "expires": int(EXPIRES_S * 1e9), "idle_heartbeat": int(HEARTBEAT_S * 1e9)}
        self._outstanding += wanted
        self._heard = time.monotonic()
        on = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        try:
            await self._bus.client.publish(on, json.dumps(request).encode(), reply=self._inbox)
        except NatsError:  # between two connections
            self.reopen()

    async def _on(self, msg: Any) -> None:
        if msg.reply.startswith("$JS.ACK."):
            self._heard = time.monotonic()
            self._outstanding = max(0, self._outstanding - 1)
            self.accept(msg)
            await self.renew()
        elif msg.subject == self._inbox:  # else of a request that was given up
            self._heard = time.monotonic()
            await self._status(msg)

    async def _status(self, msg: Any) -> None:
        status, described = wire.get(msg, "Status"), wire.get(msg, "Description").lower()
        if status == "100":
            return
        left = wire.get(msg, "Nats-Pending-Messages")
        self._outstanding = max(0, self._outstanding - int(left)) if left else 0
        if status == "503" or any(reason in described for reason in GONE):
            self.reopen()
        else:
            await self.renew()

    async def _look(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._lost.wait(), HEARTBEAT_S / 2)
            except TimeoutError:
                if self._outstanding == 0:
                    self._heard = time.monotonic()  # nothing asked, nothing to hear
                    await self.renew()
                    continue
                if time.monotonic() - self._heard < SILENCE_S:
                    continue
            await self._bus.up.wait()
            old = self._sub
            try:
                await self._open()
            except (NatsError, TimeoutError, Unavailable) as error:
                self._bus.log.debug("pull not reopened yet", stream=self._stream, error=repr(error))
                self.reopen()
                await asyncio.sleep(0.2)
            else:
                await self._end(old)

    async def _end(self, sub: Any) -> None:
        """Drain rather than unsubscribe: what is on its way would otherwise be missed until its ack_wait is over."""
        try:
            await asyncio.wait_for(sub.drain(), 2.0)
        except (NatsError, TimeoutError):
            self._bus.log.debug("a pull was not drained", stream=self._stream)


class Puller:
    """Keeps a consumer's messages coming into a buffer, and keeps those that wait there from being redelivered.

    Never more than `batch` messages are buffered or on their way. A `counted` one, which must not hoard, also counts those
    that were taken, until they are released.
    """

    def __init__(
        self, bus: "Bus", durable: Durable, batch: int, *, counted: bool = False, on_dead: "OnDead | None" = None
    ) -> None:
        """Use `Bus.pull`."""
        self._bus = bus
        self.durable = durable
        self.arrived = asyncio.Event()
        self._batch = batch
        self._counted = counted
        self._taken = 0
        self._on_dead = on_dead
        self._buffer: deque[Delivery] = deque()
        self._keep: asyncio.Task[None] | None = None
        self._request = Request(bus, durable.stream, self._make, lambda: self._batch - self._taken - len(self._buffer))
        self._request.accept = self._accept

    async def start(self) -> Self:
        """Ask for the first batch."""
        await self._request.start()
        self._keep = asyncio.create_task(self._hold())
        return self

    async def stop(self) -> None:
        """Stop asking; hand back what nobody took."""
        await self._request.stop()
        if self._keep is not None:
            self._keep.cancel()
        while self._buffer:
            await self._buffer.popleft().nak()

    @property
    def waiting(self) -> int:
        """How many are buffered here."""
        return len(self._buffer)

    async def get(self, n: int, wait: float) -> list[Delivery]:
        """Up to `n` messages in stream order: what is buffered, or else the first within `wait` seconds. May be empty."""
        if not self._buffer and wait > 0:
            self.arrived.clear()
            try:
                await asyncio.wait_for(self.arrived.wait(), wait)
            except TimeoutError:
                return []
        taken = [self._buffer.popleft() for _ in range(min(n, len(self._buffer)))]
        if not taken:
            return []
        self._taken += len(taken) if self._counted else 0
        opened = await asyncio.gather(*(self._opened(delivery) for delivery in taken))
        await self.release(len(opened) - sum(opened))
        return [delivery for delivery, ready in zip(taken, opened, strict=True) if ready]

    async def release(self, count: int) -> None:
        """So many of those taken are done with, and there is room for others."""
        self._taken -= count if self._counted else 0
        await self._request.renew()

    async def done(self, delivery: Delivery, seconds: float) -> None:
        """One of those taken is done with; what it took is of no matter to a single consumer."""
        await self.release(1)

    async def _opened(self, delivery: Delivery) -> bool:
        """Whether a message may be handed out, with its payload at hand."""
        try:
            if 0 < self.durable.max_deliver < delivery.num_delivered:  # its workers died of it, every time
                reason = f"delivered {delivery.num_delivered - 1} times and never answered"
                await give_up(delivery, reason, self._on_dead)
                return False
            await delivery.load()
        except Unavailable as error:
            self._bus.log.warning("a message goes back unopened", msg_id=delivery.msg_id, error=str(error))
            await delivery.nak(1.0)
            return False
        return True

    async def _make(self) -> str:
        await ensure_durable(self._bus, self.durable)
        return self.durable.name

    def _accept(self, msg: Any) -> None:
        self._buffer.append(Delivery(self._bus, msg, self.durable.ack_wait))
        self.arrived.set()

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(self.durable.ack_wait / 3)
            for delivery in list(self._buffer):
                await delivery.in_progress()


OnDead = Callable[[Delivery, str], Awaitable[None]]


async def give_up(delivery: Delivery, reason: str, on_dead: OnDead | None) -> None:
    """Tell who wants to know, then to the dead letters. In this order: a crash in between tells twice rather than never."""
    if on_dead is not None and delivery.named:
        await on_dead(delivery, reason)
    await delivery.reject(reason)
