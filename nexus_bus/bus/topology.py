"""Streams, buckets and consumers as data, and the calls that make a server agree with it (DESIGN §3)."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nats.js.api import ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, NotFoundError

from schemas.subjects import TABLE, subject

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

MB = 1 << 20
GB = 1 << 30
HOUR_S = 3600.0
DUPLICATES_S = 120.0


@dataclass(frozen=True)
class Stream:
    """One stream. `max_bytes` is reserved by the server up front, so it is modest."""

    name: str
    work: bool  # a work queue, or a log with limits
    max_bytes: int
    memory: bool = False
    max_age_s: float = 0.0
    per_subject: int = -1  # messages of one tenant (or job) before that one alone is refused
    extra: dict[str, Any] = field(default_factory=dict)


STREAMS: tuple[Stream, ...] = (
    Stream("JOBS", work=True, max_bytes=256 * MB),
    Stream("ROLLOUT", work=True, max_bytes=256 * MB, per_subject=20_000),
    Stream("INFERENCE", work=True, max_bytes=512 * MB, memory=True, per_subject=4096),
    Stream("TRAINING", work=True, max_bytes=2 * GB, per_subject=4096),
    Stream("EVENTS", work=False, max_bytes=512 * MB, max_age_s=30 * 24 * HOUR_S),
    Stream("USAGE", work=False, max_bytes=256 * MB, max_age_s=400 * 24 * HOUR_S),
    Stream("AUDIT", work=False, max_bytes=256 * MB, max_age_s=400 * 24 * HOUR_S),
    Stream("TRACES", work=False, max_bytes=512 * MB, max_age_s=24 * HOUR_S),
    Stream("DEAD", work=False, max_bytes=256 * MB, max_age_s=30 * 24 * HOUR_S),
)
BUCKETS = {"registry": 256 * MB, "leases": 16 * MB}
BLOB_BUCKET, BLOB_BYTES = "blobs", 8 * GB


@dataclass(frozen=True)
class Durable:
    """A durable consumer: who reads what, how long a delivery may stay unanswered, how often it is tried."""

    stream: str
    name: str
    filters: tuple[str, ...]
    ack_wait: float = 10.0
    max_ack_pending: int = 256
    max_deliver: int = 5


def inference_durable(tenant: str) -> Durable:
    """A tenant's own consumer of the Inference Queue. Asking is cheap to repeat, so a lost worker's share comes back soon."""
    return Durable(
        "INFERENCE", f"infer-{tenant}", (subject("infer.request", tenant=tenant),), ack_wait=5.0, max_ack_pending=1024
    )


def training_durable(tenant: str, job: str) -> Durable:
    """A job's own consumer of the Training Queue. Unlimited deliveries: a trainer holds records over many restarts."""
    filters = tuple(subject(name, tenant=tenant, job=job) for name in ("train.record", "train.batch"))
    return Durable("TRAINING", f"train-{tenant}-{job}", filters, ack_wait=8.0, max_ack_pending=8192, max_deliver=-1)


async def ensure_topology(bus: "Bus", replicas: int = 1) -> None:
    """Make every stream and bucket exist as described; safe to run from many processes at once."""
    for stream in STREAMS:
        await _ensure_stream(bus, _stream_config(stream, replicas))
    for bucket, size in BUCKETS.items():
        await _ensure_stream(bus, _bucket_config(bucket, size, replicas))
    await _ensure_stream(bus, _blob_config(replicas))


def _stream_config(stream: Stream, replicas: int) -> StreamConfig:
    return StreamConfig(
        name=stream.name,
        subjects=[row.wildcard for row in TABLE if row.stream == stream.name],
        retention=RetentionPolicy.WORK_QUEUE if stream.work else RetentionPolicy.LIMITS,
        storage=StorageType.MEMORY if stream.memory else StorageType.FILE,
        max_bytes=stream.max_bytes,
        max_age=stream.max_age_s,
        discard=DiscardPolicy.NEW if stream.work else DiscardPolicy.OLD,
        max_msgs_per_subject=stream.per_subject,
        discard_new_per_subject=stream.per_subject > 0,
        duplicate_window=DUPLICATES_S,
        num_replicas=replicas,
    )


def _bucket_config(bucket: str, size: int, replicas: int) -> StreamConfig:
    return StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        max_msgs_per_subject=1,
        max_bytes=size,
        discard=DiscardPolicy.NEW,
        duplicate_window=DUPLICATES_S,
        allow_rollup_hdrs=True,
        deny_delete=True,
        allow_direct=True,
        num_replicas=replicas,
    )


def _blob_config(replicas: int) -> StreamConfig:
    return StreamConfig(
        name=f"OBJ_{BLOB_BUCKET}",
        subjects=[f"$O.{BLOB_BUCKET}.C.>", f"$O.{BLOB_BUCKET}.M.>"],
        max_bytes=BLOB_BYTES,
        discard=DiscardPolicy.NEW,
        allow_rollup_hdrs=True,
        allow_direct=True,
        num_replicas=replicas,
    )


async def _ensure_stream(bus: "Bus", config: StreamConfig) -> None:
    try:
        await bus.js.stream_info(config.name or "")
    except NotFoundError:
        try:
            await bus.js.add_stream(config)
        except BadRequestError as error:
            if error.err_code != 10058:  # somebody else made it in the meantime, as it stands or in another form
                raise


async def ensure_durable(bus: "Bus", durable: Durable) -> None:
    """Make a consumer exist."""
    config = ConsumerConfig(
        name=durable.name,
        durable_name=durable.name,
        ack_wait=durable.ack_wait,
        max_deliver=durable.max_deliver,
        max_ack_pending=durable.max_ack_pending,
        max_waiting=64,
    )
    if len(durable.filters) == 1:
        config.filter_subject = durable.filters[0]
    else:
        config.filter_subjects = list(durable.filters)
    for attempt in range(10):
        try:
            await bus.js.add_consumer(durable.stream, config)
        except APIError as error:
            if error.err_code not in (10008, 10013) or attempt == 9:  # not ready, or made by another this very moment
                raise
            await asyncio.sleep(0.05)
        else:
            return


async def ensure_tenant(bus: "Bus", tenant: str) -> None:
    """A tenant's consumer of the Inference Queue."""
    await ensure_durable(bus, inference_durable(tenant))


async def ensure_job(bus: "Bus", tenant: str, job: str) -> None:
    """A job's consumer of the Training Queue."""
    await ensure_durable(bus, training_durable(tenant, job))


async def remove_job(bus: "Bus", tenant: str, job: str) -> None:
    """Take a job's consumer away, and what is still queued for it."""
    for name in ("train.record", "train.batch"):
        await bus.purge(name, tenant=tenant, job=job)
    durable = training_durable(tenant, job)
    try:
        await bus.js.delete_consumer(durable.stream, durable.name)
    except NotFoundError:
        return
