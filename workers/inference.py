"""Inference: one resident backbone, a private slot per policy version, one grouped forward for many tenants.

Reads   INFERENCE (a durable consumer per tenant, served in weighted rounds), registry (tenants, policy versions), blobs.
Writes  answers to the asker's inbox, USAGE, EVENTS (refused requests).
Killed  what it held is redelivered to another or to the restarted one; an answer depends on the request and the version
        alone, so answering twice is harmless. Slots are a cache: a version is loaded on demand, never a 404.
"""

import asyncio
import time
import uuid
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_bus import registry, telemetry, worker
from nexus_bus.bus import Bus, Delivery, Rounds, ensure_tenant, inference_durable
from nexus_bus.clock import now
from nexus_bus.errors import BadMessage, NexusError, NotFound
from nexus_bus.models import process
from nexus_bus.tensors import from_tensor, to_tensor
from nexus_bus.worker import Context
from schemas.control import Role
from schemas.inference import InferenceReply, InferenceRequest
from schemas.policy import PolicyVersion
from schemas.usage import Usage

if TYPE_CHECKING:
    from nexus_bus.models.act import Answer
    from nexus_bus.models.slots import PolicySlot

ROLE: Role = "inference"

USAGE_S = 2.0


@dataclass
class Ask:
    """One request on its way through the group."""

    delivery: Delivery
    request: InferenceRequest
    slot: "PolicySlot"
    received_ns: int


@dataclass
class Used:
    """What a job used since the last usage record."""

    device_s: float = 0.0
    requests: int = 0
    group_sum: int = 0


class Inference:
    """Collects groups, runs them off the loop, answers."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.rounds = Rounds()
        self.compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self.slots: Any = None  # models.slots.PolicySlots, once torch is there
        self.backbone: Any = None
        self.cache: Any = None
        self.used: dict[tuple[str, str], Used] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def load(self) -> None:
        """Load torch, the backbone and an empty cache, off the loop: heartbeats go on meanwhile."""
        settings = self.context.config

        def work() -> None:
            from nexus_bus.models.backbone import Backbone
            from nexus_bus.models.cache import FeatureCache
            from nexus_bus.models.slots import PolicySlots

            self.backbone = Backbone.load(settings.base, device=settings.device, profile=settings.profile)
            directory = Path(settings.cache_dir) if settings.cache_dir else None
            self.cache = FeatureCache(directory, settings.cache_memory_bytes, settings.cache_disk_bytes)
            self.slots = PolicySlots(settings.slots)

        await asyncio.get_running_loop().run_in_executor(self.compute, work)
        self.context.log.info("backbone resident", base=settings.base, fingerprint=self.backbone.fingerprint[:12])

    async def tenants(self) -> None:
        """Serve each tenant's own consumer, from the moment the tenant exists."""
        seen: set[str] = set()
        async for key, entry in self.kv.watch("tenant.", dict):
            tenant = registry.tenant_of(key)
            if entry is None or tenant in seen:
                continue
            seen.add(tenant)
            await ensure_tenant(self.bus, tenant)
            self.rounds.add(tenant, await self.bus.pull(inference_durable(tenant), batch=self.context.config.batch))

    async def serve(self) -> None:
        """Collect, run, answer, until told to stop."""
        while not self.context.stop.is_set():
            group = await self.collect()
            if group:
                await self.handle(group)
        await asyncio.gather(*self.tasks)

    async def collect(self) -> list[Delivery]:
        """A group: closed at `batch` requests, or `wait_ms` after its first."""
        settings = self.context.config
        group = await self.rounds.take(settings.batch, wait=0.25)
        if not group:
            return []
        closes = time.monotonic() + settings.wait_ms / 1000
        while len(group) < settings.batch and (left := closes - time.monotonic()) > 0:
            group += await self.rounds.take(settings.batch - len(group), wait=left)
        return group

    async def handle(self, group: list[Delivery]) -> None:
        """One grouped forward. What cannot be served is answered with its error; the rest of the group goes on."""
        self.context.pulse.busy += 1
        try:
            asks = [ask for ask in await asyncio.gather(*(self.admit(delivery) for delivery in group)) if ask is not None]
            if asks:
                started = time.time_ns()
                loop = asyncio.get_running_loop()
                results, busy_s = await loop.run_in_executor(self.compute, self.forward, asks)
                self.later(self.answer(asks, results, started, time.time_ns(), busy_s))
        finally:
            self.context.pulse.busy -= 1
            self.context.pulse.progress += len(group)

    async def admit(self, delivery: Delivery) -> Ask | None:
        """Decode a request and page its version in; None if it was answered with an error or nobody waits any more."""
        received = time.time_ns()
        try:
            request: InferenceRequest = delivery.decode()
        except BadMessage as error:
            await delivery.reject(str(error))
            await self.context.event(
                "request.refused", delivery.tenant, key=delivery.msg_id or uuid.uuid4().hex, message=str(error)
            )
            return None
        if request.deadline and time.time() > request.deadline:
            await delivery.ack()
            return None
        try:
            slot = await self.slot(delivery.tenant, request.policy)
        except NexusError as error:
            await self.refuse(delivery, request, error)
            return None
        return Ask(delivery, request, slot, received)

    async def slot(self, tenant: str, policy: str) -> "PolicySlot":
        """The loaded version, from the cache or from registry and blobs.

        Raises:
            NotFound: this tenant has no such version. Never the base model instead.
        """
        found = self.slots.get(tenant, policy)
        if found is not None:
            return found
        job, _, n = policy.partition("@")
        entry = await self.kv.get(registry.policy_key(tenant, job, int(n)), PolicyVersion)
        if entry is None:
            raise NotFound(f"policy: no version {policy!r}")
        weights = await self.bus.blobs.get(entry.value.weights)
        slot = await asyncio.get_running_loop().run_in_executor(self.compute, self.load_slot, entry.value, weights)
        self.slots.put(tenant, slot)  # a pointer swap: whoever acts on another version is not disturbed
        return slot

    def load_slot(self, version: PolicyVersion, weights: bytes) -> "PolicySlot":
        """Runs on the compute thread: build the head, fill it, check that it fits this backbone."""
        from nexus_bus.models.checkpoint import load_policy
        from nexus_bus.models.contract import check_contract

        check_contract(version.contract, backbone=self.backbone.info)
        return load_policy(version.id, version.contract, weights, self.backbone.hidden_size)

    def forward(self, asks: list[Ask]) -> tuple[list["Answer"], float]:
        """Runs on the compute thread: decode pictures, encode the group once, let every slot act on its row."""
        from nexus_bus.learning.algorithms.base import observation_prompt
        from nexus_bus.models.act import Answer, Asked, act_group

        started = time.perf_counter()
        answers: list[Answer | None] = []
        asked: list[Asked] = []
        for ask in asks:
            request = ask.request
            try:
                prompt = observation_prompt(request.observation, ask.slot.contract)
                asked.append(Asked(ask.slot, prompt, from_tensor(request.observation.state), request.greedy, request.seed))
                answers.append(None)
            except NexusError as error:
                answers.append(Answer(error=error))
        acted = iter(act_group(self.backbone, self.cache, asked))
        return [answer or next(acted) for answer in answers], time.perf_counter() - started

    async def answer(self, asks: list[Ask], results: list["Answer"], start_ns: int, end_ns: int, busy_s: float) -> None:
        """Send the answers, acknowledge, and account for the forward."""
        tenants = len({ask.delivery.tenant for ask in asks})
        share = busy_s / len(asks)
        links = [link for ask in asks if (link := telemetry.link_from(ask.delivery.headers.get("traceparent", ""))) is not None]
        group = telemetry.record_span(
            "inference.group", start_ns, end_ns, attributes={"group": len(asks), "tenants": tenants}, links=links
        )
        group_link = telemetry.link_from(group)
        for ask, result in zip(asks, results, strict=True):
            parent = ask.delivery.headers.get("traceparent", "")
            telemetry.record_span("inference.queue", ask.delivery.published_ns, start_ns, parent=parent)
            telemetry.record_span(
                "inference.forward", start_ns, end_ns, parent=parent,
                attributes={"policy": ask.request.policy, "group": len(asks), "tenants": tenants, "device_s": share},
                links=[group_link] if group_link else [],
            )  # fmt: skip
            acted = result.acted
            if acted is None:
                await self.refuse(ask.delivery, ask.request, result.error or NotFound("no answer"))
                continue
            reply = InferenceReply(
                id=ask.request.id,
                policy=ask.slot.version,
                actions=to_tensor(acted.actions),
                sample=to_tensor(acted.sample),
                log_prob=acted.log_prob,
                value=acted.value,
                feature_id=result.feature_id,
                group=len(asks),
                tenants=tenants,
                queue_s=max(0.0, (start_ns - ask.delivery.published_ns) / 1e9),
                device_s=share,
            )
            await self.send(ask.delivery, reply)
            used = self.used.setdefault((ask.delivery.tenant, ask.request.job), Used())
            used.device_s += share
            used.requests += 1
            used.group_sum += len(asks)
        answered = [ask for ask, result in zip(asks, results, strict=True) if result.acted is not None]
        await asyncio.gather(*(ask.delivery.ack() for ask in answered))
        self.context.pulse.gauges["group_size"] = len(asks)

    async def refuse(self, delivery: Delivery, request: InferenceRequest, error: NexusError) -> None:
        """Answer with the error, and let the request go: repeating it would not help."""
        await self.send(delivery, InferenceReply(id=request.id, error=str(error), error_code=error.code))
        await self.context.event(
            "request.refused", delivery.tenant, job=request.job, key=f"refused/{request.id}", message=str(error)
        )
        await delivery.ack()

    async def send(self, delivery: Delivery, reply: InferenceReply) -> None:
        """To the asker's inbox; a request without one is a tenant's fire and forget, and only its event remains."""
        if delivery.inbox:
            await self.bus.cast_to(delivery.inbox, "infer.reply", reply)

    async def usage(self) -> None:
        """Publish what was used, every few seconds and at the end."""
        while True:
            await asyncio.sleep(USAGE_S)
            await self.flush()

    async def flush(self) -> None:
        """Publish the usage of each job since the last time."""
        taken, self.used = self.used, {}
        for (tenant, job), used in taken.items():
            entry = Usage(
                tenant=tenant,
                job=job,
                worker=self.context.name,
                kind="inference",
                device_s=used.device_s,
                requests=used.requests,
                group_sum=used.group_sum,
                time=now(),
            )
            await self.bus.publish("usage", entry, msg_id=uuid.uuid4().hex, tenant=tenant, job=job)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Answer while the next group is already being collected."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.context.log.error("answering a group failed; its requests are redelivered", exc_info=error)


async def main(context: Context) -> None:
    """Serve until told to stop."""
    process.settings(context.config.threads)
    inference = Inference(context)
    await inference.load()
    context.pulse.state = "running"
    try:
        await worker.side_by_side(inference.serve(), inference.tenants(), inference.usage())
    finally:
        await inference.rounds.stop()
        await inference.flush()


def run(**options: Any) -> int:
    """Entry point of `nexus worker inference`."""
    return worker.run(ROLE, main, **options)
