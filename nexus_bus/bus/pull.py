"""A continuous pull: one long-lived request per consumer, renewed by us.

The stock `fetch(n)` can stall to its timeout with messages waiting (#986, #933). Here a request for `batch` messages is always
open; it is renewed when half of it is used up, when the server ends it (404, 408, 409), when its idle heartbeats stay away,
and after a reconnect.
"""

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec
from nats.errors import Error as NatsError

from nexus_bus.bus import headers
from nexus_bus.bus.delivery import Delivery
from nexus_bus.bus.topology import Durable, ensure_durable
from nexus_bus.errors import NexusError
from schemas.base import BlobRef

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

EXPIRES_S = 30.0
HEARTBEAT_S = 1.0
GONE = ("consumer deleted", "no responders", "consumer not found")


class Puller:
    """Keeps a consumer's messages coming into a buffer of at most about `batch`."""

    def __init__(self, bus: "Bus", durable: Durable, batch: int) -> None:
        """Use `Bus.pull`."""
        self._bus = bus
        self.durable = durable
        self._batch = batch
        self._buffer: asyncio.Queue[Delivery] = asyncio.Queue()
        self._outstanding = 0
        self._heard = time.monotonic()
        self._sub: Any = None
        self._inbox = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self.ready = asyncio.Event()  # something is buffered

    async def start(self) -> Self:
        """Subscribe and ask for the first batch."""
        await self._open()
        self._tasks = [asyncio.create_task(self._look())]
        return self

    async def _open(self) -> None:
        self._inbox = self._bus.client.new_inbox()
        self._sub = await self._bus.client.subscribe(self._inbox, cb=self._on, pending_msgs_limit=0, pending_bytes_limit=0)
        self._outstanding = 0
        await self._ask()

    @property
    def waiting(self) -> int:
        """How many are buffered here."""
        return self._buffer.qsize()

    async def get(self, n: int, wait: float) -> list[Delivery]:
        """Up to `n` messages: what is buffered, or else the first to come within `wait` seconds. May be empty."""
        if self._buffer.empty() and wait > 0:
            self.ready.clear()
            try:
                await asyncio.wait_for(self.ready.wait(), wait)
            except TimeoutError:
                return []
        taken: list[Delivery] = []
        while len(taken) < n and not self._buffer.empty():
            taken.append(self._buffer.get_nowait())
        await self._renew()
        return taken

    async def stop(self) -> None:
        """Stop asking; hand back what nobody took."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        try:
            await self._sub.unsubscribe()
        except NatsError:
            self._bus.log.debug("unsubscribe while away", consumer=self.durable.name)
        while not self._buffer.empty():
            await self._buffer.get_nowait().nak()

    async def _ask(self) -> None:
        wanted = self._batch - self._outstanding - self._buffer.qsize()
        if wanted <= 0 or self._stopped:
            return
        request = {"batch": wanted, "expires": int(EXPIRES_S * 1e9), "idle_heartbeat": int(HEARTBEAT_S * 1e9)}
        self._outstanding += wanted
        self._heard = time.monotonic()
        on = f"$JS.API.CONSUMER.MSG.NEXT.{self.durable.stream}.{self.durable.name}"
        try:
            await self._bus.client.publish(on, json.dumps(request).encode(), reply=self._inbox)
        except NatsError as error:
            self._outstanding = 0  # the watch asks again
            self._bus.log.debug("pull not sent", consumer=self.durable.name, error=repr(error))

    async def _renew(self) -> None:
        if self._outstanding + self._buffer.qsize() <= self._batch // 2:
            await self._ask()

    async def _on(self, msg: Any) -> None:
        self._heard = time.monotonic()
        status = headers.get(msg, "Status")
        if not status:
            self._outstanding = max(0, self._outstanding - 1)
            await self._accept(msg)
            return
        if status == "100":
            return
        described = headers.get(msg, "Description").lower()
        left = headers.get(msg, "Nats-Pending-Messages")
        self._outstanding = max(0, self._outstanding - int(left)) if left else 0
        if status == "503" or any(word in described for word in GONE):
            await asyncio.sleep(0.2)
            await self._again()
        await self._renew()

    async def _accept(self, msg: Any) -> None:
        body: bytes | None = None
        try:
            if headers.get(msg, headers.BLOB):
                body = await self._bus.blobs.get(msgspec.json.decode(msg.data, type=BlobRef))
            delivery = Delivery(self._bus, msg, body)
        except (NexusError, msgspec.MsgspecError, KeyError) as error:
            # Not ours to lose: the blob may be readable in a moment. The consumer's max_deliver bounds it.
            self._bus.log.warning("a message could not be opened", subject=msg.subject, error=str(error))
            await msg.nak(1.0)
            return
        self._buffer.put_nowait(delivery)
        self.ready.set()

    async def _again(self) -> None:
        """The consumer is gone, with a memory stream after a restart of the server for example: make it again."""
        if self._stopped:
            return
        try:
            await ensure_durable(self._bus, self.durable)
        except (NatsError, TimeoutError) as error:
            self._bus.log.debug("consumer not there yet", consumer=self.durable.name, error=repr(error))

    async def _look(self) -> None:
        """No heartbeat: the request died with a server or a connection. Open another, on an inbox of its own."""
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            if time.monotonic() - self._heard < HEARTBEAT_S * 2.5 or not self._bus.client.is_connected:
                continue
            old = self._sub
            await self._again()
            try:
                await self._open()
                await old.unsubscribe()
            except (NatsError, TimeoutError) as error:
                self._bus.log.debug("pull not renewed yet", consumer=self.durable.name, error=repr(error))
