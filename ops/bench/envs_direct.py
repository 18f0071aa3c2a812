"""A simulator called directly in a loop, in a child of its own and without a bus: what sessions are held against."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from nexus_bus.envs.recipes import variables
from nexus_bus.failures import last_words
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec

KINDS = 64  # chunks there are
CALM = 0.2  # of an action's bounds, about their middle: wild motion is another load than policies are

# Text, because the interpreter of a simulator's own virtual environment finds no module of ours but what sessions need.
CHILD = """
import os, sys, time
import msgspec, numpy as np
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what simulators print is no answer
from nexus_bus.envs import catalog
from schemas.job import EnvironmentSpec
spec = msgspec.json.decode(sys.argv[1], type=EnvironmentSpec)
pool = {int(size): np.array(chunks) for size, chunks in msgspec.json.decode(sys.stdin.readline()).items()}
limit = catalog.describe(spec).max_steps
simulator = catalog.build(spec)

def play(size, seconds):
    simulator.reset(0)
    steps = since = number = 0
    spent = 0.0
    while spent < seconds:
        chunk = pool[size][number % len(pool[size])]
        number += 1
        began = time.perf_counter()
        for action in chunk:
            moment = simulator.act(action)
        simulator.observe()
        spent += time.perf_counter() - began
        steps, since = steps + size, since + size
        if moment.terminated or moment.truncated or since + size > limit:
            simulator.reset(0)
            since = 0
    return steps / spent

def cycles(size, seconds):
    began, done = time.perf_counter(), 0
    while not done or time.perf_counter() - began < seconds:
        one = catalog.build(spec)
        one.reset(0)
        one.observe()
        one.close()
        done += 1
    return done / (time.perf_counter() - began)

for line in sys.stdin:
    name, size, seconds = line.split()
    print({"play": play, "cycles": cycles}[name](int(size), float(seconds)), file=said, flush=True)
simulator.close()
"""


def chunks(action: ActionSpec, size: int) -> list[np.ndarray]:
    """The chunks that both sides play, float32 `[size, D]`, gently about the middle of the action's bounds."""
    low, high = np.array(action.low), np.array(action.high)
    drawn = np.random.default_rng(0).uniform(-CALM, CALM, (KINDS, size, action.size))
    return list(((low + high) / 2 + drawn * (high - low) / 2).astype(np.float32))


@dataclass
class Loop:
    """The child."""

    process: asyncio.subprocess.Process
    complaints: Path  # where what it prints goes

    async def play(self, size: int, seconds: float) -> float:
        """Steps a second; after each `size` of them it looks."""
        return await self._ask(f"play {size} {seconds}")

    async def cycles(self, seconds: float) -> float:
        """Simulators a second, one after another: make, reset, look, free."""
        return await self._ask(f"cycles 1 {seconds}")

    async def _ask(self, words: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(words.encode() + b"\n")
        answer = await asyncio.wait_for(self.process.stdout.readline(), 120)
        assert answer, f"{words}: the simulator's process ended: {last_words(self.complaints)}"
        return float(answer)


@asynccontextmanager
async def direct(spec: EnvironmentSpec, action: ActionSpec, sizes: tuple[int, ...], python: Path | None) -> AsyncIterator[Loop]:
    """The loop of one simulator, on an interpreter of its own or on ours."""
    pool = {str(size): [chunk.tolist() for chunk in chunks(action, size)] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="nexus-direct-") as folder:
        complaints = Path(folder) / "stderr"
        with complaints.open("wb") as printed:
            process = await asyncio.create_subprocess_exec(
                str(python or sys.executable), "-c", CHILD, msgspec.json.encode(spec).decode(), cwd=folder, stderr=printed,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=variables(Path(folder), python),
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(pool) + b"\n")
        try:
            yield Loop(process, complaints)
        finally:
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
