"""The object store, content-addressed: weights, training states, and every payload above 512 KB.

Stored as the stock clients store objects, so that `nats object get blobs <sha256>` works; read and written by our own
pipelined calls, because the stock `get` of 100 MB runs at 5 MB/s (#703).
"""

import asyncio
import base64
import hashlib
import json
import uuid
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError

from nexus_bus.bus import headers
from nexus_bus.bus.topology import BLOB_BUCKET
from nexus_bus.errors import BadMessage, NotFound, Unavailable
from schemas.base import BlobRef

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

CHUNK = 1 << 20
WINDOW = 8  # chunks in flight
BATCH_BYTES = 32 << 20  # per batched direct get
MAX_BLOB = 4 << 30
TIMEOUT_S = 60.0
QUIET_S = 5.0


class Blobs:
    """Put and get by hash."""

    def __init__(self, bus: "Bus") -> None:
        """Use `bus.blobs`."""
        self._bus = bus

    async def put(self, data: bytes, media_type: str = "application/octet-stream") -> BlobRef:
        """Store content once; the same content again is only looked up."""
        digest = hashlib.sha256(data)
        ref = BlobRef(sha256=digest.hexdigest(), size=len(data), media_type=media_type)
        if await self._info(ref.sha256) is not None:
            return ref
        nuid = uuid.uuid4().hex
        on = f"$O.{BLOB_BUCKET}.C.{nuid}"
        window = asyncio.Semaphore(WINDOW)
        view = memoryview(data)

        async def chunk(number: int) -> None:
            async with window:
                piece = bytes(view[number * CHUNK : (number + 1) * CHUNK])
                # The sequence of chunks is the content: sent one after another, confirmed in parallel.
                await self._bus.publisher.send(on, piece, {headers.MSG_ID: f"{nuid}/{number}"}, TIMEOUT_S)

        chunks = (len(data) + CHUNK - 1) // CHUNK
        if chunks > 1:
            await self._in_order(chunk, chunks)
        elif chunks == 1:
            await chunk(0)
        info = {
            "name": ref.sha256,
            "bucket": BLOB_BUCKET,
            "nuid": nuid,
            "size": len(data),
            "chunks": chunks,
            "digest": "SHA-256=" + base64.urlsafe_b64encode(digest.digest()).decode(),
            "options": {"max_chunk_size": CHUNK},
            "mtime": "0001-01-01T00:00:00Z",
            "metadata": {"media-type": media_type},
        }
        await self._bus.publisher.send(_meta(ref.sha256), json.dumps(info).encode(), {"Nats-Rollup": "sub"}, TIMEOUT_S)
        return ref

    async def _in_order(self, chunk: Any, chunks: int) -> None:
        """Tasks start in order and each publishes before it first waits, so chunks enter the stream in order; a resend after
        a disconnect could break that, so the order of the stored chunks is checked by the hash when they are read."""
        async with asyncio.TaskGroup() as group:
            for number in range(chunks):
                group.create_task(chunk(number))

    async def get(self, ref: BlobRef) -> bytes:
        """Read content and check it.

        Raises:
            NotFound: no such content.
            BadMessage: it is not what its hash says.
            Unavailable: the broker stopped answering.
        """
        if ref.size > MAX_BLOB:
            raise BadMessage(f"blob {ref.sha256[:12]}: {ref.size} bytes; at most {MAX_BLOB} are read")
        info = await self._info(ref.sha256)
        if info is None:
            raise NotFound(f"blob {ref.sha256[:12]}… does not exist")
        if info["size"] != ref.size:
            raise BadMessage(f"blob {ref.sha256[:12]}: {info['size']} bytes stored, {ref.size} expected")
        data = await self._read(info) if ref.size else b""
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise BadMessage(f"blob {ref.sha256[:12]}: its content does not match its hash")
        return data

    async def delete(self, ref: BlobRef) -> None:
        """Remove content and leave the marker that stock clients leave."""
        info = await self._info(ref.sha256)
        if info is None:
            return
        marker = {**info, "deleted": True, "size": 0, "chunks": 0, "digest": ""}
        await self._bus.publisher.send(_meta(ref.sha256), json.dumps(marker).encode(), {"Nats-Rollup": "sub"}, TIMEOUT_S)
        await self._bus.js.purge_stream(f"OBJ_{BLOB_BUCKET}", subject=f"$O.{BLOB_BUCKET}.C.{info['nuid']}")

    async def _info(self, name: str) -> dict[str, Any] | None:
        request = json.dumps({"last_by_subj": _meta(name)}).encode()
        for attempt in range(5):
            try:
                reply = await self._bus.client.request(f"$JS.API.DIRECT.GET.OBJ_{BLOB_BUCKET}", request, timeout=2.0)
                break
            except (NatsError, TimeoutError) as error:
                if attempt == 4:
                    raise Unavailable(f"blobs: the broker does not answer: {error!r}") from error
                await asyncio.sleep(0.1)
        if headers.get(reply, "Status") == "404":
            return None
        info: dict[str, Any] = json.loads(reply.data)
        return None if info.get("deleted") else info

    async def _read(self, info: dict[str, Any]) -> bytes:
        """Batched direct get: one request, and the server streams the chunks."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        inbox = self._bus.client.new_inbox()
        subscription = await self._bus.client.subscribe(inbox, cb=queue.put, pending_msgs_limit=0, pending_bytes_limit=0)
        out = bytearray()
        sequence = 1
        try:
            while len(out) < info["size"]:
                request = {
                    "batch": 64,
                    "seq": sequence,
                    "next_by_subj": f"$O.{BLOB_BUCKET}.C.{info['nuid']}",
                    "max_bytes": BATCH_BYTES,
                }
                await self._bus.client.publish(
                    f"$JS.API.DIRECT.GET.OBJ_{BLOB_BUCKET}", json.dumps(request).encode(), reply=inbox
                )
                got = False
                while True:
                    message = await asyncio.wait_for(queue.get(), QUIET_S)
                    if (status := headers.get(message, "Status")) != "":
                        if status != "204" or not got:
                            raise Unavailable(f"blob {info['name'][:12]}: reading stopped: {headers.get(message, 'Description')}")
                        break
                    got = True
                    out += message.data
                    sequence = int(headers.get(message, "Nats-Sequence")) + 1
        except (NatsError, TimeoutError) as error:
            raise Unavailable(f"blob {info['name'][:12]}: reading stopped: {error!r}") from error
        finally:
            try:
                await subscription.unsubscribe()
            except NatsError:
                self._bus.log.debug("unsubscribe while away")
        return bytes(out)


def _meta(name: str) -> str:
    return f"$O.{BLOB_BUCKET}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
