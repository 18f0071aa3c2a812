"""One message as a consumer gets it, with the ways to answer it, and holding it while work goes on."""

import asyncio
import re
import time
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from nexus_bus import faults
from nexus_bus.bus import headers as wire
from nexus_bus.bus.codec import decode
from nexus_bus.bus.dead import bury
from nexus_bus.errors import BadMessage, Refused, Unavailable
from schemas.base import NAME_PATTERN, BlobRef
from schemas.subjects import SubjectEntry, parse

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

NAME = re.compile(NAME_PATTERN)
INBOX = re.compile(r"_INBOX(\.[A-Za-z0-9_-]{1,64}){1,4}")
ACK_S = 15.0  # an acknowledgement is repeated for this long: a restarting server is back by then
ANSWER_S = 1.0
ELECTION_S = 5.0  # of a consumer in a cluster: meanwhile nobody hears an acknowledgement, and what it delivered still counts


class Delivery:
    """A message of a stream. Exactly one of `ack`, `nak`, `reject` ends it."""

    def __init__(self, bus: "Bus", message: Msg, ack_wait: float) -> None:
        """Made by a Puller."""
        meta = message.metadata
        self._bus = bus
        self._msg = message
        self._decoded: Any = None
        self._ref: BlobRef | None = None
        self._lost = ""  # why the payload cannot be had, ever
        self.ack_wait = ack_wait
        self.settled = False
        self.raw = message.data  # as it lies in the stream: the payload, or a reference to it
        self.payload = message.data
        self.subject = message.subject
        self.headers: dict[str, str] = dict(message.headers or {})
        self.row: SubjectEntry
        self.tokens: dict[str, str]
        self.row, self.tokens = parse(message.subject)
        self.stream: str = meta.stream
        self.seq: int = meta.sequence.stream
        self.num_delivered: int = meta.num_delivered
        self.published_ns = int(meta.timestamp.timestamp() * 1e9)  # when the stream took it, unix time
        self.received = time.monotonic()  # when it came here

    @property
    def tenant(self) -> str:
        """Who it belongs to, by the subject."""
        return self.tokens.get("tenant", "")

    @property
    def msg_id(self) -> str:
        """Its idempotency key."""
        return self.headers.get(wire.MSG_ID, "") or f"{self.stream}-{self.seq}"

    @property
    def named(self) -> bool:
        """Whether the subject's tokens are names; a subject made by hand may hold anything, and belongs to nobody."""
        return all(name == "_" or NAME.match(name) for name in self.tokens.values())

    @property
    def inbox(self) -> str:
        """Where the asker wants the answer, if that is an inbox: with any other subject a tenant would speak as ourselves."""
        given = self.headers.get(wire.REPLY_TO, "")
        return given if INBOX.fullmatch(given) else ""

    @property
    def sent(self) -> float:
        """When the sender sent it, unix time by its own clock; if it does not say, when the stream took it."""
        try:
            return datetime.fromisoformat(self.headers.get(wire.TIME, "")).timestamp()
        except (ValueError, OverflowError):
            return self.published_ns / 1e9

    async def load(self) -> None:
        """Fetch the payload if it travels by the object store.

        Raises:
            Unavailable: it cannot be had right now. If it cannot be had ever, `decode` says so.
        """
        if wire.BLOB not in self.headers:
            return
        try:
            self._ref = msgspec.json.decode(self.raw, type=BlobRef)
            self.payload = await self._bus.payloads.get(self._ref)
        except (Refused, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._lost = f"{self.row.name}: the payload in the object store cannot be read: {error}"

    def decode(self) -> Any:
        """The message in its type. Raises BadMessage naming the field."""
        if self._decoded is None:
            if self._lost:
                raise BadMessage(self._lost)
            if not self.named:
                raise BadMessage(f"{self.row.name}: the subject {self.subject!r} holds what is not a name")
            message = decode(self.row, self.payload, self.headers.get(wire.CONTENT_TYPE))
            for token in self.tokens.keys() & {"tenant", "job"}:
                said = getattr(message, token, None)
                if isinstance(said, str) and said != self.tokens[token]:
                    raise BadMessage(f"{self.row.name}: {token} is {said!r}, but its subject says {self.tokens[token]!r}")
            self._decoded = message
        return self._decoded

    @property
    def message(self) -> Any:
        """The decoded message."""
        return self.decode()

    async def ack(self) -> None:
        """Acknowledge, and wait until the server knows it.

        Raises:
            Unavailable: the server did not say so in time, or forgot in a crash that it had delivered this; it will come again.
        """
        ends, unanswered = time.monotonic() + ACK_S, 0
        while unanswered < 2 and time.monotonic() < ends:
            try:
                await self._bus.client.request(self._msg.reply, b"+ACK", timeout=ANSWER_S)
                break
            except (NatsError, TimeoutError) as error:
                # A repeated acknowledgement is met with silence. A work queue has dropped what was acknowledged: look there.
                if not await self._stored():
                    break
                if isinstance(error, NoRespondersError) and time.monotonic() < ends - ACK_S + ELECTION_S:
                    await asyncio.sleep(0.1)
                    continue
                unanswered += 1
        else:
            raise Unavailable(f"acknowledgement of {self.msg_id} not confirmed; it will be delivered again")
        self.settled = True
        faults.at("after-ack", self.row.name)
        if self._ref is not None and self.row.delivery == "work":
            self._bus.spawn(self._bus.payloads.discard(self._ref))

    async def nak(self, delay: float = 0.0) -> None:
        """Hand it back, to be delivered again after `delay` seconds."""
        self.settled = True
        await self._answer(b"-NAK" if delay <= 0 else b'-NAK {"delay": %d}' % int(delay * 1e9))

    async def in_progress(self) -> None:
        """Keep it from being redelivered for another `ack_wait` seconds."""
        if not self.settled:
            await self._answer(b"+WPI")

    async def reject(self, reason: str) -> None:
        """To the dead letters, then never again. The letter is stored first: nothing is lost in between."""
        await bury(self._bus, self, reason)
        self.settled = True
        await self._answer(b"+TERM")

    async def _stored(self) -> bool:
        answer = await self._bus.ask(f"$JS.API.STREAM.MSG.GET.{self.stream}", b'{"seq": %d}' % self.seq)
        return b'"err_code":10037' not in answer.data  # no message found

    async def _answer(self, answer: bytes) -> None:
        """An answer that does not reach the server only means a redelivery; the connection comes back by itself."""
        try:
            await self._bus.client.publish(self._msg.reply, answer)
        except NatsError as error:
            self._bus.log.warning("an answer did not reach the server", msg_id=self.msg_id, error=repr(error))


class Hold:
    """Keeps deliveries from being redelivered while somebody works on them; a context manager."""

    def __init__(self, deliveries: Iterable[Delivery]) -> None:
        """Holding starts with `with`."""
        self._held = list(deliveries)
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        """Start; must be called on the event loop."""
        if self._held:
            self._task = asyncio.get_running_loop().create_task(self._keep(min(d.ack_wait for d in self._held) / 3))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; what is not settled comes again after its ack_wait."""
        if self._task is not None:
            self._task.cancel()

    async def _keep(self, every: float) -> None:
        while held := [delivery for delivery in self._held if not delivery.settled]:
            await asyncio.sleep(every)
            for delivery in held:
                await delivery.in_progress()
