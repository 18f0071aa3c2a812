"""Where sessions go: among processes of one tenant and kind, to the one with the fewest."""

import asyncio
from typing import Any, cast

import pytest
import structlog

from nexus_bus.envs.catalog import describe
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.errors import EnvironmentFault
from nexus_bus.sessions import Sessions
from nexus_bus.worker import Pulse
from schemas.environment import SessionCall, SessionOpen, SessionReply
from schemas.job import EnvironmentSpec

SPEC = EnvironmentSpec(id="tabletop", task="touch")


class Host:
    """A process that simulates nothing, and dies when told to."""

    def __init__(self) -> None:
        self.alive, self.opened = True, 0

    async def open(self, _: EnvironmentSpec) -> int:
        self.opened += 1
        return self.opened

    async def call(self, _sid: int, call: SessionCall, _encoding: str) -> SessionReply:
        if call.op == "render":
            self.alive = False
            raise EnvironmentFault("it died")
        if call.op == "save":
            raise EnvironmentFault("its session was closed")
        return SessionReply()

    async def stop(self) -> None:
        self.alive = False


class Rig:
    """Sessions with such processes."""

    def __init__(self, processes: int, limit: int = 100) -> None:
        self.hosts: list[Host] = []
        self.used: list[str] = []
        log: Any = structlog.get_logger()
        self.sessions = Sessions(self.start, self.listen, limit, Pulse(), log, "environment-0", self.note, processes)

    async def start(self, _: EnvironmentSpec) -> SimulatorHost:
        self.hosts.append(host := Host())
        await asyncio.sleep(0)
        return cast(SimulatorHost, host)

    async def listen(self, _tenant: str, _session: str) -> Any:
        async def close() -> None:
            return

        return close

    def note(self, tenant: str, _job: str, /, **_: float) -> None:
        self.used.append(tenant)

    async def open(self, tenant: str = "acme") -> str:
        known = describe(SPEC)
        asked = SessionOpen(
            tenant=tenant, job="pick", environment=SPEC, action=known.action, observation=known.observation, lease_s=60
        )
        return await self.sessions.open(tenant, asked, known)


async def test_sessions_spread_over_so_many_processes_and_no_more() -> None:
    rig = Rig(processes=3)
    await asyncio.gather(*(rig.open() for _ in range(7)))
    assert sorted(host.opened for host in rig.hosts) == [2, 2, 3]
    await rig.open("other")
    assert len(rig.hosts) == 4, "nobody shares a process with another tenant"


async def test_a_process_that_dies_takes_only_its_own_sessions_along_and_is_replaced() -> None:
    rig = Rig(processes=2)
    names = [await rig.open() for _ in range(4)]
    died = rig.sessions.held[names[0]].host
    with pytest.raises(EnvironmentFault, match="it died"):
        await rig.sessions.call(names[0], SessionCall(op="render"))
    assert len(rig.sessions.held) == 2
    assert all(held.host is not died for held in rig.sessions.held.values())
    await asyncio.gather(*(rig.open() for _ in range(2)))
    assert [host.opened for host in rig.hosts] == [2, 2, 2]
    assert sorted(process.load for process in rig.sessions.running["acme", "tabletop"]) == [2, 2]


async def test_a_fault_of_one_session_frees_its_place_and_leaves_the_others_of_its_process() -> None:
    rig = Rig(processes=1, limit=2)
    failed, other = await rig.open(), await rig.open()
    with pytest.raises(EnvironmentFault, match="was closed"):
        await rig.sessions.call(failed, SessionCall(op="save"))
    assert list(rig.sessions.held) == [other]
    with pytest.raises(EnvironmentFault, match="gone; open another"):
        await rig.sessions.call(failed, SessionCall(op="close"))
    await rig.open()
    assert rig.hosts[0].opened == 3, "what failed is not handed out again"


async def test_a_session_that_was_closed_is_kept_warm_and_counts_for_nothing() -> None:
    rig = Rig(processes=1)
    first = await rig.open()
    await rig.sessions.call(first, SessionCall(op="close"))
    (process,) = rig.sessions.running["acme", "tabletop"]
    assert process.load == 0
    second = await rig.open()
    assert second != first
    assert (process.load, rig.hosts[0].opened) == (1, 1), "no simulator was made anew"
