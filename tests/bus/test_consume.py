"""The one loop: outcomes, holding, draining, and what happens to the messages of a worker that died."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from nexus_bus.bus import Bus, Done, Durable, Outcome, Reject, Retry
from nexus_bus.bus.delivery import Delivery
from nexus_bus.errors import BadJob, BadMessage, EnvironmentFault, Unavailable
from schemas.subjects import BY_NAME

# A stall of two thirds of this, while something is held, is a redelivery that nobody may be blamed for.
ACK_WAIT_S = 4.0
LATER_S = 1.5 * ACK_WAIT_S
SLOW = Durable("JOBS", "test", ("job.cancel.*",), ack_wait=ACK_WAIT_S, max_deliver=3)


async def test_each_outcome_does_what_it_says(bus: Bus, put: Any, held: Any, consuming: Any, eventually: Any) -> None:
    seen: dict[str, list[int]] = {}

    async def handler(delivery: Delivery) -> Outcome:
        job = delivery.message.job
        seen.setdefault(job, []).append(delivery.num_delivered)
        first = delivery.num_delivered == 1
        match job:
            case "retry" if first:
                return Retry(0.05, "not yet")
            case "reject":
                return Reject("no such thing")
            case "refused":
                raise BadJob("head.type: unknown")
            case "fault" if first:
                raise EnvironmentFault("the simulator crashed")
            case "bug" if first:
                raise ZeroDivisionError
            case "away" if len(seen[job]) < 3:
                raise Unavailable("no worker yet")
            case _:
                return Done()

    consuming(handler, concurrency=4)
    await put("done", "retry", "reject", "refused", "fault", "bug", "away")

    async def empty() -> bool:
        return await held("JOBS") == 0

    await eventually(empty)
    assert seen == {
        "done": [1],
        "retry": [1, 2],
        "reject": [1],
        "refused": [1],
        "fault": [1, 2],
        "bug": [1, 2],
        "away": [1, 1, 1],  # what it needs was away: waited for with the message in hand, no attempt is used up
    }
    letters = {item.message.msg_id: item.message.reason async for item in bus.tail("dead", follow=False)}
    assert letters == {"acme/reject": "no such thing", "acme/refused": "head.type: unknown"}


async def test_an_undecodable_message_is_told_and_buried_at_once(bus: Bus, held: Any, consuming: Any, eventually: Any) -> None:
    told: list[tuple[str, str]] = []

    async def on_bad(delivery: Delivery, error: BadMessage) -> None:
        told.append((delivery.tenant, str(error)))

    async def never(_: Delivery) -> Outcome:
        raise AssertionError("it does not decode")

    consuming(never, on_bad=on_bad)
    await bus.publisher.send("job.cancel.acme", b'{"job": 3}', {"Nats-Msg-Id": "bad"}, 30.0)
    await eventually(lambda: told)
    assert told == [("acme", "job.cancel: Expected `str`, got `int` - at `$.job`")]

    async def buried() -> bool:
        return await held("DEAD") == 1 and await held("JOBS") == 0

    await eventually(buried)


async def test_a_message_that_lies_about_its_tenant_is_refused(bus: Bus, put: Any) -> None:
    event = b'{"type":"job.phase","tenant":"other","time":"now"}'
    await put("x")
    puller = await bus.pull(SLOW)
    (delivery,) = await puller.get(1, wait=30)
    delivery.row, delivery.tokens, delivery.payload = BY_NAME["event"], {"tenant": "acme", "job": "_"}, event
    with pytest.raises(BadMessage, match="tenant is 'other', but its subject says 'acme'"):
        delivery.decode()
    await puller.stop()


async def test_a_handler_longer_than_the_ack_wait_is_not_run_twice(put: Any, consuming: Any, eventually: Any) -> None:
    runs: list[int] = []
    finished: list[int] = []

    async def slow(delivery: Delivery) -> Outcome:
        runs.append(delivery.num_delivered)
        await asyncio.sleep(LATER_S)
        finished.append(1)
        return Done()

    consuming(slow, SLOW)
    consuming(slow, SLOW)
    await put("long")
    await eventually(lambda: finished)
    assert runs == [1]


async def test_concurrency_is_kept_and_nothing_is_hoarded(bus: Bus, put: Any, consuming: Any, eventually: Any) -> None:
    now, most = 0, 0
    gate = asyncio.Event()

    async def busy(_: Delivery) -> Outcome:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await gate.wait()
        now -= 1
        return Done()

    consuming(busy, concurrency=3)
    await put(*(f"j{n}" for n in range(10)))
    await eventually(lambda: now == 3)
    assert (await bus.depths())["JOBS"]["test"] == (7, 3)
    gate.set()

    async def empty() -> bool:
        return (await bus.depths())["JOBS"]["test"] == (0, 0)

    await eventually(empty)
    assert most == 3


async def test_stopping_finishes_what_runs_and_hands_back_the_rest(bus: Bus, put: Any, eventually: Any) -> None:
    stop, short = asyncio.Event(), asyncio.Event()
    started: list[str] = []
    finished: list[str] = []

    async def handler(delivery: Delivery) -> Outcome:
        started.append(delivery.message.job)
        await (short.wait() if delivery.message.job == "short" else asyncio.sleep(600))
        finished.append(delivery.message.job)
        return Done()

    long = Durable("JOBS", "test", ("job.cancel.*",), ack_wait=60.0)
    await put("short", "endless")
    loop = asyncio.create_task(bus.consume(long, handler, concurrency=2, stop=stop, grace=2.0))
    await eventually(lambda: sorted(started) == ["endless", "short"])
    stop.set()
    short.set()  # only now: it ends in the grace
    await asyncio.wait_for(loop, 30)
    assert finished == ["short"]
    puller = await bus.pull(long)
    (delivery,) = await puller.get(1, wait=20)  # before its ack_wait
    assert (delivery.message.job, delivery.num_delivered) == ("endless", 2)
    await delivery.ack()
    await puller.stop()


async def test_a_stopped_puller_hands_back_what_it_buffered(bus: Bus, put: Any, eventually: Any) -> None:
    long = Durable("JOBS", "test", ("job.cancel.*",), ack_wait=30.0)
    first = await bus.pull(long, batch=8)
    await put(*(f"j{n}" for n in range(8)))
    await eventually(lambda: first.waiting == 8)
    await first.stop()
    second = await bus.pull(long, batch=8)
    got: set[str] = set()
    ends = time.monotonic() + 20
    while len(got) < 8 and time.monotonic() < ends:
        for delivery in await second.get(8, wait=0.5):
            got.add(delivery.message.job)
            await delivery.ack()
    assert len(got) == 8
    await second.stop()


WORKER = f"""
import asyncio, sys
from nexus_bus.bus import Bus, Durable

async def main():
    bus = await Bus.connect(sys.argv[1], name="doomed")
    async def handler(delivery):
        print("took", flush=True)
        await asyncio.sleep(600)
    await bus.consume(Durable("JOBS", "test", ("job.cancel.*",), ack_wait={ACK_WAIT_S}), handler, stop=asyncio.Event())

asyncio.run(main())
"""


async def test_what_a_killed_worker_held_comes_again(bus: Bus, put: Any, consuming: Any, eventually: Any) -> None:
    await put("precious")
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, bus.url, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert await asyncio.wait_for(worker.stdout.readline(), 60) == b"took\n"
    got: list[int] = []

    async def handler(delivery: Delivery) -> Outcome:
        got.append(delivery.num_delivered)
        return Done()

    consuming(handler, SLOW)
    await asyncio.sleep(LATER_S)  # a living worker keeps what it holds
    assert got == []
    os.kill(worker.pid, signal.SIGKILL)
    await worker.communicate()
    await eventually(lambda: got == [2])


async def test_the_loop_goes_on_over_a_restart_of_the_server(crash: Any, put: Any, consuming: Any, eventually: Any) -> None:
    got: set[str] = set()

    async def handler(delivery: Delivery) -> Outcome:
        got.add(delivery.message.job)
        return Done()

    consuming(handler, concurrency=4)
    await put("before")
    await eventually(lambda: got == {"before"})
    crash.kill()
    await asyncio.sleep(0.3)
    crash.restart()
    await put("after")
    await eventually(lambda: got == {"before", "after"})


@pytest.mark.parametrize("tenant", ["ACME", "bücher"])
async def test_a_subject_that_holds_what_is_not_a_name_is_a_dead_letter_of_nobody(
    bus: Bus, consuming: Any, held: Any, eventually: Any, tenant: str
) -> None:
    told: list[str] = []

    async def tell(delivery: Delivery, *_: object) -> None:
        told.append(delivery.tenant)

    async def handler(_: Delivery) -> Outcome:
        raise AssertionError

    consuming(handler, on_bad=tell, on_dead=tell)
    await bus.publisher.send(f"job.cancel.{tenant}", b'{"job":"pick"}', {"Nats-Msg-Id": tenant}, 30.0)

    async def buried() -> bool:
        return await held("JOBS") == 0 and await held("DEAD") == 1

    await eventually(buried)
    assert told == []


@pytest.mark.parametrize(
    ("given", "taken"), [("_INBOX.a1.b-2", "_INBOX.a1.b-2"), ("job.report.b.pick", ""), ("_INBOX." + "x" * 5000, "")]
)
async def test_an_answer_goes_to_an_inbox_and_nowhere_else(bus: Bus, given: str, taken: str) -> None:
    headers = {"Nats-Msg-Id": "one", "Nexus-Reply-To": given}
    await bus.publisher.send("job.cancel.acme", b'{"job":"pick"}', headers, 30.0)
    puller = await bus.pull(SLOW)
    (delivery,) = await puller.get(1, wait=30.0)
    assert delivery.inbox == taken
    await puller.stop()
