"""Every tenant's own consumer of one queue, served by its share, while tenants come and go and their limits change.

What the master and inference, rollout and environment workers have in common: who there is (registry), what each may take
(allowances.py), whose turn it is (bus/rounds.py).
"""

import asyncio
import difflib
from collections.abc import Callable
from typing import Any

from nexus_bus import registry
from nexus_bus.allowances import NO_LIMITS, Allowances
from nexus_bus.bus import Bus, Durable, Puller, Rounds, ensure_durable, ensure_tenant
from nexus_bus.bus.consume import Handler, Loop, OnBad
from nexus_bus.bus.pull import OnDead
from nexus_bus.errors import NotFound
from nexus_bus.worker import side_by_side
from schemas.base import PROVIDER
from schemas.tenant import TenantLimits, TenantRecord

AHEAD = 2  # messages at hand beyond those in work: a tenant that waits must be seen to wait, or it counts as idle

# What tenants' consumers are called before the dash.
_KINDS = {"JOBS": ("orders",), "INFERENCE": ("infer",), "ROLLOUT": ("rollout", "own", "data")}
ALONE = "default"  # the tenant of somebody who has added none
_ORDERS = "JOBS"  # may hold the first order of somebody whom nobody knows yet


async def introduce(bus: Bus, tenant: str) -> None:
    """Have a tenant served, before its first order goes out."""
    await ensure_tenant(bus, tenant)
    await bus.kv("registry").put(registry.tenant_key(tenant), {"name": tenant})


async def check_known(bus: Bus, tenant: str) -> None:
    """Whoever runs a service for itself may give itself any name. Once it has added tenants, a name that none of them has, and
    that was not in use before, was mistyped: what began under it would be nobody's.

    Raises:
        NotFound: it is such a name.
    """
    kv = bus.kv("registry")
    names = [registry.tenant_of(key) for key in await kv.keys(registry.account_key(""), deleted=True)]
    if not names or tenant in (ALONE, *names) or await kv.get(registry.tenant_key(tenant), dict[str, Any]) is not None:
        return
    near = difflib.get_close_matches(tenant, names, n=1)
    raise NotFound(
        f"tenant: no {tenant!r}{f'; did you mean {near[0]!r}?' if near else ''}; `nexus tenant list` shows who there is, and "
        f"`nexus tenant add {tenant}` adds this one"
    )


class Serving:
    """Serves tenants from the moment they exist until they are removed. `rounds` deals out what arrives."""

    def __init__(
        self,
        bus: Bus,
        durable: Callable[[str, TenantLimits], Durable],
        *,
        batch: int,
        on_bad: OnBad | None = None,
        on_dead: OnDead | None = None,
        allowances: Allowances | None = None,
    ) -> None:
        """Serves nobody until `follow` or `consume` runs.

        Args:
            durable: a tenant's consumer, by its limits. What changes with them is changed on the server at once; of several
                workers each does so with what it heard last, hence with the same in the end.
            batch: messages of one tenant that may be here at a time, those in work included.
            on_bad: hears of messages that do not decode; `on_dead` of others given up.
            allowances: followed from here on; default some of its own.
        """
        self.bus = bus
        self.rounds = Rounds()
        self.allowances = allowances or Allowances(bus)
        self._durable = durable
        self._batch = batch
        self._on_bad, self._on_dead = on_bad, on_dead
        self._there: set[str] = set()
        self._pullers: dict[str, Puller] = {}
        self._news: asyncio.Queue[str] = asyncio.Queue()  # tenants about whom something is new

    @property
    def tenants(self) -> set[str]:
        """Who is served right now."""
        return set(self._pullers)

    async def consume(
        self, handler: Handler, *, stop: asyncio.Event, concurrency: int | Callable[[], int], grace: float = 6.0
    ) -> None:
        """THE loop, see bus/consume.py, over the consumers of all tenants. A turn costs the seconds that it was in hand."""
        anybody = self._durable(PROVIDER, NO_LIMITS)  # how often a message is tried is the same for all
        loop = Loop(self.bus, anybody, handler, stop, self._on_bad, self._on_dead)
        await side_by_side(loop.serve(self.rounds, concurrency, grace), self.follow())

    async def follow(self) -> None:
        """Serve who is there and who comes, until cancelled."""
        await self.allowances.load()
        self.allowances.changed.add(self._news.put_nowait)
        await side_by_side(self.allowances.follow(), self._watch(), self._take_in())

    async def _watch(self) -> None:
        async for key, entry in self.bus.kv("registry").watch(registry.tenant_key(""), dict[str, Any]):
            tenant = registry.tenant_of(key)
            if entry is None:
                self._there.discard(tenant)
            else:
                self._there.add(tenant)
            self._news.put_nowait(tenant)

    async def _take_in(self) -> None:
        while True:
            tenant = await self._news.get()
            if tenant in self._there:
                await self._serve(tenant)
            elif tenant in self._pullers:
                self.rounds.remove(tenant)
                await self._pullers[tenant].stop()
                del self._pullers[tenant]

    async def _serve(self, tenant: str) -> None:
        limits = self.allowances.of(tenant)
        durable = self._durable(tenant, limits)
        puller = self._pullers.get(tenant)
        if puller is None:
            puller = await self.bus.pull(durable, batch=self._batch, counted=True, on_dead=self._on_dead)
            self._pullers[tenant] = puller
        elif puller.durable != durable:
            puller.durable = durable  # first: should the consumer be lost just now, it is made anew from this
            await ensure_durable(self.bus, durable)
        self.rounds.add(tenant, puller, limits.weight)


async def sweep(bus: Bus) -> None:
    """Remove consumers of tenants that are not there (any more), and what is queued for such. Part of the master's sweep."""
    queued = {stream: await bus.queued(stream) for stream in _KINDS}
    depths = await bus.depths()
    there = {registry.tenant_of(key) for key in await bus.kv("registry").keys(registry.tenant_key(""))}  # after the others
    accounts = await bus.kv("registry").entries(registry.account_key(""), TenantRecord)
    # An environment may be offered before the first order; its consumer must not be taken from under who serves it.
    known = there | {registry.tenant_of(key) for key, account in accounts.items() if account.value.phase != "removed"}
    for stream, kinds in _KINDS.items():
        for on, messages in queued[stream].items():
            if stream != _ORDERS and on.split(".")[2] not in there:
                bus.log.warning("removed what nobody serves", subject=on, messages=messages)
                await bus.drop(stream, on)
        for name in depths[stream]:
            kind, _, whose = name.partition("-")
            if kind in kinds and whose.partition("=")[0] not in known:
                bus.log.warning("removed a consumer of nobody", stream=stream, consumer=name)
                await bus.ask(f"$JS.API.CONSUMER.DELETE.{stream}.{name}")
