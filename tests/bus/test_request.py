"""Requests, casts and inboxes."""

import asyncio
from typing import Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from nexus_bus.bus import Bus, EmbeddedServer, Incoming
from nexus_bus.errors import BadMessage, Conflict, EnvironmentFault, NexusError, Refused, Unavailable
from schemas.control import Ack, Heartbeat, ProcessOrder
from schemas.environment import SessionCall, SessionReply
from schemas.inference import InferenceReply

ORDER = ProcessOrder(worker="w", action="stop", reason="test")


async def ask(bus: Bus, order: ProcessOrder = ORDER, *, timeout: float = 30.0, **options: Any) -> Any:
    return await bus.request("host.order", order, timeout=timeout, host="h1", **options)


async def test_a_request_is_answered_with_its_tokens_and_headers(bus: Bus) -> None:
    async def handler(order: ProcessOrder, incoming: Incoming) -> Ack:
        assert incoming.subject == "host.order.h1"
        assert incoming.headers["ce-type"] == "nexus.host.order"
        return Ack(error=f"{order.worker} on {incoming.tokens['host']}")

    service = await bus.serve("host.order", handler, host="*")
    assert await ask(bus) == Ack(error="w on h1")
    await service.stop()
    with pytest.raises(Unavailable, match="nobody serves it"):
        await ask(bus)


@pytest.mark.parametrize(
    "error", [EnvironmentFault("it crashed"), Conflict("too late"), Unavailable("full"), BadMessage("x: y")]
)
async def test_an_error_is_raised_on_the_other_side_as_the_same_class(bus: Bus, error: NexusError) -> None:
    async def handler(_: ProcessOrder, __: Incoming) -> Ack:
        raise error

    await bus.serve("host.order", handler, host="h1")
    with pytest.raises(type(error), match=str(error)) as raised:
        await ask(bus)
    assert type(raised.value) is type(error)


async def test_a_bug_in_a_handler_crosses_as_an_id_and_not_as_a_traceback(bus: Bus) -> None:
    async def handler(_: ProcessOrder, __: Incoming) -> Ack:
        raise ZeroDivisionError("secret")

    await bus.serve("host.order", handler, host="h1")
    with pytest.raises(NexusError, match=r"^internal error [0-9a-f]{12} of test; see its log$"):
        await ask(bus)


async def test_an_answer_that_is_larger_than_may_be_sent_is_said_to_be(bus: Bus) -> None:
    async def handler(_: ProcessOrder, __: Incoming) -> Ack:
        return Ack(error="x" * (bus.client.max_payload + 1))

    await bus.serve("host.order", handler, host="h1")
    with pytest.raises(Refused, match=r"the answer to host\.order\.h1: larger than the \d+ bytes that may be sent"):
        await ask(bus)


async def test_a_request_that_does_not_decode_is_refused_by_name(bus: Bus) -> None:
    async def handler(_: ProcessOrder, __: Incoming) -> Ack:
        return Ack()

    await bus.serve("host.order", handler, host="h1")
    answer = await bus.client.request("host.order.h1", b'{"worker": 3}', timeout=30)
    assert answer.headers is not None
    assert answer.headers["Nexus-Error-Code"] == "bad_message"
    assert b"$.worker" in answer.data


async def test_handlers_run_side_by_side_and_no_answer_in_time_is_unavailable(bus: Bus) -> None:
    gate = asyncio.Event()
    waiting = 0

    async def handler(_: ProcessOrder, __: Incoming) -> Ack:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            gate.set()
        await gate.wait()
        return Ack()

    service = await bus.serve("host.order", handler, host="h1")
    with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
        await ask(bus, timeout=0.2)
    await asyncio.gather(*(ask(bus) for _ in range(2)))
    await service.stop()


async def test_who_gives_up_leaves_nothing_behind_and_the_late_answer_harms_nobody(bus: Bus) -> None:
    gate, late = asyncio.Event(), asyncio.Event()

    async def handler(order: ProcessOrder, _: Incoming) -> Ack:
        if order.reason == "slow":
            await gate.wait()
            late.set()
        return Ack(error=order.reason)

    await bus.serve("host.order", handler, host="h1")
    slow = ProcessOrder(worker="w", action="stop", reason="slow")
    asked = asyncio.create_task(ask(bus, slow, watch="host.order.h1"))
    await ask(bus)  # by now the first one is there, too
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not bus.client._resp_map
    gate.set()
    await late.wait()
    assert await ask(bus) == Ack(error="test")


async def test_a_queue_group_shares_and_a_handler_may_stop_its_own_service(bus: Bus, server: EmbeddedServer) -> None:
    other = await Bus.connect(server.url, name="other")
    served = {"test": 0, "other": 0}
    services: dict[str, Any] = {}

    def handler(name: str) -> Any:
        async def handle(_: ProcessOrder, __: Incoming) -> Ack:
            served[name] += 1
            if served[name] == 10:
                await services[name].stop()
            return Ack()

        return handle

    for name, connection in (("test", bus), ("other", other)):
        services[name] = await connection.serve("host.order", handler(name), queue="hosts", host="h1")
    for _ in range(20):
        await ask(bus)
    assert served == {"test": 10, "other": 10}
    await other.close()


async def test_the_trace_goes_on_on_the_other_side(bus: Bus) -> None:
    seen: list[int] = []

    async def handler(_: ProcessOrder, incoming: Incoming) -> Ack:
        assert "traceparent" in incoming.headers
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return Ack()

    await bus.serve("host.order", handler, host="h1")
    with TracerProvider().get_tracer("test").start_as_current_span("asking") as span:
        await ask(bus)
    assert seen == [span.get_span_context().trace_id]


async def test_casts_reach_subscribers_and_inboxes_and_a_bad_one_harms_nobody(bus: Bus, eventually: Any) -> None:
    beats: list[tuple[str, str]] = []
    replies: list[tuple[str, str]] = []

    async def on_beat(beat: Heartbeat, tokens: dict[str, str]) -> None:
        beats.append((beat.worker, tokens["role"]))

    async def on_reply(reply: InferenceReply, headers: dict[str, str]) -> None:
        replies.append((reply.id, headers["Content-Type"]))

    await bus.subscribe("health.beat", on_beat, role="*", worker="*")
    inbox = await bus.inbox("infer.reply", on_reply)
    beat = Heartbeat(role="trainer", worker="t1", host="h1", pid=1, state="running", busy=False, progress=0, time=0.0)
    await bus.client.publish("health.beat.trainer.t1", b"rubbish")
    await bus.cast("health.beat", beat, role="trainer", worker="t1")
    await bus.client.publish(inbox.subject, b"rubbish")
    await bus.cast_to(inbox.subject, "infer.reply", InferenceReply(id="r1"))
    await eventually(lambda: beats == [("t1", "trainer")] and replies == [("r1", "application/msgpack")])


async def test_a_cast_while_the_server_is_away_is_dropped(bus: Bus, crash: Any, eventually: Any) -> None:
    crash.kill()
    await eventually(lambda: not bus.up.is_set())
    beat = Heartbeat(role="trainer", worker="t1", host="h1", pid=1, state="running", busy=False, progress=0, time=0.0)
    await asyncio.wait_for(bus.cast("health.beat", beat, role="trainer", worker="t1"), 1)


def fault(code: int, err_code: int, description: str) -> bytes:
    """As the server says it."""
    error = {"code": code, "err_code": err_code, "description": description}
    return msgspec.json.encode({"type": "io.nats.jetstream.api.v1.stream_info_response", "error": error, "total": 0})


async def test_what_the_server_cannot_do_for_a_moment_is_asked_again(bus: Bus) -> None:
    """As while a cluster elects a leader."""
    passing = [fault(503, 10008, "JetStream system temporarily unavailable"), fault(500, 10009, "cannot handle request")]
    final = fault(404, 10059, "stream not found")
    answers = [*passing, b'{"type":"io.nats.jetstream.api.v1.stream_info_response","total":3}', final]

    async def answer(msg: Any) -> None:
        await bus.client.publish(msg.reply, answers.pop(0) if answers else passing[0])

    await bus.listen("as.the.server", answer)
    assert msgspec.json.decode((await bus.ask("as.the.server")).data)["total"] == 3
    assert (await bus.ask("as.the.server")).data == final
    with pytest.raises(Unavailable, match="JetStream system temporarily unavailable"):
        await bus.ask("as.the.server", deadline=1.0)


async def test_subjects_cannot_be_broken_out_of(bus: Bus) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        await bus.request("host.order", ORDER, host="h1.>")
    with pytest.raises(ValueError, match="is not a name"):
        bus.tail("event", tenant="acme.>")


@pytest.mark.parametrize("asked", ["application/json", "application/JSON; charset=utf-8", "application/msgpack", ""])
async def test_who_asks_in_json_is_answered_in_json(bus: Bus, asked: str) -> None:
    async def handler(call: SessionCall, __: Incoming) -> SessionReply:
        return SessionReply(state=call.state, steps=3)

    await bus.serve("env.session", handler, tenant="acme", session="s")
    body = SessionCall(op="restore", state=b"\x00\xff")
    encoder = msgspec.json if "json" in asked.lower() else msgspec.msgpack
    headers = {"Content-Type": asked} if asked else {}
    answer = await bus.client.request("env.session.acme.s", encoder.encode(body), timeout=30, headers=headers)
    assert (answer.headers or {})["Content-Type"] == f"application/{'json' if encoder is msgspec.json else 'msgpack'}"
    assert encoder.decode(answer.data) == {"state": "AP8=" if encoder is msgspec.json else b"\x00\xff", "steps": 3}
