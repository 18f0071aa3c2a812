"""The connection to the bus: one object per process, from which everything else hangs."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Self

import structlog
from nats.aio.client import RawCredentials
from nats.errors import Error as NatsError
from nats.js.client import JetStreamContext

from nexus_bus import faults
from nexus_bus.bus import headers as wire
from nexus_bus.bus.api import ServerApi
from nexus_bus.bus.blobs import Blobs
from nexus_bus.bus.client import GuardedClient
from nexus_bus.bus.codec import decode, encode
from nexus_bus.bus.consume import Handler, Loop, OnBad
from nexus_bus.bus.delivery import Delivery, Hold
from nexus_bus.bus.jwt import Credentials, denial, read_creds
from nexus_bus.bus.kv import Kv
from nexus_bus.bus.publish import Published, Publisher
from nexus_bus.bus.pull import OnDead, Puller
from nexus_bus.bus.request import RequestHandler, Service, request
from nexus_bus.bus.tail import Item, Since, tail
from nexus_bus.bus.tls import context
from nexus_bus.bus.topology import BLOBS, PAYLOADS, Durable, ensure_topology
from nexus_bus.config import default_ca, default_creds
from nexus_bus.errors import Denied, NexusError, Unavailable
from schemas.subjects import BY_NAME, parse, subject

PENDING_BYTES = 64 << 20  # outbound buffer; the stock 2 MiB fills in a moment
PING_S = 2  # silence over two of these is a disconnect
WATCH_S = 0.5
PUBLISH_S = 60.0  # a message waits so long for a server that is cut off


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


class Bus(ServerApi):
    """A connection that comes back for ever, and what is built on it."""

    def __init__(self, url: str, name: str, creds: Credentials | None = None) -> None:
        """Use `Bus.connect`."""
        self.url = url
        self.name = name
        self.creds = creds
        self.denied = ""  # why the server does not let us in, while it does not
        self.log: Any = structlog.get_logger()
        self.client = GuardedClient()
        self.js: Any = JetStreamContext(self.client, timeout=2)  # Any: its types are half open
        self.publisher = Publisher(self)
        self.blobs = Blobs(self, BLOBS)
        self.payloads = Blobs(self, PAYLOADS)
        self.up = asyncio.Event()  # set while the server is there
        self.returned: set[Callable[[], None]] = set()  # called when it comes back
        self.replicas = 0  # of the streams, once `ensure_topology` has run here
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._refused = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str = "client",
        timeout: float = 15.0,
        creds: str | Path | None = None,
        streams: bool = True,
    ) -> Self:
        """Connect, waiting up to `timeout` seconds for the server to answer. Later the connection comes back for ever.

        Args:
            url: one server, or several of a cluster with commas between.
            creds: a `.creds` file; default NEXUS_CREDS, else the provider's of this home, else none.
            streams: wait until JetStream answers, too; the system account and tenants have none.

        Raises:
            Denied: the credentials are damaged, or the server does not accept them.
            Unavailable: nothing answers at `url`.
        """
        source = creds if creds is not None else default_creds()
        bus = cls(url, name, read_creds(source) if source not in (None, "none") else None)
        opening = asyncio.ensure_future(bus._open(streams and bus.tenant is None))
        denied = asyncio.ensure_future(bus._refused.wait())
        try:
            await asyncio.wait({opening, denied}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
                return bus
            while not opening.done():  # one cancellation may be lost on the way, where a try ends at the same moment
                opening.cancel()
                await asyncio.wait({opening}, timeout=1.0)
            await bus.client.close()
            if bus.denied:
                raise Denied(bus.denied)
            raise TimeoutError  # noqa: TRY301 - as whatever else may have come of it
        except (NatsError, OSError, TimeoutError) as error:
            await bus.client.close()
            why = bus.client.last_error or error
            if isinstance(why, ssl.SSLCertVerificationError):
                raise Unavailable(
                    f"{url}: its certificate cannot be checked ({why.verify_message}); NEXUS_CA names the ca.pem that came "
                    "with the credentials, and the address begins with tls://"
                ) from error
            raise Unavailable(f"no NATS server with JetStream at {url}: {why!r}. Start one with `nexus up`") from error
        finally:
            denied.cancel()

    @property
    def tenant(self) -> str | None:
        """Whom the connection speaks for; None: the provider, who may speak for everybody."""
        return self.creds.tenant if self.creds is not None else None

    @property
    def key(self) -> str:
        """Public key of the credentials in use; empty where the server asks for none."""
        return self.creds.user if self.creds is not None else ""

    async def _open(self, streams: bool) -> None:
        secret: dict[str, Any] = {}
        if self.creds is not None:
            secret["user_credentials"] = RawCredentials(self.creds.text)
        if "tls://" in self.url:  # of one server of several, and all are asked to encrypt
            secret["tls"] = context(default_ca())
        await self.client.connect(
            servers=[one.strip() for one in self.url.split(",")],
            name=self.name,
            connect_timeout=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,  # type: ignore[arg-type]  # seconds; fractions work
            ping_interval=PING_S,
            max_outstanding_pings=2,
            pending_size=PENDING_BYTES,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            **secret,
        )
        while streams:
            try:
                await self.js.account_info()
                break
            except (NatsError, TimeoutError):  # a server that has just started opens JetStream a little later
                await asyncio.sleep(0.05)
        self.up.set()
        await self.publisher.start()
        self._watch = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Flush what can be flushed and end."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        if self._tasks and self.up.is_set():
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        self.publisher.stop()
        try:
            if self.client.is_connected:
                await self.client.flush(timeout=2)
        except (NatsError, TimeoutError) as error:
            self.log.warning("the last messages may not have left", error=repr(error))
        await self.client.close()

    # Staying connected

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self.client.revive()

    async def _on_error(self, error: Exception) -> None:
        self.log.debug("nats", error=repr(error))
        if not self.up.is_set() and (why := denial(str(error), self.creds, self.url)):
            if why != self.denied and self._watch is not None:
                self.log.warning("the server does not let us in any more", why=why)
            self.denied = why
            self._refused.set()

    async def _on_disconnect(self) -> None:
        self.up.clear()
        if not self._closing:
            self.log.warning("the bus is away; waiting for it", url=self.url)

    async def _on_reconnect(self) -> None:
        self.log.info("the bus is back", url=self.url)
        self.denied = ""
        self.up.set()
        self.spawn(self._resume())

    async def _resume(self) -> None:
        try:
            if self.replicas:  # a memory stream does not survive its server
                await ensure_topology(self, self.replicas)
        except (NatsError, TimeoutError, NexusError) as error:
            self.log.warning("the streams could not be checked after the bus came back", error=repr(error))
        self.publisher.resend()
        for reopen in list(self.returned):
            reopen()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine beside the caller, kept alive until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Publishing

    async def publish(
        self,
        name: str,
        message: Any,
        *,
        msg_id: str,
        deadline: float = PUBLISH_S,
        headers: dict[str, str] | None = None,
        **tokens: str,
    ) -> Published:
        """Store a message in its stream, once however often it is repeated.

        Raises:
            Unavailable: not stored within `deadline` seconds: broker away, or this subject's queue is full.
        """
        row = BY_NAME[name]
        return await self.publisher.publish(row, subject(name, **tokens), encode(row, message), msg_id, deadline, headers)

    async def cast(self, name: str, message: Any, **tokens: str) -> None:
        """Core publish, fire and forget: while the server is away it is dropped, which is right for heartbeats."""
        await self.cast_to(subject(name, **tokens), name, message)

    async def cast_to(self, on: str, name: str, message: Any, headers: dict[str, str] | None = None) -> None:
        """Core publish of a row's message to a concrete subject, an inbox for example."""
        row = BY_NAME[name]
        body = encode(row, message)
        if not self.up.is_set():
            return
        try:
            await self.client.publish(on, body, headers=wire.build(row, self.name, extra=headers))
        except NatsError as error:
            self.log.debug("cast lost", subject=on, error=repr(error))
        faults.at("after-cast", name)

    # Requests and subscriptions

    async def request(
        self,
        name: str,
        message: Any,
        *,
        timeout: float = 5.0,
        headers: dict[str, str] | None = None,
        watch: str = "",
        **tokens: str,
    ) -> Any:
        """Ask whoever serves it.

        Args:
            watch: a subject that one process serves; once nobody does, no answer is waited for.

        Raises:
            NexusError: what the other side raised, as the same class.
            Denied: the server does not let us in any more.
            Unavailable: nobody serves it, or no answer in time.
        """
        row = BY_NAME[name]
        on = row.local if self.tenant is not None and row.local else subject(name, **tokens)
        return await request(self, row, on, message, timeout, headers, watch)

    async def serve(self, name: str, handler: RequestHandler, *, queue: str = "", **tokens: str) -> Service:
        """Answer requests, many at a time: `await handler(message, incoming)` gives the reply; `*` takes any token."""
        service = Service(self, BY_NAME[name], handler)
        await service.start(_pattern(name, tokens), queue)
        return service

    async def subscribe(
        self, name: str, callback: Callable[[Any, dict[str, str]], Awaitable[None]], **tokens: str
    ) -> Subscription:
        """Core subscription: `await callback(message, tokens)`, one after another."""
        row = BY_NAME[name]

        async def on(msg: Any) -> None:
            await callback(decode(row, msg.data, wire.get(msg, wire.CONTENT_TYPE) or None), parse(msg.subject)[1])

        return await self.listen(_pattern(name, tokens), on)

    async def inbox(self, name: str, callback: Callable[[Any, dict[str, str]], Awaitable[None]]) -> Subscription:
        """A private subject for answers: `await callback(message, headers)`, one after another."""
        row = BY_NAME[name]

        async def on(msg: Any) -> None:
            await callback(decode(row, msg.data, wire.get(msg, wire.CONTENT_TYPE) or None), dict(msg.headers or {}))

        return await self.listen(self.client.new_inbox(), on)

    async def listen(self, on: str, callback: Callable[[Any], Awaitable[None]], queue: str = "") -> Subscription:
        """Raw core subscription; when this returns, the server knows of it."""

        async def guarded(msg: Any) -> None:
            try:
                await callback(msg)
            except Exception as error:  # noqa: BLE001 - one bad message must not end a subscription; only the log is there to tell
                self.log.warning("a message was not understood", subject=msg.subject, error=repr(error))

        inner = await self.client.take(on, guarded, queue)
        try:
            await self.client.flush(timeout=5)
        except (NatsError, TimeoutError):
            self.log.debug("subscribed while the bus is away", subject=on)
        return Subscription(inner, on)

    # Consuming

    async def pull(self, durable: Durable, *, batch: int = 64, counted: bool = False, on_dead: OnDead | None = None) -> Puller:
        """A continuous pull on a consumer, which is made if it does not exist; see pull.py."""
        return await Puller(self, durable, batch, counted=counted, on_dead=on_dead).start()

    async def consume(
        self,
        durable: Durable,
        handler: Handler,
        *,
        stop: asyncio.Event,
        concurrency: int = 1,
        on_bad: OnBad | None = None,
        on_dead: OnDead | None = None,
        grace: float = 6.0,
    ) -> None:
        """THE loop, see consume.py. `on_bad` hears of messages that do not decode, `on_dead` of others given up."""
        await Loop(self, durable, handler, stop, on_bad, on_dead).run(concurrency, grace)

    def hold(self, deliveries: Iterable[Delivery]) -> Hold:
        """Keep deliveries from being redelivered: `with bus.hold(deliveries): …`."""
        return Hold(deliveries)

    def tail(self, name: str, *, since: Since = "all", follow: bool = True, **tokens: str) -> AsyncIterator[Item]:
        """Read a log stream in order, from its beginning, from a time, or from the moment the iteration begins."""
        return tail(self, BY_NAME[name], _pattern(name, tokens), since, follow)

    def kv(self, bucket: str) -> Kv:
        """A key-value bucket with typed values and compare-and-set."""
        return Kv(self, bucket)


def _pattern(name: str, tokens: dict[str, str]) -> str:
    """The subject with `*` allowed for any token, and for those not given."""
    row = BY_NAME[name]
    fixed = {key: value for key, value in tokens.items() if value != "*"}
    subject(name, **{key: fixed.get(key, "_") for key in row.tokens})  # refuses what is not a name
    return row.pattern.format(**{key: fixed.get(key, "*") for key in row.tokens})
