"""Streams told once, logs read in order, the registry, and blobs."""

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from nexus_bus.audit import audit
from nexus_bus.bus import Bus, EmbeddedServer, ensure_topology, topology
from nexus_bus.errors import BadMessage, Conflict, NotFound, Unavailable
from schemas.base import BlobRef
from schemas.events import Event


class Note(msgspec.Struct):
    text: str
    n: int = 0


def event(number: int) -> Event:
    return Event(type="job.progress", tenant="acme", job="pick", time="2026-01-01T00:00:00Z", data={"number": number})


async def publish(bus: Bus, *numbers: int, tenant: str = "acme", job: str = "pick") -> None:
    for n in numbers:
        await bus.publish("event", event(n), msg_id=f"{tenant}/{job}/{n}", tenant=tenant, job=job)


async def test_the_same_id_is_stored_once(bus: Bus, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexus_bus.bus.publish.RESEND_S", 60.0)  # else one that is slow to be confirmed is its own duplicate
    first = await bus.publish("event", event(1), msg_id="one", tenant="acme", job="pick")
    second = await bus.publish("event", event(2), msg_id="one", tenant="acme", job="pick")
    assert (first.duplicate, second.duplicate, second.seq) == (False, True, first.seq)
    assert await held("EVENTS") == 1


async def test_a_message_carries_its_headers(bus: Bus) -> None:
    await publish(bus, 1)
    (item,) = [item async for item in bus.tail("event", follow=False)]
    assert item.headers["Nats-Msg-Id"] == item.headers["ce-id"] == "acme/pick/1"
    assert (item.headers["ce-type"], item.headers["ce-source"]) == ("nexus.event", "/nexus/test")
    assert (item.headers["ce-specversion"], item.headers["Nexus-Schema"]) == ("1.0", "1")
    assert item.headers["Content-Type"] == "application/json"
    assert item.tokens == {"tenant": "acme", "job": "pick"}
    assert abs((datetime.now(UTC) - item.time).total_seconds()) < 60


async def test_ensuring_the_streams_from_many_processes_at_once_is_safe(server: EmbeddedServer) -> None:
    buses = [await Bus.connect(server.url, name=f"w{n}") for n in range(4)]
    await asyncio.gather(*(ensure_topology(bus) for bus in buses))
    await publish(buses[0], 1)
    await asyncio.gather(*(ensure_topology(bus) for bus in buses))
    assert (await buses[3].js.stream_info("EVENTS")).state.messages == 1
    for bus in buses:
        await bus.close()


async def test_whoever_floods_a_log_that_all_share_pushes_out_its_own_entries(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [replace(one, max_bytes=256 << 10) for one in topology.STREAMS if one.name in ("AUDIT", "EVENTS")]
    small = [replace(one, remembered=min(one.remembered, 50)) for one in shared]
    bus = await Bus.connect(server.url, name="w")
    for streams in ([replace(one, remembered=-1) for one in shared], small):  # as an earlier release made them, and now
        monkeypatch.setattr(topology, "STREAMS", streams)
        await ensure_topology(bus)
    await audit(bus, "globex", "job.submit", "pick", "asked", "", key="1")
    await publish(bus, 1, tenant="globex")
    for first in range(0, 1000, 100):
        some = range(first, first + 100)
        await asyncio.gather(*(audit(bus, "acme", "data.drop", "_", "asked", "x" * 300, key=str(n)) for n in some))
        await publish(bus, *some)
    for name in ("audit", "event"):
        kept = [item.tokens["tenant"] async for item in bus.tail(name, follow=False)]
        assert (kept.count("globex"), kept.count("acme")) == (1, 50), name
    await bus.close()


async def test_connecting_to_nothing_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match=r"no NATS server with JetStream at nats://127\.0\.0\.1:1.*nexus up"):
        await Bus.connect("nats://127.0.0.1:1", timeout=0.5)


async def test_a_log_is_read_in_order_from_all_from_a_time_and_from_now(bus: Bus, eventually: Any) -> None:
    await publish(bus, *range(5))
    await publish(bus, 0, tenant="other")
    middle = datetime.now(UTC)
    await publish(bus, *range(5, 10))

    async def numbers(items: AsyncIterator[Any]) -> list[Any]:
        return [item.message.data["number"] async for item in items]

    assert await numbers(bus.tail("event", follow=False, tenant="acme")) == list(range(10))
    assert await numbers(bus.tail("event", follow=False, tenant="acme", since=middle)) == list(range(5, 10))
    assert await numbers(bus.tail("event", follow=False, tenant="nobody")) == []
    seen: list[Any] = []

    async def follow() -> None:
        async for item in bus.tail("event", since="new", tenant="acme"):
            seen.append(item.message.data["number"])

    following = asyncio.create_task(follow())

    async def prodded() -> bool:  # "new" begins when the reader is there
        await publish(bus, 100 + int(asyncio.get_running_loop().time() * 1000) % 10**9)
        return bool(seen)

    await eventually(prodded)
    await publish(bus, 10, 11)
    await eventually(lambda: seen[-2:] == [10, 11])
    following.cancel()


async def test_following_a_log_over_a_kill_misses_nothing_and_repeats_nothing(bus: Bus, crash: Any, eventually: Any) -> None:
    seen: list[Any] = []

    async def follow() -> None:
        async for item in bus.tail("event"):
            seen.append(item.message.data["number"])

    following = asyncio.create_task(follow())
    await publish(bus, *range(100))
    crash.kill()
    crash.restart()
    await publish(bus, *range(100, 200))
    await eventually(lambda: len(seen) >= 200, within=60)
    assert seen == list(range(200))
    following.cancel()


async def test_an_unreadable_entry_does_not_end_a_tail(bus: Bus) -> None:
    await publish(bus, 1)
    await bus.publisher.send("event.acme.pick", b"rubbish", {"Nats-Msg-Id": "bad"}, 30.0)
    await publish(bus, 2)
    assert [item.message.data["number"] async for item in bus.tail("event", follow=False)] == [1, 2]


async def test_keys_change_by_compare_and_set(bus: Bus) -> None:
    kv = bus.kv("registry")
    assert await kv.get("job.acme.pick", Note) is None
    revision = await kv.create("job.acme.pick", Note("a"))
    with pytest.raises(Conflict):
        await kv.create("job.acme.pick", Note("b"))
    newer = await kv.update("job.acme.pick", Note("c"), revision)
    with pytest.raises(Conflict):
        await kv.update("job.acme.pick", Note("d"), revision)
    entry = await kv.get("job.acme.pick", Note)
    assert entry is not None
    assert (entry.value, entry.revision) == (Note("c"), newer)
    with pytest.raises(BadMessage, match=r"job\.acme\.pick: .*`int`"):
        await kv.get("job.acme.pick", int)


async def test_a_copy_that_is_behind_does_not_decide_that_there_is_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster any server answers, and only the leader knows."""
    ask, behind = bus.ask, ["once", "and again"]

    async def asked(on: str, *given: Any, **how: Any) -> Any:
        answer = await ask(on, *given, **how)
        if "DIRECT.GET" in on and behind and behind.pop():
            answer.headers = {"Status": "404", "Description": "Message Not Found"}
        return answer

    kv = bus.kv("registry")
    await kv.put("job.a", 1)
    monkeypatch.setattr(bus, "ask", asked)
    entry = await kv.get("job.a", int)
    assert entry is not None
    assert entry.value == 1
    assert behind == []
    assert await kv.get("job.b", int) is None


async def test_of_many_updates_of_one_revision_one_wins(bus: Bus) -> None:
    kv = bus.kv("leases")
    revision = await kv.create("slot", 0)
    results = await asyncio.gather(*(kv.update("slot", n, revision) for n in range(20)), return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 19


async def test_keys_are_listed_by_prefix_and_a_deleted_one_may_be_made_again(bus: Bus) -> None:
    kv = bus.kv("registry")
    for key in ("job.acme.pick", "job.acme.push", "job.other.pick", "policy.acme.pick@1"):
        await kv.put(key, 1)
    assert await kv.keys("job.acme.") == ["job.acme.pick", "job.acme.push"]
    assert await kv.keys("job.acme.pi") == ["job.acme.pick"]
    assert len(await kv.keys()) == 4
    await kv.delete("job.acme.pick")
    assert await kv.keys("job.acme.") == ["job.acme.push"]
    assert await kv.keys("job.acme.", deleted=True) == ["job.acme.pick", "job.acme.push"]
    assert await kv.keys("job.acme.pi", deleted=True) == ["job.acme.pick"]
    assert await kv.get("job.acme.pick", int) is None
    await kv.create("job.acme.pick", 2)
    assert await kv.keys("nothing.") == []
    assert await kv.keys("nothing.", deleted=True) == []
    for bad in ("", ".a", "a.", "a b", "a.*", "a..b"):
        with pytest.raises(ValueError, match="is not a key"):
            await kv.put(bad, 1)


async def test_a_watch_tells_what_is_and_what_becomes(bus: Bus, eventually: Any) -> None:
    kv = bus.kv("registry")
    await kv.put("job.a", 1)
    seen: list[tuple[str, int | None]] = []

    async def watch() -> None:
        async for key, entry in kv.watch("job.", int):
            seen.append((key, entry.value if entry else None))

    watching = asyncio.create_task(watch())
    await eventually(lambda: seen == [("job.a", 1)])
    await kv.put("job.b", 2)
    await kv.put("policy.c", 3)
    await kv.delete("job.a")
    await eventually(lambda: seen == [("job.a", 1), ("job.b", 2), ("job.a", None)])
    watching.cancel()


async def test_stock_clients_read_the_registry(bus: Bus) -> None:
    await bus.kv("registry").put("job.acme.pick", Note("a", 3))
    stock = await bus.js.key_value("registry")
    assert (await stock.get("job.acme.pick")).value == b'{"text":"a","n":3}'
    await stock.put("job.acme.push", b'{"text":"b"}')
    entry = await bus.kv("registry").get("job.acme.push", Note)
    assert entry is not None
    assert entry.value == Note("b")


async def test_a_blob_is_stored_once_and_checked(bus: Bus, held: Any) -> None:
    data = os.urandom(2_500_000)
    first, second = await asyncio.gather(bus.blobs.put(data), bus.blobs.put(data))
    assert first == second == BlobRef(sha256=first.sha256, size=len(data))
    assert await bus.blobs.put(data) == first
    assert await held("OBJ_blobs") == 4  # three chunks and what describes them
    assert await bus.blobs.get(first) == data
    assert await bus.blobs.get(first.sha256) == data
    assert await bus.blobs.get(await bus.blobs.put(b"")) == b""
    await bus.blobs.delete(first)
    await bus.blobs.delete(first)
    with pytest.raises(NotFound, match="does not exist in blobs"):
        await bus.blobs.get(first)
    assert await bus.blobs.put(data) == first
    assert await bus.blobs.get(first) == data


async def test_a_damaged_blob_is_never_returned(bus: Bus) -> None:
    ref = await bus.blobs.put(os.urandom(3_000_000))
    stream = await bus.js.get_last_msg("OBJ_blobs", f"$O.blobs.M.{_name(ref)}")
    nuid = msgspec.json.decode(stream.data)["nuid"]
    await bus.publisher.send(f"$O.blobs.C.{nuid}", b"more", {"Nats-Msg-Id": "forged"}, 30.0)
    with pytest.raises(NotFound, match="damaged"):
        await bus.blobs.get(ref)
    await bus.js.purge_stream("OBJ_blobs", subject=f"$O.blobs.C.{nuid}")
    with pytest.raises(NotFound, match="damaged"):
        await bus.blobs.get(ref)


def _name(ref: BlobRef) -> str:
    return base64.urlsafe_b64encode(ref.sha256.encode()).decode()


async def test_a_stored_value_that_cannot_be_read_does_not_end_a_watch(bus: Bus) -> None:
    kv = bus.kv("registry")
    await kv.put("job.acme.bad", {"text": None})
    await kv.put("job.acme.good", Note("fine"))
    async with asyncio.timeout(30):
        async for key, entry in kv.watch("job.", Note):
            assert (key, entry and entry.value) == ("job.acme.good", Note("fine"))
            break


async def test_content_that_finds_no_room_is_unavailable_however_many_chunks_it_has(bus: Bus) -> None:
    config = (await bus.js.stream_info("OBJ_blobs")).config
    config.max_bytes = 1 << 20
    await bus.js.update_stream(config)

    async def finds_no_room(size: int) -> None:
        with pytest.raises(Unavailable, match=r"not stored within .* is full"):
            await bus.blobs.put(os.urandom(size), deadline=3.0)

    await asyncio.gather(finds_no_room(1_500_000), finds_no_room(5_000_000))
