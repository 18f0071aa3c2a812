"""Health: sees workers by their heartbeats, and has a host restart what died or no longer moves.

Reads   health.beat and health.exit (core subjects).
Writes  host.order (requests to the supervising host), EVENTS (worker.lost, worker.restarted).
Killed  the host restarts it directly; it learns the workers again from their next heartbeats.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from nexus_bus import worker
from nexus_bus.errors import NexusError
from nexus_bus.worker import PROVIDER, Context
from schemas.control import Heartbeat, ProcessExit, ProcessOrder, Role

ROLE: Role = "health"

TICK_S = 0.25


@dataclass
class Seen:
    """What is known of one worker."""

    role: Role
    host: str
    pid: int
    beat: float  # monotonic time of the last heartbeat
    state: str
    busy: bool
    progress: int
    moved: float  # monotonic time at which progress last changed, or at which it was idle
    restarts: list[float] = field(default_factory=list)
    ordered: bool = False  # a restart was asked for and no heartbeat of the new process came yet


class Health:
    """Keeps the table of workers and decides about restarts."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.workers: dict[str, Seen] = {}
        self.back = 0.0  # monotonic time at which the bus was last seen to be away

    async def beat(self, message: Heartbeat, _tokens: dict[str, str]) -> None:
        """Note a sign of life; a new pid after an order is a completed restart."""
        clock = time.monotonic()
        seen = self.workers.get(message.worker)
        if seen is None:
            seen = self.workers[message.worker] = Seen(
                message.role, message.host, message.pid, clock, message.state, message.busy, message.progress, clock
            )
        if message.pid != seen.pid:
            if seen.ordered:
                await self.context.event(
                    "worker.restarted", PROVIDER, key=f"restarted/{message.worker}/{message.pid}",
                    message=f"{message.worker} is back as process {message.pid}",
                    data={"role": message.role, "worker": message.worker, "after_s": round(clock - seen.beat, 3)},
                )  # fmt: skip
            seen.pid, seen.ordered, seen.moved = message.pid, False, clock
        if message.progress != seen.progress or not message.busy:
            seen.moved = clock
        seen.host, seen.beat, seen.state = message.host, clock, message.state
        seen.busy, seen.progress = message.busy, message.progress
        self.context.pulse.progress += 1

    async def exited(self, message: ProcessExit, _tokens: dict[str, str]) -> None:
        """A supervised process ended: no need to wait for missed heartbeats. Code 0 is a worker that drained."""
        seen = self.workers.get(message.worker)
        if seen is None:
            clock = time.monotonic()
            seen = self.workers[message.worker] = Seen(message.role, message.host, message.pid, clock, "lost", False, 0, clock)
        if message.returncode != 0 and message.pid == seen.pid:
            await self.restart(message.worker, seen, f"ended with code {message.returncode}")
        elif message.returncode == 0:
            self.workers.pop(message.worker, None)

    async def look(self) -> None:
        """Find workers that fell silent, and busy ones that stopped moving."""
        settings, clock = self.context.config, time.monotonic()
        if not self.context.bus.up.is_set():  # nobody's heartbeats arrive, and that is no fault of the workers
            self.back = clock
            return
        for name, seen in list(self.workers.items()):
            if seen.ordered or seen.role == ROLE:
                if seen.ordered and clock - seen.restarts[-1] > settings.starting_s:
                    seen.ordered = False  # the new process never spoke: look at it again
                continue
            silent = clock - max(seen.beat, self.back)
            allowed = settings.starting_s if seen.state == "starting" else settings.beat_s * settings.missed
            if silent > allowed:
                await self.restart(name, seen, f"no heartbeat for {silent:.1f} s")
            elif seen.busy and seen.state == "running" and clock - seen.moved > settings.wedged_s:
                await self.restart(name, seen, f"no progress for {clock - seen.moved:.0f} s")

    async def restart(self, name: str, seen: Seen, why: str) -> None:
        """Ask the host for a restart, with back-off, and give up on a crash loop."""
        settings, clock = self.context.config, time.monotonic()
        if seen.ordered:
            return
        seen.restarts = [t for t in seen.restarts if clock - t < settings.loop_window_s]
        if len(seen.restarts) >= settings.loop_limit:
            if seen.state != "given up":
                seen.state = "given up"
                await self.context.event(
                    "worker.lost", PROVIDER, key=f"looping/{name}/{seen.pid}",
                    message=f"{name} ended {len(seen.restarts)} times in {settings.loop_window_s:g} s; left alone",
                )  # fmt: skip
            return
        seen.ordered = True
        seen.restarts.append(clock)
        await self.context.event(
            "worker.lost", PROVIDER, key=f"lost/{name}/{seen.pid}", message=f"{name} (process {seen.pid}): {why}",
            data={"role": seen.role, "worker": name},
        )  # fmt: skip
        delay = settings.backoff_s * (2 ** (len(seen.restarts) - 1) - 1)  # the first restart is immediate
        if delay:
            await asyncio.sleep(min(delay, 10.0))
        order = ProcessOrder(worker=name, action="restart", reason=why, pid=seen.pid)
        try:
            await self.context.bus.request("host.order", order, timeout=10.0, host=seen.host)
        except NexusError as error:
            seen.ordered = False
            self.context.log.warning("the host did not restart a worker", worker=name, host=seen.host, error=str(error))


async def main(context: Context) -> None:
    """Serve until told to stop."""
    health = Health(context)
    subscriptions = [
        await context.bus.subscribe("health.beat", health.beat, role="*", worker="*"),
        await context.bus.subscribe("health.exit", health.exited, host="*"),
    ]
    context.pulse.state = "running"
    while not context.stop.is_set():
        await asyncio.sleep(TICK_S)
        await health.look()
    for subscription in subscriptions:
        await subscription.stop()


def run(**options: Any) -> int:
    """Entry point of `nexus worker health`."""
    return worker.run(ROLE, main, **options)
