"""Core requests: asking a worker, and answering. An error raised on one side is raised on the other, as the same class."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoRespondersError
from opentelemetry import context as otel

from nexus_bus import faults
from nexus_bus.bus import headers as wire
from nexus_bus.bus.codec import content_type, decode, encode
from nexus_bus.errors import Denied, NexusError, Refused, Unavailable, from_code
from schemas.subjects import SubjectEntry, parse

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

T = TypeVar("T")

STOP_S = 5.0
PROBE_S = 0.5  # how often a request that waits looks whether somebody still works on it


@dataclass(frozen=True)
class Incoming:
    """Where a request came in."""

    subject: str
    tokens: dict[str, str]
    headers: dict[str, str]


RequestHandler = Callable[[Any, Incoming], Awaitable[Any]]


async def request(
    bus: "Bus", row: SubjectEntry, on: str, message: Any, timeout: float, headers: dict[str, str] | None = None, watch: str = ""
) -> Any:
    """Ask and wait; see Bus.request."""
    if bus.denied and not bus.up.is_set():
        raise Denied(bus.denied)
    given = wire.build(row, bus.name, extra=headers)
    if row.producer in ("tenant", "cli") and bus.tenant is None and bus.key:
        given[wire.CALLER] = bus.key
    try:
        async with asyncio.timeout(timeout):
            await bus.up.wait()
            answer = await bus.client.ask(on, encode(row, message), given)
            msg = await (while_served(bus, answer, watch) if watch else answer)
    except MaxPayloadError as error:
        raise Refused(_too_large(bus, on)) from error
    except (NatsError, TimeoutError) as error:
        if bus.denied and not bus.up.is_set():
            raise Denied(bus.denied) from error
        raise Unavailable(f"{on}: no answer within {timeout:g} s") from error
    if wire.get(msg, wire.STATUS) == wire.NOBODY:
        raise Unavailable(f"{on}: nobody serves it right now")
    code = wire.get(msg, wire.ERROR_CODE)
    if code:
        raise from_code(code, msg.data.decode(errors="replace"))
    return decode(row, msg.data, wire.get(msg, wire.CONTENT_TYPE) or None, reply=True)


async def ask_aside(bus: "Bus", row: SubjectEntry, on: str, message: Any, answer: "asyncio.Future[T]", timeout: float) -> T:
    """Ask somebody who answers by another way, into `answer`.

    Raises:
        Refused: the question is too large to be sent.
        Unavailable: nobody is there to ask, or no longer, or no answer in time.
    """
    tasks: list[asyncio.Future[Any]] = []
    try:
        async with asyncio.timeout(timeout):
            await bus.up.wait()
            # As a request, so that the server says when nobody hears it; the reply that it waits for never comes.
            given = wire.build(row, bus.name)
            asking = asyncio.ensure_future(bus.client.request(on, encode(row, message), timeout=timeout, headers=given))
            watching = asyncio.ensure_future(while_served(bus, answer, on))
            tasks += asking, watching
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                asking.result()
            return await watching
    except NoRespondersError:
        raise Unavailable(f"{on}: nobody serves it right now") from None
    except MaxPayloadError as error:
        raise Refused(_too_large(bus, on)) from error
    except (NatsError, TimeoutError) as error:
        raise Unavailable(f"{on}: no answer within {timeout:g} s") from error
    finally:
        for task in tasks:
            task.cancel()


async def while_served(bus: "Bus", asking: Awaitable[T], watch: str) -> T:
    """What is asked, or Unavailable as soon as nobody serves `watch` any more: the server knows at once when a process dies."""
    task = asyncio.ensure_future(asking)
    try:
        while not (await asyncio.wait({task}, timeout=PROBE_S))[0]:
            if not await _served(bus, watch) and not task.done():
                raise Unavailable(f"{watch}: who served it is gone")
        return task.result()
    finally:
        task.cancel()


async def _served(bus: "Bus", on: str) -> bool:
    try:
        await bus.client.request(on, b"", timeout=PROBE_S, headers={wire.PROBE: "1"})
    except NoRespondersError:
        return False
    except (NatsError, TimeoutError):
        return True  # slow, or the bus is away: nothing is known
    return True


def _too_large(bus: "Bus", what: str) -> str:
    return f"{what}: larger than the {bus.client.max_payload} bytes that may be sent in one message"


class Service:
    """Answers requests until stopped."""

    def __init__(self, bus: "Bus", row: SubjectEntry, handler: RequestHandler) -> None:
        """Use `Bus.serve`."""
        self._bus = bus
        self._row = row
        self._handler = handler
        self._running: set[asyncio.Task[None]] = set()
        self._sub: Any = None

    async def start(self, on: str, queue: str) -> None:
        """Listen."""
        self._sub = await self._bus.listen(on, self._spawn, queue)

    async def stop(self) -> None:
        """Take no more requests, and let running handlers finish. A handler may stop its own service."""
        await self._sub.stop()
        others = self._running - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=STOP_S)
        for task in others:
            task.cancel()

    async def _spawn(self, msg: Any) -> None:
        if wire.get(msg, wire.PROBE):
            await self._bus.client.publish(msg.reply, b"")
            return
        # A task each: the client runs the callbacks of a subscription one after another, and one slow session would stop all.
        task = asyncio.create_task(self._one(msg))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _one(self, msg: Any) -> None:
        carrier: dict[str, str] = msg.headers or {}
        otel.attach(wire.TRACE.extract(carrier))  # until the end of this task
        body, headers = await self._answer(msg)
        if not msg.reply:
            return  # nobody waits for it
        try:
            try:
                await self._bus.client.publish(msg.reply, body, headers=headers)
            except MaxPayloadError:  # whoever waits is told so
                too_large = _too_large(self._bus, f"the answer to {msg.subject}").encode()
                await self._bus.client.publish(msg.reply, too_large, headers={wire.ERROR_CODE: Refused.code})
        except NatsError as error:  # the asker times out and asks again
            self._bus.log.warning("an answer did not leave", subject=msg.subject, error=repr(error))

    async def _answer(self, msg: Any) -> tuple[bytes, dict[str, str]]:
        try:
            _, tokens = parse(msg.subject)
            asked = wire.get(msg, wire.CONTENT_TYPE)
            message = decode(self._row, msg.data, asked or None)
            faults.at("before-call", self._row.name)
            reply = await self._handler(message, Incoming(msg.subject, tokens, dict(msg.headers or {})))
            faults.at("after-call", self._row.name)
            headers = wire.build(self._row, self._bus.name, extra={wire.CONTENT_TYPE: content_type(self._row, asked)})
            return encode(self._row, reply, reply=True, asked=asked), headers
        except NexusError as error:
            return str(error).encode(), {wire.ERROR_CODE: error.code}
        except Exception:  # a bug must cost one request, not the service; its traceback stays here, under an id
            error_id = uuid.uuid4().hex[:12]
            self._bus.log.exception("request failed", error_id=error_id, subject=msg.subject)
            return f"internal error {error_id} of {self._bus.name}; see its log".encode(), {wire.ERROR_CODE: NexusError.code}
