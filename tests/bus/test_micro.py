"""Discovery: every process of ours answers as the NATS micro protocol says, to the provider and to nobody else."""

import json
from pathlib import Path
from typing import Any

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from nexus_bus import __version__
from nexus_bus.bus import Bus, Card, EmbeddedServer, Presence, discover
from nexus_bus.tenants import tenants_of
from tests.bus.conftest import Crash

ABOUT = {"role": "rollout", "worker": "rollout-0", "host": "here", "pid": "7"}
CARD = Card("rollout", ABOUT, "rollout.run.*.*", "Play one episode.")


@pytest.fixture
async def present(server: EmbeddedServer) -> Any:
    """Somebody who answers, on a connection of its own."""
    bus = await Bus.connect(server.url, name="rollout-0")
    presence = await Presence(bus, CARD, lambda: (12, {"busy": True, "gauges": {"sessions": 3.0}})).start()
    yield presence
    await bus.close()


async def ask(bus: Bus, on: str) -> dict[str, Any]:
    return json.loads((await bus.client.request(on, b"", timeout=30)).data)


@pytest.mark.parametrize("whom", ["", ".nexus-rollout", f".nexus-rollout.{CARD.id}"])
async def test_answers_are_those_of_the_protocol_as_its_own_client_reads_them(bus: Bus, present: Presence, whom: str):
    ping = ServicePing.from_dict(await ask(bus, f"$SRV.PING{whom}"))
    info = ServiceInfo.from_dict(await ask(bus, f"$SRV.INFO{whom}"))
    stats = ServiceStats.from_dict(await ask(bus, f"$SRV.STATS{whom}"))
    for answer, kind in ((ping, "ping"), (info, "info"), (stats, "stats")):
        assert (answer.name, answer.id, answer.version) == ("nexus-rollout", CARD.id, __version__)
        assert answer.metadata == ABOUT
        assert answer.type == f"io.nats.micro.v1.{kind}_response"
    assert (info.endpoints[0].subject, info.description) == ("rollout.run.*.*", "Play one episode.")
    (work,) = stats.endpoints
    assert (work.num_requests, work.data) == (12, {"busy": True, "gauges": {"sessions": 3.0}})


async def test_who_is_asked_for_answers_and_who_left_does_not(bus: Bus, present: Presence, eventually: Any):
    other = await Presence(bus, Card("host", {"host": "h"}, "host.order.h", "Supervises."), lambda: (1, {})).start()

    async def all_found() -> bool:
        return {one.kind for one in await discover(bus)} == {"rollout", "host"}

    await eventually(all_found)
    (found,) = await eventually(lambda: discover(bus, "rollout"))
    assert (found.about, found.data["gauges"]) == (ABOUT, {"sessions": 3.0})
    await other.stop()
    (left,) = await eventually(lambda: discover(bus))
    assert left.kind == "rollout"
    assert await discover(bus, "trainer", within=0.5) == []


async def test_services_of_others_are_passed_over(bus: Bus, present: Presence, eventually: Any):
    async def answer(msg: Any) -> None:
        for body in (b"", b"[]", b"{}", b'{"name": "nexus-x", "type": "io.nats.micro.v1.stats_response"}', b'{"name": "shop"}'):
            await bus.client.publish(msg.reply, body)

    await bus.listen("$SRV.STATS", answer)
    (found,) = await eventually(lambda: discover(bus))
    assert found.kind == "rollout"


async def test_it_is_found_again_after_the_server_came_back(bus: Bus, present: Presence, crash: Crash, eventually: Any):
    crash.kill()
    crash.restart()
    for one in (bus, present._bus):  # `up` is set until a connection notices that it is none any more
        await eventually(lambda one=one: one.client.stats["reconnects"] > 0 and one.up.is_set())

    async def found() -> bool:
        return [one.kind for one in await discover(bus, within=1.0)] == ["rollout"]

    await eventually(found, within=60)


async def test_a_tenant_learns_of_nobody(bus: Bus, server: EmbeddedServer, present: Presence, tmp_path: Path, eventually: Any):
    creds = tmp_path / "acme.creds"
    async with tenants_of(server.url, server.authority) as tenants:
        creds.write_text((await tenants.add("acme")).creds)
    intruder = await Bus.connect(server.url, name="acme", creds=creds)
    try:
        assert await discover(intruder, within=1.0) == []
        heard: list[Any] = []

        async def hear(msg: Any) -> None:
            heard.append(msg)

        await intruder.listen("$SRV.>", hear)
        assert await eventually(lambda: discover(bus))
        assert heard == []
    finally:
        await intruder.close()
