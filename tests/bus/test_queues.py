"""Fair shares: a consumer per tenant served in rounds, back pressure per tenant; memory streams, large payloads."""

import asyncio
import dataclasses
import os
import time
from typing import Any

import pytest

from nexus_bus.bus import (
    Bus,
    Delivery,
    Durable,
    Puller,
    Rounds,
    ensure_durable,
    ensure_job,
    ensure_tenant,
    inference_durable,
    remove_job,
    training_durable,
)
from nexus_bus.errors import BadMessage, Unavailable
from schemas.base import Image, Tensor
from schemas.control import DeadLetter
from schemas.environment import Observation
from schemas.inference import InferenceRequest
from schemas.training import TrainingBatch, TrainingSample


def ask(number: int) -> InferenceRequest:
    state = Tensor(dtype="float32", shape=(1,), data=bytes(4))
    return InferenceRequest(
        id=str(number), job="pick", policy="pick@0", observation=Observation(images={}, state=state, instruction="")
    )


def batch(number: int, pixels: bytes) -> TrainingBatch:
    state = Tensor(dtype="float32", shape=(1,), data=bytes(4))
    image = Image(encoding="raw", shape=(1, 1, 3), data=pixels)
    sample = TrainingSample(
        observation=Observation(images={"top": image}, state=state, instruction="push"), actions=state, action_is_pad=state
    )
    return TrainingBatch(id=f"pick/{number}", tenant="acme", job="pick", batch=number, samples=[sample])


async def ask_many(bus: Bus, tenant: str, count: int) -> None:
    await asyncio.gather(*(bus.publish("infer.request", ask(n), msg_id=f"{tenant}/{n}", tenant=tenant) for n in range(count)))


async def test_a_tenant_that_floods_delays_nobody_else(bus: Bus, eventually: Any) -> None:
    rounds, pullers = Rounds(), {}
    for tenant in ("loud", "quiet"):
        await ensure_tenant(bus, tenant)
        pullers[tenant] = await bus.pull(inference_durable(tenant), batch=32)
        rounds.add(tenant, pullers[tenant])
    await ask_many(bus, "loud", 600)
    await ask_many(bus, "quiet", 20)
    await eventually(lambda: pullers["quiet"].waiting >= 20)
    served: list[str] = []
    while served.count("quiet") < 20:
        for delivery in await rounds.take(8, wait=30):
            served.append(delivery.tenant)
            await delivery.ack()
    assert served.count("loud") < 100  # on a shared consumer all 600 would have come first
    await rounds.stop()


async def test_weights_share_out_the_rounds(bus: Bus, eventually: Any) -> None:
    rounds = Rounds()
    pullers = {}
    for tenant, weight in (("gold", 3), ("iron", 1)):
        pullers[tenant] = await bus.pull(inference_durable(tenant), batch=64)
        rounds.add(tenant, pullers[tenant], weight)
        await ask_many(bus, tenant, 60)
    await eventually(lambda: all(puller.waiting >= 40 for puller in pullers.values()))
    taken = [delivery.tenant for delivery in await rounds.take(40, wait=1)]
    assert (taken.count("gold"), taken.count("iron")) == (30, 10)
    await rounds.stop()


async def test_a_key_may_be_removed_and_added_while_rounds_go_on(bus: Bus) -> None:
    rounds = Rounds()
    assert await rounds.take(4, wait=0.05) == []
    for tenant in ("a1", "b1"):
        rounds.add(tenant, await bus.pull(inference_durable(tenant)))
    waiting = asyncio.create_task(rounds.take(4, wait=30))
    await ask_many(bus, "b1", 1)
    (delivery,) = await waiting
    await delivery.ack()
    gone = rounds.remove("a1")
    assert gone is not None
    await gone.stop()
    assert rounds.remove("a1") is None
    await ask_many(bus, "b1", 2)
    assert await rounds.take(4, wait=30)
    await rounds.stop()


async def test_a_full_queue_refuses_that_tenant_alone_and_takes_more_when_there_is_room(bus: Bus) -> None:
    config = (await bus.js.stream_info("INFERENCE")).config
    config.max_msgs_per_subject = 5
    await bus.js.update_stream(config)
    await ask_many(bus, "loud", 5)
    with pytest.raises(Unavailable, match="the queue is full"):
        await bus.publish("infer.request", ask(6), msg_id="loud/6", deadline=3.0, tenant="loud")
    await bus.publish("infer.request", ask(1), msg_id="quiet/1", deadline=30, tenant="quiet")
    waiting = asyncio.create_task(bus.publish("infer.request", ask(7), msg_id="loud/7", tenant="loud"))
    puller = await bus.pull(inference_durable("loud"), batch=1)
    (delivery,) = await puller.get(1, wait=30)
    await delivery.ack()
    await asyncio.wait_for(waiting, 30)
    await puller.stop()


async def test_the_inference_queue_comes_back_after_a_restart(bus: Bus, crash: Any) -> None:
    puller = await bus.pull(inference_durable("acme"))
    crash.kill()
    crash.restart()
    await ask_many(bus, "acme", 3)  # its stream was in memory, and so was its consumer
    got = 0
    ends = time.monotonic() + 60
    while got < 3 and time.monotonic() < ends:
        for delivery in await puller.get(8, wait=0.5):
            await delivery.ack()
            got += 1
    assert got == 3
    await puller.stop()


async def test_a_large_payload_travels_by_the_object_store_and_leaves_it(bus: Bus, held: Any, eventually: Any) -> None:
    await ensure_job(bus, "acme", "pick")
    puller = await bus.pull(training_durable("acme", "pick"))
    sent = [batch(n, os.urandom(size)) for n, size in enumerate((100, 3 << 20, 200, 700_000))]
    for message in sent:
        await bus.publish("train.batch", message, msg_id=message.id, tenant="acme", job="pick")
    got = []
    while len(got) < len(sent):
        for delivery in await puller.get(8, wait=30):
            got.append(delivery)
    assert [delivery.message for delivery in got] == sent
    assert await held("OBJ_payloads") > 0
    await asyncio.gather(*(delivery.ack() for delivery in got))

    async def forgotten() -> bool:
        return await held("OBJ_payloads") == 0

    await eventually(forgotten)
    await puller.stop()


async def test_a_payload_that_is_gone_makes_its_message_unreadable_and_nothing_else(bus: Bus) -> None:
    puller = await bus.pull(training_durable("acme", "pick"), batch=1)
    big = await bus.pull(training_durable("acme", "other"), batch=1)
    message = batch(0, os.urandom(600_000))
    await bus.publish("train.batch", message, msg_id="lost", tenant="acme", job="pick")
    await bus.js.purge_stream("OBJ_payloads")
    (delivery,) = await puller.get(1, wait=30)
    with pytest.raises(BadMessage, match="the payload in the object store cannot be read"):
        delivery.decode()
    await delivery.reject("its payload is gone")
    (letter,) = [item.message async for item in bus.tail("dead", follow=False)]
    assert isinstance(letter, DeadLetter)
    await puller.stop()
    await big.stop()


async def test_removing_a_job_takes_its_queue_and_consumer_along(bus: Bus, held: Any) -> None:
    await ensure_job(bus, "acme", "pick")
    await bus.publish("train.batch", batch(0, b"123"), msg_id="b0", tenant="acme", job="pick")
    await remove_job(bus, "acme", "pick")
    await remove_job(bus, "acme", "pick")
    assert await held("TRAINING") == 0
    assert (await bus.depths())["TRAINING"] == {}


async def test_held_deliveries_are_not_redelivered(bus: Bus, put: Any) -> None:
    durable = Durable("JOBS", "test", ("job.cancel.*",), ack_wait=4.0)
    await put("a", "b")
    puller = await bus.pull(durable)
    held = []
    while len(held) < 2:
        held += await puller.get(2, wait=30)
    with bus.hold(held):
        assert await puller.get(1, wait=1.5 * durable.ack_wait) == []
        await held[0].ack()
    again = await puller.get(1, wait=30)
    assert [delivery.message.job for delivery in again] == [held[1].message.job]
    await again[0].ack()
    await puller.stop()


async def test_who_reads_after_somebody_that_is_gone_gets_at_once_what_that_one_held(
    bus: Bus, server: Any, held: Any, eventually: Any
) -> None:
    patient = dataclasses.replace(training_durable("acme", "pick"), ack_wait=600.0)
    for job in ("pick", "other"):
        await ensure_job(bus, "acme", job)
    await ensure_durable(bus, patient)
    for n in range(4):
        for job in ("pick", "other"):
            await bus.publish("train.batch", batch(n, b"1"), msg_id=f"{job}/{n}", tenant="acme", job=job)
    before = await Bus.connect(server.url, creds=server.creds)
    first = await before.pull(patient)
    neighbour = await bus.pull(training_durable("acme", "other"))
    taken = [await take(puller, 4) for puller in (first, neighbour)]
    await taken[0][0].ack()
    await before.close()

    async def gone() -> bool:  # with all that it asked for
        return not (await bus.js.consumer_info(patient.stream, patient.name)).num_waiting

    await eventually(gone)
    await bus.recall(patient.stream, patient.name)
    puller = await bus.pull(patient)
    again = await take(puller, 3)
    assert [(one.msg_id, one.num_delivered) for one in again] == [(f"pick/{n}", 2) for n in (1, 2, 3)]
    await asyncio.gather(*(one.ack() for one in [*again, *taken[1]]))
    await bus.recall(patient.stream, patient.name)  # nothing is out: nothing comes, and it harms nobody
    assert await puller.get(1, wait=0.5) == await neighbour.get(1, wait=0.1) == []
    await bus.recall(patient.stream, "nobody")
    assert await held("TRAINING") == 0
    await puller.stop()
    await neighbour.stop()


async def take(puller: Puller, count: int) -> list[Delivery]:
    """So many messages."""
    taken: list[Delivery] = []
    while len(taken) < count:
        taken += await puller.get(count - len(taken), wait=10)
    return taken
