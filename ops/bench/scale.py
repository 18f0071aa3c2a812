"""`make bench-scale`: what further producers add, into runs/bench/scale.json. See RESULTS.md.

1, 2, 4 and 8 rollout workers, each a process of its own as `nexus worker rollout` starts it, play episodes of a simulator that
sleeps 20 ms a step. This process plays the Environment Service (it sleeps, for any number of sessions at once) and inference
(it answers with the same chunk at once, from the real Inference Queue), so neither can be what producers wait for; how busy it
was is reported beside the rates. Records, reports and orders go over the real streams; nobody learns from them.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import structlog

from nexus_bus import registry
from nexus_bus.bus import (
    Bus,
    Delivery,
    Done,
    EmbeddedServer,
    Incoming,
    Outcome,
    discover,
    ensure_job,
    ensure_tenant,
    ensure_topology,
    inference_durable,
)
from nexus_bus.tensors import encode_image, to_tensor
from ops.bench.models import about
from ops.bench.models_base import Bench
from schemas.environment import Observation, SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec
from schemas.rollout import RolloutOrder

PRODUCERS = (1, 2, 4, 8)
STEP_S = 0.02
CHUNK = 4  # actions that are executed of one answer
EPISODE = 40  # steps
ROUNDS = 2  # the better one counts: other programs of the machine meet all numbers of producers alike
TENANT, JOB = "bench", "scale"
AIM = "aim 0.9 at least"
ACTION = ActionSpec(size=7, low=[-1.0] * 7, high=[1.0] * 7)
SEEN = ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=8)


class Stage:
    """The Environment Service and inference, both as quick as they can be."""

    def __init__(self, bus: Bus) -> None:
        """Nothing is served yet."""
        picture = encode_image(np.zeros((96, 96, 3), np.uint8))
        state = to_tensor(np.zeros(8, np.float32))
        self.observation = Observation(images={"front": picture}, state=state, instruction="wait")
        self.chunk = to_tensor(np.zeros((CHUNK, 7), np.float32))
        self.bus = bus
        self.steps = 0  # of all sessions
        self.left: dict[str, int] = {}  # session → steps of its episode that are left

    async def open(self, request: SessionOpen, incoming: Incoming) -> SessionOpened:
        """A session; there is nothing to start."""
        tenant, name = incoming.tokens["tenant"], request.session or ""
        return SessionOpened(session=name, subject=f"env.session.{tenant}.{name}", worker="stage", version="sleeper 1")

    async def call(self, request: SessionCall, incoming: Incoming) -> SessionReply:
        """Sleep so long as the steps take."""
        session = incoming.tokens["session"]
        if request.op == "close":
            self.left.pop(session, None)
            return SessionReply()
        if request.op == "reset" or request.actions is None:
            self.left[session] = EPISODE
            return SessionReply(observation=self.observation)
        count = min(request.actions.shape[0], self.left[session])
        await asyncio.sleep(STEP_S * count)
        self.left[session] -= count
        self.steps += count
        done = self.left[session] <= 0
        return SessionReply(
            observation=self.observation, rewards=[0.0] * count, successes=[False] * count, terminated=done,
            end="failure" if done else "running", steps=EPISODE - self.left[session],
        )  # fmt: skip

    async def answer(self, delivery: Delivery) -> Outcome:
        """The same chunk to everybody, as soon as it is asked for."""
        request: InferenceRequest = delivery.message
        reply = InferenceReply(
            id=request.id, policy=request.policy, actions=self.chunk, sample=self.chunk, log_prob=[0.0] * CHUNK, value=0.0
        )
        await self.bus.cast_to(delivery.inbox, "infer.reply", reply)
        return Done()

    async def order(self, count: int, batch: int) -> None:
        """So many episodes, queued."""
        await asyncio.gather(*(self._order(batch, index) for index in range(count)))

    async def _order(self, batch: int, index: int) -> None:
        order = RolloutOrder(
            tenant=TENANT, job=JOB, purpose="train", batch=batch, index=index, policy=f"{JOB}@0", seed=index, noise_seed=index,
            environment=EnvironmentSpec(id="sleeper", task="wait"), action=ACTION, observation=SEEN, greedy=True,
            max_steps=EPISODE, execute=CHUNK,
        )  # fmt: skip
        await self.bus.publish("rollout.run", order, msg_id=f"{batch}/{index}", tenant=TENANT, job=JOB)


async def rate(stage: Stage, url: str, home: Path, producers: int, batch: int, seconds: float) -> tuple[float, float]:
    """(steps a second of all producers together, share of a core that the stage used meanwhile)."""
    await stage.order(round(2 * producers * (seconds + 4) / STEP_S / EPISODE), batch)
    environment = os.environ | {"NEXUS_HOME": str(home), "NEXUS_LOG_LEVEL": "warning"}
    started: list[asyncio.subprocess.Process] = []
    with (home / "producers.log").open("ab") as log:
        for i in range(producers):
            words = ["worker", "rollout", "--name", f"producer-{batch}-{i}", "--url", url, "--set", "concurrency=1"]
            started.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "nexus_bus.cli", *words,
                    env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                )
            )  # fmt: skip
    try:
        async with asyncio.timeout(120):
            while not await all_work(stage.bus, producers):
                assert all(process.returncode is None for process in started), (home / "producers.log").read_text()
        began, before, cpu = time.perf_counter(), stage.steps, time.process_time()
        await asyncio.sleep(seconds)
        took = time.perf_counter() - began
        return (stage.steps - before) / took, (time.process_time() - cpu) / took
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in started))
        await stage.bus.purge("rollout.run", tenant=TENANT, job=JOB)
        await stage.bus.purge("train.record", tenant=TENANT, job=JOB)


async def all_work(bus: Bus, producers: int) -> bool:
    """Whether each of them has played for a while; asked by discovery."""
    found = await discover(bus, "rollout")
    return sum(one.data["progress"] >= 5 for one in found) == producers


async def measure(*, quick: bool) -> dict[str, float]:
    """All numbers of producers, in turns."""
    seconds = 3.0 if quick else 10.0
    best: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        server = EmbeddedServer(home / "nats").start()
        os.environ["NEXUS_CREDS"] = str(server.creds)
        bus, stop = await Bus.connect(server.url, name="stage", creds=server.creds), asyncio.Event()
        try:
            await ensure_topology(bus)
            await bus.kv("registry").put(registry.tenant_key(TENANT), {})
            await ensure_tenant(bus, TENANT)
            await ensure_job(bus, TENANT, JOB)
            stage = Stage(bus)
            await bus.serve("env.open", stage.open, queue="environment", tenant=TENANT)
            await bus.serve("env.session", stage.call, tenant=TENANT, session="*")
            answering = asyncio.create_task(bus.consume(inference_durable(TENANT), stage.answer, concurrency=256, stop=stop))
            for turn in range(1 if quick else ROUNDS):
                for producers in PRODUCERS:
                    found = await rate(stage, server.url, home, producers, 100 * turn + producers, seconds)
                    best[producers] = max(best.get(producers, found), found)
                    print(f"{producers} producers: {found[0]:7.1f} steps/s; the stage used {found[1]:.2f} of a core")
            stop.set()
            await answering
        finally:
            await bus.close()
            server.stop()
    single = best[1][0]
    numbers = {f"steps_per_s_{n}": found[0] for n, found in best.items()} | {"stage_core_8": best[8][1]}
    return numbers | {f"scaling_efficiency_{n}": best[n][0] / (n * single) for n in PRODUCERS[1:]}


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(prog="make bench-scale", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/scale.json"))
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    started, load = time.monotonic(), os.getloadavg()[0]
    numbers: dict[str, Any] = {key: round(value, 4) for key, value in asyncio.run(measure(quick=arguments.quick)).items()}
    for key, value in numbers.items():
        print(f"{key:<24} {value:>10.3f}  {AIM if key.startswith('scaling') else ''}".rstrip())
    told = about(cast(Bench, SimpleNamespace(device="cpu", profile="exact", quick=arguments.quick)))
    told["machine"]["load_before"] = round(load, 2)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(numbers | told, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s; {arguments.out}")


if __name__ == "__main__":
    main()
