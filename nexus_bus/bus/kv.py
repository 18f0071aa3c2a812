"""Key-value buckets with typed values and compare-and-set: jobs, policy versions, leases."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DeliverPolicy

from nexus_bus.bus import headers
from nexus_bus.errors import BadMessage, Conflict, Unavailable

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

T = TypeVar("T")
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
OPERATION = "KV-Operation"
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A value and the revision that compare-and-set needs."""

    value: T
    revision: int


class Kv:
    """One bucket."""

    def __init__(self, bus: "Bus", bucket: str) -> None:
        """Use `Bus.kv`."""
        self._bus = bus
        self.bucket = bucket
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def get(self, key: str, kind: type[T]) -> Entry[T] | None:
        """The current value, or None where there is none.

        Raises:
            BadMessage: what is stored is not of that type.
            Unavailable: the broker does not answer.
        """
        message = await self._last(key)
        if message is None or headers.get(message, OPERATION) in ("DEL", "PURGE"):
            return None
        return Entry(self._decode(key, message.data, kind), int(headers.get(message, "Nats-Sequence")))

    async def create(self, key: str, value: Any) -> int:
        """Store a first value. Raises Conflict if there is one already."""
        message = await self._last(key)
        if message is not None and headers.get(message, OPERATION) not in ("DEL", "PURGE"):
            raise Conflict(f"{self.bucket}/{key} exists")
        revision = int(headers.get(message, "Nats-Sequence")) if message is not None else 0
        return await self._put(key, value, revision)

    async def update(self, key: str, value: Any, revision: int) -> int:
        """Replace the value of that revision. Raises Conflict if another was stored since."""
        return await self._put(key, value, revision)

    async def put(self, key: str, value: Any) -> int:
        """Store whatever is there now."""
        return await self._put(key, value, None)

    async def delete(self, key: str) -> None:
        """Leave a marker in its place."""
        await self._bus.publisher.send(self._prefix + key, b"", {OPERATION: "DEL"}, TIMEOUT_S)

    async def keys(self, prefix: str = "") -> list[str]:
        """Keys below a prefix that ends with a dot, in no particular order."""
        request = json.dumps({"subjects_filter": f"{self._prefix}{prefix}>"}).encode()
        reply = await self._ask(f"$JS.API.STREAM.INFO.{self._stream}", request)
        subjects = (json.loads(reply.data).get("state") or {}).get("subjects") or {}
        found = [subject.removeprefix(self._prefix) for subject in subjects]
        alive = await asyncio.gather(*(self._last(key) for key in found))
        return sorted(
            key for key, m in zip(found, alive, strict=True) if m is not None and headers.get(m, OPERATION) not in ("DEL", "PURGE")
        )

    async def watch(self, prefix: str, kind: type[T] = msgspec.Raw) -> AsyncIterator[tuple[str, Entry[T] | None]]:  # type: ignore[assignment]  # undecoded unless asked
        """Every current value below the prefix, then every change; None for a deletion. Survives restarts of the server."""
        seen = 0
        while True:
            try:
                config = ConsumerConfig(
                    filter_subject=f"{self._prefix}{prefix}>",
                    deliver_policy=DeliverPolicy.BY_START_SEQUENCE if seen else DeliverPolicy.LAST_PER_SUBJECT,
                    opt_start_seq=seen + 1 if seen else None,
                )
                subscription = await self._bus.js.subscribe(
                    f"{self._prefix}{prefix}>", stream=self._stream, ordered_consumer=True, config=config
                )
                try:
                    while True:
                        try:
                            message = await subscription.next_msg(timeout=2.0)
                        except TimeoutError:
                            await subscription.consumer_info()  # raises once the server forgot the consumer
                            continue
                        seen = max(seen, message.metadata.sequence.stream)
                        key = message.subject.removeprefix(self._prefix)
                        if headers.get(message, OPERATION) in ("DEL", "PURGE"):
                            yield key, None
                        else:
                            yield key, Entry(self._decode(key, message.data, kind), message.metadata.sequence.stream)
                finally:
                    await self._quiet(subscription)
            except (NatsError, TimeoutError) as error:
                self._bus.log.debug("watch begins again", bucket=self.bucket, error=repr(error))
                await asyncio.sleep(0.2)

    async def _quiet(self, subscription: Any) -> None:
        try:
            await subscription.unsubscribe()
        except NatsError:
            return  # gone with its connection

    async def _put(self, key: str, value: Any, revision: int | None) -> int:
        given = {} if revision is None else {EXPECTED: str(revision)}
        data = msgspec.json.encode(value)
        try:
            return (await self._bus.publisher.send(self._prefix + key, data, given, TIMEOUT_S)).seq
        except Conflict:
            # A retry whose first try was stored meets its own value: that is a success.
            current = await self._last(key)
            if revision is not None and current is not None and current.data == data:
                return int(headers.get(current, "Nats-Sequence"))
            raise

    async def _last(self, key: str) -> Any:
        request = json.dumps({"last_by_subj": self._prefix + key}).encode()
        reply = await self._ask(f"$JS.API.DIRECT.GET.{self._stream}", request)
        return None if headers.get(reply, "Status") == "404" else reply

    async def _ask(self, on: str, request: bytes) -> Any:
        last: Exception | None = None
        for _ in range(5):
            try:
                return await self._bus.client.request(on, request, timeout=2.0)
            except (NatsError, TimeoutError) as error:
                last = error
                await asyncio.sleep(0.1)
        raise Unavailable(f"{self.bucket}: the broker does not answer: {last!r}") from last

    def _decode(self, key: str, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise BadMessage(f"{self.bucket}/{key}: {error}") from error


