"""What cannot be served is answered with its error, leaves little behind, and holds up nobody."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.bus import Bus
from nexus_bus.models.backbone import Backbone
from schemas.subjects import subject
from tests.conftest import Eventually
from tests.line.asking import TENANT, Asker, Start, events, held, starting
from workers import inference as worker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")


@pytest.fixture
async def asker(bus: Bus, backbone: Backbone) -> Asker:
    return await Asker(bus, backbone).open()


@pytest.fixture
async def start(bus: Bus, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`await start(slots=2)` runs a worker with these settings until the test ends."""
    async with starting(bus, backbone, tmp_path / "home", monkeypatch) as begin:
        yield begin


async def test_an_unreadable_request_is_answered_too(asker: Asker, start: Start, bus: Bus, eventually: Eventually) -> None:
    await start()
    given = {"Nats-Msg-Id": "garbled", "Content-Type": "application/json", "Nexus-Reply-To": asker.inbox}
    await bus.publisher.send(subject("infer.request", tenant=TENANT), b'{"id": "garbled", "job": 7}', given, 30.0)
    reply = await asker.reply("garbled")
    assert reply.error_code == "bad_message"
    assert "job" in reply.error
    assert [event.message for event in await events(bus, TENANT, "request.refused", 1)] == [reply.error]
    await eventually(lambda: held(bus))


async def test_a_refused_request_leaves_little_behind_however_much_it_held(
    asker: Asker, start: Start, bus: Bus, eventually: Eventually
) -> None:
    """Events are kept for weeks: what does not fit into one would fill the bucket that everybody's payloads go through."""
    await asker.publish("pick")
    await start()
    reply = await asker.ask("pick@0", camera="x" * 900_000)
    assert "no camera 'front'; there is xxx" in reply.error
    assert len(reply.error) < 500
    assert [event.message for event in await events(bus, TENANT, "request.refused", 1)] == [reply.error]
    await eventually(lambda: held(bus))

    async def emptied() -> bool:
        return not await bus.queued("OBJ_payloads")

    await eventually(emptied)


async def test_refused_requests_become_events_only_so_often(
    asker: Asker, start: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TELL_S", 1000.0)
    monkeypatch.setattr(worker, "TOLD", 3)
    await start()
    for number in range(6):
        assert "there is no such version" in (await asker.ask(f"none@{number}")).error, "who asked is answered all the same"
    await asker.publish("pick")
    await asker.ask("pick@0")
    told = await bus.queued("EVENTS", subject("event", tenant=TENANT, job="none"))
    assert sum(told.values()) == 3


async def test_telling_of_a_refused_request_holds_back_no_other_answer(
    asker: Asker, start: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    await asker.publish("pick")
    serving = await start()
    await asker.ask("pick@0")
    await eventually(lambda: held(bus))
    monkeypatch.setattr(serving.pace, "batch", 8)
    told, free = asyncio.Event(), threading.Event()

    async def slow(*_: Any, **__: Any) -> None:
        await told.wait()

    monkeypatch.setattr(serving.context, "event", slow)
    serving.compute.submit(free.wait, 60)
    names = [await asker.send("pick@0", scene, camera) for scene, camera in enumerate(("front", "wrist", "front"))]
    await eventually(lambda: held(bus, 3))
    free.set()
    first, bad, good = [await asker.reply(name) for name in names]
    assert (first.error, bad.error_code, good.error) == ("", "bad_message", "")
    assert good.group == 2, "both came of one forward"
    told.set()
