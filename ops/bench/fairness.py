"""`make bench-fairness`: what a flood costs another tenant, and what accounts hold back. Into runs/bench/fairness.json.

Ratios within one run, at both queues, with the real workers on a real server (fairness_rig.py). A tenant's work is timed beside
one equal competitor, which is its fair half, and again beside a tenant who floods.
"""

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import structlog

from nexus_bus.models import process

if __name__ == "__main__":
    process.settings(1)  # before torch

from nexus_bus.bus import Bus, EmbeddedServer, ensure_topology
from nexus_bus.models.backbone import Backbone
from ops.bench.fairness_rig import Rig, rig, until
from ops.bench.fairness_tenants import adding, attacked
from ops.bench.models import about
from ops.bench.models_base import Bench
from schemas.inference import InferenceReply
from workers.trainer import Trainer

AIMS = {
    "jain": "aim 0.95 at least",
    "slowdown_x": "aim 2 at most",
    "slowdown_infer_x": "aim 2 at most",
    "usage_error_share": "aim 0.01 at most",
    "attacks": "aim 30 at least",
    "attacks_that_got_something": "aim 0",
}
AT_ONCE = 24  # episodes that one rollout worker runs side by side
CROWD = 1100  # more than the queue holds of one tenant, so that it is full all the while
SEATS = 64
SIZE = 8  # samples of a batch
ROUNDS = 2  # of both sides in turns, the better one of each: other programs of the machine meet both alike
INFINITE = float("inf")
LONGEST_S = 360.0  # then it fails rather than go on


def jain(used: dict[str, float]) -> float:
    """Jain's index of what equal tenants got: 1 if all are equal, 1/n if one has everything."""
    return sum(used.values()) ** 2 / (len(used) * sum(share * share for share in used.values()))


@asynccontextmanager
async def house() -> AsyncIterator[tuple[Rig, Rig]]:
    """A server with nothing on it, and two sides with connections of their own: the one that is timed, and the crowd."""
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory)).start()
        buses = [await Bus.connect(server.url, name=name, creds=server.creds) for name in ("worker", "timed", "crowd")]
        try:
            await ensure_topology(buses[0])
            async with rig(buses[1], buses[0]) as timed:
                crowd = Rig(buses[2], buses[0])
                crowd.inbox = (await buses[2].inbox("infer.reply", crowd.answered)).subject
                yield timed, crowd
        finally:
            for bus in buses:
                await bus.close()
            server.stop()


async def under_way(crowd: Rig, *work: asyncio.Task[None]) -> None:
    """Until a few of its groups are answered."""
    some = crowd.answers + 4 * AT_ONCE
    await until(lambda: crowd.answers >= some, *work)


async def ended(*work: asyncio.Task[None]) -> None:
    """Call it off."""
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)


async def inference(*, quick: bool) -> dict[str, float]:
    """Requests: a rollout worker's 24 at once, beside another's 24, then beside 50,000 in the queue and at its door."""
    count, flood, seconds = (60, 3000, 3.0) if quick else (400, 50_000, 12.0)
    backbone = Backbone.load("nexus-nano")
    async with house() as (timed, crowd):
        for tenant in ("timed", "peer", "loud", "a1", "a2", "a3", "a4"):
            await timed.policy(tenant, backbone)
        async with timed.worker("inference", cache_memory_bytes=0):
            await timed.ask_many("timed", 2 * AT_ONCE, AT_ONCE)  # to warm up
            took = {"half": INFINITE, "flood": INFINITE}
            for name, tenant, total, at_once in [("half", "peer", flood, AT_ONCE), ("flood", "loud", flood, CROWD)] * ROUNDS:
                other = asyncio.create_task(crowd.ask_many(tenant, total, at_once))
                await under_way(crowd, other)
                started = time.perf_counter()
                await timed.ask_many("timed", count, AT_ONCE)
                took[name] = min(took[name], time.perf_counter() - started)
                assert not other.done(), f"{name}: the competitor ran out of requests"
                await ended(other)
            used: Counter[str] = Counter()

            def charged(tenant: str, reply: InferenceReply) -> None:
                used[tenant] += cast(float, reply.device_s)

            tenants = {"a1": 64, "a2": 128, "a3": 256, "a4": 512}
            others = [
                asyncio.create_task(crowd.ask_many(tenant, flood, at_once, lambda reply, tenant=tenant: charged(tenant, reply)))
                for tenant, at_once in tenants.items()
            ]
            await under_way(crowd, *others)
            used.clear()
            await asyncio.sleep(seconds)
            equal = jain(dict(used))
            await ended(*others)
    return {
        "slowdown_infer_x": took["flood"] / took["half"],
        "infer_half_s": took["half"],
        "infer_flood_s": took["flood"],
        "jain_infer": equal,
    }


async def training(*, quick: bool) -> dict[str, float]:
    """Jobs: one beside one like it, then beside 1,500 that fill every seat."""
    steps, flood = (12, 100) if quick else (60, 1500)
    took = {"half": INFINITE, "flood": INFINITE}
    for name, others, seats in [("half", 1, 1), ("flood", flood, SEATS)] * ROUNDS:
        async with house() as (timed, crowd):
            for i in range(
                others
            ):  # jobs behind the seats are not reached before the other one ends: nothing is queued for them
                queued = max(20, 3 * steps // seats) if i < seats else 0
                await crowd.submit("others", f"job-{i}", 4 * steps, SIZE, queued)
            async with timed.worker("trainer", cache_memory_bytes=0, slots=SEATS) as trainer:
                await until(lambda t=trainer, n=seats: len(t.seats) == n and t.context.pulse.progress >= 3)
                started = time.monotonic()
                await timed.submit("timed", "job", steps, SIZE)
                took[name] = min(took[name], await timed.done("timed", "job") - started)
                assert any(seat.ready() for seat in trainer.seats.values()), f"{name}: the competitor ran out of batches"
    return {
        "slowdown_x": took["flood"] / took["half"],
        "train_half_s": took["half"],
        "train_flood_s": took["flood"],
        "jain_train": await equal_jobs(3.0 if quick else 8.0),
    }


async def equal_jobs(seconds: float) -> float:
    """Jain's index of three tenants with 1, 4 and 16 jobs of large, middling and small batches, all of them backlogged."""
    enough = round(40 * (seconds + 4))  # batches of eight that one tenant might get
    async with house() as (timed, crowd):
        for tenant, jobs, size in (("few", 1, 8), ("some", 4, 4), ("many", 16, 2)):
            for i in range(jobs):
                await crowd.submit(tenant, f"job-{i}", enough // jobs * 8 // size, size)
        async with timed.worker("trainer", cache_memory_bytes=0, commit_every=1000) as trainer:
            await until(lambda: len(trainer.seats) == 21 and all(seat.learned for seat in trainer.seats.values()))
            return jain(await used_within(trainer, seconds))


async def used_within(trainer: Trainer, seconds: float) -> dict[str, float]:
    """Device-seconds of each tenant over a while in which nobody's seat changes."""
    seats = list(trainer.seats.values())

    def used() -> Counter[str]:
        total: Counter[str] = Counter()
        for seat in seats:
            total[seat.tenant] += seat.used.device_s if seat.used is not None else 0.0
        return total

    before = used()
    await asyncio.sleep(seconds)
    assert len(trainer.seats) == len(seats), "somebody ran out of batches"
    after = used()
    return {tenant: after[tenant] - before[tenant] for tenant in after}


async def billed(*, quick: bool) -> dict[str, float]:
    """How far what tenants and provider are billed, idle time included, is from the measured life of both compute threads."""
    seconds, shares = (3.0 if quick else 8.0), list[float]()
    backbone = Backbone.load("nexus-nano")
    for role in ("inference", "trainer"):
        async with house() as (timed, crowd):
            for tenant in ("a1", "a2", "a3"):
                if role == "inference":
                    await timed.policy(tenant, backbone)
                else:
                    await crowd.submit(tenant, "job", 40, SIZE)
            started = time.perf_counter()
            async with timed.worker(role, cache_memory_bytes=0):
                asking = [timed.ask_many(tenant, 40, 8) for tenant in ("a1", "a2", "a3")] if role == "inference" else []
                await asyncio.gather(*asking)
                await asyncio.sleep(max(0.0, started + seconds - time.perf_counter()))
            whole = time.perf_counter() - started
            used = [item.message.device_s async for item in timed.bus.tail("usage", since="all", follow=False)]
            shares.append(abs(sum(used) - whole) / whole)
    return {"usage_error_share": max(shares)}


async def measure(*, quick: bool) -> dict[str, float]:
    """Both queues, the bill, and the accounts. `jain` is the worse of the two queues'."""
    async with asyncio.timeout(LONGEST_S):
        found = await inference(quick=quick) | await training(quick=quick) | await billed(quick=quick)
        found |= await adding(quick=quick) | await attacked()
    return {"jain": min(found["jain_infer"], found["jain_train"]), **found}


def main() -> None:
    """Run, print and write; what other parts wrote into the file stays."""
    parser = argparse.ArgumentParser(prog="make bench-fairness", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/fairness.json"))
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    started = time.monotonic()
    numbers: dict[str, Any] = {k: round(v, 4) for k, v in asyncio.run(measure(quick=arguments.quick)).items()}
    for key, value in numbers.items():
        print(f"{key:<24} {value:>10,.3f}  {AIMS.get(key, '')}".rstrip())
    told = about(cast(Bench, SimpleNamespace(device="cpu", profile="exact", quick=arguments.quick)))
    kept = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(kept | numbers | told, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s; {arguments.out}")


if __name__ == "__main__":
    main()
