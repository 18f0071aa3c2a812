"""Rounds by device time: what is charged decides who is served, and what one key has on its way is bounded."""

from collections import Counter
from typing import Any

from nexus_bus.bus import Bus, Rounds, inference_durable
from tests.bus.test_queues import ask_many


async def test_device_time_decides_not_the_number_of_requests(bus: Bus, eventually: Any) -> None:
    rounds, costs = Rounds(), {"dear": 0.04, "cheap": 0.01}
    for tenant in costs:
        rounds.add(tenant, puller := await bus.pull(inference_durable(tenant), batch=256))
        await ask_many(bus, tenant, 250)
        await eventually(lambda puller=puller: puller.waiting >= 250)
    served: list[str] = []
    for _ in range(25):
        for delivery in await rounds.take(8, wait=30):
            served.append(delivery.tenant)
            rounds.charge(delivery, costs[delivery.tenant])
            await delivery.ack()
    late = Counter(served[40:])  # once the costs are known
    assert 3 <= late["cheap"] / late["dear"] <= 5
    await rounds.stop()


async def test_what_is_on_its_way_is_bounded_until_it_is_charged(bus: Bus) -> None:
    rounds = Rounds()
    for tenant in ("loud", "quiet"):
        rounds.add(tenant, await bus.pull(inference_durable(tenant), batch=10, counted=True))
    await ask_many(bus, "loud", 40)
    held = []
    while len(held) < 10:
        held += await rounds.take(32, wait=30)
    assert await rounds.take(32, wait=1.0) == []
    assert len(held) == 10
    await ask_many(bus, "quiet", 3)
    assert {delivery.tenant for delivery in await rounds.take(32, wait=30)} == {"quiet"}
    for delivery in held[:4]:
        rounds.charge(delivery, 0.01)
        rounds.charge(delivery)  # says nothing new
        await delivery.ack()
    more = Counter[str]()
    while more["loud"] < 4:
        more.update(delivery.tenant for delivery in await rounds.take(32, wait=30))
    more.update(delivery.tenant for delivery in await rounds.take(32, wait=1.0))
    assert more["loud"] == 4
    await rounds.stop()


async def test_another_weight_counts_from_then_on(bus: Bus, eventually: Any) -> None:
    rounds, pullers = Rounds(), dict[str, Any]()
    for tenant in ("gold", "iron"):
        pullers[tenant] = await bus.pull(inference_durable(tenant), batch=64)
        rounds.add(tenant, pullers[tenant])
        await ask_many(bus, tenant, 60)
    await eventually(lambda: all(puller.waiting >= 60 for puller in pullers.values()))
    assert Counter(delivery.tenant for delivery in await rounds.take(20, wait=1)) == {"gold": 10, "iron": 10}
    rounds.add("gold", pullers["gold"], weight=3)
    assert Counter(delivery.tenant for delivery in await rounds.take(40, wait=1)) == {"gold": 30, "iron": 10}
    await rounds.stop()


async def test_what_a_removed_key_had_in_hand_may_still_be_charged(bus: Bus, eventually: Any) -> None:
    rounds = Rounds()
    for tenant in ("gone", "here"):
        rounds.add(tenant, await bus.pull(inference_durable(tenant), batch=1, counted=True))
        await ask_many(bus, tenant, 2)
    held = []
    while len(held) < 2:
        held += await rounds.take(2, wait=30)
    first, second = sorted(held, key=lambda delivery: delivery.tenant)
    puller = rounds.remove("gone")
    assert puller is not None
    await puller.stop()
    for delivery in (first, second):
        await rounds.done(delivery, 0.5)
        await delivery.ack()
    assert [delivery.tenant for delivery in await rounds.take(2, wait=30)] == ["here"]

    async def unasked() -> bool:  # nothing is asked for any more
        return (await bus.js.consumer_info("INFERENCE", "infer-gone")).num_waiting == 0

    await eventually(unasked)
    await rounds.stop()
