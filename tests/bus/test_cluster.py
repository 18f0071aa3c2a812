"""Three servers as one cluster, every stream on all three: nodes are killed one after another while records flow."""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from bus_examples import example

from nexus_bus.bus import Bus, Delivery, Done, Outcome, ensure_topology
from nexus_bus.bus.topology import BUCKETS, OBJECTS, STREAMS, training_durable
from nexus_bus.client import Client
from nexus_bus.errors import Denied, Unavailable
from nexus_bus.tenants import tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.rollout import RolloutRecord
from tests.cluster import NODES, Cluster, stream, whole
from tests.conftest import Eventually
from workers.gateway import Gateway

pytestmark = pytest.mark.timeout(300)

PUBLISHERS = 8
WHILE_DOWN = 150  # records stored while a node is dead, before it may come back


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes."""
    cluster = Cluster(tmp_path / "cluster")
    try:
        for node in range(NODES):
            cluster.start(node)
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
async def buses(cluster: Cluster) -> AsyncIterator[list[Bus]]:
    """A connection to each node, and every stream on all of them."""
    buses = [await Bus.connect(cluster.url(node), name=f"test-{node}", timeout=60) for node in range(NODES)]
    await ensure_topology(buses[0], replicas=NODES)
    for bus in buses:
        bus.replicas = NODES  # as after `ensure_topology`: a reconnect looks after the streams
    yield buses
    for bus in buses:
        await bus.close()


async def test_a_dead_node_at_a_time_loses_no_record_and_stores_none_twice(
    cluster: Cluster, buses: list[Bus], eventually: Eventually
) -> None:
    """Publishers and the consumer are connected to different nodes, so that each kill cuts off some of them."""
    pattern = example(RolloutRecord, full=False)
    tenant, job, stop = "acme", "touch", asyncio.Event()
    stored: dict[str, int] = {}  # record → its place in the stream, as acknowledged to the publisher
    places: defaultdict[str, set[int]] = defaultdict(set)  # record → places it was delivered from
    learned: set[str] = set()

    async def publish(lane: int) -> None:
        number = 0
        while not stop.is_set():
            name = f"{job}/{lane}/{number}"
            record = msgspec.structs.replace(pattern, id=name, tenant=tenant, job=job, batch=lane, index=number)
            done = await buses[lane % 2].publish(
                "train.record", record, msg_id=f"{tenant}/{name}", deadline=60.0, tenant=tenant, job=job
            )
            stored[name] = done.seq
            number += 1
            await asyncio.sleep(0.005)

    async def learn(delivery: Delivery) -> Outcome:
        name = delivery.message.id
        places[name].add(delivery.seq)
        learned.add(name)  # as a trainer does: what comes again is told by its id
        return Done()

    ended = asyncio.Event()
    consuming = asyncio.create_task(buses[2].consume(training_durable(tenant, job), learn, stop=ended, concurrency=64))
    publishing = [asyncio.create_task(publish(lane)) for lane in range(PUBLISHERS)]

    async def more(number: int) -> None:
        """So many more records, stored and learned."""
        wanted = len(stored) + number, len(learned) + number
        await eventually(lambda: len(stored) >= wanted[0] and len(learned) >= wanted[1], within=60)

    await more(WHILE_DOWN)
    leader = int((await eventually(lambda: stream(buses[0]), within=60))["cluster"]["leader"].removeprefix("n"))
    for node in (leader, *(node for node in range(NODES) if node != leader)):
        cluster.kill(node)
        await more(WHILE_DOWN)
        cluster.start(node)
        await eventually(lambda: whole(buses[0]), within=60)

    stop.set()
    await asyncio.wait_for(asyncio.gather(*publishing), 60)
    await eventually(lambda: len(learned) >= len(stored), within=60)
    ended.set()
    await consuming

    assert learned == set(stored)  # none lost
    assert {name: {place} for name, place in stored.items()} == dict(places)  # none stored twice, however often it was sent

    async def empty() -> bool:
        info = await stream(buses[0])
        return info is not None and info["state"]["messages"] == 0

    await eventually(empty, within=60)  # every acknowledgement counted


async def test_what_is_sent_twice_at_once_is_stored_once_and_confirmed_twice(buses: list[Bus], eventually: Eventually) -> None:
    """A cluster refuses an id that it is about to store. Who sends again because a server died hears that for a moment."""
    record = msgspec.structs.replace(example(RolloutRecord, full=False), tenant="acme", job="touch")

    async def twice(number: int) -> None:
        name = f"touch/{number}"
        sends = [
            bus.publish("train.record", msgspec.structs.replace(record, id=name), msg_id=name, tenant="acme", job="touch")
            for bus in (buses[0], buses[0], buses[1])
        ]
        done = await asyncio.gather(*sends)
        assert len({each.seq for each in done}) == 1
        # All three, where the first answer was lost or late: what was sent again is then a duplicate of its own.
        assert sum(not each.duplicate for each in done) <= 1

    await asyncio.gather(*(twice(number) for number in range(64)))
    assert (await eventually(lambda: stream(buses[0]), within=60))["state"]["messages"] == 64


async def test_every_stream_is_on_all_nodes_and_who_asks_for_fewer_takes_none_away(
    buses: list[Bus], eventually: Eventually
) -> None:
    names = [each.name for each in STREAMS] + [f"KV_{name}" for name in BUCKETS] + [f"OBJ_{name}" for name in OBJECTS]
    await ensure_topology(buses[1], replicas=1)  # a process whose settings were forgotten
    for name in names:
        found = await eventually(lambda name=name: stream(buses[1], name), within=60)
        assert found["config"]["num_replicas"] == NODES, name


async def test_a_client_that_knows_several_servers_takes_one_that_lives(cluster: Cluster, buses: list[Bus]) -> None:
    cluster.kill(0)
    client = await Bus.connect(f"{cluster.url(0)},{cluster.url(1)}", name="late", timeout=60)
    assert (await client.depths()).keys() == (await buses[1].depths()).keys()
    await client.close()


async def test_a_tenant_is_known_to_every_node_and_a_void_key_to_none(
    cluster: Cluster, buses: list[Bus], tmp_path: Path, eventually: Eventually
) -> None:
    await Gateway(Context("gateway", "gateway-0", buses[2], None, asyncio.Event(), Pulse(), buses[2].log, "host")).open()
    authority = Path(os.environ["NEXUS_AUTHORITY"])
    old, new = tmp_path / "old.creds", tmp_path / "new.creds"
    async with tenants_of(cluster.url(0), authority, timeout=60) as tenants:
        old.write_text((await tenants.add("acme")).creds)

    async def known(node: int, creds: Path) -> bool:
        try:
            async with await Client.connect(cluster.url(node), creds=creds, timeout=5.0) as client:
                return (await client.account()).tenant == "acme"
        except (Denied, Unavailable):  # the nodes tell each other within moments
            return False

    for node in range(NODES):
        await eventually(lambda node=node: known(node, old), within=60)
    cluster.kill(0)
    async with tenants_of(cluster.url(1), authority, timeout=60) as tenants:
        new.write_text((await tenants.rotate("acme")).creds)
    cluster.start(0)  # which heard nothing of it
    for node in range(NODES):
        await eventually(lambda node=node: known(node, new), within=60)

        async def void(node: int = node) -> bool:
            try:
                await (await Client.connect(cluster.url(node), creds=old, timeout=5.0)).close()
            except Denied:
                return True
            except Unavailable:  # it is still finding the others
                pass
            return False

        await eventually(void, within=60)
