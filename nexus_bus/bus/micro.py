"""Discovery: each process answers `$SRV.PING`, `INFO` and `STATS` as the NATS micro protocol says, so any NATS tool finds it.

`nats micro ls`, `info` and `stats` of the NATS command line read it, and so does `nexus workers`. Written by hand: the client's
own implementation ends its subscriptions by draining, and has data only where there are endpoints that count requests.

Source: ADR-32 of nats-architecture-and-design (service API), versions v1 of the three responses.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError

from nexus_bus import __version__

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus, Subscription

PREFIX = "$SRV"
TYPE = "io.nats.micro.v1.{}_response"
QUIET_S = 0.25  # after an answer: nobody else is expected
SERVICE = "nexus-"  # before what a process is, in the name of its service


@dataclass(frozen=True)
class Card:
    """Who answers. Processes of one `kind` are one service, and each is an instance of it."""

    kind: str  # a role, or host
    about: Mapping[str, str]  # what never changes: worker, host, pid
    reads: str  # the subject its work comes on
    summary: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def name(self) -> str:
        """Of the service."""
        return SERVICE + self.kind


@dataclass(frozen=True)
class Found:
    """One process that answered."""

    kind: str
    about: Mapping[str, str]
    version: str
    started: str  # RFC 3339
    data: Any  # what it says of itself now


class Presence:
    """Answers until stopped. Subscriptions come back with the connection, as all do."""

    def __init__(self, bus: "Bus", card: Card, work: Callable[[], tuple[int, Any]]) -> None:
        """`work` gives, when asked, how much was done so far and what else there is to say (anything that JSON holds)."""
        self._bus, self._card, self._work = bus, card, work
        self._since = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._subscriptions: list[Subscription] = []

    async def start(self) -> "Presence":
        """Listen under the three forms of name that the protocol has."""
        for whom in ("", f".{self._card.name}", f".{self._card.name}.{self._card.id}"):
            for verb, answer in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
                self._subscriptions.append(await self._bus.listen(f"{PREFIX}.{verb}{whom}", self._answering(answer)))
        return self

    async def stop(self) -> None:
        """Leave: nobody finds it any more."""
        for subscription in self._subscriptions:
            await subscription.stop()

    def _answering(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Any], Any]:
        async def handle(msg: Any) -> None:
            if msg.reply:
                await self._bus.client.publish(msg.reply, json.dumps(answer()).encode())

        return handle

    def _self(self, response: str) -> dict[str, Any]:
        card = self._card
        return {
            "type": TYPE.format(response), "name": card.name, "id": card.id, "version": __version__,
            "metadata": dict(card.about),
        }  # fmt: skip

    def _ping(self) -> dict[str, Any]:
        return self._self("ping")

    def _endpoint(self) -> dict[str, Any]:
        return {"name": "work", "subject": self._card.reads, "queue_group": self._card.kind}

    def _info(self) -> dict[str, Any]:
        metadata: dict[str, str] = {}
        endpoint = self._endpoint() | {"metadata": metadata}
        return self._self("info") | {"description": self._card.summary, "endpoints": [endpoint]}

    def _stats(self) -> dict[str, Any]:
        done, data = self._work()
        counts = {
            "num_requests": done, "num_errors": 0, "last_error": "", "processing_time": 0, "average_processing_time": 0,
            "data": data,
        }  # fmt: skip
        return self._self("stats") | {"started": self._since, "endpoints": [self._endpoint() | counts]}


async def discover(bus: "Bus", kind: str = "", within: float = 2.0) -> list[Found]:
    """Who answers: of one kind, or everybody of ours. It takes a quarter of a second longer than the last answer.

    Args:
        within: seconds at most.
    """
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(msg: Any) -> None:
        answers.put_nowait(msg.data)

    inbox = await bus.listen(bus.client.new_inbox(), take)
    found: list[Found] = []
    ends = time.monotonic() + within
    try:
        await bus.client.publish(f"{PREFIX}.STATS" + (f".{SERVICE}{kind}" if kind else ""), b"", reply=inbox.subject)
        patience = within  # for the first one
        while (left := min(patience, ends - time.monotonic())) > 0:
            data = await asyncio.wait_for(answers.get(), left)
            if (one := _read(data)) is not None:
                found.append(one)
            patience = QUIET_S
    except (TimeoutError, NatsError):
        pass  # whoever has not answered by now does not
    finally:
        await inbox.stop()
    return found


def _read(data: bytes) -> Found | None:
    """None for a service that is not ours, and for what is no answer at all, such as "nobody is there"."""
    try:
        content: dict[str, Any] = json.loads(data)
        name = str(content["name"])
        if not name.startswith(SERVICE) or content["type"] != TYPE.format("stats"):
            return None
        about: dict[str, str] = content["metadata"]
        return Found(name.removeprefix(SERVICE), about, content["version"], content["started"], content["endpoints"][0]["data"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None
