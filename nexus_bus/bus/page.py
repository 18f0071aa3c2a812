"""A page of a log: some entries of a stream, read without a consumer, so that any number of readers cost the server nothing."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from nats.errors import Error as NatsError

from nexus_bus.bus import headers as wire
from nexus_bus.bus.codec import decode
from nexus_bus.bus.tail import start_time
from nexus_bus.errors import BadMessage, NotFound, Unavailable
from schemas.subjects import SubjectEntry

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

PAGE_BYTES = 2 << 20  # of one page, about
SILENCE_S = 3.0
PAUSE_S = 0.05


@dataclass(frozen=True)
class Page:
    """Messages in order, the sequence to go on behind, and whether that was all there is now."""

    messages: list[Any]
    next: int
    end: bool


async def page(bus: "Bus", row: SubjectEntry, on: str, *, after: int = 0, since: datetime | None = None, limit: int) -> Page:
    """Up to `limit` messages of the subjects `on` (wildcards allowed) behind a sequence number, or from a time on.

    What cannot be read is logged and left out.

    Raises:
        Unavailable: no answer.
    """
    request: dict[str, Any] = {"batch": limit, "max_bytes": PAGE_BYTES, "next_by_subj": on}
    if since is not None and not after:
        request["start_time"] = start_time(since)
    else:
        request["seq"] = after + 1
    found, last, left = list[Any](), after, 0
    async for msg in _answers(bus, f"$JS.API.DIRECT.GET.{row.stream}", request):
        last, left = int(wire.get(msg, "Nats-Sequence")), int(wire.get(msg, "Nats-Num-Pending") or 0)
        try:
            found.append(decode(row, await _payload(bus, msg), wire.get(msg, wire.CONTENT_TYPE) or None))
        except (BadMessage, NotFound) as error:
            bus.log.warning("an unreadable message in a log", stream=row.stream, seq=last, error=str(error))
    return Page(found, last, left == 0)


async def _payload(bus: "Bus", msg: Any) -> bytes:
    sha = wire.get(msg, wire.BLOB)
    return await bus.payloads.get(sha) if sha else msg.data


async def _answers(bus: "Bus", on: str, request: dict[str, Any]) -> AsyncIterator[Any]:
    """The messages of one batched direct get."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    inbox = bus.client.new_inbox()
    subscription = await bus.listen(inbox, queue.put)
    ends = time.monotonic() + SILENCE_S
    try:
        async with asyncio.timeout(SILENCE_S):
            await bus.up.wait()
        await bus.client.publish(on, json.dumps(request).encode(), reply=inbox)
        while True:
            msg = await asyncio.wait_for(queue.get(), SILENCE_S)
            status = wire.get(msg, "Status")
            if not status:
                yield msg
            elif status == "503" and time.monotonic() < ends:  # JetStream opens a little later than the server
                await asyncio.sleep(PAUSE_S)
                await bus.client.publish(on, json.dumps(request).encode(), reply=inbox)
            else:
                break
        if status not in ("204", "404"):
            raise Unavailable(f"{on}: {status} {wire.get(msg, 'Description')}")
    except (NatsError, TimeoutError) as error:
        raise Unavailable(f"{on}: no answer from the server") from error
    finally:
        await subscription.stop()


async def whole(bus: "Bus", row: SubjectEntry, on: str) -> list[Any]:
    """Every message of the subjects `on` that is stored now. Raises Unavailable."""
    messages, after = list[Any](), 0
    while True:
        one = await page(bus, row, on, after=after, limit=256)
        messages += one.messages
        after = one.next
        if one.end:
            return messages


async def last_sequence(bus: "Bus", stream: str) -> int:
    """Of a stream's newest message. Raises Unavailable."""
    msg = await bus.ask(f"$JS.API.STREAM.INFO.{stream}")
    return msgspec.json.decode(msg.data, type=_Info).state.last_seq


class _State(msgspec.Struct):
    last_seq: int = 0


class _Info(msgspec.Struct):
    state: _State = msgspec.field(default_factory=_State)
