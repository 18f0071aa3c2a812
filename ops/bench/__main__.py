"""`make bench`: the parts of the line one by one, on this machine, into runs/bench/line.json."""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nexus_bus.models import process

process.settings(1)  # before torch

import numpy as np  # noqa: E402

from nexus_bus.bus import Bus, Delivery, Done, Durable, EmbeddedServer, Outcome, ensure_topology  # noqa: E402
from nexus_bus.envs.rendering import probe  # noqa: E402
from nexus_bus.envs.session import Session  # noqa: E402
from nexus_bus.models.backbone import Backbone  # noqa: E402
from nexus_bus.models.cache import FeatureCache, encode_cached  # noqa: E402
from ops.bench.models_base import looks  # noqa: E402
from schemas.control import JobReport  # noqa: E402
from schemas.job import EnvironmentSpec  # noqa: E402

MESSAGES = 3000
TENANTS = 8
FRAMES = 64
STEPS = 400


def timed(work: Callable[[], object], times: int = 5) -> float:
    """Median CPU seconds of a call, after one to warm up: other programs of the machine do not count."""
    work()
    spent = []
    for _ in range(times):
        started = time.process_time()
        work()
        spent.append(time.process_time() - started)
    return float(np.median(spent))


async def bus_rates() -> dict[str, float]:
    """Messages per second through a work queue: stored and confirmed, then taken, handled and acknowledged."""
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory)).start()
        try:
            bus = await Bus.connect(server.url, name="bench", creds=server.creds)
            await ensure_topology(bus)
            report = JobReport(job="bench", kind="learned", reason="x" * 900)
            started = time.perf_counter()
            await asyncio.gather(
                *(bus.publish("job.report", report, msg_id=str(i), tenant="bench", job="bench") for i in range(MESSAGES))
            )
            published = time.perf_counter() - started
            stop, seen = asyncio.Event(), 0

            async def handle(_: Delivery) -> Outcome:
                nonlocal seen
                seen += 1
                if seen == MESSAGES:
                    stop.set()
                return Done()

            started = time.perf_counter()
            await bus.consume(Durable("JOBS", "bench", ("job.report.*.*",)), handle, concurrency=64, stop=stop)
            consumed = time.perf_counter() - started
            await bus.close()
        finally:
            server.stop()
    return {"publish_1kb_per_s": MESSAGES / published, "consume_1kb_per_s": MESSAGES / consumed}


def model_ratios() -> dict[str, float]:
    """What group batching and the feature cache save, against one forward per tenant and sample."""
    backbone = Backbone.load("nexus-nano")
    frames = looks(TENANTS, TENANTS)
    serial = timed(lambda: [backbone.encode([frame]) for frame in frames])
    grouped = timed(lambda: backbone.encode(frames))
    shared = looks(FRAMES)

    def epochs(cache: FeatureCache | None) -> None:
        for _ in range(3):
            for start in range(0, FRAMES, 16):
                encode_cached(backbone, shared[start : start + 16], cache)

    plain = timed(lambda: epochs(None), times=3)
    cached = timed(lambda: epochs(FeatureCache(None, 256 << 20, 0)), times=3)
    alone, together = backbone.encode(frames[:1])[0], backbone.encode(frames)[0]
    return {
        "forward_ms_alone": serial / TENANTS * 1e3,
        "forward_ms_grouped": grouped / TENANTS * 1e3,
        "grouped_x": serial / grouped,
        "cache_3_epochs_x": plain / cached,
        "bit_equal": float(bool((alone.hidden == together.hidden).all())),
    }


def environment_rates() -> dict[str, float]:
    """Tabletop steps per second at 96 px: a picture each step, and one per chunk of 5."""
    if probe().backend is None:
        return {}
    session = Session(EnvironmentSpec(id="tabletop", task="touch", options={"max_steps": 1000, "end_on_success": False}))
    session.reset(0)

    def run(chunk: int) -> None:
        for step in range(STEPS // chunk):
            if step * chunk % 1000 == 0:
                session.reset(0)
            session.step(np.zeros((chunk, 3), np.float32))

    rates = {f"tabletop_steps_per_s_chunk_{chunk}": STEPS / timed(lambda c=chunk: run(c), times=3) for chunk in (1, 5)}
    session.close()
    return rates


def main() -> None:
    """Run all, print and write."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/line.json"))
    arguments = parser.parse_args()
    measured: dict[str, Any] = {**asyncio.run(bus_rates()), **model_ratios(), **environment_rates()}
    rounded = {name: round(value, 3) for name, value in measured.items()}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    versions = {name: version(name) for name in ("torch", "transformers", "nats-py", "mujoco")}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"measured": rounded, "machine": machine, "versions": versions}, indent=2) + "\n")
    for name, value in rounded.items():
        print(f"{name:<32} {value:>12,.3f}")


if __name__ == "__main__":
    main()
