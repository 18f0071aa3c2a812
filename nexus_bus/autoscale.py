"""Workers by queue depth on one machine: off unless `nexus up --autoscale` names roles with bounds. Beside the host.

`decide` is pure and moves by one worker at a time. Up when more waits per worker than one has in hand at once, for some
seconds; down when what is in hand would fit on fewer, for much longer. A role that crashes is left alone: more of what fails
helps nobody. A job stays with its trainer, so a further trainer takes jobs that come later.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nexus_bus.bus import training_durable
from nexus_bus.errors import Refused, Unavailable
from nexus_bus.nearest import nearest
from nexus_bus.roster import Roster
from schemas.control import Role

# role → (beginning of its consumers' names, messages that one worker has in hand at once)
QUEUES: dict[Role, tuple[str, int]] = {
    "rollout": ("rollout", 24),
    "environment": ("data", 8),
    "inference": ("infer", 64),
    "trainer": ("train", 64),
}
LOOK_S = 1.0
UP_S = 3.0  # so long must more wait than the workers can take
SETTLE_S = 10.0  # after a change: a new worker has to load what it works with
DOWN_S = 60.0
MOST = 64  # workers of a role on one host


@dataclass(frozen=True)
class Bounds:
    """How many workers of a role there may be."""

    low: int
    high: int


@dataclass(frozen=True)
class Look:
    """What is seen of a role at one moment."""

    clock: float  # monotonic seconds
    workers: int  # that are to run
    waiting: int  # messages that nobody has taken
    held: int  # messages in hand
    crashing: bool = False


@dataclass(frozen=True)
class Memory:
    """Since when it has been so; None: it is not so."""

    crowded: float | None = None
    idle: float | None = None
    changed: float | None = None


def decide(role: Role, bounds: Bounds, memory: Memory, look: Look) -> tuple[Memory, int]:
    """What to remember, and how many workers are to run: as many as now, one more or one fewer.

    Bounds come first, a step at a time too, and also for a role that is crashing: they are what was asked for.
    """
    room = QUEUES[role][1]
    crowded = memory.crowded if memory.crowded is not None else look.clock
    idle = memory.idle if memory.idle is not None else look.clock
    seen = replace(
        memory,
        crowded=crowded if look.waiting > room * look.workers else None,
        idle=idle if look.waiting == 0 and look.held <= room * (look.workers - 1) // 2 else None,
    )
    moved = Memory(changed=look.clock)
    if look.workers < bounds.low:
        return moved, look.workers + 1
    if look.workers > bounds.high:
        return moved, look.workers - 1
    if look.crashing:
        return Memory(changed=memory.changed), look.workers
    settled = memory.changed is None or look.clock - memory.changed >= SETTLE_S
    if seen.crowded is not None and look.clock - seen.crowded >= UP_S and settled and look.workers < bounds.high:
        return moved, look.workers + 1
    if seen.idle is not None and look.clock - seen.idle >= DOWN_S and settled and look.workers > bounds.low:
        return moved, look.workers - 1
    return seen, look.workers


def rules(text: str) -> dict[Role, Bounds]:
    """`rollout=1..4,inference=1..2` as bounds.

    Raises:
        Refused: a role that is not scaled so, or bounds that are none.
    """
    found: dict[Role, Bounds] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, span = part.partition("=")
        role: Role | None = next((known for known in QUEUES if known == name.strip()), None)
        if role is None:
            raise Refused(f"autoscale: {name.strip()!r} has no queue to go by{nearest(name.strip(), QUEUES)}")
        low, dots, high = (piece.strip() for piece in span.partition(".."))
        if not (dots and low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= MOST):
            raise Refused(f"autoscale: {role}={span!r} must be MIN..MAX with 1 ≤ MIN ≤ MAX ≤ {MOST}, as {role}=1..4")
        found[role] = Bounds(int(low), int(high))
    return found


def load(
    role: Role, depths: Mapping[str, Mapping[str, tuple[int, int]]], rest: Collection[str] = frozenset()
) -> tuple[int, int]:
    """(waiting, in hand) of a role, over the consumers of all tenants but those that rest; see `Bus.depths`."""
    kind = QUEUES[role][0]
    every = ((name, depth) for queue in depths.values() for name, depth in queue.items())
    found = [depth for name, depth in every if name.partition("-")[0] == kind and name not in rest]
    return sum(waiting for waiting, _ in found), sum(held for _, held in found)


async def resting(roster: Roster) -> set[str]:
    """Consumers of jobs that are paused: what waits there is no work for anybody. Raises Unavailable."""
    jobs = [state for tenant in await roster.tenants() for state in (await roster.of(tenant)).values()]
    return {training_durable(job.plan.tenant, job.plan.spec.name).name for job in jobs if job.phase == "paused"}


class Autoscaler:
    """Looks at the queues once a second and scales, while `run` runs."""

    def __init__(
        self,
        bus: Any,
        bounds: Mapping[Role, Bounds],
        workers: Callable[[Role], tuple[int, bool]],
        scale: Callable[[Role, int, str], Awaitable[None]],
    ) -> None:
        """`workers` tells how many of a role are to run and whether one of them crashes; `scale` makes it so many."""
        self.bus, self.bounds, self._workers, self._scale = bus, bounds, workers, scale
        self.memory: dict[Role, Memory] = {role: Memory() for role in bounds}

    async def run(self) -> None:
        """Until cancelled. While the bus is away nothing is known, and nothing changes."""
        roster = Roster(self.bus)
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.bus.up.is_set():
                continue
            try:
                await self.look(await self.bus.depths(), time.monotonic(), self.bounds, await resting(roster))
            except Unavailable as error:
                self.bus.log.warning("the queues could not be seen; nothing is scaled", error=str(error))

    async def look(
        self,
        depths: Mapping[str, Mapping[str, tuple[int, int]]],
        clock: float,
        roles: Iterable[Role],
        rest: Collection[str] = frozenset(),
    ) -> None:
        """One look at these roles."""
        for role in roles:
            workers, crashing = self._workers(role)
            waiting, held = load(role, depths, rest)
            self.memory[role], wanted = decide(
                role, self.bounds[role], self.memory[role], Look(clock, workers, waiting, held, crashing)
            )
            if wanted != workers:
                why = f"{waiting} wait" if wanted > workers else f"{held} in hand, nothing waits"
                await self._scale(role, wanted, f"autoscale {self.bounds[role].low}..{self.bounds[role].high}: {why}")
