"""Inference: one resident backbone, a private slot per policy version, one grouped forward for many tenants.

Reads   INFERENCE (a durable consumer per tenant, served by shares of device time), registry (tenants and their limits,
        policy versions), blobs.
Writes  answers to the asker's inbox, USAGE, EVENTS (refused requests, gaps that the canary found).
Killed  what it held is redelivered to another or to the restarted one; an answer depends on the request and the version
        alone, so answering twice is harmless. Slots are a cache: a version is loaded on demand, never a 404.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_bus import faults, telemetry, worker
from nexus_bus.bus import Bus, Delivery, inference_durable
from nexus_bus.bus.codec import brief
from nexus_bus.errors import BadMessage, NexusError, NotFound, Unavailable
from nexus_bus.loading import Loader
from nexus_bus.models import process
from nexus_bus.pace import Pace
from nexus_bus.serving import Serving
from nexus_bus.tensors import to_tensor
from nexus_bus.usage import Device, Tally
from nexus_bus.worker import Context
from schemas.base import PROVIDER
from schemas.control import Role
from schemas.inference import InferenceReply, InferenceRequest
from schemas.policy import PolicyVersion

if TYPE_CHECKING:
    from nexus_bus.models.act import Answer, Asked
    from nexus_bus.models.slots import Acted, PolicySlot

ROLE: Role = "inference"

DRAIN_S = 1.0  # for answers on their way when told to stop
HOLD_S = 0.6  # what is held is said to be in progress this often; less than a third of the durable's ack_wait
CLOCK_S = 30.0  # how often the queue's clock is looked at
CANARY_IDLE_S = 0.02  # nothing came for so long: the canary runs
CANARY_GROUPS = 50  # or so many groups after its answer
TELL_S, TOLD = 1.0, 20  # of a tenant's refused requests so many become events, then one in so many seconds


@dataclass(eq=False)
class Ask:
    """One request on its way through the group."""

    delivery: Delivery
    request: InferenceRequest
    slot: "PolicySlot"
    asked: "Asked | None" = None  # once its pictures are decoded, on the compute thread


@dataclass(frozen=True)
class Canary:
    """An answer that is made again, alone."""

    ask: Ask
    asked: "Asked"
    acted: "Acted"
    group: int  # size
    number: int  # of the group


class Inference:
    """Collects groups, runs them off the loop, answers."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.serving = Serving(context.bus, lambda tenant, _: inference_durable(tenant), batch=context.config.tenant_inflight)
        self.rounds = self.serving.rounds
        self.used = Tally(context.bus, context.name, "inference")
        self.compute = Device(self.used, "forward")
        self.backbone: Any = None
        self.cache: Any = None
        self.answering: Any = None  # answering.Answering, once torch is there
        self.decoding: dict[int, Ask] = {}  # whose answers are on their way, token by token
        self.pace: Pace
        self.versions: Loader
        self.held: set[Delivery] = set()
        self.ready: deque[Ask] = deque()  # set aside before, and their versions are there now
        self.tasks: set[asyncio.Task[None]] = set()
        self.told: dict[str, float] = {}  # by tenant, when the next refused request is due to become an event
        self.groups = self.answers = 0
        self.canaries: deque[Canary] = deque()
        self.clock = 0.0  # of the queue, less our monotonic one

    async def run(self) -> None:
        """Serve until told to stop; what is not answered by then goes to another worker."""
        await self.load()
        self.context.pulse.state = "running"
        try:
            await worker.side_by_side(
                self.serve(), self.serving.follow(), self.versions.follow(), self.hold(), self.follow(), self.used.publish()
            )
        finally:
            await self.hand_back()

    async def load(self) -> None:
        """Load torch, the backbone, an empty cache and empty slots, off the loop: heartbeats go on meanwhile."""
        settings, gauges = self.context.config, self.context.pulse.gauges
        slots = await asyncio.get_running_loop().run_in_executor(self.compute.of(PROVIDER, "loading"), self.resident)
        self.versions = Loader(self.bus, slots)
        self.clock = await self.bus.clock("INFERENCE") - time.monotonic()
        gauges.update(batch_knee=self.pace.batch, late=0, canary_runs=0, canary_gaps=0)
        curve = dict(zip(self.pace.curve.sizes, (round(1000 * s, 2) for s in self.pace.curve.seconds), strict=True))
        self.context.log.info(
            "backbone resident", base=settings.base, fingerprint=self.backbone.fingerprint[:12], batch=self.pace.batch, ms=curve
        )

    def resident(self) -> Any:
        """Runs on the compute thread. Loads, and measures what grouping is worth on this machine."""
        from nexus_bus.answering import Answering
        from nexus_bus.models.backbone import Backbone
        from nexus_bus.models.cache import FeatureCache
        from nexus_bus.models.paging import Pages, PolicySlots

        settings = self.context.config
        self.backbone = Backbone.load(settings.base, device=settings.device, profile=settings.profile)
        directory = Path(settings.cache_dir) if settings.cache_dir else None
        self.cache = FeatureCache(directory, settings.cache_memory_bytes, settings.cache_disk_bytes)
        self.answering = Answering(self.backbone, self.cache, self.context.log)
        curve = self.backbone.tune(settings.batch)
        self.pace = Pace(curve, settings.batch, settings.wait_ms / 1000)
        directory = Path(settings.slot_dir) if settings.slot_dir else None
        host_bytes = settings.slot_host_bytes if self.backbone.device.type != "cpu" else 0
        pages = Pages(directory, settings.slot_disk_bytes, host_bytes)
        return PolicySlots(self.build, pages, slots=settings.slots, slot_bytes=settings.slot_bytes)

    def build(self, version: PolicyVersion, weights: bytes, adapter: bytes | None) -> "PolicySlot":
        """Runs on the loader's thread: check that a version fits this backbone, build its head, fill it."""
        from nexus_bus.models.checkpoint import load_policy
        from nexus_bus.models.contract import check_contract

        check_contract(version.contract, backbone=self.backbone.info)
        lora = version.contract.lora
        places = self.backbone.places(lora) if lora is not None else None
        slot = load_policy(version, weights, adapter, self.backbone.shape, places)
        for module in (slot.module, slot.adapter):
            if module is not None:
                module.to(self.backbone.device)
        return slot

    async def serve(self) -> None:
        """Collect, run, answer, until told to stop. The canary runs when nobody waits, or when it was put off for long."""
        while not self.context.stop.is_set():
            group = await self.collect()
            if group:
                await self.handle(group)
            if self.decoding:
                await self.decode()
            if self.canaries and (not group or self.groups - self.canaries[0].number >= CANARY_GROUPS):
                await self.compare(self.canaries.popleft())
        ends = time.monotonic() + DRAIN_S
        while self.tasks and (left := ends - time.monotonic()) > 0:  # an answer may leave refusals to another
            await asyncio.wait(self.tasks, timeout=left)

    async def collect(self) -> list[Ask]:
        """A group, closed by its size or by the pace: see nexus_bus/pace.py. May be empty."""
        group = await self.take(self.pace.batch, 0 if self.decoding else CANARY_IDLE_S if self.canaries else 0.25)
        opened = time.monotonic()
        while group and not self.decoding:
            wait = self.pace.patience(len(group), min(map(self.closes, group)), time.monotonic())
            if wait <= 0:
                self.context.pulse.gauges.update(group_size=len(group), wait_ms=1000 * (time.monotonic() - opened))
                break
            group += await self.take(self.pace.batch - len(group), wait)
        return group

    async def take(self, room: int, wait: float) -> list[Ask]:
        """Requests whose versions are ready: those that were set aside for them first, then new ones."""
        taken = [self.ready.popleft() for _ in range(min(room, len(self.ready)))]
        if room > len(taken):
            arrived = await self.rounds.take(room - len(taken), 0 if taken else wait)
            for delivery in sorted(arrived, key=lambda delivery: delivery.received):
                self.pace.arrived(delivery.received)
                if (ask := self.admit(delivery)) is not None:
                    taken.append(ask)
        return [ask for ask in taken if not self.expired(ask)]

    def admit(self, delivery: Delivery) -> Ask | None:
        """Decode a request. None if it does not go into this group: unreadable, or set aside until its version is ready."""
        self.held.add(delivery)
        try:
            request: InferenceRequest = delivery.decode()
        except BadMessage as error:
            self.later(self.unreadable(delivery, error), delivery)
            return None
        slot = self.versions.get(delivery.tenant, request.policy)
        if slot is None:
            self.later(self.set_aside(delivery, request), delivery)
            return None
        return Ask(delivery, request, slot)

    def closes(self, ask: Ask) -> float:
        """Monotonic time at which it goes, however small its group."""
        bound = min(self.context.config.wait_ms, ask.request.latency_ms or float("inf"))
        return ask.delivery.received + bound / 1000

    def expired(self, ask: Ask) -> bool:
        """Whether nobody waits for the answer any more; the request is let go then."""
        # What it is by the asker's clock: when it was sent, and by the queue's since then. Those of several machines are apart.
        delivery = ask.delivery
        if not 0 < ask.request.deadline < delivery.sent + self.clock + time.monotonic() - delivery.published_ns / 1e9:
            return False
        self.context.pulse.gauges["late"] += 1
        self.later(delivery.ack(), delivery)
        return True

    async def set_aside(self, delivery: Delivery, request: InferenceRequest) -> None:
        """Wait for a version while the others of the group go on; the request joins a later group."""
        try:
            slot = await self.versions.load(delivery.tenant, request.policy)
        except NexusError as error:
            await self.refuse(delivery, request, error)
            return
        self.ready.append(Ask(delivery, request, slot))
        self.rounds.wake()

    async def handle(self, group: list[Ask]) -> None:
        """One grouped forward. What cannot be served is answered with its error; the rest of the group goes on."""
        self.context.pulse.busy += 1
        try:
            started = time.time_ns()
            results, busy_s = await asyncio.get_running_loop().run_in_executor(self.compute, self.answering.forward, group)
            faults.at("after-compute")
            self.pace.ran(len(group), busy_s)
            self.groups += 1
            now = {id(ask): (ask, result) for ask, result in zip(group, results, strict=True) if result is not None}
            self.decoding |= {id(ask): ask for ask in group if id(ask) not in now}
            for ask, result in now.values():
                self.rounds.charge(ask.delivery, result.device_s)
            asks = [ask for ask, _ in now.values()]
            answers = [result for _, result in now.values()]
            self.later(self.answer(asks, answers, started, busy_s), *(ask.delivery for ask in asks))
        finally:
            self.context.pulse.busy -= 1
            self.context.pulse.progress += len(group)

    async def decode(self) -> None:
        """The next tokens of long answers: between two groups, so that they delay nobody by more than a token."""
        for key, ask in list(self.decoding.items()):
            if self.expired(ask):
                del self.decoding[key]
                spent_s = self.answering.decoding.drop(key)
                self.used.charge(ask.delivery, ask.request.job, spent_s, 1)
        ended = await asyncio.get_running_loop().run_in_executor(self.compute, self.answering.decode)
        for key, result in ended.items():
            ask = self.decoding.pop(key)
            self.rounds.charge(ask.delivery, result.device_s)
            self.later(self.answer([ask], [result], time.time_ns() - int(result.device_s * 1e9), result.device_s), ask.delivery)
        self.context.pulse.progress += 1

    async def answer(self, asks: list[Ask], results: list["Answer"], start_ns: int, busy_s: float) -> None:
        """Send the answers, and account for the forward; what is answered is acknowledged once that is on record."""
        end_ns, tenants = start_ns + int(busy_s * 1e9), len({ask.delivery.tenant for ask in asks})
        links = [link for ask in asks if (link := telemetry.link_from(ask.delivery.headers.get("traceparent", ""))) is not None]
        group = telemetry.record_span(
            "inference.group", start_ns, end_ns, attributes={"group": len(asks), "tenants": tenants}, links=links
        )
        group_link = telemetry.link_from(group)
        number = self.groups
        done: list[Delivery] = []
        for ask, result in zip(asks, results, strict=True):
            parent, share = ask.delivery.headers.get("traceparent", ""), result.device_s
            self.used.charge(ask.delivery, ask.request.job, share, len(asks))
            telemetry.record_span("inference.queue", ask.delivery.published_ns, start_ns, parent=parent)
            telemetry.record_span(
                "inference.forward", start_ns, end_ns, parent=parent, links=[group_link] if group_link else [],
                attributes={"policy": ask.request.policy, "group": len(asks), "tenants": tenants, "device_s": share},
            )  # fmt: skip
            acted = result.acted
            if acted is None:
                self.later(self.refuse(ask.delivery, ask.request, result.error or NotFound("no answer")), ask.delivery)
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
                clipped=acted.clipped,
            )
            await self.send(ask.delivery, reply)
            done.append(ask.delivery)
            self.answers += 1
            every = self.context.config.canary_every
            if every and self.answers % every == 0 and ask.asked is not None:
                self.canaries.append(Canary(ask, ask.asked, acted, len(asks), number))
        self.used.settle(done)

    async def compare(self, canary: Canary) -> None:
        """Answer a request again, alone and from its pixels; tell the provider if that is another answer."""
        from nexus_bus.models.act import act_group
        from nexus_bus.models.canary import TOLERANCE, gap

        loop, nobodys = asyncio.get_running_loop(), self.compute.of(PROVIDER, "canary")
        alone = (await loop.run_in_executor(nobodys, act_group, self.backbone, None, [canary.asked]))[0]
        gauges, profile = self.context.pulse.gauges, self.backbone.profile
        gauges["canary_runs"] += 1
        apart = gap(canary.acted, alone.acted, profile) if alone.acted is not None else float("inf")
        if apart <= TOLERANCE[profile]:
            return
        gauges["canary_gaps"] += 1
        request, tenant = canary.ask.request, canary.ask.delivery.tenant
        text = (
            f"{self.context.name}: an answer of {request.policy} in a group of {canary.group} is {apart:.3g} from the same "
            f"request alone, tolerated is {TOLERANCE[profile]:g}: answers depend on neighbours; compare driver and libraries"
        )
        numbers = {"gap": apart, "tolerance": TOLERANCE[profile], "group": canary.group, "profile": profile}
        named = {"tenant": tenant, "policy": request.policy, "request": request.id, "worker": self.context.name}
        self.context.log.error("canary gap", **numbers, **named)
        await self.context.event("canary.gap", PROVIDER, key=f"canary/{request.id}", message=text, data=numbers | named)

    async def unreadable(self, delivery: Delivery, error: BadMessage) -> None:
        """Answer what cannot be decoded by its message id, which askers set to the request's, and keep it as a dead letter."""
        await self.send(delivery, InferenceReply(id=delivery.msg_id, error=brief(str(error)), error_code=error.code))
        await delivery.reject(str(error))
        await self.tell(delivery.tenant, "_", delivery.msg_id, error)

    async def refuse(self, delivery: Delivery, request: InferenceRequest, error: NexusError) -> None:
        """Answer with the error, and let the request go: repeating it would not help."""
        await self.send(delivery, InferenceReply(id=request.id, error=brief(str(error)), error_code=error.code))
        await self.tell(delivery.tenant, request.job, f"refused/{request.id}", error)
        await delivery.ack()

    async def tell(self, tenant: str, job: str, key: str, error: NexusError) -> None:
        """As an event, unless the tenant had many of late: they would push everybody's out, and who asked has an answer."""
        clock = time.monotonic()
        due = max(self.told.get(tenant, 0.0), clock - (TOLD - 1) * TELL_S)
        if due <= clock:
            self.told[tenant] = due + TELL_S
            await self.context.event("request.refused", tenant, job=job, key=key, message=str(error))

    async def send(self, delivery: Delivery, reply: InferenceReply) -> None:
        """To the asker's inbox; a request without one is a tenant's fire and forget, and only its event remains."""
        if delivery.inbox:
            await self.bus.cast_to(delivery.inbox, "infer.reply", reply)

    async def hold(self) -> None:
        """Keep requests from being redelivered while they wait for a version or for a slow forward."""
        while True:
            await asyncio.sleep(HOLD_S)
            self.held = {delivery for delivery in self.held if not delivery.settled}
            for delivery in list(self.held):
                await delivery.in_progress()

    async def follow(self) -> None:
        """Know the time of the queue, should a clock be set."""
        while True:
            await asyncio.sleep(CLOCK_S)
            with contextlib.suppress(Unavailable):
                self.clock = await self.bus.clock("INFERENCE") - time.monotonic()

    async def hand_back(self) -> None:
        """At the end: what was not answered goes to another worker at once."""
        await self.rounds.stop()
        await self.used.flush()
        for delivery in self.held:
            if not delivery.settled:
                await delivery.nak()

    def later(self, work: Coroutine[Any, Any, None], *deliveries: Delivery) -> None:
        """Do it while the next group is already being collected. If it fails, these deliveries come again."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._finished(task, deliveries))

    def _finished(self, task: asyncio.Task[None], deliveries: tuple[Delivery, ...]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        for delivery in deliveries:
            if delivery.settled or error is not None:
                self.rounds.charge(delivery)  # unless its forward was charged already
        if error is not None:
            self.held.difference_update(deliveries)
            self.context.log.error("answering failed; the requests are redelivered", exc_info=error)


async def main(context: Context) -> None:
    """Serve until told to stop."""
    process.settings(context.config.threads)
    await Inference(context).run()


def run(**options: Any) -> int:
    """Entry point of `nexus worker inference`."""
    return worker.run(ROLE, main, **options)
