"""The connection to the bus: one object per process, from which everything else hangs."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Any, Literal, Self

import structlog
from nats.errors import Error as NatsError
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from nexus_bus.bus import headers
from nexus_bus.bus.blobs import Blobs
from nexus_bus.bus.client import GuardedClient
from nexus_bus.bus.codec import decode, encode
from nexus_bus.bus.consume import BadCallback, Handler, consume
from nexus_bus.bus.kv import Kv
from nexus_bus.bus.publish import Published, Publisher
from nexus_bus.bus.pull import Puller
from nexus_bus.bus.request import Incoming, RequestHandler, Service, request, serve
from nexus_bus.bus.tail import Item, tail
from nexus_bus.bus.topology import Durable, ensure_durable
from nexus_bus.errors import Unavailable
from schemas.subjects import BY_NAME, parse, subject

PENDING_BYTES = 32 << 20  # outbound buffer while the server is away; the stock 2 MiB fills in a moment
PING_S = 5  # silence for two of these is a disconnect
WATCH_S = 1.0


class Subscription:
    """A core subscription."""

    def __init__(self, inner: Any, on: str) -> None:
        """Use `Bus.subscribe` or `Bus.inbox`."""
        self._inner = inner
        self.subject = on

    async def stop(self) -> None:
        """End it."""
        try:
            await self._inner.unsubscribe()
        except NatsError:
            return  # the connection is gone, and the subscription with it


class Bus:
    """A connection that comes back for ever, and what is built on it."""

    def __init__(self, url: str, name: str) -> None:
        """Use `Bus.connect`."""
        self.url = url
        self.name = name
        self.log: Any = structlog.get_logger()
        self.client = GuardedClient()
        self.js: JetStreamContext
        self.blobs = Blobs(self)
        self.publisher = Publisher(self)
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closing = False

    @classmethod
    async def connect(cls, url: str, *, name: str = "client", timeout: float = 15.0) -> Self:
        """Connect, waiting up to `timeout` seconds for the first answer.

        Raises:
            Unavailable: no server answers at `url`.
        """
        bus = cls(url, name)
        ends = time.monotonic() + timeout
        while True:
            try:
                await bus.client.connect(
                    servers=[url],
                    name=name,
                    connect_timeout=2,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; the client takes fractions
                    ping_interval=PING_S,
                    max_outstanding_pings=2,
                    pending_size=PENDING_BYTES,
                    error_cb=bus._on_error,
                    disconnected_cb=bus._on_disconnect,
                    reconnected_cb=bus._on_reconnect,
                )
                bus.js = bus.client.jetstream(timeout=5)
                await bus.js.account_info()
                break
            except (NatsError, OSError, TimeoutError) as error:
                if not bus.client.is_closed:
                    await bus.client.close()
                bus.client = GuardedClient()
                if time.monotonic() > ends:
                    raise Unavailable(f"no NATS server with JetStream at {url}: {error!r}. Start one with `nexus up`") from error
                await asyncio.sleep(0.1)
        await bus.publisher.start()
        bus._watch = asyncio.create_task(bus._look())
        return bus

    async def close(self) -> None:
        """Flush what can be flushed and end."""
        self.closing = True
        if self._watch is not None:
            self._watch.cancel()
        await self.publisher.stop()
        try:
            if self.client.is_connected:
                await self.client.flush(timeout=2)
        except (NatsError, TimeoutError) as error:
            self.log.warning("the last messages may not have left", error=repr(error))
        await self.client.close()

    @property
    def connected(self) -> bool:
        """Whether the server is there right now."""
        return self.client.is_connected and self.client.reading()

    async def _look(self) -> None:
        """A dead read loop leaves `is_connected` true; look, and come back."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.client.is_connected and not self.client.reading():
                self.log.warning("the read loop ended; reconnecting")
                await self.client.revive()

    async def _on_error(self, error: Exception) -> None:
        self.log.debug("nats", error=repr(error))

    async def _on_disconnect(self) -> None:
        if not self.closing:
            self.log.warning("the bus is away; waiting for it", url=self.url)

    async def _on_reconnect(self) -> None:
        self.log.info("the bus is back", url=self.url)
        self.publisher.resend()

    # Publishing

    async def publish(
        self, name: str, message: Any, *, msg_id: str, deadline: float = 30.0, headers: dict[str, str] | None = None, **tokens: str
    ) -> Published:
        """Store a message in its stream, once whatever is repeated.

        Raises:
            Unavailable: not stored within `deadline` seconds: broker away, or this subject's queue is full.
        """
        row = BY_NAME[name]
        return await self.publisher.publish(row, subject(name, **tokens), encode(row, message), msg_id, deadline, headers)

    async def publish_raw(self, on: str, payload: bytes, given: dict[str, str], deadline: float = 30.0) -> Published:
        """Store bytes as they are; for dead letters that are tried again."""
        return await self.publisher.send(on, payload, given, deadline)

    async def cast(self, name: str, message: Any, **tokens: str) -> None:
        """Core publish, fire and forget: while the server is away it is dropped, which is right for heartbeats."""
        await self.cast_to(subject(name, **tokens), name, message)

    async def cast_to(self, on: str, name: str, message: Any, given: dict[str, str] | None = None) -> None:
        """Core publish of a row's message to a concrete subject, an inbox for example."""
        row = BY_NAME[name]
        if not self.client.is_connected:
            return
        try:
            await self.client.publish(on, encode(row, message), headers=headers.build(row, self.name, extra=given))
        except NatsError as error:
            self.log.debug("cast lost", subject=on, error=repr(error))

    # Requests and subscriptions

    async def request(self, name: str, message: Any, *, timeout: float = 5.0, **tokens: str) -> Any:
        """Ask whoever serves it.

        Raises:
            NexusError: what the other side raised, as the same class.
            Unavailable: nobody serves it, or no answer in time.
        """
        return await request(self, BY_NAME[name], subject(name, **tokens), message, timeout)

    async def serve(self, name: str, handler: RequestHandler, *, queue: str = "", **tokens: str) -> Service:
        """Answer requests; `*` for a token serves all of its values."""
        return await serve(self, BY_NAME[name], handler, queue, _pattern(name, tokens))

    async def subscribe(
        self, name: str, callback: Callable[[Any, dict[str, str]], Awaitable[None]], **tokens: str
    ) -> Subscription:
        """Core subscription: `callback(message, tokens)`."""
        row = BY_NAME[name]

        async def on(msg: Any) -> None:
            _, found = parse(msg.subject)
            await callback(decode(row, msg.data, headers.get(msg, headers.CONTENT_TYPE)), found)

        return await self._subscribe(_pattern(name, tokens), on)

    async def inbox(self, name: str, callback: Callable[[Any, dict[str, str]], Awaitable[None]]) -> Subscription:
        """A private subject for answers: `callback(message, headers)`."""
        row = BY_NAME[name]

        async def on(msg: Any) -> None:
            await callback(decode(row, msg.data, headers.get(msg, headers.CONTENT_TYPE)), dict(msg.headers or {}))

        return await self._subscribe(self.client.new_inbox(), on)

    async def _subscribe(self, on: str, callback: Callable[[Any], Awaitable[None]]) -> Subscription:
        async def guarded(msg: Any) -> None:
            try:
                await callback(msg)
            except Exception as error:  # a bad message must not end the subscription; there is nobody to tell but the log
                self.log.warning("a message was not understood", subject=msg.subject, error=str(error))

        # No limits: a slow reader must not lose messages silently (134 of 200 were, with the stock limits).
        inner = await self.client.subscribe(on, cb=guarded, pending_msgs_limit=0, pending_bytes_limit=0)
        return Subscription(inner, on)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine beside the caller, kept alive until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Consuming

    async def pull(self, durable: Durable, *, batch: int = 64) -> Puller:
        """A continuous pull on a consumer, which is made if it does not exist."""
        await ensure_durable(self, durable)
        return await Puller(self, durable, batch).start()

    async def consume(
        self,
        durable: Durable,
        handler: Handler,
        *,
        concurrency: int = 1,
        stop: asyncio.Event,
        on_bad: BadCallback | None = None,
        grace: float = 6.0,
    ) -> None:
        """THE loop; see consume.py."""
        await consume(self, durable, handler, concurrency=concurrency, stop=stop, on_bad=on_bad, grace=grace)

    def tail(
        self, name: str, *, since: Literal["all", "new"] | datetime = "all", follow: bool = True, **tokens: str
    ) -> AsyncIterator[Item]:
        """Read a log stream in order, from the beginning, from a time, or from now."""
        return tail(self, BY_NAME[name], _pattern(name, tokens), since, follow)

    def kv(self, bucket: str) -> Kv:
        """A key-value bucket with typed values and compare-and-set."""
        return Kv(self, bucket)

    async def purge(self, name: str, **tokens: str) -> None:
        """Remove what is queued on a subject."""
        stream = BY_NAME[name].stream
        if stream is not None:
            try:
                await self.js.purge_stream(stream, subject=subject(name, **tokens))
            except NotFoundError:
                return

    async def depths(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Per stream and consumer: (waiting, delivered and unanswered)."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for stream in ("JOBS", "ROLLOUT", "INFERENCE", "TRAINING"):
            reply = await self.client.request(f"$JS.API.CONSUMER.LIST.{stream}", b"", timeout=2)
            listed = json.loads(reply.data).get("consumers") or []
            found[stream] = {c["name"]: (int(c["num_pending"]), int(c["num_ack_pending"])) for c in listed}
        return found


def _pattern(name: str, tokens: dict[str, str]) -> str:
    """The subject with `*` allowed for any token, and for those not given."""
    row = BY_NAME[name]
    given = {key: tokens.get(key, "*") for key in row.tokens}
    fixed = {key: value for key, value in given.items() if value != "*"}
    marked = subject(name, **{key: fixed.get(key, "_") for key in row.tokens})
    parts, shape = marked.split("."), row.pattern.split(".")
    return ".".join("*" if s.startswith("{") and s[1:-1] not in fixed else p for s, p in zip(shape, parts, strict=True))


__all__ = ["Bus", "Incoming", "Subscription"]
