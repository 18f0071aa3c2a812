"""From publishing a policy version to its first answer, and what others wait meanwhile: a real server, a real worker.

The worker, the publisher and those who ask are processes of their own, as in service.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nexus_bus import registry
from nexus_bus.bus import Bus, EmbeddedServer, ensure_topology
from nexus_bus.clock import now
from nexus_bus.tensors import encode_image, to_tensor
from schemas.environment import Observation
from schemas.inference import InferenceReply, InferenceRequest
from schemas.policy import PolicyContract, PolicyVersion

WIDTHS = {1: 300, 5: 750, 50: 2500}  # MB → width of an oft head of about that size
ASKERS = 4
PAUSE_S = 0.05  # between an answer and the next question
START_S = 60.0
QUIET_S = 3.0  # of asking alone, to know what a machine's own stalls are


def publish(bench: Any) -> dict[str, float]:
    """Milliseconds from the start of a publication to the first answer, by size; the longest answer of others meanwhile."""
    return asyncio.run(_publish(bench))


async def _publish(bench: Any) -> dict[str, float]:
    sizes, times = ((1, 5), 1) if bench.quick else ((1, 5, 50), 7)
    ready = {mb: _versions(bench, mb, times + 1) for mb in sizes}
    quiet = _versions(bench, 1, 1)
    with tempfile.TemporaryDirectory(dir=bench.directory) as home:
        server = EmbeddedServer(Path(home) / "server").start()
        os.environ["NEXUS_CREDS"] = str(server.creds)  # for the workers, too
        try:
            async with _service(bench, server.url, Path(home)) as bus:
                return await _measure(bench, bus, server.url, ready, quiet)
        finally:
            server.stop()


async def _measure(bench: Any, bus: Bus, url: str, ready: Any, quiet: Any) -> dict[str, float]:
    asker = await Asker.open(bus, "tenant-0")
    for tenant in [f"tenant-{i}" for i in range(ASKERS)]:
        await bus.kv("registry").put(registry.tenant_key(tenant), msgspec.Raw(msgspec.json.encode({"name": tenant})))
        await _store(bus, tenant, "quiet", 0, *quiet[0])
    await asker.ask("quiet@0", deadline=START_S)
    windows: dict[int, list[tuple[float, float]]] = {mb: [] for mb in ready}
    with Others(url) as others:
        await asyncio.sleep(0.3 if bench.quick else QUIET_S)
        for n in range(1 + max(len(versions) for versions in ready.values())):
            for mb, versions in ready.items():
                if n < len(versions):
                    started = time.monotonic()
                    await _store(bus, "tenant-0", f"mb{mb}", n, *versions[n])
                    await asker.ask(f"mb{mb}@{n}")
                    windows[mb].append((started, time.monotonic()))
                    await asyncio.sleep(0.1)
    found = {}
    for mb, spans in windows.items():
        later = spans[1:] or spans  # the first of a job is not loaded ahead
        found[f"publish_to_served_ms_{mb}mb"] = float(np.median([end - start for start, end in later])) * 1e3
        found[f"published_mb_{mb}mb"] = len(ready[mb][0][1]) / 1e6
        found[f"longest_stall_ms_{mb}mb"] = others.longest(spans)
    every = [span for spans in windows.values() for span in spans]
    found["longest_stall_ms"] = others.longest(every)
    found["longest_quiet_ms"] = others.longest(every, outside=True)
    found["median_answer_ms"] = float(np.median([seconds for _, seconds in others.answers])) * 1e3
    return found


def _versions(bench: Any, mb: int, count: int) -> list[tuple[PolicyContract, bytes]]:
    from nexus_bus.models.checkpoint import weights_bytes
    from nexus_bus.models.slots import build_module
    from ops.bench.models_base import contract

    backbone = bench.backbones[""]
    terms = contract(backbone, "oft", width=WIDTHS[mb])
    return [(terms, weights_bytes(build_module(terms, backbone.shape, seed))) for seed in range(count)]


async def _store(bus: Bus, tenant: str, job: str, n: int, terms: PolicyContract, weights: bytes) -> None:
    """As a trainer publishes: content first, then the entry that names it."""
    ref = await bus.blobs.put(weights)
    version = PolicyVersion(
        id=f"{job}@{n}",
        tenant=tenant,
        job=job,
        n=n,
        parent=f"{job}@{n - 1}" if n else None,
        contract=terms,
        weights=ref,
        created=now(),
    )
    await bus.kv("registry").create(registry.policy_key(tenant, job, n), version)


@asynccontextmanager
async def _service(bench: Any, url: str, home: Path) -> AsyncIterator[Bus]:
    """A connection, and an inference worker beside it."""
    bus = await Bus.connect(url, name="bench")
    await ensure_topology(bus)
    command = [sys.executable, "-m", "nexus_bus.cli", "worker", "inference", "--name", "bench-inference", "--url", url]
    for setting in (f"device={bench.device}", f"profile={bench.profile}"):
        command += ["--set", setting]
    with (home / "inference.log").open("wb") as log:
        own = os.environ | {"NEXUS_HOME": str(home)}
        worker = await asyncio.create_subprocess_exec(*command, env=own, stdout=log, stderr=log)
    try:
        yield bus
    except Exception:
        print((home / "inference.log").read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        worker.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(worker.wait(), 20)
        except TimeoutError:
            worker.kill()
        await bus.close()


@dataclass
class Asker:
    """One who asks for actions and waits for them."""

    bus: Bus
    tenant: str
    inbox: Any = None
    waiting: dict[str, asyncio.Future[InferenceReply]] = field(default_factory=dict)
    noise: np.random.Generator = field(default_factory=lambda: np.random.default_rng(os.getpid()))

    @classmethod
    async def open(cls, bus: Bus, tenant: str) -> "Asker":
        """With an inbox for its answers."""
        asker = cls(bus, tenant)

        async def answered(reply: InferenceReply, _headers: dict[str, str]) -> None:
            if (future := asker.waiting.pop(reply.id, None)) is not None and not future.done():
                future.set_result(reply)

        asker.inbox = await bus.inbox("infer.reply", answered)
        return asker

    async def ask(self, policy: str, deadline: float = 20.0) -> None:
        """A new picture each time, so that it is encoded."""
        picture = encode_image(self.noise.integers(0, 256, (96, 96, 3), dtype=np.uint8), "raw")
        state = to_tensor(np.zeros(3, np.float32))
        seen = Observation(images={"front": picture}, state=state, instruction="touch the red block")
        name = uuid.uuid4().hex
        request = InferenceRequest(id=name, job=policy.partition("@")[0], policy=policy, observation=seen)
        future = self.waiting[name] = asyncio.get_running_loop().create_future()
        await self.bus.publish(
            "infer.request", request, msg_id=name, headers={"Nexus-Reply-To": self.inbox.subject}, tenant=self.tenant
        )
        reply = await asyncio.wait_for(future, deadline)
        if reply.error or reply.policy != policy:
            raise RuntimeError(f"asked for {policy}, got {reply.policy!r}: {reply.error}")


class Others:
    """Those who ask all the while, in a process of their own."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "ops.bench.models_publish", url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
        self.answers: list[tuple[float, float]] = []  # when asked (monotonic, as all processes see it), seconds to the answer
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> "Others":
        self._reader.start()
        ends = time.monotonic() + START_S
        while not self.answers and time.monotonic() < ends:
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(START_S)
        self._process.wait(START_S)

    def longest(self, spans: list[tuple[float, float]], *, outside: bool = False) -> float:
        """Milliseconds of the longest answer that overlaps one of the spans, or none of them."""
        met = [
            seconds
            for asked, seconds in self.answers
            if any(start < asked + seconds and asked < end for start, end in spans) is not outside
        ]
        return max(met, default=0.0) * 1e3

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            asked, seconds = json.loads(line)
            self.answers.append((asked, seconds))


async def _ask_on(url: str) -> None:
    bus = await Bus.connect(url, name="bench-others")
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()

    async def go_on(tenant: str) -> None:
        asker = await Asker.open(bus, tenant)
        await asker.ask("quiet@0")
        while not stop.is_set():
            asked = time.monotonic()
            await asker.ask("quiet@0")
            print(json.dumps([asked, time.monotonic() - asked]), flush=True)
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(go_on(f"tenant-{i}") for i in range(ASKERS)))
    await bus.close()


if __name__ == "__main__":
    asyncio.run(_ask_on(sys.argv[1]))
