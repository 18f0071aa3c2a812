"""What tenants and jobs have used, as it is on record. The master's: budgets go by it.

Nothing of it is kept: whoever is asked about is followed from the first record on, so a master that was started anew knows
the same. Until it has caught up it says so, and nobody decides by half a sum.
"""

import asyncio
from datetime import datetime, timedelta

from nexus_bus.bus import Bus
from nexus_bus.errors import NexusError
from nexus_bus.pricing import Prices
from schemas.usage import Usage

BILLED = frozenset({"inference", "training"})  # kinds that device-seconds are about
EVERY = "*"  # job: all of a tenant's
OVERLAP = timedelta(seconds=1)  # clocks of clients are coarser than the stream's


class Account:
    """A sum of records, in the order of the stream."""

    def __init__(self) -> None:
        """Of nothing."""
        self.known = False  # whether all that was on record at the beginning is in it
        self.device_s = 0.0
        self.session_s = 0.0
        self._gb_days = 0.0  # of what was stored, up to the last record of each job
        self._kept: dict[str, tuple[int, datetime]] = {}  # job → bytes, since when

    def take(self, used: Usage) -> None:
        """One record."""
        self.session_s += used.session_s
        if used.kind in BILLED:
            self.device_s += used.device_s
        elif used.kind == "storage":
            at = datetime.fromisoformat(used.time)
            if (before := self._kept.get(used.job)) is not None:
                self._gb_days += _gb_days(*before, at)
            self._kept[used.job] = used.stored_bytes, at

    def cost(self, prices: Prices, at: datetime) -> float:
        """Of all that was used up to a time, as `nexus usage` says it."""
        stored = self._gb_days + sum(_gb_days(size, since, at) for size, since in self._kept.values())
        return prices.cost(self.device_s, self.session_s, stored)


class Spending:
    """Accounts of those that were asked about."""

    def __init__(self, bus: Bus) -> None:
        """Follows nobody yet."""
        self._bus = bus
        self._followed: dict[tuple[str, str], tuple[Account, asyncio.Task[None]]] = {}

    def of(self, tenant: str, job: str = EVERY) -> Account:
        """What is known by now; from the first call on it is followed."""
        found = self._followed.get((tenant, job))
        if found is None or found[1].done():
            account = Account()
            found = self._followed[tenant, job] = account, asyncio.create_task(self._follow(account, tenant, job))
        return found[0]

    def forget(self, tenant: str, job: str = EVERY) -> None:
        """Follow it no more."""
        if (found := self._followed.pop((tenant, job), None)) is not None:
            found[1].cancel()

    async def _follow(self, account: Account, tenant: str, job: str) -> None:
        try:
            last, since = 0, None
            async for item in self._bus.tail("usage", since="all", follow=False, tenant=tenant, job=job):
                account.take(item.message)
                last, since = item.seq, item.time - OVERLAP
            account.known = True
            async for item in self._bus.tail("usage", since=since or "all", tenant=tenant, job=job):
                if item.seq > last:
                    account.take(item.message)
        except NexusError as error:  # begun anew when asked again
            account.known = False
            self._bus.log.warning("a budget cannot be followed", tenant=tenant, job=job, error=str(error))


def _gb_days(size: int, since: datetime, until: datetime) -> float:
    return size / 1e9 * max(0.0, (until - since).total_seconds()) / 86_400
