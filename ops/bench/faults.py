"""`make bench-faults`: a service that is killed all the time, and what is lost of its jobs, into runs/bench/faults.json.

Two tenants' jobs run one after another, while every role is killed or frozen at random points and moments, the server is killed
and frozen, and records of one tenant are sent twice and delivered in another order. Each job must come to what it comes to in
peace, to the bit. Recovery is the time from a fault to the next progress of the one it happened to. See RESULTS.md.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import structlog

from nexus_bus.errors import NexusError
from ops.bench.faults_rig import BEAT_S, House, Hurt, Outcome, house, meddling, rl, sft, size
from ops.bench.models import about
from ops.bench.models_base import Bench
from schemas.job import JobSpec

FAULTS, QUICK = 200, 20
LONGEST_S = 540.0
BETWEEN_S = (0.3, 1.6)  # two faults, of one of those that are …
AT_ONCE = 4  # … on their way
OPEN_S = 6.0  # a planned point that nobody comes to by then is given up
JOB_S = 300.0
SAY_S = 30.0
SEED = 1

# How often whom, and where. Who loads torch is longer on its way back: not more often than it can get something done.
ROLES = {"rollout": 24, "environment": 18, "master": 16, "gateway": 8, "health": 6, "trainer": 12, "inference": 10, "broker": 6}
POINTS = {
    "rollout": ["before-handle", "after-publish/infer.request", "after-publish/train.record", "after-handle", "after-ack"],
    "environment": ["before-call", "after-call", "before-handle", "after-publish/train.batch", "after-handle", "after-ack"],
    "master": ["before-handle", "after-write/job", "after-publish", "after-handle", "after-ack"],
    "gateway": ["before-call", "after-call", "after-publish"],
    "health": ["after-publish/event"],
    "trainer": ["after-compute", "after-blob", "after-write/policy", "after-write/state", "after-publish", "after-ack"],
    "inference": ["after-compute", "after-cast/infer.reply", "after-publish/usage", "after-ack"],
}


@dataclass
class Found:
    """What the jobs came to."""

    peace: dict[str, Outcome]
    ended: list[tuple[str, JobSpec, Outcome]] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    meddled: Counter[str] = field(default_factory=Counter)

    def numbers(self, hurt: list[Hurt], seconds: float) -> dict[str, Any]:
        """For the file."""
        back = [one.back_s for one in hurt if one.back_s is not None]
        by_role: defaultdict[str, list[float]] = defaultdict(list)
        for one in hurt:
            if one.back_s is not None:
                by_role[one.role].append(one.back_s)
        outcomes = [one for _, _, one in self.ended]
        return {
            "faults": len(hurt),
            "faults_by_role": dict(sorted(Counter(one.role for one in hurt).items())),
            "faults_seconds": round(seconds, 1),
            "jobs": len(self.ended),
            "jobs_failed": sum(one.phase != "completed" for one in outcomes),
            "other_tenants_failed": sum(one.phase != "completed" for tenant, _, one in self.ended if tenant != "acme"),
            "records": sum(one.expected for one in outcomes),
            "records_lost": sum(one.lost for one in outcomes),
            "records_twice": sum(one.twice for one in outcomes),
            "records_dead": sum(one.dead for one in outcomes),
            "records_doubled": self.meddled["doubled"],
            "records_taken_away": self.meddled["taken"],
            "weights_equal": all(one.numbers == self.peace[spec.kind].numbers for _, spec, one in self.ended),
            "usage_equal": all(
                (one.used_records, one.used_steps) == (self.peace[spec.kind].used_records, self.peace[spec.kind].used_steps)
                for _, spec, one in self.ended
            ),
            "recovery_s_median": round(statistics.median(back), 2),
            "recovery_s_worst": round(max(back), 2),
            "recovery_s_by_role": {
                role: {"median": round(statistics.median(some), 2), "worst": round(max(some), 2)}
                for role, some in sorted(by_role.items())
            },
            "recovery_s_slowest": [
                f"{one.back_s:.2f} s: {one.worker or one.role} {one.how} at {one.at:.1f}"
                for one in sorted(hurt, key=lambda one: one.back_s or 0.0)[:-6:-1]
                if one.back_s is not None
            ],
            "not_recovered": sum(one.back_s is None for one in hurt),
        }


async def work(here: House, found: Found, tenant: str, draw: random.Random) -> None:
    """Jobs of one tenant, one after another, until it is enough."""
    number = 0
    while not found.stop.is_set():
        spec = draw.choice((rl, sft))(f"job-{number}")
        number += 1
        meddled = meddling(here.bus, tenant, spec.name, draw.randrange(1 << 30)) if tenant == "acme" else None
        try:
            async with meddled or contextlib.nullcontext({}) as did:
                came = await here.run(tenant, spec, JOB_S)
            found.meddled.update(did)
        except (NexusError, TimeoutError) as error:
            came = Outcome("stuck", str(error), size(spec), 0, 0, 0, 0, (), "")
        found.ended.append((tenant, spec, came))
        if came.phase != "completed" or came.numbers != found.peace[spec.kind].numbers:
            print(f"{tenant}/{spec.name} ({spec.kind}): {came}")


@dataclass
class Harm:
    """Faults at random: a role gets its next one when it has recovered from the last."""

    here: House
    count: int
    ends: float  # monotonic time
    draw: random.Random
    at_work: set[str] = field(default_factory=set)  # roles whose fault is on its way
    committed: int = 0  # when a trainer was hurt last

    async def run(self) -> None:
        """Until there were so many, or the time is over; several at a time."""
        await asyncio.gather(*(self.one_after_another() for _ in range(AT_ONCE)))

    async def one_after_another(self) -> None:
        """Some of them."""
        while len(self.here.hurt) < self.count and time.monotonic() < self.ends:
            await asyncio.sleep(self.draw.uniform(*BETWEEN_S))
            role = self.draw.choices(list(ROLES), weights=list(ROLES.values()))[0]
            if role in self.at_work or not self.here.well(role) or (role == "trainer" and not self.bearable()):
                continue
            self.at_work.add(role)
            try:
                await self.hurt(role)
            finally:
                self.at_work.discard(role)

    def bearable(self) -> bool:
        """A trainer commits in between: three deaths in one step are taken for the work of a poison record, and rightly."""
        return self.here.committed >= self.committed + 4

    async def hurt(self, role: str) -> None:
        """One fault."""
        draw, here = self.draw, self.here
        if role == "broker":
            await (here.restart_server() if draw.random() < 0.7 else here.freeze_server(draw.uniform(0.2, 3.0)))
        elif draw.random() < 0.4:
            here.kill(draw.choice([name for name, child in here.supervisor.children.items() if child.role == role]))
        else:
            await self.planned(role)
        if role == "trainer":
            self.committed = here.committed

    async def planned(self, role: str) -> None:
        """One at a point, if its role comes there soon."""
        draw, here = self.draw, self.here
        action = "kill" if draw.random() < 0.85 else f"freeze {draw.uniform(0.3, 3.0):.1f}"
        (line,) = here.plan(f"{role} {draw.choice(POINTS[role])} {draw.randint(1, 4)} {action}")
        for _ in range(round(OPEN_S / 0.1)):
            here.note()
            if line in here.noted:
                return
            await asyncio.sleep(0.1)
        here.withdraw([line])
        here.note()


async def measure(home: Path, count: int, seed: int) -> dict[str, Any]:
    """All of it."""
    draw = random.Random(seed)  # noqa: S311 - to draw faults, not keys
    log = (home / "host.log").open("w", buffering=1)

    def say(what: str) -> None:
        log.write(f"{time.time():.1f} {what}\n")

    async with house(home, say=say, spare=True) as here:
        found = Found({spec.kind: await here.run("calm", spec) for spec in (rl("rl"), sft("sft"))})
        began = time.monotonic()
        jobs = [asyncio.create_task(work(here, found, tenant, random.Random(seed))) for tenant in ("acme", "beta")]  # noqa: S311
        harming = asyncio.create_task(Harm(here, count, began + LONGEST_S, draw).run())
        while not harming.done():
            await asyncio.wait([harming, *jobs], timeout=SAY_S, return_when=asyncio.FIRST_EXCEPTION)
            print(f"{time.monotonic() - began:5.0f} s: {len(here.hurt)} faults, {len(found.ended)} jobs", flush=True)
            for job in jobs:
                if job.done():
                    job.result()
        found.stop.set()
        seconds = time.monotonic() - began
        harming.result()
        await asyncio.gather(*jobs)
        for _ in range(100):
            if here.well():
                break
            await asyncio.sleep(BEAT_S)
        return found.numbers(here.hurt, seconds)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(prog="make bench-faults", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/faults.json"))
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--home", type=Path, help="keep logs and data there; otherwise they go when it is over")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} faults, to see that it runs")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        home = given.home or Path(directory)
        home.mkdir(parents=True, exist_ok=True)
        numbers = asyncio.run(measure(home.resolve(), QUICK if given.quick else given.faults, given.seed))
    for key, value in numbers.items():
        print(f"{key:<24} {value}")
    told = about(cast(Bench, SimpleNamespace(device="cpu", profile="exact", quick=given.quick)))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(numbers | {"seed": given.seed} | told, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s; {given.out}")


if __name__ == "__main__":
    main()
