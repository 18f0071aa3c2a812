"""Weights over the gateway, in pieces."""

import asyncio
import hashlib
import uuid
from typing import TYPE_CHECKING

from nexus_bus.errors import NotFound
from schemas.api import CHUNK_BYTES, Content, ContentQuery, UploadChunk
from schemas.base import BlobRef

if TYPE_CHECKING:
    from nexus_bus.client.calls import Calls

AT_ONCE = 8  # pieces in flight
SMALLEST = 4096
OVERHEAD = 1024  # of a message around its piece


async def fetch(client: "Calls", policy: str, ref: BlobRef) -> bytes:
    """What a version (`<job>@<n>`), or the training state of its job, refers to.

    Raises:
        NotFound: it refers to no such content, or what came is not it.
        Unavailable: no answer in time.
    """
    room = asyncio.Semaphore(AT_ONCE)

    async def piece(offset: int) -> bytes:
        async with room:
            answer: Content = await client.call("policy.read", ContentQuery(policy=policy, sha256=ref.sha256, offset=offset))
            return answer.data

    pieces = await asyncio.gather(*(piece(offset) for offset in range(0, ref.size, CHUNK_BYTES)))
    data = b"".join(pieces)
    if await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()) != ref.sha256:
        raise NotFound(f"policy: what came of {policy} is not what it refers to ({len(data)} of {ref.size} bytes)")
    return data


async def send(client: "Calls", data: bytes) -> str:
    """Send a file for an import; the name it has at the gateway. Raises Unavailable."""
    upload = uuid.uuid4().hex
    size = max(SMALLEST, min(CHUNK_BYTES, (await client.account()).limits.payload_bytes - OVERHEAD))
    for offset in range(0, len(data), size):  # one after another: a tenant's link is its own
        await client.call("policy.upload", UploadChunk(upload=upload, offset=offset, data=data[offset : offset + size]))
    return upload
