"""Key-value buckets with typed values and compare-and-set: the registry and the leases. Readable by any NATS KV client."""

import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from nexus_bus import faults
from nexus_bus.bus import headers as wire
from nexus_bus.bus.tail import Reader
from nexus_bus.errors import BadMessage, Conflict

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

T = TypeVar("T")

OPERATION = "KV-Operation"  # set on markers of deletion
_KEY = re.compile(r"[-/_=@a-zA-Z0-9]+(\.[-/_=@a-zA-Z0-9]+)*")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A value and the revision to give to `update`."""

    value: T
    revision: int


class Kv:
    """One bucket. Values are JSON."""

    def __init__(self, bus: "Bus", bucket: str) -> None:
        """Use `Bus.kv`."""
        self._bus = bus
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def get(self, key: str, kind: type[T]) -> Entry[T] | None:
        """The current value, or None. Raises BadMessage if it is not of that type."""
        msg = await self._bus.last(self._stream, self._subject(key))
        if msg is None or wire.get(msg, OPERATION):
            return None
        return self._entry(key, msg.data, int(wire.get(msg, "Nats-Sequence")), kind)

    async def put(self, key: str, value: Any, *, deadline: float = 15.0) -> int:
        """Write whatever was there before; the new revision."""
        return await self._write(key, msgspec.json.encode(value), {}, deadline)

    async def create(self, key: str, value: Any, *, deadline: float = 15.0) -> int:
        """Write a key that does not exist; the revision. Raises Conflict if it does."""
        try:
            return await self.update(key, value, 0, deadline=deadline)
        except Conflict:
            msg = await self._bus.last(self._stream, self._subject(key))
            if msg is None or not wire.get(msg, OPERATION):
                raise
        marker = int(wire.get(msg, "Nats-Sequence"))  # of a deletion
        return await self.update(key, value, marker, deadline=deadline)

    async def update(self, key: str, value: Any, revision: int, *, deadline: float = 15.0) -> int:
        """Write if the current revision is the given one; the new revision. Raises Conflict otherwise."""
        return await self._write(key, msgspec.json.encode(value), {wire.EXPECTED_REVISION: str(revision)}, deadline)

    async def delete(self, key: str, *, deadline: float = 15.0) -> None:
        """Remove a key; watchers see it."""
        await self._write(key, b"", {OPERATION: "DEL"}, deadline)

    async def keys(self, prefix: str = "", *, deleted: bool = False) -> list[str]:
        """Keys that begin with `prefix`, sorted; with those that were deleted it costs little, however many there are."""
        if deleted:
            on = await self._bus.queued(self._stream, self._filter(prefix))
            return sorted(key for one in on if (key := one.removeprefix(self._prefix)).startswith(prefix))
        found: list[str] = []
        async with Reader(self._bus, self._stream, (self._filter(prefix),), "last_per_subject") as reader:
            async for msg in reader.stored():
                key = msg.subject.removeprefix(self._prefix)
                if key.startswith(prefix) and not wire.get(msg, OPERATION):
                    found.append(key)
        return sorted(found)

    async def entries(self, prefix: str, kind: type[T], *, strict: bool = False) -> dict[str, Entry[T]]:
        """What is there under keys that begin with `prefix`, in one pass. What cannot be read is logged and left out; or else
        raises BadMessage.
        """
        found: dict[str, Entry[T]] = {}
        async with Reader(self._bus, self._stream, (self._filter(prefix),), "last_per_subject") as reader:
            async for msg in reader.stored():
                key = msg.subject.removeprefix(self._prefix)
                if key.startswith(prefix) and not wire.get(msg, OPERATION):
                    try:
                        found[key] = self._entry(key, msg.data, msg.metadata.sequence.stream, kind)
                    except BadMessage as error:
                        if strict:
                            raise
                        self._bus.log.warning("a stored value cannot be read", error=str(error))
        return found

    async def watch(self, prefix: str, kind: type[T]) -> AsyncIterator[tuple[str, Entry[T] | None]]:
        """What is there, then every change as it happens; None for a key that was deleted.

        A value that is not of that type is logged and passed over: it must not end whoever watches for everybody else's sake.
        """
        async with Reader(self._bus, self._stream, (self._filter(prefix),), "last_per_subject") as reader:
            async for msg in reader.all():
                key = msg.subject.removeprefix(self._prefix)
                if key.startswith(prefix):
                    deleted = bool(wire.get(msg, OPERATION))
                    try:
                        entry = None if deleted else self._entry(key, msg.data, msg.metadata.sequence.stream, kind)
                    except BadMessage as error:
                        self._bus.log.warning("a stored value cannot be read", error=str(error))
                        continue
                    yield key, entry

    async def _write(self, key: str, data: bytes, given: dict[str, str], deadline: float) -> int:
        # The id makes a repeated write the same write: a compare-and-set whose answer was lost does not fail against itself.
        given = given | {wire.MSG_ID: uuid.uuid4().hex}
        revision = (await self._bus.publisher.send(self._subject(key), data, given, deadline)).seq
        faults.at("after-write", key)
        return revision

    def _entry(self, key: str, data: bytes, revision: int, kind: type[T]) -> Entry[T]:
        try:
            return Entry(msgspec.json.decode(data, type=kind), revision)
        except msgspec.MsgspecError as error:
            raise BadMessage(f"{self._prefix}{key}: {error}") from None

    def _subject(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a key: letters, digits, - _ / = @, in tokens parted by dots")
        return self._prefix + key

    def _filter(self, prefix: str) -> str:
        """The narrowest subject that covers every key with this prefix."""
        whole = prefix.rpartition(".")[0]
        return f"{self._prefix}{whole}.>" if whole else f"{self._prefix}>"
