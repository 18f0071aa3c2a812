"""Slot leases: who serves a job's slot, in the KV bucket `leases`. Beside the seat; trainers take, renew and drop them.

A lease also says what is being learned under it, so that whoever takes it over knows what its holder died of.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from nexus_bus import registry
from nexus_bus.bus import Bus
from nexus_bus.errors import Conflict
from schemas.control import Attempt, Lease

PATIENCE_S = 300.0  # with a server that is away; whether the lease is still ours shows when it is back


@dataclass
class _Held:
    revision: int
    lease: Lease
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # renewing and noting write the same entry


class Leases:
    """Leases of one holder. It keeps its name over a restart, so it takes its own lease back at once."""

    def __init__(self, bus: Bus, holder: str, seconds: float) -> None:
        """Holds none yet; each lasts `seconds` unless it is renewed."""
        self.kv = bus.kv("leases")
        self.holder = holder
        self.seconds = seconds
        self._held: dict[tuple[str, str], _Held] = {}

    async def take(self, tenant: str, job: str) -> Lease | None:
        """Take a free, expired or own lease, with the attempts that stand in it; None if somebody else holds it."""
        key = registry.slot_key(tenant, job)
        entry = await self.kv.get(key, Lease)
        if entry is not None and entry.value.holder != self.holder and entry.value.expires > time.time():
            return None
        lease = Lease(
            tenant=tenant,
            job=job,
            holder=self.holder,
            epoch=entry.value.epoch + 1 if entry is not None else 1,
            expires=time.time() + self.seconds,
            attempts=entry.value.attempts if entry is not None else [],
        )
        try:
            revision = await (self.kv.create(key, lease) if entry is None else self.kv.update(key, lease, entry.revision))
        except Conflict:
            return None
        self._held[tenant, job] = _Held(revision, lease)
        return lease

    async def renew(self, tenant: str, job: str, attempts: Sequence[Attempt] | None = None) -> bool:
        """Hold it for another while, and note what is being learned; False if somebody took it."""
        held = self._held.get((tenant, job))
        if held is None:
            return False
        async with held.lock:
            lease = msgspec.structs.replace(held.lease, expires=time.time() + self.seconds)
            if attempts is not None:
                lease = msgspec.structs.replace(lease, attempts=list(attempts))
            try:
                key = registry.slot_key(tenant, job)
                held.revision = await self.kv.update(key, lease, held.revision, deadline=PATIENCE_S)
            except Conflict:
                return False
            held.lease = lease
        return True

    async def drop(self, lease: Lease, attempts: Sequence[Attempt] | None = None) -> None:
        """Give it up; the epoch stays, so that a stale holder is still told from a later one. One of the same slot that was
        taken since stays."""
        name = lease.tenant, lease.job
        held = self._held.get(name)
        if held is None or held.lease.epoch != lease.epoch:
            return
        del self._held[name]
        async with held.lock:
            free = msgspec.structs.replace(held.lease, expires=0.0)
            if attempts is not None:
                free = msgspec.structs.replace(free, attempts=list(attempts))
            with contextlib.suppress(Conflict):  # somebody has it already, which is what dropping is for
                await self.kv.update(registry.slot_key(*name), free, held.revision)
