"""What the service is doing, in numbers for Prometheus (`nexus metrics`). Beside the line: it reads, and changes nothing.

Aggregates over all tenants: a label for each would grow with them and tell their names. `by_tenant` adds families that have
one, and changes none of the others. While the bus is away only `nexus_up 0` is left: whoever scales by the others must see
that nothing is known, rather than a number that stands still.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nexus_bus import registry
from nexus_bus.bus import Bus, topology, training_durable
from nexus_bus.errors import Unavailable
from nexus_bus.registry import tenant_of
from nexus_bus.worker import side_by_side
from schemas.base import PROVIDER
from schemas.control import Heartbeat, Role
from schemas.plan import JobState, Phase
from schemas.subjects import parse
from schemas.usage import Usage

EVERY_S = 2.0  # how old a number may be
SILENT_S = 5.0  # a worker that says nothing for so long is not counted
RETRY_S = 1.0

# What the names of consumers begin with → (queue, role that serves it); behind it stands the tenant, see bus/topology.py.
CONSUMERS = {
    "orders": ("JOBS", "master"),
    "rollout": ("ROLLOUT", "rollout"),
    "data": ("ROLLOUT", "environment"),
    "infer": ("INFERENCE", "inference"),
    "train": ("TRAINING", "trainer"),
}
STREAMS = ("JOBS", "ROLLOUT", "INFERENCE", "TRAINING")
KEPT = (*(stream.name for stream in topology.STREAMS), "KV_registry", "OBJ_blobs", "OBJ_payloads")
STATES = get_args(Heartbeat.__annotations__["state"])
COMPUTED = ("inference", "training")  # kinds of usage with device time

# name → (what it says, labels); counters end in _total
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nexus_up": ("Whether the bus answers; without it nothing else is known.", ()),
    "nexus_queue_waiting": ("Messages that nobody has taken yet, by queue and the role that serves it.", ("queue", "role")),
    "nexus_queue_in_flight": ("Messages taken and not yet answered.", ("queue", "role")),
    "nexus_queue_oldest_age_seconds": ("Age of the oldest message that is not answered; 0 where there is none.", ("queue",)),
    "nexus_stream_filled_ratio": ("Share of a stream's bytes in use; a log forgets its oldest at 1.", ("stream",)),
    "nexus_dead_letters": ("Messages that were given up and are kept.", ()),
    "nexus_workers": ("Workers that send heartbeats.", ("role", "state")),
    "nexus_workers_busy": ("Workers that hold work.", ("role",)),
    "nexus_sessions": ("Environment sessions held.", ()),
    "nexus_canary_gaps": ("Answers and features that came out otherwise in a group than alone, since its worker began.", ()),
    "nexus_jobs": ("Jobs by phase.", ("phase",)),
    "nexus_lag_versions_mean": ("Policy versions between acting and learning, mean over the jobs in training.", ()),
    "nexus_lag_versions_max": ("Policy versions between acting and learning, of the job where they are most.", ()),
    "nexus_device_seconds_total": (
        "Device time on record since this exporter started: of jobs, or the provider's by what it was.", ("kind", "use"),
    ),
}  # fmt: skip
BY_TENANT: dict[str, tuple[str, tuple[str, ...]]] = {
    "nexus_tenant_queue_messages": ("Messages of a tenant that are not answered yet.", ("tenant", "queue")),
    "nexus_tenant_jobs": ("Jobs of a tenant by phase.", ("tenant", "phase")),
    "nexus_tenant_device_seconds_total": ("Device time of a tenant on record since this exporter started.", ("tenant", "kind")),
}

Samples = Mapping[tuple[str, ...], float]


@dataclass
class Seen:
    """What is known. Pure: how it was learned stands in `Exporter`."""

    queues: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # (queue, role) → (waiting, in flight)
    ages: dict[str, float] = field(default_factory=dict)  # queue → seconds
    filled: dict[str, float] = field(default_factory=dict)  # stream → share of its bytes
    dead: int = 0
    beats: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)  # worker → (its newest, monotonic time)
    jobs: dict[str, tuple[Phase, float | None]] = field(default_factory=dict)  # registry key → (phase, lag)
    device_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # (kind, use)
    tenants_queued: dict[tuple[str, str], int] = field(default_factory=dict)  # (tenant, queue) → messages
    tenants_device_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # (tenant, kind)

    def count(self, depths: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
        """Take in `Bus.depths`: the consumers of a role together. What waits for a job that rests is no work for anybody."""
        resting = {
            training_durable(registry.tenant_of(key), key.split(".")[2]).name
            for key, (phase, _) in self.jobs.items()
            if phase == "paused"
        }
        sums: dict[tuple[str, str], tuple[int, int]] = dict.fromkeys(CONSUMERS.values(), (0, 0))
        for queue, consumers in depths.items():
            for consumer, (waiting, held) in consumers.items():
                if consumer in resting:
                    continue
                key = CONSUMERS.get(consumer.partition("-")[0], (queue, "other"))
                before, taken = sums.get(key, (0, 0))
                sums[key] = before + waiting, taken + held
        self.queues = sums

    def use(self, used: Usage) -> None:
        """Take in one record of usage."""
        if used.device_s <= 0:
            return
        self.device_s[used.kind, used.job if used.tenant == PROVIDER else "jobs"] += used.device_s
        if used.tenant != PROVIDER:
            self.tenants_device_s[used.tenant, used.kind] += used.device_s

    def families(self, clock: float, *, by_tenant: bool) -> Iterator[Metric]:
        """Everything as Prometheus has it, at a monotonic time. What can be counted is there from the start, as 0."""
        workers = {(role, state): 0.0 for role in get_args(Role) for state in STATES}
        busy = {(role,): 0.0 for role in get_args(Role)}
        sessions = 0.0
        for beat, heard in self.beats.values():
            if clock - heard <= SILENT_S:
                workers[beat.role, beat.state] += 1
                busy[(beat.role,)] += beat.busy
                sessions += beat.gauges.get("sessions", 0.0)
        phases = {(phase,): 0.0 for phase in get_args(Phase)}
        for phase, _ in self.jobs.values():
            phases[(phase,)] += 1
        lags = [lag for phase, lag in self.jobs.values() if phase == "training" and lag is not None] or [0.0]
        known: dict[str, Samples] = {
            "nexus_up": {(): 1},
            "nexus_queue_waiting": {key: waiting for key, (waiting, _) in self.queues.items()},
            "nexus_queue_in_flight": {key: held for key, (_, held) in self.queues.items()},
            "nexus_queue_oldest_age_seconds": {(queue,): age for queue, age in self.ages.items()},
            "nexus_stream_filled_ratio": {(stream,): share for stream, share in self.filled.items()},
            "nexus_dead_letters": {(): self.dead},
            "nexus_workers": workers,
            "nexus_workers_busy": busy,
            "nexus_sessions": {(): sessions},
            "nexus_canary_gaps": {(): sum(beat.gauges.get("canary_gaps", 0.0) for beat, _ in self.beats.values())},
            "nexus_jobs": phases,
            "nexus_lag_versions_mean": {(): sum(lags) / len(lags)},
            "nexus_lag_versions_max": {(): max(lags)},
            "nexus_device_seconds_total": {(kind, "jobs"): 0.0 for kind in COMPUTED} | self.device_s,
        }
        yield from (_family(name, *METRICS[name], known[name]) for name in METRICS)
        if by_tenant:
            known = {
                "nexus_tenant_queue_messages": self.tenants_queued,
                "nexus_tenant_jobs": _counted((tenant_of(key), phase) for key, (phase, _) in self.jobs.items()),
                "nexus_tenant_device_seconds_total": self.tenants_device_s,
            }
            yield from (_family(name, *BY_TENANT[name], known[name]) for name in BY_TENANT)


def _family(name: str, said: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, said, labels=labels)
    for values, number in samples.items():
        family.add_metric(values, number)
    return family


def _counted(keys: Iterable[tuple[str, ...]]) -> Samples:
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for key in keys:
        found[key] += 1
    return found


class Exporter(Collector):
    """Follows the bus, and holds what a scrape gets. A scrape asks the bus for nothing, however many scrape how often."""

    def __init__(self, bus: Bus, *, by_tenant: bool = False) -> None:
        """Knows nothing until `run`."""
        self.bus, self.by_tenant = bus, by_tenant
        self.seen = Seen()
        self._families: list[Metric] = [_down()]  # replaced as a whole: scrapes come on another thread

    def collect(self) -> Iterable[Metric]:
        """For the registry of prometheus_client."""
        return self._families

    async def run(self) -> None:
        """Follow until cancelled, whether or not the bus is there at the time."""
        await self.bus.subscribe("health.beat", self._beat, role="*", worker="*")
        await side_by_side(self._again(self._jobs), self._again(self._usage), self._look())

    async def refresh(self) -> None:
        """Read the queues, and make what the next scrape gets."""
        try:
            self.seen.count(await self.bus.depths())
            infos = {name: await self._stream(name) for name in KEPT}
            self.seen.filled = {name: info["state"]["bytes"] / info["config"]["max_bytes"] for name, info in infos.items()}
            self.seen.ages = {name: _age(infos[name]) for name in STREAMS}
            self.seen.dead = _messages(infos["DEAD"])
            if self.by_tenant:
                self.seen.tenants_queued = {key: n for name in STREAMS for key, n in (await self._by_tenant(name)).items()}
        except Unavailable:
            self._families = [_down()]
        else:
            self._families = list(self.seen.families(time.monotonic(), by_tenant=self.by_tenant))

    async def _look(self) -> None:
        while True:
            if self.bus.up.is_set():
                await self.refresh()
            else:
                self._families = [_down()]
            await asyncio.sleep(EVERY_S)

    async def _stream(self, name: str) -> dict[str, Any]:
        return json.loads((await self.bus.ask(f"$JS.API.STREAM.INFO.{name}", deadline=5.0)).data)

    async def _by_tenant(self, stream: str) -> dict[tuple[str, str], int]:
        found: defaultdict[tuple[str, str], int] = defaultdict(int)
        for subject, messages in (await self.bus.queued(stream)).items():
            found[parse(subject)[1].get("tenant", ""), stream] += messages
        return found

    async def _again(self, follow: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await follow()
            except Unavailable as error:  # no streams yet: the first worker makes them
                self.bus.log.warning("not followed yet", error=str(error))
            await asyncio.sleep(RETRY_S)

    async def _beat(self, beat: Heartbeat, _tokens: dict[str, str]) -> None:
        clock = time.monotonic()
        self.seen.beats = {name: seen for name, seen in self.seen.beats.items() if clock - seen[1] <= SILENT_S}
        self.seen.beats[beat.worker] = beat, clock

    async def _jobs(self) -> None:
        self.seen.jobs.clear()
        async for key, entry in self.bus.kv("registry").watch("job.", JobState):
            if entry is None:
                self.seen.jobs.pop(key, None)
            else:
                self.seen.jobs[key] = entry.value.phase, entry.value.metrics.get("lag")

    async def _usage(self) -> None:
        async for item in self.bus.tail("usage", since="new", tenant="*", job="*"):
            self.seen.use(item.message)


def _down() -> Metric:
    return _family("nexus_up", *METRICS["nexus_up"], {(): 0})


def _messages(info: Mapping[str, Any]) -> int:
    return int(info.get("state", {}).get("messages", 0))


def _age(info: Mapping[str, Any]) -> float:
    """Of the first message, by the server's own clock. A work queue keeps none that were answered."""
    if _messages(info) == 0:
        return 0.0
    asked, first = (datetime.fromisoformat(text) for text in (info["ts"], info["state"]["first_ts"]))
    return max(0.0, (asked - first).total_seconds())
