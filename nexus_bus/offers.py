"""Who serves environments of a tenant's own right now: the bucket `offers`, where what is not repeated is over.

The gateway writes what tenants' workers say; whoever plans or plays reads it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from nexus_bus.bus import Bus, Durable, own_durable
from nexus_bus.bus.pull import OnDead
from nexus_bus.bus.topology import OFFER_S
from nexus_bus.envs.catalog import Own
from nexus_bus.envs.offered import ID, entries
from nexus_bus.errors import Unavailable
from nexus_bus.roster import Roster
from nexus_bus.serving import Serving
from nexus_bus.worker import Context, side_by_side
from schemas.environment import OwnFound, OwnOffer, OwnPage, OwnQuery
from schemas.events import EventType
from schemas.tenant import TenantLimits

EVERY_S = OFFER_S / 5  # how often a worker says it, so that a few may be lost
LOOK_S = 0.5
PLAYING = ("evaluating_before", "training", "evaluating_after")
MOST = 32  # orders of one tenant in hand: half of what a rollout worker plays, so that robots which stall hold up nobody else's


def offer_key(tenant: str, environment: str, worker: str) -> str:
    """OwnOffer."""
    return f"{tenant}.{environment}.{worker}"


async def offered(bus: Bus, tenant: str) -> Own:
    """A tenant's own environments as entries of the catalogue, by id."""
    return entries(entry.value for entry in (await bus.kv("offers").entries(f"{tenant}.", OwnOffer)).values())


async def listed(bus: Bus, tenant: str, query: OwnQuery) -> OwnPage:
    """A page of a tenant's own environments."""
    offers: dict[str, list[OwnOffer]] = {}
    for entry in (await bus.kv("offers").entries(f"{tenant}.", OwnOffer)).values():
        offers.setdefault(entry.value.environment, []).append(entry.value)
    names = sorted(name for name in offers if name > query.after)
    some = names[: query.limit]
    return OwnPage(environments=[_found(offers[name]) for name in some], next=some[-1] if len(names) > len(some) else "")


def _found(offers: list[OwnOffer]) -> OwnFound:
    """What several workers of one environment say: they serve the same."""
    offers = sorted(offers, key=lambda one: one.worker)
    last = offers[-1]
    return OwnFound(
        environment=last.environment,
        workers=[one.worker for one in offers],
        sessions=sum(one.sessions for one in offers),
        tasks={name: task.instruction for name, task in last.tasks.items()},
        max_steps=max(task.max_steps for task in last.tasks.values()),
        simulator=last.simulator,
    )


class Offers:
    """What is offered. `changed(tenant, environment, sessions)` is called whenever there are more or fewer of them."""

    def __init__(self, bus: Bus, changed: Callable[[str, str, int], None]) -> None:
        """Knows of none until `follow` runs."""
        self._kv = bus.kv("offers")
        self._changed = changed
        self._heard: dict[str, tuple[int, float]] = {}  # by key: sessions, and when that was said (monotonic)
        self._sessions = Counter[tuple[str, str]]()  # by tenant and environment

    async def follow(self) -> None:
        """Until cancelled."""
        await side_by_side(self._hear(), self._count())

    async def _hear(self) -> None:
        async for key, entry in self._kv.watch("", OwnOffer):
            if entry is None:
                self._heard.pop(key, None)
            else:
                self._heard[key] = entry.value.sessions, time.monotonic()

    async def _count(self) -> None:
        """What is over leaves the bucket without a word."""
        while True:
            ended = time.monotonic() - OFFER_S
            self._heard = {key: said for key, said in self._heard.items() if said[1] > ended}
            now = Counter[tuple[str, str]]()
            for key, (sessions, _) in self._heard.items():
                tenant, environment, _ = key.split(".")
                now[tenant, environment] += sessions
            before, self._sessions = self._sessions, now
            for which in now.keys() | before.keys():
                if now[which] != before[which]:
                    self._changed(*which, now[which])
            await asyncio.sleep(LOOK_S)


class OwnServing(Serving):
    """Serves environments of tenants' own while they are offered, each as many orders at once as it has sessions.

    Without an offer nothing is taken: what waits for a robot that is away waits in the queue, and holds up nothing else.
    """

    def __init__(self, bus: Bus, *, on_dead: OnDead | None = None) -> None:
        """Serves none until `follow` or `consume` runs."""
        super().__init__(bus, self._consumer, batch=MOST, on_dead=on_dead)
        self._offers = Offers(bus, self._offered)
        self._sessions = Counter[str]()  # by tenant=environment, which is what is served here in place of a tenant

    def _consumer(self, key: str, _: TenantLimits) -> Durable:
        tenant, environment = key.split("=") if "=" in key else (key, ID)
        most = self.allowances.of(tenant).sessions or MOST
        return own_durable(tenant, environment, max(1, min(self._sessions[key], most, MOST)))

    async def _watch(self) -> None:
        await self._offers.follow()

    def _offered(self, tenant: str, environment: str, sessions: int) -> None:
        key = f"{tenant}={environment}"
        self._sessions[key] = sessions
        if sessions:
            self._there.add(key)
        else:
            self._there.discard(key)
            del self._sessions[key]
        self._news.put_nowait(key)


class Attendance:
    """Tells jobs when the environment of their tenant's own that they play in goes away and comes back. The master's."""

    def __init__(self, context: Context, roster: Roster) -> None:
        """Tells nobody until `follow` runs."""
        self._context, self._roster = context, roster
        self._away: set[tuple[str, str]] = set()  # since it left: what was there when this began is no news
        self._news: asyncio.Queue[tuple[str, str, bool]] = asyncio.Queue()

    async def follow(self) -> None:
        """Until cancelled."""
        await side_by_side(Offers(self._context.bus, self._offered).follow(), self._tell())

    def _offered(self, tenant: str, environment: str, sessions: int) -> None:
        which = tenant, environment
        if not sessions:
            self._away.add(which)
        elif which in self._away:
            self._away.discard(which)
        else:
            return
        self._news.put_nowait((*which, bool(sessions)))

    async def _tell(self) -> None:
        while True:
            tenant, environment, there = await self._news.get()
            try:
                await self._say(tenant, environment, there)
            except Unavailable as error:  # jobs go on without having been told
                self._context.log.warning("not told that an environment came or went", tenant=tenant, error=str(error))

    async def _say(self, tenant: str, environment: str, there: bool) -> None:
        kind: EventType = "environment.joined" if there else "environment.left"
        said = "serves it again" if there else "serves it now; orders to play in it wait until one does"
        for job, state in list((await self._roster.of(tenant)).items()):
            plays = state.plan.spec.environment
            if plays is not None and plays.id == environment and state.phase in PLAYING:
                # Of several masters each says it: within such a time it is the same.
                key = f"{kind}/{environment}/{int(time.time() / OFFER_S)}"
                message = f"{environment}: {'a' if there else 'no'} worker of yours {said}"
                await self._context.event(kind, tenant, job=job, key=key, message=message)
