"""Real inference and training workers on a real server in one process, and the tenants' and the master's sides played to them.

What is left out of the line is what could hide how the two queues share the device: simulators, datasets, evaluations.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import structlog

from nexus_bus import config, registry
from nexus_bus.bus import Bus, Delivery, Done, Durable, Outcome, ensure_job, ensure_tenant
from nexus_bus.clock import now
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.checkpoint import weights_bytes
from nexus_bus.models.contract import build_contract
from nexus_bus.models.slots import build_module
from nexus_bus.plan import compile_plan
from nexus_bus.tensors import encode_image, to_tensor
from nexus_bus.worker import Context, Pulse
from schemas.environment import Observation
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import DataSpec, EnvironmentSpec, HeadSpec, JobSpec, Sft
from schemas.plan import JobState
from schemas.policy import PolicyVersion
from schemas.training import TrainingBatch, TrainingSample
from workers.inference import Inference
from workers.trainer import Trainer

HEAD = HeadSpec(type="oft", horizon=2, options={"width": 8, "blocks": 1, "value_width": 8})
SCENE = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1})
REPORTS = Durable("JOBS", "rig", ("job.report.*.*",))
SCENES = 4096  # pictures there are
PLENTY = 120.0  # seconds that a publication may wait for room


@lru_cache(maxsize=SCENES)
def observation(seed: int) -> Observation:
    """A picture of its own for each seed; made once, so that asking costs little beside the device that answers."""
    tint = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    picture = np.kron(tint, np.ones((24, 24, 1), np.uint8))
    state = to_tensor(np.zeros(3, np.float32))
    return Observation(images={"front": encode_image(picture)}, state=state, instruction="touch the red block")


@dataclass
class Rig:
    """Tenants and master for workers under test. Use `rig`."""

    bus: Bus
    workers: Bus  # their connection
    inbox: str = ""
    waiting: dict[str, asyncio.Future[InferenceReply]] = field(default_factory=dict)
    trained: dict[tuple[str, str], float] = field(default_factory=dict)  # (tenant, job) → monotonic time of its last step
    failed: dict[tuple[str, str], str] = field(default_factory=dict)  # and why
    scenes: int = 0
    answers: int = 0

    # Inference

    async def policy(self, tenant: str, backbone: Backbone) -> str:
        """A tenant with one policy version, whose name is returned."""
        plan = compile_plan(job_spec("pick", 1, 1), tenant)
        contract = build_contract(backbone=backbone.info, head=HEAD, action=plan.action, observation=plan.observation)
        weights = await self.bus.blobs.put(weights_bytes(build_module(contract, backbone.shape, seed=0)))
        version = PolicyVersion(
            id="pick@0", tenant=tenant, job="pick", n=0, parent=None, contract=contract, weights=weights, created=now()
        )
        kv = self.bus.kv("registry")
        await kv.put(registry.policy_key(tenant, "pick", 0), version)
        await kv.put(registry.tenant_key(tenant), {})
        await ensure_tenant(self.bus, tenant)
        return version.id

    async def ask(self, tenant: str, policy: str = "pick@0") -> InferenceReply:
        """One request, and its answer."""
        self.scenes += 1
        name = uuid.uuid4().hex
        future = self.waiting[name] = asyncio.get_running_loop().create_future()
        request = InferenceRequest(id=name, job="pick", policy=policy, observation=observation(self.scenes % SCENES))
        headers = {"Nexus-Reply-To": self.inbox}
        await self.bus.publish("infer.request", request, msg_id=name, headers=headers, tenant=tenant, deadline=PLENTY)
        try:
            return await future
        finally:
            del self.waiting[name]

    async def ask_many(
        self, tenant: str, count: int, at_once: int, got: Callable[[InferenceReply], None] | None = None
    ) -> None:
        """So many requests, `at_once` of them on their way at any time."""
        left = iter(range(count))

        async def one_after_another() -> None:
            for _ in left:
                reply = await self.ask(tenant)
                assert not reply.error, reply.error
                if got is not None:
                    got(reply)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))

    async def answered(self, reply: InferenceReply, _headers: dict[str, str]) -> None:
        """To whoever asked."""
        self.answers += 1
        if (future := self.waiting.get(reply.id)) is not None and not future.done():
            future.set_result(reply)

    # Training

    async def submit(self, tenant: str, job: str, steps: int, size: int, queued: int | None = None) -> None:
        """A job that is to be trained now, with its batches (or the first `queued` of them) on the queue."""
        state = JobState(
            plan=compile_plan(job_spec(job, steps, size), tenant), phase="training", submission=job, submitted=now()
        )
        if queued != 0:  # else its consumer is made when it gets a seat
            await ensure_job(self.bus, tenant, job)
        await self.feed(tenant, job, range(steps if queued is None else queued), size)
        await self.bus.kv("registry").put(registry.job_key(tenant, job), state)

    async def feed(self, tenant: str, job: str, numbers: Iterable[int], size: int) -> None:
        """Batches of these numbers, onto the queue."""
        await asyncio.gather(*(self._feed(tenant, job, number, size) for number in numbers))

    async def _feed(self, tenant: str, job: str, number: int, size: int) -> None:
        actions, pad = to_tensor(np.zeros((2, 3), np.float32)), to_tensor(np.zeros(2, np.bool_))
        samples = []
        for _ in range(size):
            self.scenes += 1
            samples.append(TrainingSample(observation=observation(self.scenes % SCENES), actions=actions, action_is_pad=pad))
        name = f"{job}/{number}"
        batch = TrainingBatch(id=name, tenant=tenant, job=job, batch=number, samples=samples)
        await self.bus.publish("train.batch", batch, msg_id=f"{tenant}/{name}", tenant=tenant, job=job, deadline=PLENTY)

    async def done(self, tenant: str, job: str, within: float = 120.0) -> float:
        """Wait for a job's last step; when it was, by the monotonic clock."""
        await until(lambda: (tenant, job) in self.trained or (tenant, job) in self.failed, within=within)
        assert (tenant, job) in self.trained, self.failed[tenant, job]
        return self.trained[tenant, job]

    async def reported(self, delivery: Delivery) -> Outcome:
        """The master's part: a job that is trained needs its seat no more."""
        report, tenant = delivery.message, delivery.tenant
        if report.kind == "failed":
            self.failed[tenant, report.job] = report.reason
        if report.kind == "trained":
            self.trained.setdefault((tenant, report.job), time.monotonic())
            kv, key = self.bus.kv("registry"), registry.job_key(tenant, report.job)
            entry = await kv.get(key, JobState)
            assert entry is not None
            await kv.put(key, msgspec.structs.replace(entry.value, phase="completed"))
        return Done()

    # Workers

    @asynccontextmanager
    async def worker(self, role: Any, **flags: Any) -> AsyncIterator[Any]:
        """An Inference or a Trainer that serves until the end of the block."""
        flags = {"cache_dir": "none", "slot_dir": "none", "canary_every": 0, **flags}
        settings = config.load(role, flags=flags).value
        log = structlog.get_logger()
        context = Context(role, f"{role}-0", self.workers, settings, asyncio.Event(), Pulse(), log, "here")
        serving = (Inference if role == "inference" else Trainer)(context)
        task = asyncio.create_task(serving.run())
        while context.pulse.state != "running":
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)
        try:
            yield serving
        finally:
            context.stop.set()
            await asyncio.wait_for(task, 30)


async def until(condition: Callable[[], object], *work: asyncio.Task[Any], within: float = 60.0) -> None:
    """Wait for a condition while others work; what they raise is raised here."""
    ends = time.monotonic() + within
    while not condition():
        for task in work:
            if task.done():
                task.result()
        assert time.monotonic() < ends, f"not within {within:g} s"
        await asyncio.sleep(0.01)


def job_spec(name: str, steps: int, size: int) -> JobSpec:
    """A small SFT job; one version, at its end."""
    return JobSpec(
        kind="sft", name=name, head=HEAD, environment=SCENE, data=DataSpec(dataset="made"),
        algorithm=Sft(steps=steps, batch_size=size, warmup_steps=0, publish_every=steps),
    )  # fmt: skip


@asynccontextmanager
async def rig(bus: Bus, workers: Bus | None = None) -> AsyncIterator[Rig]:
    """Tenants and master on this bus, until the end of the block; the workers on another one, if it is given."""
    made, stop = Rig(bus, workers or bus), asyncio.Event()
    made.inbox = (await bus.inbox("infer.reply", made.answered)).subject
    master = asyncio.create_task(bus.consume(REPORTS, made.reported, concurrency=8, stop=stop))
    try:
        yield made
    finally:
        stop.set()
        await master
