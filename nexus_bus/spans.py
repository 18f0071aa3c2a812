"""Finished spans on their way into the TRACES stream, so that `nexus trace` works with nothing else installed.

Beside the line: every role's process has one queue. It is bounded and never waits; what does not fit, or what the bus did
not take in time, is counted, logged, and said again as the attribute `dropped_spans` of the next span that leaves.
"""

import asyncio
import contextlib
import os
import threading
from collections import deque
from typing import Any, Literal, Protocol

import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode

from nexus_bus.errors import NexusError
from schemas.control import Span, Spans

CAPACITY = 20_000  # finished spans waiting to leave
BATCH = 256  # spans per message: about 80 KB
EVERY_S = 0.5
PUBLISH_S = 5.0  # a batch that is not stored by then is given up
STOP_S = 5.0

DROPPED = "dropped_spans"

_STATUS: dict[StatusCode, Literal["ok", "error", "unset"]] = {
    StatusCode.OK: "ok",
    StatusCode.ERROR: "error",
    StatusCode.UNSET: "unset",
}


class Publisher(Protocol):
    """What the queue needs of a bus."""

    async def publish(self, name: str, message: Any, *, msg_id: str, deadline: float = ..., worker: str) -> Any:
        """Store a message in its stream."""


class SpanQueue(SpanProcessor):
    """Takes spans from any thread, publishes them from the loop that started it."""

    def __init__(self, bus: Publisher, role: str, worker: str, *, capacity: int = CAPACITY) -> None:
        """Publish through `bus` under the name of this worker."""
        self._bus, self._role, self._worker, self._capacity = bus, role, worker, capacity
        self._waiting: deque[ReadableSpan] = deque()
        self._lock = threading.Lock()
        self._flushing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._run = os.urandom(4).hex()
        self._number = 0
        self._said = 0
        self._logged = 0
        self.dropped = 0

    def start(self) -> None:
        """Begin to publish, on the running loop."""
        self._task = asyncio.create_task(self._publish_regularly())

    def on_end(self, span: ReadableSpan) -> None:
        """A span ended, on whatever thread; only queue it."""
        with self._lock:
            if self._stopping.is_set() or len(self._waiting) >= self._capacity:
                self.dropped += 1
            else:
                self._waiting.append(span)

    async def flush(self) -> None:
        """Publish what waits now. A batch the bus does not take is given up and counted."""
        async with self._flushing:
            for _ in range(len(self._waiting) // BATCH + 1):
                with self._lock:
                    batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                if batch:
                    await self._send(batch)
        if self.dropped > self._logged:
            structlog.get_logger().warning("spans were dropped", spans=self.dropped - self._logged, total=self.dropped)
            self._logged = self.dropped

    async def stop(self) -> None:
        """Take no more, publish the rest within a few seconds, and say what was lost."""
        with self._lock:
            self._stopping.set()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, STOP_S)
        if self._waiting:
            structlog.get_logger().warning("spans were dropped at the end", spans=len(self._waiting))
            self.dropped += len(self._waiting)

    async def _publish_regularly(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), EVERY_S)
            await self.flush()
        await self.flush()  # what ended while the last one ran

    async def _send(self, batch: list[ReadableSpan]) -> None:
        dropped, self._number = self.dropped, self._number + 1
        spans = [self._convert(span) for span in batch]
        if dropped > self._said:
            spans[0].attributes[DROPPED] = dropped - self._said
        msg_id = f"{self._worker}/{self._run}/{self._number}"
        try:
            await self._bus.publish("trace", Spans(spans=spans), msg_id=msg_id, deadline=PUBLISH_S, worker=self._worker)
            self._said = dropped
        except NexusError as error:
            structlog.get_logger().warning("spans were not stored", spans=len(batch), error=str(error))
            self.dropped += len(batch)
            self._logged += len(batch)
        except asyncio.CancelledError:
            self.dropped += len(batch)
            raise

    def _convert(self, span: ReadableSpan) -> Span:
        context: Any = span.get_span_context()
        attributes = {k: v for k, v in (span.attributes or {}).items() if isinstance(v, str | int | float | bool)}
        if span.status.description:
            attributes["error"] = span.status.description
        return Span(
            trace_id=format(context.trace_id, "032x"),
            span_id=format(context.span_id, "016x"),
            parent_id=format(span.parent.span_id, "016x") if span.parent else "",
            name=span.name,
            service=self._role,
            worker=self._worker,
            start_ns=span.start_time or 0,
            end_ns=span.end_time or 0,
            status=_STATUS[span.status.status_code],
            attributes=attributes,
            links=[(format(link.context.trace_id, "032x"), format(link.context.span_id, "016x")) for link in span.links],
        )
