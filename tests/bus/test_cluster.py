"""Three servers as one cluster, every stream on all three: nodes are killed one after another while records flow."""

import asyncio
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bus_examples import example

from nexus_bus.bus import Bus, Delivery, Done, Outcome, ensure_topology
from nexus_bus.bus.authority import Authority
from nexus_bus.bus.server import die_with_parent, find_binary
from nexus_bus.bus.topology import BUCKETS, OBJECTS, STREAMS, training_durable
from nexus_bus.client import Client
from nexus_bus.errors import Denied, Unavailable
from nexus_bus.tenants import tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.rollout import RolloutRecord
from tests.conftest import Eventually, free_port
from workers.gateway import Gateway

NODES = 3
PUBLISHERS = 8
WHILE_DOWN = 150  # records stored while a node is dead, before it may come back

CONFIG = """\
server_name: "n{node}"
listen: "127.0.0.1:{port}"
log_file: "{directory}/n{node}.log"
max_payload: 8MB
{trust}
jetstream {{
  store_dir: "{directory}/n{node}"
  max_memory_store: 1GB
  max_file_store: 64GB
}}
cluster {{
  name: "nexus"
  listen: "127.0.0.1:{route}"
  routes: [{routes}]
}}
"""


class Cluster:
    """Server processes that know each other."""

    def __init__(self, directory: Path) -> None:
        """Nothing starts yet."""
        self.authority = Authority.at(Path(os.environ["NEXUS_AUTHORITY"]))
        self._directory = directory
        self._ports = [free_port() for _ in range(NODES)]
        self._routes = [free_port() for _ in range(NODES)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        directory.mkdir()

    def url(self, node: int) -> str:
        """Of one node; a client learns of the others there."""
        return f"nats://127.0.0.1:{self._ports[node]}"

    def start(self, node: int) -> None:
        """First, or again with the data it had."""
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        text = CONFIG.format(
            node=node, port=self._ports[node], route=self._routes[node], routes=routes, directory=self._directory,
            trust=self.authority.server_config(self._directory / f"accounts-{node}"),
        )  # fmt: skip
        path = self._directory / f"n{node}.conf"
        path.write_text(text)
        self._processes[node] = subprocess.Popen(
            [find_binary(), "-c", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - only a system call, made ready before the fork
        )

    def kill(self, node: int) -> None:
        """As the kernel would do it."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def end(self) -> None:
        """All of them."""
        for node in list(self._processes):
            self.kill(node)
        shutil.rmtree(self._directory)


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
    buses = [await Bus.connect(cluster.url(node), name=f"test-{node}") for node in range(NODES)]
    await ensure_topology(buses[0], replicas=NODES)
    for bus in buses:
        bus.replicas = NODES  # as after `ensure_topology`: a reconnect looks after the streams
    yield buses
    for bus in buses:
        await bus.close()


async def stream(bus: Bus, name: str = "TRAINING") -> Any:
    """What the cluster says of a stream; None while it does not answer."""
    try:
        answer = msgspec.json.decode((await bus.ask(f"$JS.API.STREAM.INFO.{name}", deadline=2.0)).data)
    except Unavailable:
        return None
    return None if "error" in answer else answer


async def whole(bus: Bus) -> bool:
    """Whether every copy of the Training Queue is there and up to date."""
    info = await stream(bus)
    copies = (info or {}).get("cluster", {}).get("replicas") or []
    return len(copies) == NODES - 1 and all(copy.get("current") and not copy.get("offline") for copy in copies)


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
        await eventually(lambda: len(stored) >= wanted[0] and len(learned) >= wanted[1], within=30)

    await more(WHILE_DOWN)
    leader = int((await stream(buses[0]))["cluster"]["leader"].removeprefix("n"))
    for node in (leader, *(node for node in range(NODES) if node != leader)):
        cluster.kill(node)
        await more(WHILE_DOWN)
        cluster.start(node)
        await eventually(lambda: whole(buses[0]), within=30)

    stop.set()
    await asyncio.wait_for(asyncio.gather(*publishing), 60)
    await eventually(lambda: len(learned) >= len(stored), within=30)
    ended.set()
    await consuming

    assert learned == set(stored)  # none lost
    assert {name: {place} for name, place in stored.items()} == dict(places)  # none stored twice, however often it was sent

    async def empty() -> bool:
        info = await stream(buses[0])
        return info is not None and info["state"]["messages"] == 0

    await eventually(empty, within=30)  # every acknowledgement counted


async def test_what_is_sent_twice_at_once_is_stored_once_and_confirmed_twice(buses: list[Bus]) -> None:
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
        assert sorted(each.duplicate for each in done) == [False, True, True]

    await asyncio.gather(*(twice(number) for number in range(64)))
    assert (await stream(buses[0]))["state"]["messages"] == 64


async def test_every_stream_is_on_all_nodes_and_who_asks_for_fewer_takes_none_away(buses: list[Bus]) -> None:
    names = [each.name for each in STREAMS] + [f"KV_{name}" for name in BUCKETS] + [f"OBJ_{name}" for name in OBJECTS]
    await ensure_topology(buses[1], replicas=1)  # a process whose settings were forgotten
    assert {name: (await stream(buses[1], name))["config"]["num_replicas"] for name in names} == dict.fromkeys(names, NODES)


async def test_a_client_that_knows_several_servers_takes_one_that_lives(cluster: Cluster, buses: list[Bus]) -> None:
    cluster.kill(0)
    client = await Bus.connect(f"{cluster.url(0)},{cluster.url(1)}", name="late")
    assert (await client.depths()).keys() == (await buses[1].depths()).keys()
    await client.close()


async def test_a_tenant_is_known_to_every_node_and_a_void_key_to_none(
    cluster: Cluster, buses: list[Bus], tmp_path: Path, eventually: Eventually
) -> None:
    await Gateway(Context("gateway", "gateway-0", buses[2], None, asyncio.Event(), Pulse(), buses[2].log, "host")).open()
    authority = Path(os.environ["NEXUS_AUTHORITY"])
    old, new = tmp_path / "old.creds", tmp_path / "new.creds"
    async with tenants_of(cluster.url(0), authority) as tenants:
        old.write_text((await tenants.add("acme")).creds)

    async def known(node: int, creds: Path) -> bool:
        try:
            async with await Client.connect(cluster.url(node), creds=creds, timeout=5.0) as client:
                return (await client.account()).tenant == "acme"
        except (Denied, Unavailable):  # the nodes tell each other within moments
            return False

    for node in range(NODES):
        await eventually(lambda node=node: known(node, old), within=30)
    cluster.kill(0)
    async with tenants_of(cluster.url(1), authority) as tenants:
        new.write_text((await tenants.rotate("acme")).creds)
    cluster.start(0)  # which heard nothing of it
    for node in range(NODES):
        await eventually(lambda node=node: known(node, new), within=30)

        async def void(node: int = node) -> bool:
            try:
                await (await Client.connect(cluster.url(node), creds=old, timeout=5.0)).close()
            except Denied:
                return True
            except Unavailable:  # it is still finding the others
                pass
            return False

        await eventually(void, within=30)
