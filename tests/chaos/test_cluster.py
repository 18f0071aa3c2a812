"""Jobs of a whole service on three servers, of which one after another is killed: they come to what they come to in peace."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from nexus_bus.bus import Bus, EmbeddedServer, ensure_topology
from ops.bench.faults_rig import house, rl, sft
from tests.chaos.conftest import same
from tests.cluster import NODES, Cluster, whole
from tests.conftest import Eventually

pytestmark = [pytest.mark.slow, pytest.mark.gl, pytest.mark.timeout(900)]


async def test_jobs_end_in_the_same_bits_while_servers_die_one_after_another(tmp_path: Path, eventually: Eventually) -> None:
    cluster, home = Cluster(tmp_path / "cluster"), tmp_path / "home"
    home.mkdir()
    for node in range(NODES):
        cluster.start(node)
    servers = SimpleNamespace(url=",".join(cluster.url(node) for node in range(NODES)), creds=None)
    bus = await Bus.connect(servers.url, name="test")
    try:
        await ensure_topology(bus, replicas=NODES)
        settings = {"NEXUS_REPLICAS": str(NODES)}
        async with house(home, settings=settings, server=cast(EmbeddedServer, servers)) as service:
            calm = [await service.run("calm", spec) for spec in (rl("rl"), sft("sft"))]
            jobs = [("acme", rl("rl", updates=6)), ("acme", sft("sft")), ("beta", rl("rl"))]
            longer = await service.run("calm", rl("rl-6", updates=6))
            running = [asyncio.create_task(service.run(*job, within=400.0)) for job in jobs]
            killed = 0
            while not all(task.done() for task in running):
                node, before = killed % NODES, service.committed
                await eventually(lambda before=before: service.committed > before or all(t.done() for t in running), within=120)
                cluster.kill(node)
                killed += 1
                await asyncio.sleep(1.0)  # so long it is away: its share of leaders goes to others
                cluster.start(node)
                await eventually(lambda: whole(bus), within=120)
            assert killed >= NODES, "each of them died while jobs ran"
            for found, expected in zip(await asyncio.gather(*running), (longer, calm[1], calm[0]), strict=True):
                same(found, expected)
    finally:
        await bus.close()
        cluster.end()
