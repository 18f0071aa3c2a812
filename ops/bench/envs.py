"""`make bench-envs`: simulators through a session over the bus, and called directly; then datasets. Into runs/bench/envs.json.

A real server, and for each adapter a real environment worker, a process of its own as `nexus worker environment` starts it. The
direct side is a loop in a child without a bus (envs_direct.py), on the interpreter that has the simulator. Both sides do the
same: the actions of a chunk, then one picture. The bus also encodes the picture, which the direct side has no need to.
An adapter that is not installed here is named in `not_measured`, with what is missing.
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
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import structlog
import uvloop

from nexus_bus import memory, registry
from nexus_bus.bus import Bus, EmbeddedServer, discover, ensure_tenant, ensure_topology
from nexus_bus.envs.catalog import ENVIRONMENTS, describe
from nexus_bus.envs.recipes import interpreter, place
from nexus_bus.errors import NexusError, NotFound
from nexus_bus.tensors import to_tensor
from ops.bench import data
from ops.bench.envs_direct import chunks, direct
from ops.bench.models import about
from ops.bench.models_base import Bench
from schemas.environment import SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.job import EnvironmentSpec
from schemas.subjects import subject

AIM = "aim 0.05 at most"
SIDE = 224  # pixels of a picture
CHUNK = 8  # actions of one call
AT_ONCE = (1, 2, 4)  # sessions
ROUNDS = 3  # of both sides in turns, the better of each counts: other programs of the machine meet both alike
TENANT, JOB = "bench", "envs"
PATIENCE_S = 120.0
SLOW_S = 4.0  # a simulator whose first session takes longer is measured once, and with two sessions at most

Numbers = dict[str, Any]


def scenes() -> dict[str, EnvironmentSpec]:
    """The first task of each adapter, in episodes that do not end while they are timed; by the adapter's short name."""
    found: dict[str, EnvironmentSpec] = {}
    for name, entry in ENVIRONMENTS.items():
        if entry.tasks and (short := entry.venv or name) not in found:
            options: dict[str, Any] = {
                "end_on_success": False,
                "max_steps": int((entry.options["max_steps"].bounds or (0, 50))[1]),
            }
            options |= {"image_size": SIDE} if "image_size" in entry.options else {}
            found[short] = EnvironmentSpec(id=name, task=next(iter(entry.tasks)), options=options)
    return found


class Sessions:
    """The tenant's side."""

    def __init__(self, bus: Bus, spec: EnvironmentSpec) -> None:
        """Of one environment."""
        self.bus, self.spec, self.known = bus, spec, describe(spec)
        self.chunks = {size: [to_tensor(chunk) for chunk in chunks(self.known.action, size)] for size in (1, CHUNK)}
        self.calls, self.waited = 0, 0.0  # … and seconds of them that were not the simulator's process's

    async def open(self) -> SessionOpened:
        """A session that is reset."""
        name = uuid.uuid4().hex[:16]
        request = SessionOpen(
            tenant=TENANT, job=JOB, environment=self.spec, action=self.known.action, observation=self.known.observation,
            lease_s=600.0, session=name,
        )  # fmt: skip
        watch = subject("env.session", tenant=TENANT, session=name)
        opened = await self.bus.request("env.open", request, timeout=PATIENCE_S, tenant=TENANT, watch=watch)
        await self.call(opened, SessionCall(op="reset"))
        return opened

    async def call(self, opened: SessionOpened, call: SessionCall) -> SessionReply:
        """One call, as a rollout worker makes it."""
        return await self.bus.request(
            "env.session", call, timeout=PATIENCE_S, watch=opened.subject, tenant=TENANT, session=opened.session
        )

    async def play(self, opened: SessionOpened, size: int, seconds: float) -> float:
        """Steps a second of one session, resets left out; it plays one chunk at least, and leaves an episode that runs."""
        steps, spent, number = 0, 0.0, 0
        while spent < seconds:
            call = SessionCall(op="step", actions=self.chunks[size][number % len(self.chunks[size])])
            number += 1
            began = time.perf_counter()
            reply = await self.call(opened, call)
            took = time.perf_counter() - began
            spent, steps = spent + took, steps + len(reply.rewards)
            self.calls, self.waited = self.calls + 1, self.waited + took - reply.device_s
            if reply.end != "running" or reply.steps + size > self.known.max_steps:
                await self.call(opened, SessionCall(op="reset"))
        return steps / spent

    async def cycles(self, seconds: float) -> float:
        """Sessions a second, one after another: open, reset, close."""
        began, done = time.perf_counter(), 0
        while not done or time.perf_counter() - began < seconds:
            await self.call(await self.open(), SessionCall(op="close"))
            done += 1
        return done / (time.perf_counter() - began)


@asynccontextmanager
async def worker(bus: Bus, url: str, home: Path, processes: int = 1) -> AsyncIterator[None]:
    """An environment worker that serves, until the end of the block; what its simulators hold is gone with it."""
    name = f"environment-{uuid.uuid4().hex[:8]}"

    async def serves() -> bool:
        found = [one.data for one in await discover(bus, "environment")]
        return any(one["worker"] == name and one["state"] == "running" for one in found)

    settings = ("--set", "call_timeout_s=60", "--set", f"processes={processes}")
    words = ["worker", "environment", "--name", name, "--url", url, *settings]
    with (home / "worker.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.cli", *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"NEXUS_HOME": str(home), "NEXUS_LOG_LEVEL": "warning"},
        )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while not await serves():
                assert process.returncode is None, (home / "worker.log").read_text()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def best(rounds: int, **sides: Callable[[], Awaitable[float]]) -> dict[str, float]:
    """The best rate of each, measured in turns."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, measured in sides.items():
            found[name] = max(found.get(name, 0.0), await measured())
    return found


async def adapter(sessions: Sessions, python: Path | None, seconds: float) -> Numbers:
    """Steps and sessions a second of one adapter, both ways."""
    began = time.perf_counter()
    opened = [await sessions.open()]
    cold = time.perf_counter() - began
    slow = cold > SLOW_S
    counts = AT_ONCE[1:2] if slow else AT_ONCE[1:]
    async with direct(sessions.spec, sessions.known.action, (CHUNK,), python) as loop:
        found = await best(
            1 if slow else 2, direct=lambda: loop.play(CHUNK, seconds), one=lambda: sessions.play(opened[0], CHUNK, seconds)
        )
        numbers = {"steps_per_s": found["one"], "steps_per_s_direct": found["direct"], "first_session_s": cold}
        numbers["sessions_per_s_direct"] = await loop.cycles(seconds)
    for count in counts:
        opened += [await sessions.open() for _ in range(count - len(opened))]
        rates = await asyncio.gather(*(sessions.play(one, CHUNK, seconds) for one in opened))
        numbers[f"steps_per_s_{count}"] = sum(rates)
    for one in opened:
        await sessions.call(one, SessionCall(op="close"))
    for count in (1, *counts):
        rates = await asyncio.gather(*(sessions.cycles(seconds) for _ in range(count)))
        numbers[f"sessions_per_s_{count}" if count > 1 else "sessions_per_s"] = sum(rates)
    return numbers


async def apart(sessions: Sessions, seconds: float) -> Numbers:
    """Steps a second of two sessions, each in a process of its own."""
    opened = [await sessions.open() for _ in range(2)]
    rates = await asyncio.gather(*(sessions.play(one, CHUNK, seconds) for one in opened))
    return {"steps_per_s_2_processes": sum(rates)}


async def overhead(bus: Bus, spec: EnvironmentSpec, rounds: int, seconds: float) -> Numbers:
    """What a step costs more through the bus, as a share of what it costs directly; with pictures as PNG, and as they are."""
    plain = EnvironmentSpec(id=spec.id, task=spec.task, options=spec.options, image_encoding="raw")
    coded, raw = Sessions(bus, spec), Sessions(bus, plain)
    ours, theirs = await coded.open(), await raw.open()
    numbers: Numbers = {}
    async with direct(spec, coded.known.action, (CHUNK, 1), None) as loop:
        for size, end in ((CHUNK, ""), (1, "_chunk1")):
            found = await best(
                rounds,
                direct=lambda size=size: loop.play(size, seconds),
                bus=lambda size=size: coded.play(ours, size, seconds),
                raw=lambda size=size: raw.play(theirs, size, seconds),
            )
            numbers[f"bus_overhead_share_224px{end}"] = found["direct"] / found["bus"] - 1
            numbers[f"bus_overhead_share_224px_raw{end}"] = found["direct"] / found["raw"] - 1
            numbers[f"bus_ms_of_a_call{end}"], coded.calls, coded.waited = 1000 * coded.waited / coded.calls, 0, 0.0
            numbers |= {f"step_ms_224px_{side}{end}": 1000 / rate for side, rate in found.items()}
    return numbers


async def measure(*, quick: bool) -> Numbers:
    """All adapters, each with a worker of its own."""
    seconds, numbers, missing = (0.1 if quick else 0.5), cast(Numbers, {}), cast(dict[str, str], {})
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        server = EmbeddedServer(home / "nats").start()
        os.environ["NEXUS_CREDS"] = str(server.creds)
        os.environ.setdefault("NEXUS_ENVS", str(place("").parent))  # the workers' home is another
        bus = await Bus.connect(server.url, name="bench", creds=server.creds)
        try:
            await ensure_topology(bus)
            await bus.kv("registry").put(registry.tenant_key(TENANT), {})
            await ensure_tenant(bus, TENANT)
            for name, spec in scenes().items():
                python, venv = interpreter(name), ENVIRONMENTS[spec.id].venv
                try:
                    if venv and python is None:
                        raise NotFound(f"nexus env install {venv}")
                    async with worker(bus, server.url, home):
                        if not numbers:
                            numbers |= await overhead(bus, spec, 1 if quick else ROUNDS, 4 * seconds)
                            show(numbers)
                        found = await adapter(Sessions(bus, spec), python, seconds)
                    async with worker(bus, server.url, home, processes=2):
                        found |= await apart(Sessions(bus, spec), seconds)
                except NexusError as error:
                    missing[name] = str(error)
                    print(f"{name:<12} not measured: {error}")
                    continue
                print(f"{name:<12} " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
                for key, value in found.items():
                    numbers.setdefault(key, {})[name] = round(value, 3)
        finally:
            await bus.close()
            server.stop()
    return numbers | {"not_measured": missing}


def show(numbers: Numbers) -> None:
    """Print them."""
    for key, value in numbers.items():
        print(f"{key:<36} {value:>12,.3f}  {AIM if key == 'bus_overhead_share_224px' else ''}".rstrip())


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(prog="make bench-envs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/envs.json"))
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    started, load = time.monotonic(), os.getloadavg()[0]
    memory.keep()  # this process stands for a rollout worker: the same allocator, the same loop
    numbers = uvloop.run(measure(quick=arguments.quick))
    sets = data.measure(arguments.quick)
    show(sets)
    told = about(cast(Bench, SimpleNamespace(device="cpu", profile="exact", quick=arguments.quick)))
    told["machine"]["load_before"] = round(load, 2)
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in (numbers | sets).items()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rounded | told, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s; {arguments.out}")


if __name__ == "__main__":
    main()
