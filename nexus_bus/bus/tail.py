"""Reading a log stream in order: events, usage, audit, traces, dead letters."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DeliverPolicy

from nexus_bus.bus import headers
from nexus_bus.bus.codec import decode
from nexus_bus.errors import BadMessage
from schemas.base import BlobRef
from schemas.subjects import SubjectEntry, parse

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus


@dataclass(frozen=True)
class Item:
    """One message of a log."""

    message: Any
    subject: str
    tokens: dict[str, str]
    headers: dict[str, str]
    seq: int
    time: datetime


async def tail(
    bus: "Bus", row: SubjectEntry, pattern: str, since: Literal["all", "new"] | datetime, follow: bool
) -> AsyncIterator[Item]:
    """Yield messages in stream order; without `follow`, end at the last one there is now. Survives restarts of the server."""
    if row.stream is None:
        raise ValueError(f"{row.name} is not kept in a stream")
    seen = 0
    while True:
        try:
            subscription = await bus.js.subscribe(
                pattern, stream=row.stream, ordered_consumer=True, config=_config(pattern, since, seen)
            )
            try:
                info = await subscription.consumer_info()
                left = info.num_pending or 0
                if not follow and not left and not info.delivered.consumer_seq:
                    return
                while True:
                    try:
                        msg = await subscription.next_msg(timeout=2.0)
                    except TimeoutError:
                        info = await subscription.consumer_info()
                        if not follow and not info.num_pending:
                            return
                        continue
                    meta = msg.metadata
                    if meta.sequence.stream > seen:
                        seen = meta.sequence.stream
                        item = await _item(bus, row, msg)
                        if item is not None:
                            yield item
                    if not follow and not meta.num_pending:
                        return
            finally:
                try:
                    await subscription.unsubscribe()
                except NatsError:
                    bus.log.debug("unsubscribe while away")
        except (NatsError, TimeoutError) as error:
            bus.log.debug("tail begins again", stream=row.stream, error=repr(error))
            await asyncio.sleep(0.2)


def _config(pattern: str, since: Literal["all", "new"] | datetime, seen: int) -> ConsumerConfig:
    config = ConsumerConfig(filter_subject=pattern)
    if seen:
        config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, seen + 1
    elif since == "new":
        config.deliver_policy = DeliverPolicy.NEW
    elif isinstance(since, datetime):
        config.deliver_policy, config.opt_start_time = DeliverPolicy.BY_START_TIME, since
    return config


async def _item(bus: "Bus", row: SubjectEntry, msg: Any) -> Item | None:
    given = dict(msg.headers or {})
    _, tokens = parse(msg.subject)
    payload = msg.data
    try:
        if given.get(headers.BLOB):
            payload = await bus.blobs.get(msgspec.json.decode(payload, type=BlobRef))
        message = decode(row, payload, given.get(headers.CONTENT_TYPE))
    except (BadMessage, msgspec.MsgspecError) as error:
        bus.log.warning("an entry of a log is not readable", subject=msg.subject, error=str(error))
        return None
    return Item(message, msg.subject, tokens, given, msg.metadata.sequence.stream, msg.metadata.timestamp)
