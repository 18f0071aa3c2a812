"""The object store: content under its own sha256, in the layout of the stock clients, at the speed of the disk.

The stock `ObjectStore.get` runs at 5 MB/s for 100 MB (#703). Here chunks are written in a window and read by batched direct
gets. A name is the content's hash, so the same content is stored once, and what is read is checked against it.
"""

import asyncio
import base64
import hashlib
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from nats.errors import Error as NatsError

from nexus_bus import faults
from nexus_bus.bus import headers as wire
from nexus_bus.clock import now
from nexus_bus.errors import Conflict, NexusError, NotFound, Unavailable
from schemas.base import BlobRef

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

CHUNK_BYTES = 1 << 20
WRITE_WINDOW = 8  # chunks in flight
READ_BATCH = 4  # chunks asked for at once: what waits behind them on the connection, an inference request, waits for no more
SILENCE_S = 3.0
PAUSE_S = 0.05
HASH_INLINE = 1 << 20  # larger content is hashed off the loop


class _Info(msgspec.Struct, omit_defaults=True):
    """The stock clients' ObjectInfo."""

    name: str
    bucket: str
    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    mtime: str = ""
    deleted: bool = False
    headers: dict[str, list[str]] = {}
    options: dict[str, Any] = {}


class Blobs:
    """One bucket."""

    def __init__(self, bus: "Bus", bucket: str) -> None:
        """Use `bus.blobs`; `bus.payloads` is for large messages, and forgets."""
        self._bus = bus
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"

    async def put(self, data: bytes, media_type: str = "application/octet-stream", *, deadline: float = 60.0) -> BlobRef:
        """Store content; what is there already is not sent again.

        Raises:
            Unavailable: not stored within `deadline` seconds: broker away, or the bucket is full.
        """
        sha = await _sha256(data)
        ref = BlobRef(sha256=sha, size=len(data), media_type=media_type)
        if (known := await self._info(sha)) and not known[0].deleted:
            return ref
        revision = known[1] if known else 0
        ends = time.monotonic() + deadline
        while True:
            nuid = uuid.uuid4().hex
            in_order = await self._write(nuid, data, ends)
            if in_order:
                break
            await self._purge(f"C.{nuid}")  # a repeated chunk overtook another: the order is the content
        info = _Info(
            name=sha,
            bucket=self._bucket,
            nuid=nuid,
            size=len(data),
            chunks=-(-len(data) // CHUNK_BYTES),
            digest="SHA-256=" + base64.urlsafe_b64encode(bytes.fromhex(sha)).decode(),
            mtime=now(),
            headers={wire.CONTENT_TYPE: [media_type]},
            options={"max_chunk_size": CHUNK_BYTES},
        )
        given = {wire.MSG_ID: nuid, wire.ROLLUP: "sub", wire.EXPECTED_REVISION: str(revision)}
        try:
            await self._bus.publisher.send(self._meta(sha), msgspec.json.encode(info), given, max(1.0, ends - time.monotonic()))
        except Conflict:
            await self._purge(f"C.{nuid}")  # somebody else stored the same content meanwhile
        faults.at("after-blob", self._bucket)
        return ref

    async def get(self, ref: BlobRef | str, *, deadline: float = 60.0) -> bytes:
        """Fetch content by reference or hash, and check it.

        Raises:
            NotFound: there is no such content, or what is stored is not it.
            Unavailable: not read within `deadline` seconds.
        """
        sha = ref if isinstance(ref, str) else ref.sha256
        known = await self._info(sha)
        if known is None or known[0].deleted:
            raise NotFound(f"blob {sha[:12]}… does not exist in {self._bucket}")
        data = await self._read(known[0], time.monotonic() + deadline)
        if await _sha256(data) != sha:
            raise NotFound(f"blob {sha[:12]}… in {self._bucket} is damaged: its content has another hash")
        return data

    async def delete(self, ref: BlobRef) -> None:
        """Remove content. Whoever still refers to it gets NotFound."""
        known = await self._info(ref.sha256)
        if known is not None:
            await self._purge(f"M.{_token(ref.sha256)}")
            await self._purge(f"C.{known[0].nuid}")

    async def discard(self, ref: BlobRef) -> None:
        """Remove content if that is possible now; what is left goes with the bucket's age limit."""
        try:
            await self.delete(ref)
        except (NexusError, NatsError, TimeoutError) as error:
            self._bus.log.debug("a payload is left to its age", sha256=ref.sha256, error=repr(error))

    async def _write(self, nuid: str, data: bytes, ends: float) -> bool:
        """All chunks, several in flight; whether the stream holds them in order."""
        window = asyncio.Semaphore(WRITE_WINDOW)
        view = memoryview(data)

        async def chunk(start: int) -> int:
            async with window:
                given = {wire.MSG_ID: f"{nuid}.{start}"}
                body = bytes(view[start : start + CHUNK_BYTES])
                left = max(1.0, ends - time.monotonic())
                return (await self._bus.publisher.send(f"$O.{self._bucket}.C.{nuid}", body, given, left)).seq

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(chunk(start)) for start in range(0, len(data), CHUNK_BYTES)]
        except ExceptionGroup as failed:  # the first chunk that could not be stored; the others were called off
            raise failed.exceptions[0] from None
        order = [task.result() for task in tasks]
        return order == sorted(order)

    async def _read(self, info: _Info, ends: float) -> bytes:
        out, position, seq = bytearray(info.size), 0, 1
        queue: asyncio.Queue[Any] = asyncio.Queue()
        inbox = self._bus.client.new_inbox()
        sub = await self._bus.client.take(inbox, queue.put)
        try:
            while position < info.size:
                if time.monotonic() > ends:
                    raise Unavailable(f"blob {info.name[:12]}…: read {position} of {info.size} bytes in time")
                try:
                    await self._ask(inbox, info.nuid, seq)
                    while not (status := wire.get(msg := await asyncio.wait_for(queue.get(), SILENCE_S), "Status")):
                        at = int(wire.get(msg, "Nats-Sequence"))
                        if at < seq:
                            continue  # of an earlier request that was given up
                        end = position + len(msg.data)
                        if end > info.size:
                            raise NotFound(f"blob {info.name[:12]}… in {self._bucket} is damaged: it is too long")
                        out[position:end] = msg.data
                        position, seq = end, at + 1
                except (NatsError, TimeoutError):
                    continue  # the server went away: ask again from where we are
                if status not in ("204", "404"):  # nobody there right now
                    await asyncio.sleep(PAUSE_S)
                elif status == "404" and position < info.size and not await self._held(info.nuid, seq):
                    raise NotFound(
                        f"blob {info.name[:12]}… in {self._bucket} is damaged: it ends at byte {position} of {info.size}"
                    )
        finally:
            await _unsubscribe(sub)
        return bytes(out)

    async def _held(self, nuid: str, seq: int) -> bool:
        """Whether there is a chunk from `seq` on: in a cluster the copy that we read may be behind, the leader's is not."""
        request = {"seq": seq, "next_by_subj": f"$O.{self._bucket}.C.{nuid}"}
        answer = await self._bus.ask(f"$JS.API.STREAM.MSG.GET.{self._stream}", json.dumps(request).encode())
        return b'"error":{' not in answer.data

    async def _ask(self, inbox: str, nuid: str, seq: int) -> None:
        async with asyncio.timeout(SILENCE_S):
            await self._bus.up.wait()
        request = {"batch": READ_BATCH, "seq": seq, "next_by_subj": f"$O.{self._bucket}.C.{nuid}"}
        await self._bus.client.publish(f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(request).encode(), reply=inbox)

    async def _info(self, sha: str) -> tuple[_Info, int] | None:
        msg = await self._bus.last(self._stream, self._meta(sha))
        return (msgspec.json.decode(msg.data, type=_Info), int(wire.get(msg, "Nats-Sequence"))) if msg else None

    async def _purge(self, what: str) -> None:
        body = json.dumps({"filter": f"$O.{self._bucket}.{what}"}).encode()
        await self._bus.ask(f"$JS.API.STREAM.PURGE.{self._stream}", body)

    def _meta(self, sha: str) -> str:
        return f"$O.{self._bucket}.M.{_token(sha)}"


def _token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


async def _sha256(data: bytes) -> str:
    if len(data) <= HASH_INLINE:
        return hashlib.sha256(data).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()


async def _unsubscribe(sub: Any) -> None:
    try:
        await sub.unsubscribe()
    except NatsError:
        return  # the connection is gone, and the subscription with it
