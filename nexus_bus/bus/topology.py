"""Streams, buckets and consumers as data, and the calls that make a server agree with it (DESIGN §3)."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from nexus_bus.errors import Unavailable
from schemas.subjects import TABLE, subject

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

MB = 1 << 20
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Stream:
    """One stream. `max_bytes` is reserved by the server up front, so it is modest."""

    name: str
    work: bool  # a work queue that refuses when full, or a log that forgets its oldest
    max_bytes: int
    memory: bool = False
    max_age_s: float = 0.0
    per_subject: int = -1  # messages of one tenant (or job) before that one alone is refused
    duplicates_s: float = 120.0  # how long a message id is remembered
    rollup: bool = False  # whether a message may take the place of all others of its subject
    remembered: int = -1  # of a log, messages of one tenant (or job) before its own oldest go: nobody pushes out another's


STREAMS: tuple[Stream, ...] = (
    Stream("JOBS", work=True, max_bytes=256 * MB, per_subject=20_000, duplicates_s=600.0),
    Stream("ROLLOUT", work=True, max_bytes=128 * MB, per_subject=20_000, duplicates_s=600.0),
    Stream("INFERENCE", work=True, max_bytes=512 * MB, memory=True, per_subject=1024, duplicates_s=30.0),
    Stream("TRAINING", work=True, max_bytes=1024 * MB, per_subject=4096, duplicates_s=600.0),
    Stream("UPLOADS", work=False, max_bytes=8192 * MB, max_age_s=HOUR_S, per_subject=4096, duplicates_s=600.0),
    Stream("EVENTS", work=False, max_bytes=256 * MB, max_age_s=30 * DAY_S, duplicates_s=600.0, remembered=20_000),
    Stream("EVALS", work=False, max_bytes=256 * MB, max_age_s=400 * DAY_S, duplicates_s=600.0),
    Stream("FILMS", work=False, max_bytes=512 * MB, max_age_s=30 * DAY_S, duplicates_s=600.0),
    Stream("USAGE", work=False, max_bytes=256 * MB, max_age_s=400 * DAY_S, duplicates_s=600.0, rollup=True),
    Stream("AUDIT", work=False, max_bytes=256 * MB, max_age_s=400 * DAY_S, remembered=30_000),
    Stream("TRACES", work=False, max_bytes=256 * MB, max_age_s=DAY_S),
    Stream("DEAD", work=False, max_bytes=1024 * MB, max_age_s=30 * DAY_S, duplicates_s=600.0),
)
OFFER_S = 15.0  # an offer that is not repeated is over
# Bytes, and seconds until a value is forgotten that nobody wrote again.
BUCKETS = {"registry": (1024 * MB, 0.0), "leases": (16 * MB, 0.0), "offers": (64 * MB, OFFER_S)}
# For good; and for messages too large to travel, kept as long as letters in DEAD: a job may rest for weeks with records queued.
BLOBS, PAYLOADS = "blobs", "payloads"
OBJECTS = {BLOBS: (4096 * MB, 0.0), PAYLOADS: (1024 * MB, 30 * DAY_S)}

# Consumers that all tenants shared, in a store of an earlier release. A work queue allows no second one on their subjects.
OUTGROWN = (("ROLLOUT", "rollout"), ("ROLLOUT", "environment"), ("JOBS", "master"))

PATIENCE_S = 15.0
# JetStream not ready; servers of a cluster not found yet; files of a consumer of this name are being removed, or the name is
# being taken by another process, this very moment; another process changes the same stream
NOT_YET = frozenset({10005, 10008, 10012, 10013, 10058, 10226})
OTHERWISE = 10148  # a consumer of this name exists, and differs


@dataclass(frozen=True)
class Durable:
    """A durable consumer: who reads what, how long a delivery may stay unanswered, how often it is tried (-1: always).

    `ack_wait` is how long others wait for what a worker held that was killed. Who holds something says so three times as often.
    """

    stream: str
    name: str
    filters: tuple[str, ...]
    ack_wait: float = 10.0
    max_ack_pending: int = 256
    max_deliver: int = 5  # counted by the worker, see dead.py


def orders_durable(tenant: str) -> Durable:
    """A tenant's own consumer of orders to the master, and of reports about its jobs: whoever sends a thousand waits alone."""
    orders = ("job.submit", "job.cancel", "job.pause", "job.resume", "policy.import", "policy.pin")
    filters = (*(subject(name, tenant=tenant) for name in orders), _all_jobs("job.report", tenant))
    return Durable("JOBS", f"orders-{tenant}", filters, ack_wait=3.0, max_deliver=10)


def inference_durable(tenant: str) -> Durable:
    """A tenant's own consumer of the Inference Queue. Asking is cheap to repeat, so a lost worker's share comes back soon."""
    filters = (subject("infer.request", tenant=tenant),)
    return Durable("INFERENCE", f"infer-{tenant}", filters, ack_wait=2.0, max_ack_pending=1024)


def rollout_durable(tenant: str, sessions: int | None = None) -> Durable:
    """A tenant's own consumer of orders to play. Who has an order in hand may hold a session for it, so the server itself keeps
    the tenant to so many `sessions` at once: it delivers no more, however many workers ask.
    """
    filters = (_all_jobs("rollout.run", tenant),)
    return Durable("ROLLOUT", f"rollout-{tenant}", filters, ack_wait=2.0, max_ack_pending=sessions or 1024, max_deliver=8)


def own_durable(tenant: str, environment: str, sessions: int) -> Durable:
    """A consumer of orders to play in one environment of a tenant's own, of which there are so many `sessions`."""
    filters = (subject("rollout.own", tenant=tenant, environment=environment, job="_").removesuffix("_") + "*",)
    name = f"own-{tenant}={environment}"  # no name has a `=`
    return Durable("ROLLOUT", name, filters, ack_wait=2.0, max_ack_pending=sessions, max_deliver=8)


def data_durable(tenant: str) -> Durable:
    """A tenant's own consumer of orders to prepare datasets, and to feed batches from them."""
    filters = tuple(_all_jobs(name, tenant) for name in ("env.prepare", "env.feed"))
    return Durable("ROLLOUT", f"data-{tenant}", filters, ack_wait=6.0, max_ack_pending=64, max_deliver=8)


def _all_jobs(name: str, tenant: str) -> str:
    return subject(name, tenant=tenant, job="_").removesuffix("_") + "*"


def training_durable(tenant: str, job: str) -> Durable:
    """A job's own consumer of the Training Queue. Unlimited deliveries: a trainer holds records over many restarts. Who takes
    a lease recalls what its last holder had (intake.py), so nobody waits for `ack_wait`, which may be generous.
    """
    filters = tuple(subject(name, tenant=tenant, job=job) for name in ("train.record", "train.batch"))
    return Durable("TRAINING", f"train-{tenant}-{job}", filters, ack_wait=6.0, max_ack_pending=8192, max_deliver=-1)


async def ensure_topology(bus: "Bus", replicas: int = 1) -> None:
    """Make every stream and bucket exist as described; safe to run from many processes at once."""
    for config in _configs(replicas):
        await _ensure_stream(bus, config)
    for stream, name in OUTGROWN:
        await bus.ask(f"$JS.API.CONSUMER.DELETE.{stream}.{name}")
    bus.replicas = replicas


def _configs(replicas: int) -> Iterator[StreamConfig]:
    for stream in STREAMS:
        yield StreamConfig(
            name=stream.name,
            subjects=[row.wildcard for row in TABLE if row.stream == stream.name],
            retention=RetentionPolicy.WORK_QUEUE if stream.work else RetentionPolicy.LIMITS,
            storage=StorageType.MEMORY if stream.memory else StorageType.FILE,
            max_bytes=stream.max_bytes,
            max_age=stream.max_age_s,
            discard=DiscardPolicy.NEW if stream.work or stream.per_subject > 0 else DiscardPolicy.OLD,
            allow_direct=not stream.work,  # logs are read in pages by many
            max_msgs_per_subject=max(stream.per_subject, stream.remembered),
            discard_new_per_subject=stream.per_subject > 0,
            duplicate_window=stream.duplicates_s,
            allow_rollup_hdrs=stream.rollup,
            num_replicas=replicas,
        )
    for bucket, (size, age) in BUCKETS.items():
        yield StreamConfig(
            name=f"KV_{bucket}",
            subjects=[f"$KV.{bucket}.>"],
            max_msgs_per_subject=1,
            max_bytes=size,
            max_age=age,
            discard=DiscardPolicy.NEW,
            duplicate_window=min(120.0, age or 120.0),
            allow_rollup_hdrs=True,
            deny_delete=True,
            allow_direct=True,
            num_replicas=replicas,
        )
    for bucket, (size, age) in OBJECTS.items():
        yield StreamConfig(
            name=f"OBJ_{bucket}",
            subjects=[f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
            max_bytes=size,
            max_age=age,
            discard=DiscardPolicy.NEW,
            duplicate_window=120.0,
            allow_rollup_hdrs=True,
            allow_direct=True,
            num_replicas=replicas,
        )


async def _ensure_stream(bus: "Bus", config: StreamConfig) -> None:
    try:
        found = (await _patiently(bus, lambda: bus.js.stream_info(config.name))).config
    except NotFoundError:
        await _patiently(bus, lambda: bus.js.add_stream(config))
        return
    config.num_replicas = max(config.num_replicas or 1, found.num_replicas or 1)  # who asks for fewer takes none away
    for name in (
        "subjects",
        "max_bytes",
        "max_age",
        "max_msgs_per_subject",
        "duplicate_window",
        "num_replicas",
        "allow_direct",
        "allow_rollup_hdrs",
    ):
        if getattr(found, name) != getattr(config, name):
            await _patiently(bus, lambda: bus.js.update_stream(config))
            return


async def _patiently(bus: "Bus", call: Callable[[], Awaitable[Any]]) -> Any:
    """Another process may be making the same thing this very moment, and JetStream opens a little later than the server."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await bus.up.wait()
            return await call()
        except (NatsError, TimeoutError) as error:
            if isinstance(error, APIError) and (error.code or 0) < 500 and error.err_code not in NOT_YET:
                raise
            if time.monotonic() > ends:
                raise Unavailable(f"the server does not do it: {error!r}") from error
        await asyncio.sleep(0.05)


async def ensure_durable(bus: "Bus", durable: Durable) -> None:
    """Make a consumer exist as described: one that is there and differs, in its limits for instance, is changed."""
    await _patiently(bus, lambda: bus.js.add_consumer(durable.stream, _consumer(durable)))


def _consumer(durable: Durable) -> ConsumerConfig:
    return ConsumerConfig(
        name=durable.name,
        durable_name=durable.name,
        ack_wait=durable.ack_wait,
        max_ack_pending=durable.max_ack_pending,
        max_deliver=-1,
        max_waiting=512,
        filter_subjects=list(durable.filters),
    )


async def ensure_tenant(bus: "Bus", tenant: str) -> None:
    """A tenant's consumers. Those that exist stay as they are: the workers that serve them know the tenant's limits.

    The master's is not among them: it makes it when it begins to serve the tenant.
    """
    for durable in _of_workers(tenant):
        await _patiently(bus, lambda durable=durable: _create(bus, durable))


async def _create(bus: "Bus", durable: Durable) -> None:
    body = {"stream_name": durable.stream, "config": _consumer(durable).as_dict(), "action": "create"}
    answer = await bus.ask(f"$JS.API.CONSUMER.CREATE.{durable.stream}.{durable.name}", json.dumps(body).encode())
    error: dict[str, Any] | None = json.loads(answer.data).get("error")
    if error is not None and error.get("err_code") != OTHERWISE:
        APIError.from_error(error)  # raises


async def remove_tenant(bus: "Bus", tenant: str) -> None:
    """Take a tenant's consumers away, and what is queued for them. Its key in the registry goes first: who still serves the
    tenant makes them anew.
    """
    for durable in (orders_durable(tenant), *_of_workers(tenant)):
        for on in durable.filters:
            await bus.drop(durable.stream, on)
        await bus.ask(f"$JS.API.CONSUMER.DELETE.{durable.stream}.{durable.name}")
    await bus.drop("ROLLOUT", f"rollout.own.{tenant}.>")  # their consumers are the sweep's: whoever knew them may be gone


def _of_workers(tenant: str) -> tuple[Durable, ...]:
    return inference_durable(tenant), rollout_durable(tenant), data_durable(tenant)


async def ensure_job(bus: "Bus", tenant: str, job: str) -> None:
    """A job's consumer of the Training Queue."""
    await ensure_durable(bus, training_durable(tenant, job))


async def remove_job(bus: "Bus", tenant: str, job: str) -> None:
    """Take a job's consumer away, and what is still queued for it."""
    for name in ("train.record", "train.batch"):
        await bus.purge(name, tenant=tenant, job=job)
    durable = training_durable(tenant, job)
    await bus.ask(f"$JS.API.CONSUMER.DELETE.{durable.stream}.{durable.name}")
