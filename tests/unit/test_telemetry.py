"""Traces and logs: spans keep their family over processes, leave in batches, and are never lost in silence."""

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import structlog

from nexus_bus import logs, telemetry
from nexus_bus.errors import Refused, Unavailable
from nexus_bus.spans import BATCH, DROPPED, SpanQueue
from schemas.control import Span, Spans


class Recorder:
    """A bus that keeps what is published, or refuses it."""

    def __init__(self) -> None:
        self.messages: list[Spans] = []
        self.ids: list[str] = []
        self.workers: set[str] = set()
        self.away = False

    async def publish(self, name: str, message: Any, *, msg_id: str, deadline: float = 1.0, worker: str) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("the bus is away")
        assert name == "trace"
        assert deadline > 0
        self.messages.append(message)
        self.ids.append(msg_id)
        self.workers.add(worker)

    def spans(self) -> dict[str, Span]:
        return {span.name: span for message in self.messages for span in message.spans}


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    """structlog as it comes, whatever was set up before, and as it was before, afterwards."""
    kept = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**kept)


@pytest.fixture
def bus() -> Recorder:
    return Recorder()


@pytest.fixture
async def traces(bus: Recorder, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[telemetry.Telemetry]:
    monkeypatch.delenv(telemetry.ENDPOINT, raising=False)
    traces = telemetry.start("rollout", "rollout-0", bus)
    yield traces
    await traces.stop()


async def test_spans_reach_the_stream_with_their_parents(bus: Recorder, traces: telemetry.Telemetry) -> None:
    with telemetry.span("rollout.episode", tenant="acme", job=None), telemetry.span("environment.step", steps=3):
        pass
    await traces.flush()
    outer, inner = bus.spans()["rollout.episode"], bus.spans()["environment.step"]
    assert inner.parent_id == outer.span_id
    assert inner.trace_id == outer.trace_id
    assert outer.parent_id == ""
    assert (outer.service, outer.worker, outer.attributes) == ("rollout", "rollout-0", {"tenant": "acme"})
    assert inner.attributes == {"steps": 3}
    assert inner.end_ns >= inner.start_ns > 0
    assert bus.workers == {"rollout-0"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(bus.messages[0]), type=Spans) == bus.messages[0]


async def test_a_traceparent_carries_the_family_to_another_process(bus: Recorder, traces: telemetry.Telemetry) -> None:
    with telemetry.span("here.asks"):
        carried = telemetry.current_traceparent()
    with telemetry.span("there.answers", parent=carried):
        pass
    now = time.time_ns()
    below = telemetry.record_span("there.queue", now - 10**6, now, parent=carried, attributes={"group": 4, "none": None})
    telemetry.record_span("there.below", now, now + 5, parent=below)
    await traces.flush()
    spans = bus.spans()
    assert {span.trace_id for span in spans.values()} == {spans["here.asks"].trace_id}
    assert spans["there.answers"].parent_id == spans["there.queue"].parent_id == spans["here.asks"].span_id
    assert spans["there.below"].parent_id == spans["there.queue"].span_id
    assert spans["there.queue"].end_ns - spans["there.queue"].start_ns == 10**6
    assert spans["there.queue"].attributes == {"group": 4}


async def test_a_root_begins_a_trace_and_links_name_its_relatives(bus: Recorder, traces: telemetry.Telemetry) -> None:
    with telemetry.span("job.trace"):
        job = telemetry.current_traceparent()
        with telemetry.span("rollout.episode", root=True, links=[telemetry.link_from(job), telemetry.link_from("")]):
            pass
        telemetry.record_span("inference.group", 10, 20, links=[telemetry.link_from(job)])
    await traces.flush()
    spans = bus.spans()
    link = (spans["job.trace"].trace_id, spans["job.trace"].span_id)
    assert spans["rollout.episode"].links == spans["inference.group"].links == [link]
    assert len({span.trace_id for span in spans.values()}) == 3


@pytest.mark.parametrize("text", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_traceparent_is_none(text: str) -> None:
    assert telemetry.link_from(text) is None


async def test_a_clock_that_ran_backwards_gives_no_negative_time(bus: Recorder, traces: telemetry.Telemetry) -> None:
    telemetry.record_span("inference.queue", 2000, 1000)
    await traces.flush()
    assert bus.spans()["inference.queue"].end_ns == 2000


async def test_an_exception_is_the_spans_error(bus: Recorder, traces: telemetry.Telemetry) -> None:
    with pytest.raises(Unavailable), telemetry.span("env.open"):
        raise Unavailable("nobody serves it")
    await traces.flush()
    span = bus.spans()["env.open"]
    assert span.status == "error"
    assert "nobody serves it" in str(span.attributes["error"])


async def test_spans_end_on_any_thread_and_leave_in_batches(bus: Recorder, traces: telemetry.Telemetry) -> None:
    def work() -> None:
        for _ in range(BATCH // 2 + 1):
            telemetry.record_span("training.step", 1, 2)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await traces.flush()
    assert sum(len(message.spans) for message in bus.messages) == BATCH + 2
    assert max(len(message.spans) for message in bus.messages) <= BATCH
    assert len(set(bus.ids)) == len(bus.ids)


async def test_what_has_ended_leaves_without_being_asked(bus: Recorder, traces: telemetry.Telemetry) -> None:
    telemetry.record_span("training.step", 1, 2)
    async with asyncio.timeout(20):
        while not bus.messages:
            await asyncio.sleep(0.01)


async def test_stopping_sends_the_rest(bus: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(telemetry.ENDPOINT, raising=False)
    traces = telemetry.start("rollout", "rollout-0", bus)
    telemetry.record_span("training.step", 1, 2)
    await traces.stop()
    assert list(bus.spans()) == ["training.step"]
    assert telemetry.record_span("too.late", 1, 2) == ""
    assert traces.dropped == 0


async def test_spans_the_bus_does_not_take_are_counted_and_said(bus: Recorder, traces: telemetry.Telemetry) -> None:
    bus.away = True
    telemetry.record_span("lost", 1, 2)
    with structlog.testing.capture_logs() as lines:
        await traces.flush()
    assert traces.dropped == 1
    assert [line["event"] for line in lines] == ["spans were not stored"]
    bus.away = False
    telemetry.record_span("kept", 1, 2)
    telemetry.record_span("kept too", 1, 2)
    await traces.flush()
    assert bus.spans()["kept"].attributes == {DROPPED: 1}
    assert bus.spans()["kept too"].attributes == {}


async def test_a_full_queue_drops_counts_and_says(bus: Recorder) -> None:
    queue = SpanQueue(bus, "rollout", "rollout-0", capacity=2)
    spans: list[Any] = [_ended() for _ in range(5)]
    for span in spans:
        queue.on_end(span)
    with structlog.testing.capture_logs() as lines:
        await queue.flush()
    assert queue.dropped == 3
    assert [line["spans"] for line in lines if line["event"] == "spans were dropped"] == [3]
    assert bus.messages[0].spans[0].attributes[DROPPED] == 3
    with structlog.testing.capture_logs() as lines:
        await queue.flush()
    assert lines == []


async def test_unsampled_traces_are_not_kept_but_still_named(bus: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(telemetry.ENDPOINT, raising=False)
    traces = telemetry.start("rollout", "rollout-0", bus, ratio=0.0)
    with telemetry.span("rollout.episode"):
        assert not int(telemetry.current_traceparent()[-2:], 16) & 1
    await traces.stop()
    assert bus.messages == []


async def test_an_endpoint_without_its_exporter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(telemetry.ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(Refused, match=r"pip install 'nexus-bus\[otlp\]'"):
        telemetry.start("rollout", "rollout-0", None)


def test_without_a_start_everything_works_and_makes_nothing() -> None:
    with telemetry.span("rollout.episode"):
        assert telemetry.current_traceparent() == ""
    assert telemetry.record_span("inference.queue", 1, 2) == ""


def test_importing_it_brings_no_sdk() -> None:
    script = "import sys, nexus_bus.telemetry; sys.exit(any(m.startswith('opentelemetry.sdk') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# Logs


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logging as it was, afterwards."""
    monkeypatch.setenv("NEXUS_LOG", "json")
    root = logging.getLogger()
    kept, level, nats = root.handlers[:], root.level, logging.getLogger("nats").level
    yield
    root.handlers[:] = kept
    root.setLevel(level)
    logging.getLogger("nats").setLevel(nats)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("quiet")
async def test_lines_name_role_worker_trace_tenant_and_job(
    traces: telemetry.Telemetry, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.start("rollout", "rollout-0", "info")
    log = logs.get_logger()
    with telemetry.span("rollout.episode"), logs.bound(tenant="acme", job="pick"):
        trace_id = telemetry.current_traceparent().split("-")[1]
        log.info("step", n=3, what=object)
        await asyncio.to_thread(log.info, "from a thread")
    log.debug("not wanted")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    for line in (first, second):
        assert (line["role"], line["worker"], line["trace_id"]) == ("rollout", "rollout-0", trace_id)
        assert (line["tenant"], line["job"], line["level"]) == ("acme", "pick", "info")
    assert (first["n"], first["what"]) == (3, "<class 'object'>")


@pytest.mark.usefixtures("quiet")
def test_lines_of_libraries_come_out_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start("rollout", "rollout-0", "info")
    logging.getLogger("some.library").warning("%d is odd", 3)
    logging.getLogger("asyncio").error("task failed", exc_info=ValueError("inside"))
    logging.getLogger("nats").error("a traceback per lost connection")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["event"], first["logger"], first["role"]) == ("3 is odd", "some.library", "rollout")
    assert "ValueError: inside" in second["exception"]


def _ended() -> Any:
    from opentelemetry.sdk.trace import TracerProvider

    span = TracerProvider().get_tracer("test").start_span("one")
    span.end()
    return span
