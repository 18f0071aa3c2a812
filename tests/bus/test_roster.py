"""The roster on the real server: finished jobs cost a look nothing, and nothing is decided on half a list or on an old one."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.kv import Entry, Kv
from nexus_bus.client import Client
from nexus_bus.errors import Unavailable
from nexus_bus.roster import Roster
from schemas.plan import JobState
from tests.bus.conftest import Crash
from tests.conftest import Eventually
from tests.unit.mastering import TENANT, events, job, master, phases, rl, sft

FINISHED = 300


def named(state: JobState, name: str, tenant: str = TENANT) -> JobState:
    plan = state.plan
    return msgspec.structs.replace(
        state, plan=msgspec.structs.replace(plan, tenant=tenant, spec=msgspec.structs.replace(plan.spec, name=name))
    )


async def keep(bus: Bus, *states: JobState) -> None:
    """Put jobs into the registry, as another master writes them."""
    kv = bus.kv("registry")
    await asyncio.gather(*(kv.put(registry.job_key(one.plan.tenant, one.plan.spec.name), one) for one in states))


async def finished(bus: Bus) -> None:
    over = rl("completed", closed=True, dataset_bytes=1)
    await keep(bus, *(named(over, f"old-{i}", f"tenant-{i % 5}") for i in range(FINISHED)))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the jobs that were read, one after another."""
    keys: list[str] = []
    entry = Kv._entry

    def reading(self: Kv, key: str, data: bytes, revision: int, kind: Any) -> Entry[Any]:
        keys.extend([key] if kind is JobState else [])
        return entry(self, key, data, revision, kind)

    monkeypatch.setattr(Kv, "_entry", reading)
    return keys


# What a look costs


async def test_a_look_reads_nothing_of_jobs_that_are_finished(bus: Bus, decoded: list[str], eventually: Eventually) -> None:
    await finished(bus)
    await keep(bus, rl("training"))
    served = master(bus)
    await served.tick()
    # Once as a list, once more by whoever follows; then nothing new comes.
    await eventually(lambda: len(decoded) >= 2 * (FINISHED + 1))
    decoded.clear()
    for _ in range(3):
        await served.tick()
    assert decoded == []
    assert [list(await served.roster.of(f"tenant-{i}")) for i in range(5)] == [[]] * 5
    await keep(bus, rl("cancelled"))
    await eventually(lambda: served.roster._tenants[TENANT].open["touch"].phase == "cancelled")
    decoded.clear()
    await served.tick()
    assert (await job(bus)).closed
    assert set(decoded) == {registry.job_key(TENANT, "touch")}, "what is to be done is decided on what is written"


async def test_an_order_reads_nothing_of_other_jobs_that_are_finished(
    bus: Bus, decoded: list[str], eventually: Eventually
) -> None:
    await finished(bus)
    served = master(bus)
    await served.tick()
    await eventually(lambda: len(decoded) >= 2 * FINISHED)
    decoded.clear()
    await served.submit(sft("new"), "tenant-0", "s/new")
    await served.submit(sft("old-0"), "tenant-0", "s/old-0")
    assert set(decoded) <= {registry.job_key("tenant-0", name) for name in ("new", "old-0")}
    said = [item.message async for item in bus.tail("event", follow=False, tenant="tenant-0", job="old-0")]
    assert [event.message for event in said] == ["name: a job 'old-0' exists already; choose another name"]


# What it must not miss


async def test_a_master_that_starts_ends_closing_what_a_killed_one_left(bus: Bus) -> None:
    await finished(bus)
    await keep(bus, rl("cancelled", reason="enough"))
    await master(bus).tick()
    assert (await job(bus)).closed
    assert [(event.type, event.message) for event in await events(bus, "touch")] == [("job.cancelled", "enough")]


async def test_what_another_master_writes_is_looked_at(bus: Bus, eventually: Eventually) -> None:
    first, second = master(bus), master(bus)
    await first.tick()
    await second.submit(sft("a"), TENANT, "s/a")
    await second.states.end(TENANT, "a", "cancelled", "enough")
    late = rl("training", "b", deadline=time.time() - 1)
    second.roster.note(late, await bus.kv("registry").create(registry.job_key(TENANT, "b"), late))

    async def ended() -> bool:
        await first.tick()
        return await phases(bus, "ab") == ["cancelled", "failed"]

    await eventually(ended)
    await eventually(lambda: not second.roster._tenants[TENANT].open)


async def test_what_was_deleted_is_forgotten(bus: Bus, eventually: Eventually) -> None:
    await keep(bus, rl("training"), named(rl("completed", closed=True, dataset_bytes=7), "old"))
    roster = Roster(bus)
    assert (list(await roster.of(TENANT)), await roster.dataset_bytes(TENANT)) == (["touch"], 7)
    for name in ("touch", "old"):
        await bus.kv("registry").delete(registry.job_key(TENANT, name))
    await eventually(lambda: not roster._tenants[TENANT].open and not roster._tenants[TENANT].past.dataset_bytes)
    assert await roster.tenants() == []


async def test_an_evaluation_that_goes_on_is_open_again_and_counted_once(bus: Bus) -> None:
    over = rl("failed", closed=True, dataset_bytes=7)
    await keep(bus, over)
    roster = Roster(bus)
    assert list(await roster.of(TENANT)) == []
    roster.note(msgspec.structs.replace(over, phase="training", closed=False), 100)
    assert (list(await roster.of(TENANT)), await roster.dataset_bytes(TENANT)) == (["touch"], 7)
    roster.note(over, 99)
    assert list(await roster.of(TENANT)) == ["touch"], "what is older is no news"
    for revision in (101, 102):
        roster.note(over, revision)
    assert (list(await roster.of(TENANT)), await roster.dataset_bytes(TENANT)) == ([], 7)


# What it must not decide


async def test_nothing_begins_before_all_jobs_are_known(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    await keep(bus, rl("training"))
    may, asked, entries = asyncio.Event(), list[str](), Kv.entries

    async def slowly(self: Kv, prefix: str, kind: Any) -> Any:
        if kind is JobState:
            asked.append(prefix)
            await may.wait()
        return await entries(self, prefix, kind)

    monkeypatch.setattr(Kv, "entries", slowly)
    served = master(bus, max_jobs=1)
    work = asyncio.gather(served.tick(), served.submit(sft("a"), TENANT, "s/a"))
    await eventually(lambda: asked)
    assert await bus.kv("registry").keys(registry.job_key(TENANT, "a")) == []
    may.set()
    await work
    assert await phases(bus, "a") == ["waiting"]
    assert len(asked) == 1, "who comes meanwhile waits for the same list"


async def test_a_job_that_was_given_more_time_is_not_ended_by_a_master_that_hears_late(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(Kv, "watch", silent)
    late = rl("training", deadline=time.time() - 1)
    await keep(bus, late)
    served = master(bus)
    assert list(await served.roster.of(TENANT)) == ["touch"]
    await keep(bus, msgspec.structs.replace(late, deadline=time.time() + 1000))
    await served.tick()
    assert (await job(bus)).phase == "training"
    await keep(bus, late)
    served.roster.note(late, 1000)
    await served.tick()
    assert (await job(bus)).phase == "failed"


# Being cut off


async def test_who_lost_its_watch_on_the_server_hears_again(bus: Bus, eventually: Eventually) -> None:
    roster = Roster(bus)
    assert await roster.tenants() == []

    async def consumers() -> list[str]:
        return [one.name for one in await bus.js.consumers_info("KV_registry")]

    for name in await eventually(consumers):
        await bus.js.delete_consumer("KV_registry", name)
    await keep(bus, rl("training"))
    await eventually(roster.tenants)


async def test_one_that_ended_is_begun_anew_from_a_new_list(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    watch = Kv.watch

    async def away(*_: Any) -> AsyncIterator[Any]:
        raise Unavailable("no consumer on KV_registry")
        yield

    await keep(bus, rl("training"))
    monkeypatch.setattr(Kv, "watch", away)
    roster = Roster(bus)
    assert await roster.tenants() == [TENANT]
    await bus.kv("registry").delete(registry.job_key(TENANT, "touch"))
    await keep(bus, named(rl("training"), "other"))

    async def anew() -> bool:
        return list(await roster.of(TENANT)) == ["other"]

    await eventually(anew)
    monkeypatch.setattr(Kv, "watch", watch)
    await eventually(anew)
    await keep(bus, named(rl("training"), "third"))
    await eventually(lambda: set(roster._tenants[TENANT].open) == {"other", "third"})


@pytest.mark.usefixtures("gateway")
async def test_a_master_and_an_account_hear_of_jobs_again_once_a_killed_server_is_back(
    server: EmbeddedServer, bus: Bus, crash: Crash, eventually: Eventually
) -> None:
    served, acme = master(bus), Client(bus, TENANT)
    await served.tick()
    assert (await acme.account()).used["jobs"] == 0
    crash.kill()
    crash.restart()
    other = await Bus.connect(server.url, name="another-master")
    await keep(other, rl("cancelled"), named(rl("training"), "runs"))
    await other.close()

    async def closed() -> bool:
        with contextlib.suppress(Unavailable):
            await served.tick()
        return (await job(bus)).closed

    async def counted() -> bool:
        return (await acme.account()).used["jobs"] == 1

    await eventually(closed)
    await eventually(counted)


# Whose jobs are asked for


async def test_a_roster_of_one_tenant_knows_no_others_jobs(bus: Bus, decoded: list[str]) -> None:
    await keep(bus, rl("training"), named(rl("training"), "theirs", "globex"))
    roster = Roster(bus, TENANT)
    assert await roster.tenants() == [TENANT]
    roster.close()
    await keep(bus, rl("paused"))
    assert (await roster.of(TENANT))["touch"].phase == "paused", "who still asks is answered"
    assert set(decoded) == {registry.job_key(TENANT, "touch")}
