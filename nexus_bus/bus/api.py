"""What the server itself is asked: last messages, what is queued, how deep queues are."""

import asyncio
import json
import time
from datetime import datetime
from typing import Any

import msgspec
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from nexus_bus.bus import headers as wire
from nexus_bus.bus.client import GuardedClient
from nexus_bus.bus.publish import ServerError
from nexus_bus.errors import Unavailable
from schemas.subjects import BY_NAME, subject

PAUSE_S = 0.05
STALE_S = 15.0  # how far a server's copy may be behind the leader's
FAULT = 500  # from here on the fault is the server's, and passes: a leader is being elected, or it has just started
_ERROR = b'"error":{'

RECALLED = 20_000  # messages of a stream looked through; what lies behind comes again by itself


class ServerApi:
    """Part of `Bus`."""

    client: GuardedClient
    up: asyncio.Event  # set while the server is there

    async def ask(self, on: str, payload: bytes = b"", *, deadline: float = 15.0) -> Any:
        """A request to the server itself, repeated until it answers: only for what may be done twice.

        Raises:
            Unavailable: no answer within `deadline` seconds.
        """
        ends, why = time.monotonic() + deadline, "no answer from the server"
        while (left := ends - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self.up.wait()
                answer = await self.client.request(on, payload, timeout=min(2.0, left))
            except NoRespondersError:
                await asyncio.sleep(PAUSE_S)  # JetStream opens a little later than the server
            except (NatsError, TimeoutError):
                continue
            else:
                if not (fault := _fault(answer.data)):
                    return answer
                why = fault
                await asyncio.sleep(PAUSE_S)
        raise Unavailable(f"{on}: {why}, not within {deadline:g} s")

    async def last(self, stream: str, on: str) -> Any:
        """The last message of one subject, or None.

        Any server of a cluster answers this, also one whose copy is a moment behind. That there is none, only the leader knows.
        """
        body, ends = json.dumps({"last_by_subj": on}).encode(), time.monotonic() + STALE_S
        while time.monotonic() < ends:
            msg = await self.ask(f"$JS.API.DIRECT.GET.{stream}.{on}")
            status = wire.get(msg, "Status")
            if not status:
                return msg
            if status != "404":
                raise Unavailable(f"{on}: {wire.get(msg, 'Description')}")
            if _ERROR in (await self.ask(f"$JS.API.STREAM.MSG.GET.{stream}", body)).data:
                return None
            await asyncio.sleep(PAUSE_S)
        raise Unavailable(f"{on}: the server's copy is behind for more than {STALE_S:g} s")

    async def purge(self, name: str, **tokens: str) -> None:
        """Remove what is queued on a subject, or with `*` for a token on several."""
        row = BY_NAME[name]
        if row.stream is not None:
            subject(name, **{key: value if value != "*" else "_" for key, value in tokens.items()})  # refuses what is no name
            on = row.pattern.format(**tokens)
            await self.ask(f"$JS.API.STREAM.PURGE.{row.stream}", json.dumps({"filter": on}).encode())

    async def queued(self, stream: str, on: str = ">") -> dict[str, int]:
        """Messages per subject of a stream, of those that match."""
        found: dict[str, int] = {}
        while True:
            body = json.dumps({"subjects_filter": on, "offset": len(found)}).encode()
            info: dict[str, Any] = json.loads((await self.ask(f"$JS.API.STREAM.INFO.{stream}", body)).data)
            page: dict[str, int] = info.get("state", {}).get("subjects") or {}
            found |= page
            if not page or len(found) >= int(info.get("total", 0)):
                return found

    async def clock(self, stream: str) -> float:
        """Unix time by the clock that stamps a stream's messages. Raises Unavailable."""
        info: dict[str, Any] = json.loads((await self.ask(f"$JS.API.STREAM.INFO.{stream}")).data)
        if "ts" not in info:  # the stream is not there just now
            raise Unavailable(f"{stream}: the server does not say what time it is")
        return datetime.fromisoformat(info["ts"]).timestamp()

    async def drop(self, stream: str, on: str) -> None:
        """Remove what is queued on one subject, whatever its tokens are."""
        await self.ask(f"$JS.API.STREAM.PURGE.{stream}", json.dumps({"filter": on}).encode())

    async def forget(self, stream: str, seq: int) -> None:
        """Remove one message of a log; one that is gone already is no matter."""
        await self.ask(f"$JS.API.STREAM.MSG.DELETE.{stream}", json.dumps({"seq": seq}).encode())

    async def recall(self, stream: str, consumer: str) -> None:
        """Have what a consumer delivered, and nobody answered, delivered again now, instead of after its `ack_wait`.

        For a consumer of one reader at a time, by the next one: it knows that whoever holds those messages is over. They are
        handed back in its name. The server passes over what lies between them in the stream and is not of this consumer.
        """
        info: dict[str, Any] = json.loads((await self.ask(f"$JS.API.CONSUMER.INFO.{stream}.{consumer}")).data)
        if not info.get("num_ack_pending"):
            return
        last = info["delivered"]
        first = int(info["ack_floor"]["stream_seq"]) + 1
        try:
            for seq in range(first, min(int(last["stream_seq"]) + 1, first + RECALLED)):
                on = f"$JS.ACK.{stream}.{consumer}.1.{seq}.{last['consumer_seq']}.0.0"
                await self.client.publish(on, b"-NAK")
        except NatsError:  # between two connections: they come by themselves, only later
            return

    async def depths(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Per work queue and consumer: (waiting, delivered and unanswered)."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for stream in ("JOBS", "ROLLOUT", "INFERENCE", "TRAINING"):
            found[stream], total = {}, 1
            while len(found[stream]) < total:
                body = json.dumps({"offset": len(found[stream])}).encode()
                page: dict[str, Any] = json.loads((await self.ask(f"$JS.API.CONSUMER.LIST.{stream}", body, deadline=5.0)).data)
                listed: list[dict[str, Any]] = page.get("consumers") or []
                found[stream] |= {c["name"]: (int(c["num_pending"]), int(c["num_ack_pending"])) for c in listed}
                total = int(page.get("total", 0)) if listed else 0
        return found


class _Answer(msgspec.Struct):
    error: ServerError | None = None


def _fault(answer: bytes) -> str:
    """What is wrong at the server and passes, if an answer is no more than that."""
    if _ERROR not in answer[:200]:  # it would stand at the beginning
        return ""
    try:
        error = msgspec.json.decode(answer, type=_Answer).error
    except msgspec.MsgspecError:  # a message of somebody's, and no answer of the server's own
        return ""
    return f"the server does not do it ({error.description})" if error is not None and error.code >= FAULT else ""
