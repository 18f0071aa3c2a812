"""Core request and reply: environment sessions, orders to hosts. Errors cross as code and text, never as a traceback."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from opentelemetry import context as otel
from opentelemetry.propagate import extract

from nexus_bus.bus import headers
from nexus_bus.bus.codec import decode, encode
from nexus_bus.errors import NexusError, Unavailable, from_code
from schemas.subjects import SubjectEntry, parse

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus


@dataclass(frozen=True)
class Incoming:
    """Where a request came on."""

    subject: str
    tokens: dict[str, str]
    headers: dict[str, str]


RequestHandler = Callable[[Any, Incoming], Awaitable[Any]]


class Service:
    """A served subject."""

    def __init__(self, bus: "Bus", row: SubjectEntry, handler: RequestHandler) -> None:
        """Use `Bus.serve`."""
        self._bus, self._row, self._handler = bus, row, handler
        self._subscription: Any = None

    async def start(self, on: str, queue: str) -> None:
        """Begin to answer."""
        self._subscription = await self._bus.client.subscribe(
            on, queue=queue, cb=self._on, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def stop(self) -> None:
        """Answer no more."""
        try:
            await self._subscription.unsubscribe()
        except NatsError:
            self._bus.log.debug("unsubscribe while away", subject=self._row.name)

    async def _on(self, msg: Any) -> None:
        self._bus.spawn(self._answer(msg))  # callbacks run one after another; a slow request must not hold up the next

    async def _answer(self, msg: Any) -> None:
        given = dict(msg.headers or {})
        token = otel.attach(extract(given))
        try:
            payload, said = await self._reply(msg, given)
        finally:
            otel.detach(token)
        if msg.reply:
            try:
                await self._bus.client.publish(msg.reply, payload, headers=said)
            except NatsError as error:
                self._bus.log.warning("an answer was not sent", subject=msg.subject, error=repr(error))

    async def _reply(self, msg: Any, given: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        said = headers.build(self._row, self._bus.name)
        try:
            _, tokens = parse(msg.subject)
            request = decode(self._row, msg.data, given.get(headers.CONTENT_TYPE))
            answer = await self._handler(request, Incoming(msg.subject, tokens, given))
            return encode(self._row, answer, reply=True), said
        except NexusError as error:
            code, text = error.code, str(error)
        except Exception:  # a fault of ours: the asker gets an id, the log all of it
            error_id = uuid.uuid4().hex[:12]
            self._bus.log.exception("request failed", error_id=error_id, subject=msg.subject)
            code, text = "unavailable", f"internal error {error_id}"
        return b"", said | {headers.ERROR_CODE: code, headers.ERROR: " ".join(text.split())}


async def serve(bus: "Bus", row: SubjectEntry, handler: RequestHandler, queue: str, on: str) -> Service:
    """Start serving."""
    service = Service(bus, row, handler)
    await service.start(on, queue)
    return service


async def request(bus: "Bus", row: SubjectEntry, on: str, message: Any, timeout: float) -> Any:
    """Ask and decode the answer, or raise what the other side meant."""
    try:
        reply = await bus.client.request(on, encode(row, message), timeout=timeout, headers=headers.build(row, bus.name))
    except NoRespondersError as error:
        raise Unavailable(f"{on}: nobody serves it right now") from error
    except (NatsError, TimeoutError, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError):
            raise
        raise Unavailable(f"{on}: no answer within {timeout:g} s ({error!r})") from error
    code = headers.get(reply, headers.ERROR_CODE)
    if code:
        raise from_code(code, headers.get(reply, headers.ERROR))
    return decode(row, reply.data, headers.get(reply, headers.CONTENT_TYPE), reply=True)
