"""Reading a stream in order without taking anything from it: logs, watches, listings.

An ordered reader has a consumer of its own that keeps no state worth keeping: when it is lost, or a message is missing, it is
made again from the last message seen.
"""

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from nexus_bus.bus import headers as wire
from nexus_bus.bus.codec import decode
from nexus_bus.bus.pull import Request
from nexus_bus.errors import BadMessage
from schemas.subjects import SubjectEntry, parse

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

Since = Literal["all", "new"] | datetime
BATCH = 256
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Item:
    """One message of a log."""

    message: Any
    subject: str
    tokens: dict[str, str]
    headers: dict[str, str]
    seq: int
    time: datetime  # when the stream took it, UTC


class Reader:
    """Messages of some subjects of a stream, in order, each once."""

    def __init__(self, bus: "Bus", stream: str, filters: tuple[str, ...], since: Since | Literal["last_per_subject"]) -> None:
        """Use it as an async context manager."""
        self._bus = bus
        self._stream = stream
        self._filters = filters
        self._since = since
        self._consumer = ""
        self._last = 0  # stream sequence of the last message accepted
        self._expected = 1  # consumer sequence of the next one
        self._to_come = 0  # stored messages not yet accepted, as of the last news
        self._buffer: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._request = Request(bus, stream, self._make, lambda: BATCH - len(self._buffer))
        self._request.accept = self._accept

    async def __aenter__(self) -> Self:
        """Begin reading."""
        await self._request.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End; the server forgets the consumer."""
        await self._request.stop()
        try:
            await self._bus.js.delete_consumer(self._stream, self._consumer)
        except (NatsError, TimeoutError):
            self._bus.log.debug("a reader's consumer is left to its threshold", consumer=self._consumer)

    async def stored(self) -> AsyncIterator[Any]:
        """What is stored now, and no more."""
        while self._buffer or self._to_come:
            if await self._filled(2.0):
                yield await self._next()
            else:  # what was to come may have been purged, or the consumer is lost with its server: then it is made anew
                with contextlib.suppress(NatsError, TimeoutError):
                    info = await self._bus.js.consumer_info(self._stream, self._consumer)
                    self._to_come = info.num_pending or 0

    async def all(self) -> AsyncIterator[Any]:
        """What is stored, then what comes."""
        while True:
            yield await self._next()

    async def _filled(self, wait: float | None) -> bool:
        while not self._buffer:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), wait)
            except TimeoutError:
                return False
        return True

    async def _next(self) -> Any:
        await self._filled(None)
        msg = self._buffer.popleft()
        await self._request.renew()
        return msg

    async def _make(self) -> str:
        self._consumer = uuid.uuid4().hex
        config = ConsumerConfig(
            name=self._consumer,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=60.0,
            filter_subjects=list(self._filters),
        )
        if self._last:
            config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, self._last + 1
        elif isinstance(self._since, datetime):
            config.deliver_policy = DeliverPolicy.BY_START_TIME
            config.opt_start_time = start_time(self._since)  # type: ignore[assignment]
        else:
            config.deliver_policy = DeliverPolicy(self._since)
        info = await self._bus.js.add_consumer(self._stream, config)
        self._expected, self._to_come = 1, info.num_pending or 0
        return self._consumer

    def _accept(self, msg: Any) -> None:
        meta = msg.metadata
        if meta.consumer != self._consumer:
            return  # of one that was given up
        if meta.sequence.consumer != self._expected:
            self._request.reopen()  # one is missing
            return
        self._expected += 1
        self._to_come = meta.num_pending
        if meta.sequence.stream > self._last:
            self._last = meta.sequence.stream
            self._buffer.append(msg)
            self._arrived.set()


def start_time(since: datetime) -> str:
    """As the server reads it, which counts nanoseconds in 64 bits and takes what overflows for another time."""
    aware = since if since.tzinfo is not None else since.astimezone()
    return min(max(aware, _FIRST), _LAST).astimezone(UTC).isoformat()


async def tail(bus: "Bus", row: SubjectEntry, pattern: str, since: Since, follow: bool) -> AsyncIterator[Item]:
    """Read a log stream; see Bus.tail."""
    if row.stream is None:
        raise ValueError(f"{row.name} is not kept in a stream")
    async with Reader(bus, row.stream, (pattern,), since) as reader:
        async for msg in reader.all() if follow else reader.stored():
            try:
                yield await _item(bus, row, msg)
            except BadMessage as error:
                bus.log.warning("an unreadable message in a log", subject=msg.subject, error=str(error))


async def _item(bus: "Bus", row: SubjectEntry, msg: Any) -> Item:
    headers: dict[str, str] = dict(msg.headers or {})
    data = await bus.payloads.get(headers[wire.BLOB]) if wire.BLOB in headers else msg.data
    meta = msg.metadata
    return Item(
        message=decode(row, data, headers.get(wire.CONTENT_TYPE)),
        subject=msg.subject,
        tokens=parse(msg.subject)[1],
        headers=headers,
        seq=meta.sequence.stream,
        time=meta.timestamp,
    )
