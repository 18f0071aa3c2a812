"""What the server itself is asked: last messages, what is queued, how deep queues are."""

import asyncio
import json
import time
from typing import Any

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from nexus_bus.bus import headers as wire
from nexus_bus.bus.client import GuardedClient
from nexus_bus.errors import Unavailable
from schemas.subjects import BY_NAME, subject


class ServerApi:
    """Part of `Bus`."""

    client: GuardedClient
    up: asyncio.Event  # set while the server is there

    async def ask(self, on: str, payload: bytes = b"", *, deadline: float = 15.0) -> Any:
        """A request to the server itself, repeated until it answers: only for what may be done twice.

        Raises:
            Unavailable: no answer within `deadline` seconds.
        """
        ends = time.monotonic() + deadline
        while (left := ends - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self.up.wait()
                return await self.client.request(on, payload, timeout=min(2.0, left))
            except NoRespondersError:
                await asyncio.sleep(0.05)  # JetStream opens a little later than the server
            except (NatsError, TimeoutError):
                continue
        raise Unavailable(f"{on}: no answer from the server within {deadline:g} s")

    async def last(self, stream: str, on: str) -> Any:
        """The last message of one subject, or None."""
        msg = await self.ask(f"$JS.API.DIRECT.GET.{stream}.{on}")
        status = wire.get(msg, "Status")
        if status == "404":
            return None
        if status:
            raise Unavailable(f"{on}: {wire.get(msg, 'Description')}")
        return msg

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

    async def drop(self, stream: str, on: str) -> None:
        """Remove what is queued on one subject, whatever its tokens are."""
        await self.ask(f"$JS.API.STREAM.PURGE.{stream}", json.dumps({"filter": on}).encode())

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
