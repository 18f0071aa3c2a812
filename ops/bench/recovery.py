"""`make bench-recovery`: how long the line stands still after `kill -9` of each role, into runs/bench/recovery.json.

A whole service with one worker of each role trains one RL job. A worker is killed while the job trains; the time ends with the
first heartbeat in which a new process of that role has done something. Heartbeats come ten times a second here, for that alone.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from nexus_bus.bus import Bus
from nexus_bus.client import Client
from ops.bench.models import about
from ops.bench.models_base import Bench
from schemas.control import Heartbeat, Role
from schemas.job import EnvironmentSpec, HeadSpec, JobSpec, Ppo

ROLES: tuple[Role, ...] = ("rollout", "environment", "inference", "trainer")
BEATS = {"NEXUS_BEAT_S": "0.1", "NEXUS_HEALTH_MISSED": "40"}  # as many seconds of silence as ever
AIM = "under 10 s, aim 2 s"
LONGEST_S = 90.0
CALM_S = 10.0  # of work between two kills: a spare process is ready again by then, unless the machine is busy
SCENE = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1, "max_steps": 12, "reward": "dense"})


class Watch:
    """Heartbeats of all workers."""

    def __init__(self) -> None:
        """Nobody was heard yet."""
        self.last: dict[str, Heartbeat] = {}
        self.news = asyncio.Event()

    async def beat(self, message: Heartbeat, _tokens: dict[str, str]) -> None:
        """One came."""
        self.last[message.role] = message
        self.news.set()

    async def until(self, condition: Any, within: float = LONGEST_S) -> float:
        """Wait for what heartbeats say; the seconds it took."""
        started = time.monotonic()
        async with asyncio.timeout(within):
            while not condition():
                self.news.clear()
                await self.news.wait()
        return time.monotonic() - started


@contextmanager
def service(home: Path) -> Iterator[str]:
    """`nexus up`, one worker of each role; its url."""
    with (home / "up.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "nexus_bus.cli", "up", "--home", str(home)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | BEATS | {"NEXUS_HOME": str(home)},
        )  # fmt: skip
    try:
        ends = time.monotonic() + LONGEST_S
        while not ((home / "url").is_file() and (home / "url").read_text().strip()):
            assert process.poll() is None, (home / "up.log").read_text()
            assert time.monotonic() < ends, (home / "up.log").read_text()
            time.sleep(0.05)
        yield (home / "url").read_text().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def hurts(how: signal.Signals, roles: Sequence[Role], rounds: int, home: Path, url: str) -> dict[str, list[float]]:
    """Seconds of every fault, by role."""
    creds = home / "nats" / "authority" / "provider.creds"
    took: dict[str, list[float]] = {role: [] for role in roles}
    bus, watch = await Bus.connect(url, name="bench", creds=creds), Watch()
    client = await Client.connect(url, "bench", creds=creds)
    try:
        await bus.subscribe("health.beat", watch.beat, role="*", worker="*")
        algorithm = Ppo(updates=5000, episodes_per_update=6, minibatch=16)
        await client.submit(JobSpec(kind="rl", name="bench", head=HeadSpec(horizon=4), environment=SCENE, algorithm=algorithm))
        await watch.until(lambda: all(role in watch.last and watch.last[role].progress > 5 for role in ROLES))
        for _ in range(rounds):
            for role in roles:
                await asyncio.sleep(CALM_S)
                pid = watch.last[role].pid
                os.kill(pid, how)
                seconds = await watch.until(lambda r=role, p=pid: watch.last[r].pid != p and watch.last[r].progress > 0)
                took[role].append(seconds)
                print(f"{role:<12} {seconds:6.2f} s", flush=True)
                others = {r: watch.last[r].progress for r in ROLES}
                await watch.until(lambda o=others: all(watch.last[r].progress != o[r] for r in ROLES))
        state = await client.job("bench")
        assert state is not None
        assert state.phase == "training", state
        await client.cancel("bench", "measured")
    finally:
        await client.close()
        await bus.close()
    return took


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(prog="make bench-recovery", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/recovery.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=ROLES, action="append", help="kill only this one, or several; default all")
    parser.add_argument("--home", type=Path, help="keep the service's home here, with its logs")
    parser.add_argument("--freeze", action="store_true", help="the worker stands still (SIGSTOP) until it is given up")
    arguments = parser.parse_args()
    how, name = (signal.SIGSTOP, "frozen") if arguments.freeze else (signal.SIGKILL, "recovery")
    with tempfile.TemporaryDirectory() as directory:
        home = (arguments.home or Path(directory)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        with service(home) as url:
            took = asyncio.run(hurts(how, arguments.role or ROLES, arguments.rounds, home, url))
    numbers: dict[str, Any] = {f"{name}_{role}_s": round(statistics.median(found), 2) for role, found in took.items()}
    numbers |= {f"{name}_{role}_worst_s": round(max(found), 2) for role, found in took.items()}
    for key, value in numbers.items():
        print(f"{key:<32} {value:>8.2f}  {AIM}")
    told = about(cast(Bench, SimpleNamespace(device="cpu", profile="exact", quick=False)))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(numbers | told, indent=2) + "\n")
    print(arguments.out)


if __name__ == "__main__":
    main()
