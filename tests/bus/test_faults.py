"""The eight faults of nats-py that were reproduced (specs of the bus), each against a real server that is killed or frozen."""

import asyncio
import contextlib
import hashlib
import itertools
import os
import time
from typing import Any

import pytest
from nats.errors import Error as NatsError

from nexus_bus.bus import Bus, Done, Durable, EmbeddedServer, Outcome, Retry, pull
from nexus_bus.bus.delivery import Delivery
from nexus_bus.errors import Unavailable
from schemas.base import Tensor
from schemas.control import DeadLetter
from schemas.events import Event
from schemas.inference import InferenceReply

pytestmark = pytest.mark.timeout(240)

QUEUE = Durable("JOBS", "test", ("job.cancel.*",), ack_wait=3.0, max_deliver=3)
EXPIRES_S = 30.0  # of a request; one that stalls does so until then, and no other wait takes nearly as long on a busy machine
STALL_S = EXPIRES_S - 2.0


@pytest.fixture
def long_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "EXPIRES_S", EXPIRES_S)


def event(number: int) -> Event:
    return Event(type="job.progress", tenant="acme", job="pick", time="2026-01-01T00:00:00Z", data={"number": number})


@pytest.mark.usefixtures("long_requests")
async def test_1_a_pull_does_not_stall_while_messages_wait(bus: Bus, crash: Any, put: Any, eventually: Any) -> None:
    puller = await bus.pull(QUEUE, batch=16)
    got: dict[str, float] = {}

    async def one(delivery: Delivery) -> None:
        with contextlib.suppress(Unavailable):  # of a delivery the server forgot: it comes again
            await delivery.ack()
            got[delivery.message.job] = time.monotonic()

    async def take() -> None:
        while len(got) < 300:
            await asyncio.gather(*(one(delivery) for delivery in await puller.get(16, wait=0.2)))

    taking = asyncio.create_task(take())
    for first in range(0, 300, 30):
        await put(*(f"j{n}" for n in range(first, first + 30)))
        if first == 210:  # once while messages are on their way, once while a request is open that the server then forgets
            await eventually(lambda: len(got) == 240)
        if first in (120, 210):
            crash.kill()
            crash.restart()
    await asyncio.wait_for(taking, 60)
    await puller.stop()
    assert max(b - a for a, b in itertools.pairwise(sorted(got.values()))) < STALL_S


@pytest.mark.usefixtures("long_requests")
async def test_1_a_message_that_comes_to_an_open_request_is_there_at_once(bus: Bus, put: Any) -> None:
    puller = await bus.pull(QUEUE, batch=16)
    for n in range(20):
        asking = asyncio.create_task(puller.get(1, wait=30))
        started = time.monotonic()
        await put(f"j{n}")
        (delivery,) = await asking
        assert time.monotonic() - started < STALL_S
        await delivery.ack()
    await puller.stop()


async def test_2_every_publish_ends_and_is_stored_once_over_two_kills(bus: Bus, crash: Any, held: Any) -> None:
    async def publish(n: int) -> None:
        await asyncio.sleep(n / 500)  # spread over the kills
        await bus.publish("event", event(n), msg_id=f"e{n}", tenant="acme", job="pick")

    publishing = asyncio.gather(*(publish(n) for n in range(1000)))
    for _ in range(2):
        await asyncio.sleep(0.5)
        crash.kill()
        await asyncio.sleep(0.2)
        crash.restart()
    await asyncio.wait_for(publishing, 60)
    numbers = [item.message.data["number"] async for item in bus.tail("event", follow=False)]
    assert sorted(numbers) == list(range(1000))


async def test_2_a_publish_without_a_server_fails_at_its_deadline(bus: Bus, crash: Any) -> None:
    crash.kill()
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"not stored within 0\.7 s"):
        await bus.publish("event", event(1), msg_id="late", deadline=0.7, tenant="acme", job="pick")
    assert 0.5 < time.monotonic() - started < 10


async def test_3_a_late_pong_does_not_end_the_reading(bus: Bus, crash: Any) -> None:
    crash.freeze()
    with pytest.raises(Exception, match="flush timeout"):
        await bus.client.flush(timeout=0.2)  # type: ignore[arg-type]
    crash.thaw()
    await bus.client.flush(timeout=30)
    assert bus.client.alive
    assert bus.client.stats["reconnects"] == 0
    await bus.publish("event", event(1), msg_id="after", deadline=30, tenant="acme", job="pick")


async def test_3_a_dead_read_loop_is_a_disconnect(bus: Bus) -> None:
    task = bus.client._reading_task
    assert task is not None
    task.cancel()
    await bus.publish("event", event(1), msg_id="after", deadline=30, tenant="acme", job="pick")
    assert bus.client.alive


async def test_3_silence_is_a_disconnect_even_with_bytes_unsent(bus: Bus, crash: Any, eventually: Any) -> None:
    crash.freeze()
    flood = [bus.client.publish("nobody.listens", b"x" * 500_000) for _ in range(60)]
    flooding = asyncio.gather(*flood, return_exceptions=True)
    await eventually(lambda: not bus.up.is_set())
    crash.thaw()
    await eventually(bus.up.is_set)
    await bus.publish("event", event(1), msg_id="after", deadline=30, tenant="acme", job="pick")
    flooding.cancel()


async def test_3_who_closes_while_the_connection_comes_back_is_not_called_off_itself(bus: Bus) -> None:
    """Both wait for the same socket to be closed, and the stock client cancels the one of them."""
    await bus.client._process_op_err(NatsError("nats: cut off"))
    await asyncio.sleep(0)  # by now it waits until the old socket is closed
    await bus.client.close()
    assert bus.client.is_closed
    assert not bus.up.is_set()


async def test_4_an_error_line_reopens_instead_of_closing_for_ever(bus: Bus, eventually: Any) -> None:
    before = bus.client.stats["reconnects"]
    assert bus.client._transport is not None
    bus.client._transport.write(b"BOGUS\r\n")  # the server: -ERR 'Unknown Protocol Operation', and hangs up
    await eventually(lambda: bus.client.stats["reconnects"] > before)
    for reason in ("'maximum connections exceeded'", "'authorization violation'", "'account authentication expired'"):
        await eventually(bus.up.is_set)
        before = bus.client.stats["reconnects"]
        await bus.client._process_err(reason)
        await eventually(lambda before=before: bus.client.stats["reconnects"] > before)
    await bus.publish("event", event(1), msg_id="after", deadline=30, tenant="acme", job="pick")
    assert not bus.client.is_closed


async def test_5_blobs_are_fast_and_the_stock_client_reads_them(bus: Bus) -> None:
    data = os.urandom(16 << 20)
    ref = await bus.blobs.put(data, media_type="application/x-safetensors")
    stock = await bus.js.object_store("blobs")
    started = time.monotonic()
    theirs = (await stock.get(ref.sha256)).data
    stock_s = time.monotonic() - started
    assert hashlib.sha256(theirs).hexdigest() == ref.sha256 == hashlib.sha256(data).hexdigest()
    ours_s = list[float]()
    for _ in range(3):  # of which the best counts: the machine may have had something else to do
        started = time.monotonic()
        assert await bus.blobs.get(ref) == data
        ours_s.append(time.monotonic() - started)
    assert min(ours_s) < 2 * stock_s + 1.0


async def test_5_a_blob_survives_kills_while_it_is_written_and_read(bus: Bus, crash: Any) -> None:
    data = os.urandom(24 << 20)
    putting = asyncio.create_task(bus.blobs.put(data))
    await asyncio.sleep(0.05)
    crash.kill()
    crash.restart()
    ref = await asyncio.wait_for(putting, 60)
    getting = asyncio.create_task(bus.blobs.get(ref))
    await asyncio.sleep(0.05)
    crash.kill()
    crash.restart()
    assert await asyncio.wait_for(getting, 60) == data


@pytest.mark.usefixtures("long_requests")
async def test_6_stopping_an_idle_pull_takes_no_time(bus: Bus) -> None:
    puller = await bus.pull(QUEUE)
    assert await puller.get(8, wait=0.1) == []
    started = time.monotonic()
    await puller.stop()
    assert time.monotonic() - started < STALL_S


async def test_6_a_publish_that_timed_out_but_was_stored_is_stored_once(bus: Bus, crash: Any, held: Any) -> None:
    crash.freeze()
    with pytest.raises(Unavailable):
        await bus.publish("event", event(1), msg_id="same", deadline=0.5, tenant="acme", job="pick")
    crash.thaw()
    again = await bus.publish("event", event(1), msg_id="same", tenant="acme", job="pick")
    assert again.duplicate
    assert await held("EVENTS") == 1


async def test_7_a_slow_reader_loses_nothing(bus: Bus, server: EmbeddedServer, eventually: Any) -> None:
    seen: list[str] = []
    gate = asyncio.Event()

    async def slow(reply: InferenceReply, _: dict[str, str]) -> None:
        await gate.wait()
        seen.append(reply.id)

    inbox = await bus.inbox("infer.reply", slow)
    sender = await Bus.connect(server.url, name="sender")
    block = Tensor(dtype="uint8", shape=(500_000,), data=bytes(500_000))
    for n in range(280):  # 140 MB, past the stock limit of 128 MiB
        await sender.cast_to(inbox.subject, "infer.reply", InferenceReply(id=str(n), actions=block))
        if n % 20 == 0:  # or the server itself would hold more than it may
            await sender.client.flush(timeout=30)
            await bus.client.flush(timeout=30)
    await sender.client.flush(timeout=30)
    await bus.client.flush(timeout=30)
    gate.set()
    await eventually(lambda: len(seen) == 280)
    assert seen == [str(n) for n in range(280)]  # whether the socket took them at once or they had to wait for it
    await inbox.stop()
    await sender.close()


async def test_7_reconnecting_never_ends(bus: Bus, crash: Any, eventually: Any) -> None:
    bus.client.options["reconnect_time_wait"] = 0.01  # the stock client gives up after 60 attempts, without a word
    crash.kill()
    await eventually(lambda: (server := bus.client._current_server) is not None and server.reconnects > 80, within=60)
    crash.restart()
    await bus.publish("event", event(1), msg_id="after", deadline=30, tenant="acme", job="pick")


async def test_8_a_message_that_always_fails_becomes_a_dead_letter(bus: Bus, put: Any, held: Any, eventually: Any) -> None:
    attempts: list[int] = []
    told: list[str] = []
    stop = asyncio.Event()

    async def poison(delivery: Delivery) -> Outcome:
        if delivery.message.job == "good":
            return Done()
        attempts.append(delivery.num_delivered)
        return Retry(0.01, "it burns")

    async def on_dead(delivery: Delivery, reason: str) -> None:
        told.append(f"{delivery.msg_id}: {reason}")

    consuming = asyncio.create_task(bus.consume(QUEUE, poison, stop=stop, on_dead=on_dead))
    await put("bad", "good")
    await eventually(lambda: told)

    async def empty() -> bool:
        return await held("JOBS") == 0

    await eventually(empty)
    stop.set()
    await consuming
    assert attempts == [1, 2, 3]
    assert told == ["acme/bad: failed 3 times, at last: it burns"]
    (letter,) = [item.message async for item in bus.tail("dead", follow=False)]
    assert isinstance(letter, DeadLetter)
    assert (letter.stream, letter.subject, letter.deliveries) == ("JOBS", "job.cancel.acme", 3)
    assert letter.reason == "failed 3 times, at last: it burns"
    assert letter.payload == b'{"job":"bad"}'


async def test_8_a_message_that_kills_its_workers_is_buried_too(bus: Bus, put: Any, held: Any, eventually: Any) -> None:
    durable = Durable("JOBS", "test", ("job.cancel.*",), ack_wait=1.0, max_deliver=2)
    await put("killer")
    for _ in range(2):  # two workers take it and die: they never answer
        worker = await Bus.connect(bus.url, name="doomed")
        puller = await worker.pull(durable, batch=1, counted=True)  # it asks for no more: nor does it get the same again
        assert await puller.get(1, wait=30)
        await worker.client.close()
        for task in (puller._request._watch, puller._keep):
            assert task is not None
            task.cancel()
        await worker.close()
    puller = await bus.pull(durable)

    async def gone() -> bool:
        assert await puller.get(1, wait=0.1) == []
        return await held("JOBS") == 0

    await eventually(gone)
    await puller.stop()
    (letter,) = [item.message async for item in bus.tail("dead", follow=False)]
    assert letter.reason == "delivered 2 times and never answered"
