"""Traces: OpenTelemetry spans over every hop of the line, by OTLP where an endpoint is set, else into the TRACES stream.

Parent and child travel as `traceparent` in message headers. Work done for many records at once is a span of its own trace,
linked to each member; each member's trace gets a span of the same time, linked back.

Only the API is imported here, so that the client and the CLI stay light; the SDK comes with `start`. Before `start` every
function works and makes nothing: spans do not record and traceparents are empty.
"""

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nexus_bus.errors import Refused

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from nexus_bus.spans import Publisher, SpanQueue

Value = str | int | float | bool

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
NAME = "nexus_bus"

_EMPTY = Context()
_W3C = TraceContextTextMapPropagator()
_tracer: trace.Tracer = trace.NoOpTracer()


class Telemetry:
    """The running exporter of a process."""

    def __init__(self, provider: "TracerProvider", queue: "SpanQueue | None") -> None:
        """Use `start`."""
        self._provider, self._queue = provider, queue

    @property
    def dropped(self) -> int:
        """Spans that could not be kept so far: the queue was full, or the bus refused them. 0 by OTLP, which counts itself."""
        return self._queue.dropped if self._queue is not None else 0

    async def flush(self) -> None:
        """Send what has ended so far."""
        if self._queue is not None:
            await self._queue.flush()
        else:
            await asyncio.to_thread(self._provider.force_flush)

    async def stop(self) -> None:
        """Send the rest, within a few seconds, and end. Spans that end later are not kept."""
        global _tracer  # noqa: PLW0603 - one tracer per process, as one process plays one role
        _tracer = trace.NoOpTracer()
        if self._queue is not None:
            await self._queue.stop()
        await asyncio.to_thread(self._provider.shutdown)


def start(role: str, worker: str, bus: "Publisher | None" = None, *, ratio: float = 1.0) -> Telemetry:
    """Trace this process, keeping the share `ratio` of the traces that begin here.

    With OTEL_EXPORTER_OTLP_ENDPOINT set spans go there; else through `bus` to the TRACES stream, on the running loop; with
    neither they only carry ids from hop to hop.

    Raises:
        Refused: an OTLP endpoint is set and its exporter is not installed.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from nexus_bus import spans

    global _tracer  # noqa: PLW0603 - one tracer per process, as one process plays one role
    resource = Resource.create({"service.name": f"nexus-{role}", "service.instance.id": worker})
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(ratio)))
    queue: spans.SpanQueue | None = None
    if os.environ.get(ENDPOINT):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise Refused(f"{ENDPOINT} is set, but its exporter is missing: pip install 'nexus-bus[otlp]'") from error
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    elif bus is not None:
        queue = spans.SpanQueue(bus, role, worker)
        queue.start()
        provider.add_span_processor(queue)
    _tracer = provider.get_tracer(NAME)
    return Telemetry(provider, queue)


def tracer() -> trace.Tracer:
    """The tracer everything of ours uses."""
    return _tracer


@contextmanager
def span(
    name: str, *, root: bool = False, parent: str = "", links: Iterable[Link | None] = (), **attributes: Value | None
) -> Iterator[trace.Span]:
    """A span around a piece of work; an exception that passes through is its error.

    Args:
        name: `<part>.<what>`.
        root: begin a new trace, whatever is current.
        parent: a `traceparent` to go under instead of the current span.
        links: other spans it belongs with, see `link_from`.
        attributes: numbers and short strings; None is left out.
    """
    context = _EMPTY if root else context_from(parent) if parent else None
    with _tracer.start_as_current_span(
        name, context=context, links=[link for link in links if link is not None], attributes=_present(attributes)
    ) as current:
        yield current


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    *,
    parent: str = "",
    attributes: Mapping[str, Value | None] | None = None,
    links: Iterable[Link | None] = (),
) -> str:
    """A span whose times were measured elsewhere: a queue wait, work of another thread. Times are unix nanoseconds.

    Without `parent` it begins a new trace. A clock that ran backwards between two hosts gives a span of no length.

    Returns:
        Its traceparent, for further spans below it and for links to it.
    """
    made = _tracer.start_span(
        name,
        context=context_from(parent),
        start_time=start_ns,
        attributes=_present(attributes or {}),
        links=[link for link in links if link is not None],
    )
    made.end(max(start_ns, end_ns))
    return _traceparent(trace.set_span_in_context(made, _EMPTY))


def context_from(traceparent: str) -> Context:
    """The context a `traceparent` names; an empty or malformed one gives an empty context, which begins a new trace."""
    return _W3C.extract({"traceparent": traceparent}, _EMPTY) if traceparent else _EMPTY


def link_from(traceparent: str) -> Link | None:
    """A link to the span a `traceparent` names, or None if it names none."""
    context = trace.get_current_span(context_from(traceparent)).get_span_context()
    return Link(context) if context.is_valid else None


def current_traceparent() -> str:
    """`traceparent` of the current span, or an empty string."""
    return _traceparent(None)


def _traceparent(context: Context | None) -> str:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return carrier.get("traceparent", "")


def _present(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {key: value for key, value in attributes.items() if value is not None}
