"""A tenant's side of the Inference Queue, and workers that serve it in this process."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from nexus_bus import config, registry
from nexus_bus.bus import Bus, ensure_tenant
from nexus_bus.clock import now
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.checkpoint import weights_bytes
from nexus_bus.models.contract import build_contract
from nexus_bus.models.slots import build_module
from nexus_bus.tensors import encode_image, to_tensor
from nexus_bus.worker import Context, Pulse
from schemas.environment import Observation
from schemas.events import Event
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import HeadSpec
from schemas.policy import ActionSpec, ObservationSpec, PolicyContract, PolicyVersion
from workers.inference import Inference

TENANT = "acme"
Start = Callable[..., Any]


@dataclass
class Asker:
    """A tenant's side: publishes versions, asks, and keeps what was answered."""

    bus: Bus
    backbone: Backbone
    inbox: str = ""
    replies: dict[str, list[InferenceReply]] = field(default_factory=dict)

    async def open(self) -> "Asker":
        async def answered(reply: InferenceReply, _headers: dict[str, str]) -> None:
            self.replies.setdefault(reply.id, []).append(reply)

        self.inbox = (await self.bus.inbox("infer.reply", answered)).subject
        await self.bus.kv("registry").put(registry.tenant_key(TENANT), {})
        await ensure_tenant(self.bus, TENANT)
        return self

    def contract(self, **changes: Any) -> PolicyContract:
        built = build_contract(
            backbone=self.backbone.info,
            head=HeadSpec(type="oft", horizon=2, options={"width": 8, "blocks": 1, "value_width": 8}),
            action=ActionSpec(size=2, low=[-1.0, -1.0], high=[1.0, 1.0]),
            observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=1),
        )
        return msgspec.structs.replace(built, **changes)

    async def publish(self, job: str, n: int = 0, seed: int = 0, weights: bytes | None = None, **changes: Any) -> PolicyVersion:
        data = weights or weights_bytes(build_module(self.contract(), self.backbone.shape, seed=seed))
        version = PolicyVersion(
            id=f"{job}@{n}", tenant=TENANT, job=job, n=n, parent=None, contract=self.contract(**changes),
            weights=await self.bus.blobs.put(data), created=now(),
        )  # fmt: skip
        await self.bus.kv("registry").put(registry.policy_key(TENANT, job, n), version)
        return version

    async def retire(self, version: PolicyVersion) -> None:
        gone = msgspec.structs.replace(version, retired=now())
        await self.bus.kv("registry").put(registry.policy_key(TENANT, version.job, version.n), gone)

    async def send(self, policy: str, scene: int = 0, camera: str = "front", **options: Any) -> str:
        picture = np.random.default_rng(scene).integers(0, 256, (96, 96, 3), dtype=np.uint8)
        seen = Observation(
            images={camera: encode_image(picture)}, state=to_tensor(np.zeros(1, np.float32)), instruction="touch the red block"
        )
        name = uuid.uuid4().hex
        request = InferenceRequest(id=name, job=policy.partition("@")[0], policy=policy, observation=seen, **options)
        await self.bus.publish("infer.request", request, msg_id=name, headers={"Nexus-Reply-To": self.inbox}, tenant=TENANT)
        return name

    async def reply(self, name: str, within: float = 30.0) -> InferenceReply:
        ends = time.monotonic() + within
        while name not in self.replies:
            assert time.monotonic() < ends, f"no answer within {within} s"
            await asyncio.sleep(0.002)
        return self.replies[name][0]

    async def ask(self, policy: str, scene: int = 0, **options: Any) -> InferenceReply:
        return await self.reply(await self.send(policy, scene, **options))


@contextlib.asynccontextmanager
async def starting(bus: Bus, backbone: Backbone, home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """What runs a worker with the settings given, until this ends."""
    monkeypatch.setenv("NEXUS_HOME", str(home))
    monkeypatch.setattr(Backbone, "load", lambda *_, **__: backbone)
    running: list[tuple[Inference, asyncio.Task[None]]] = []

    async def begin(**flags: Any) -> Inference:
        settings = config.load("inference", flags=flags).value
        context = Context("inference", "inference-0", bus, settings, asyncio.Event(), Pulse(), structlog.get_logger(), "here")
        made = Inference(context)
        task = asyncio.create_task(made.run())
        running.append((made, task))
        while context.pulse.state != "running":
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)
        return made

    yield begin
    for made, task in running:
        made.context.stop.set()
        await asyncio.wait_for(task, 30)


async def events(bus: Bus, tenant: str, kind: str, count: int) -> list[Event]:
    """The first so many events of a kind."""
    found: list[Event] = []
    async with asyncio.timeout(30):
        async for item in bus.tail("event", since="all", tenant=tenant, job="*"):
            found += [item.message] if item.message.type == kind else []
            if len(found) == count:
                break
    return found


async def held(bus: Bus, count: int = 0) -> bool:
    """Whether so many requests are with workers, and none waits for one."""
    info = await bus.js.consumer_info("INFERENCE", f"infer-{TENANT}")
    return (info.num_ack_pending, info.num_pending) == (count, 0)
