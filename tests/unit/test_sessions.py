"""Where sessions go: among processes of one tenant and kind, to the one with the fewest."""

import asyncio
from typing import Any, cast

import pytest
import structlog

from nexus_bus import sessions
from nexus_bus.envs.catalog import describe
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.errors import EnvironmentFault, Refused
from nexus_bus.sessions import Sessions
from nexus_bus.worker import Pulse
from schemas.environment import SessionCall, SessionOpen, SessionReply
from schemas.job import EnvironmentSpec
from tests.conftest import Eventually

SPEC = EnvironmentSpec(id="tabletop", task="touch")


class Host:
    """A process that simulates nothing, and dies when told to."""

    def __init__(self) -> None:
        self.alive, self.opened = True, 0
        self.asked = 0  # closes
        self.freed: list[int] = []
        self.closing: asyncio.Event | None = None  # that a close waits for

    async def open(self, _: EnvironmentSpec) -> int:
        self.opened += 1
        return self.opened

    async def call(self, _sid: int, call: SessionCall, _encoding: str | None = None) -> SessionReply:
        if call.op == "render":
            self.alive = False
            raise EnvironmentFault("it died")
        if call.op == "save":
            raise EnvironmentFault("its session was closed")
        self.asked += call.op == "close"
        if call.op == "close" and self.closing is not None:
            await self.closing.wait()
        return SessionReply()

    async def close(self, sid: int) -> None:
        self.freed.append(sid)

    async def stop(self) -> None:
        self.alive = False


class Rig:
    """Sessions with such processes."""

    def __init__(self, processes: int, limit: int = 100, idle_s: float = 300.0) -> None:
        self.hosts: list[Host] = []
        self.used: list[str] = []
        log: Any = structlog.get_logger()
        self.sessions = Sessions(self.start, self.listen, limit, Pulse(), log, "environment-0", self.note, processes, idle_s)

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

    async def open(self, tenant: str = "acme", spec: EnvironmentSpec = SPEC, lease_s: float = 60) -> str:
        known = describe(spec)
        asked = SessionOpen(
            tenant=tenant, job="pick", environment=spec, action=known.action, observation=known.observation, lease_s=lease_s
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


async def test_leases_go_on_ending_when_a_session_is_closed_while_another_one_ends(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SWEEP_S", 0.01)
    rig = Rig(processes=2)
    first, second = await rig.open(lease_s=0.001), await rig.open(lease_s=0.001)
    hosts = [cast(Host, rig.sessions.held[name].host) for name in (first, second)]
    hosts[0].closing = hosts[1].closing = asyncio.Event()
    sweeping = asyncio.create_task(rig.sessions.sweep())
    await eventually(lambda: [host.asked for host in hosts] == [1, 1])  # of both: none waits for the other
    with pytest.raises(Refused, match="has a call running"):
        await rig.sessions.call(first, SessionCall(op="step"))
    await rig.sessions._release(second, keep=False)  # as a call does that found its process dead
    hosts[0].closing.set()
    await eventually(lambda: not rig.sessions.held)
    third = await rig.open(lease_s=0.001)
    await eventually(lambda: third not in rig.sessions.held)
    assert not sweeping.done()
    sweeping.cancel()


async def test_a_tenant_keeps_so_many_simulators_warm_and_no_more_whatever_it_calls_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "IDLE_SESSIONS", 3)
    rig = Rig(processes=1)
    specs = [EnvironmentSpec(id="tabletop", task="touch", options={"speed": 0.01 + number / 1000}) for number in range(6)]
    names = [await rig.open(spec=spec) for spec in specs]
    for name in names:
        await rig.sessions.call(name, SessionCall(op="close"))
    assert rig.hosts[0].freed == [1, 2, 3], "the oldest go"
    await rig.open(spec=specs[5])
    assert rig.hosts[0].opened == 6, "the latest is there"
    await rig.open(spec=specs[0])
    assert rig.hosts[0].opened == 7


async def test_a_process_that_nobody_uses_ends_and_takes_its_warm_sessions_along(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SWEEP_S", 0.01)
    rig = Rig(processes=1, idle_s=0.0)
    name, other = await rig.open(), await rig.open("globex")
    sweeping = asyncio.create_task(rig.sessions.sweep())
    await rig.sessions.call(name, SessionCall(op="close"))
    await eventually(lambda: not rig.hosts[0].alive)
    assert rig.hosts[1].alive, "one that is used stays"
    await rig.open()
    assert len(rig.hosts) == 3
    await rig.sessions.call(other, SessionCall(op="reset"))
    sweeping.cancel()
