"""Health: sees workers by their heartbeats, and has a host restart what died or no longer moves.

Reads   health.beat and health.exit (core subjects), health.known (requests).
Writes  host.order (requests to the supervising host), EVENTS (worker.lost, worker.restarted).
Killed  the host restarts it directly; it learns the workers again from their next heartbeats, and the host tells it again of
        those that ended meanwhile.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from nexus_bus import worker
from nexus_bus.bus import Incoming
from nexus_bus.errors import NexusError, NotFound
from nexus_bus.failures import ending
from nexus_bus.worker import Context
from schemas.base import PROVIDER
from schemas.control import Cause, Heartbeat, Known, ProcessExit, ProcessOrder, Role, WorkersKnown, WorkersQuery

ROLE: Role = "health"

TICK_S = 0.25
ORDER_S = 5.0  # for a host to do what it is told, …
ANSWER_S = 2.0  # … and to answer: then it is told again, since a server that dies takes with it what was on its way
PAUSE_S = 0.25
TELL_S = 1.0  # a restart waits no longer for its event to be stored
FORGET_S = 120.0  # a lost worker that no host brings back
LATEST_BACKOFF_S = 10.0
AGAIN_S = 5.0  # before a host is asked again that did not answer


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
    restarts: list[float] = field(default_factory=list)  # within the window of a crash loop
    total: int = 0  # restarts ever
    cause: Cause | None = None  # of the last loss
    lost: int = 0  # the process whose loss was told
    ordered: bool = False  # a restart is under way, and no heartbeat of the new process came yet
    again: float = 0.0  # monotonic time before which nothing is tried, since no host answered


class Health:
    """Keeps the table of workers and decides about restarts."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.workers: dict[str, Seen] = {}
        self.left: dict[str, int] = {}  # workers that left in good order → process: a late heartbeat brings none of them back
        self.back = 0.0  # monotonic time at which the bus was last seen to be away

    async def beat(self, message: Heartbeat, _tokens: dict[str, str]) -> None:
        """Note a sign of life; a new pid after an order is a completed restart."""
        self.context.pulse.progress += 1
        if message.last:
            self.leave(message.worker, message.pid)
        if self.left.get(message.worker) == message.pid:
            return
        clock = time.monotonic()
        seen = self.workers.get(message.worker)
        if seen is None:
            seen = self.workers[message.worker] = Seen(
                message.role, message.host, message.pid, clock, message.state, message.busy, message.progress, clock
            )
        if message.pid != seen.pid:
            if seen.ordered or seen.lost == seen.pid:
                await self.context.event(
                    "worker.restarted", PROVIDER, key=f"restarted/{message.worker}/{message.pid}",
                    message=f"{message.worker} is back as process {message.pid}",
                    data={"role": message.role, "worker": message.worker, "after_s": round(clock - seen.beat, 3)},
                )  # fmt: skip
            seen.pid, seen.ordered, seen.moved, seen.again = message.pid, False, clock, 0.0
        if message.progress != seen.progress or not message.busy:
            seen.moved = clock
        seen.host, seen.beat, seen.state = message.host, clock, message.state
        seen.busy, seen.progress = message.busy, message.progress

    async def exited(self, message: ProcessExit, _tokens: dict[str, str]) -> None:
        """A supervised process ended: no need to wait for missed heartbeats. Only its host's order makes that an end for good:
        one that drained because somebody else sent it a signal is as much missed as one that crashed.
        """
        if message.ordered:
            self.leave(message.worker, message.pid)
            return
        seen = self.workers.get(message.worker)
        if seen is None:
            clock = time.monotonic()
            seen = self.workers[message.worker] = Seen(message.role, message.host, message.pid, clock, "lost", False, 0, clock)
        if seen.ordered and message.pid != seen.pid:  # the new process, which ended before it said a word
            seen.pid, seen.ordered = message.pid, False
        if message.pid == seen.pid:
            words = f": {message.words}" if message.words else ""
            why = ending(message.returncode) if message.returncode else "it left, and its host had not told it to"
            await self.lose(message.worker, seen, message.cause or "code", why + words)

    def leave(self, name: str, pid: int) -> None:
        """It is not to come back, and nobody is to miss it."""
        if (seen := self.workers.get(name)) is None or seen.pid == pid:
            self.workers.pop(name, None)
            self.left.pop(name, None)
            self.left[name] = pid
            if len(self.left) > 1000:
                del self.left[next(iter(self.left))]

    async def look(self) -> None:
        """Find workers that fell silent, and busy ones that stopped moving."""
        settings, clock = self.context.config, time.monotonic()
        if not self.context.bus.up.is_set():  # nobody's heartbeats arrive, and that is no fault of the workers
            self.back = clock
            return
        for name, seen in list(self.workers.items()):
            if seen.role == ROLE or clock < seen.again:
                continue
            if seen.ordered:
                if clock - seen.restarts[-1] > settings.starting_s:
                    seen.ordered = False  # the new process never spoke: look at it again
                continue
            silent = clock - max(seen.beat, self.back)
            allowed = settings.starting_s if seen.state == "starting" else settings.beat_s * settings.missed
            if silent > allowed:
                if seen.lost == seen.pid and clock - seen.beat > FORGET_S:
                    del self.workers[name]
                else:
                    await self.lose(name, seen, "silent", f"no heartbeat for {silent:.1f} s")
            elif seen.busy and seen.state == "running" and clock - seen.moved > settings.wedged_s:
                await self.lose(name, seen, "wedged", f"no progress for {clock - seen.moved:.0f} s")

    async def lose(self, name: str, seen: Seen, cause: Cause, why: str) -> None:
        """Tell of a loss, once a process, and have the worker brought back; a crash loop is left alone for a while."""
        settings, clock = self.context.config, time.monotonic()
        if seen.ordered or clock < seen.again:
            return
        seen.restarts = [t for t in seen.restarts if clock - t < settings.loop_window_s]
        before, pid = len(seen.restarts), seen.pid
        looping = before >= settings.loop_limit
        new, tired = seen.lost != pid, looping and seen.state != "given up"
        seen.lost, seen.ordered, seen.state = pid, not looping, "given up" if looping else "restarting"
        if not looping:
            seen.restarts.append(clock)
        if new:
            seen.cause = cause
            await self.tell(
                f"lost/{name}/{pid}", f"{name} (process {pid}), {cause}: {why}",
                role=seen.role, worker=name, host=seen.host, pid=pid, cause=cause, reason=why, restarts=before,
            )  # fmt: skip
        if tired:
            await self.tell(
                f"looping/{name}/{pid}", f"{name} ended {before} times in {settings.loop_window_s:g} s; left alone for a while",
                role=seen.role, worker=name, cause=seen.cause, looping=True,
            )  # fmt: skip
        if not looping:
            delay = settings.backoff_s * (2**before - 1)  # the first restart is immediate
            # Beside the others: whoever crashes again and again must not keep those waiting that ended once.
            self.context.bus.spawn(self.restart(name, seen, why, pid, min(delay, LATEST_BACKOFF_S)))

    async def tell(self, key: str, message: str, **data: Any) -> None:
        """Publish an event of a loss. A stream that cannot take it yet holds up no restart for longer than a moment."""
        told = asyncio.Event()

        async def publish() -> None:
            try:
                await self.context.event("worker.lost", PROVIDER, key=key, message=message, data=data)
            except NexusError as error:
                self.context.log.warning("an event could not be stored", about=message, error=str(error))
            told.set()

        self.context.bus.spawn(publish())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(told.wait(), TELL_S)

    async def restart(self, name: str, seen: Seen, why: str, pid: int, delay: float) -> None:
        """Ask the host for a new process in the place of `pid`, after `delay` seconds."""
        await asyncio.sleep(delay)
        order, error = ProcessOrder(worker=name, action="restart", reason=why.partition(":")[0], pid=pid), ""
        try:
            async with asyncio.timeout(ORDER_S):
                while seen.pid == pid:  # else it is back: an order was followed, and the answer did not arrive
                    try:
                        await self.context.bus.request("host.order", order, timeout=ANSWER_S, host=seen.host)
                    except NotFound:  # it was told to stop, or its host is another one by now
                        self.leave(name, pid)
                        return
                    except NexusError as failed:  # a server that was away, and its host is not connected yet?
                        error = str(failed)
                        await asyncio.sleep(PAUSE_S)
                    else:
                        seen.total += 1
                        return
        except TimeoutError:
            # A machine that is gone with its host, or a worker that somebody else looks after, say Kubernetes.
            seen.state, seen.ordered, seen.again = "lost", False, time.monotonic() + AGAIN_S
            seen.restarts.pop()
            self.context.log.warning("no host restarted a worker", worker=name, host=seen.host, error=error)

    async def known(self, _query: WorkersQuery, _incoming: Incoming) -> WorkersKnown:
        """Everybody, for `nexus workers`."""
        clock = time.monotonic()
        return WorkersKnown(
            workers=[
                Known(
                    role=seen.role, worker=name, host=seen.host, pid=seen.pid, state=seen.state, busy=seen.busy,
                    progress=seen.progress, silent_s=round(clock - seen.beat, 3), restarts=seen.total, cause=seen.cause,
                )
                for name, seen in sorted(self.workers.items())
            ]
        )  # fmt: skip


async def main(context: Context) -> None:
    """Serve until told to stop."""
    health = Health(context)
    subscriptions = [
        await context.bus.subscribe("health.beat", health.beat, role="*", worker="*"),
        await context.bus.subscribe("health.exit", health.exited, host="*"),
        await context.bus.serve("health.known", health.known, queue="health"),
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
