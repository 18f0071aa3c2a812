"""Who serves environments of a tenant's own right now: the bucket `offers`, where what is not repeated is over.

The gateway writes what tenants' workers say; whoever plans or plays reads it.
"""

import asyncio
import time
from collections import Counter

from nexus_bus.bus import Bus, Durable, own_durable
from nexus_bus.bus.pull import OnDead
from nexus_bus.bus.topology import OFFER_S
from nexus_bus.envs.catalog import Own
from nexus_bus.envs.offered import entries
from nexus_bus.serving import Serving
from nexus_bus.worker import side_by_side
from schemas.environment import OwnOffer
from schemas.tenant import TenantLimits

EVERY_S = OFFER_S / 5  # how often a worker says it, so that a few may be lost
LOOK_S = 0.5
MOST = 32  # orders of one tenant in hand: half of what a rollout worker plays, so that robots which stall hold up nobody else's


def offer_key(tenant: str, environment: str, worker: str) -> str:
    """OwnOffer."""
    return f"{tenant}.{environment}.{worker}"


async def offered(bus: Bus, tenant: str) -> Own:
    """A tenant's own environments as entries of the catalogue, by id."""
    return entries(entry.value for entry in (await bus.kv("offers").entries(f"{tenant}.", OwnOffer)).values())


class OwnServing(Serving):
    """Serves tenants while they offer environments of their own, as many orders at once as those have sessions.

    Without an offer nothing is taken: what waits for a robot that is away waits in the queue, and holds up nobody.
    """

    def __init__(self, bus: Bus, *, on_dead: OnDead | None = None) -> None:
        """Serves nobody until `follow` or `consume` runs."""
        super().__init__(bus, self._consumer, batch=MOST, on_dead=on_dead)
        self._heard: dict[str, tuple[int, float]] = {}  # by key: sessions, and when that was said (monotonic)
        self._sessions = Counter[str]()  # by tenant

    def _consumer(self, tenant: str, limits: TenantLimits) -> Durable:
        return own_durable(tenant, max(1, min(self._sessions[tenant], limits.sessions or MOST, MOST)))

    async def _watch(self) -> None:
        await side_by_side(self._hear(), self._count())

    async def _hear(self) -> None:
        async for key, entry in self.bus.kv("offers").watch("", OwnOffer):
            if entry is None:
                self._heard.pop(key, None)
            else:
                self._heard[key] = entry.value.sessions, time.monotonic()

    async def _count(self) -> None:
        """What is over leaves the bucket without a word."""
        while True:
            ended = time.monotonic() - OFFER_S
            self._heard = {key: said for key, said in self._heard.items() if said[1] > ended}
            now = Counter[str]()
            for key, (sessions, _) in self._heard.items():
                now[key.split(".")[0]] += sessions
            before, self._sessions = self._sessions, now
            for tenant in now.keys() | before.keys():
                if now[tenant] != before[tenant]:
                    (self._there.add if now[tenant] else self._there.discard)(tenant)
                    self._news.put_nowait(tenant)
            await asyncio.sleep(LOOK_S)
