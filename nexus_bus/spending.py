"""What tenants and jobs have used, as it is on record. The master's: budgets go by it.

Nothing of it is kept: whoever is asked about is followed from the first record on, so a master that was started anew knows
the same. Until it has caught up it says so, and nobody decides by half a sum.
"""

import asyncio
from datetime import UTC, datetime, timedelta

from nexus_bus.bus import Bus
from nexus_bus.errors import NexusError
from nexus_bus.ledger import Span, Used
from nexus_bus.pricing import Prices
from schemas.usage import Usage

BILLED = frozenset({"inference", "training"})  # kinds that device-seconds are about
EVER: Span = datetime(1970, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)
EVERY = "*"  # job: all of a tenant's
OVERLAP = timedelta(seconds=1)  # clocks of clients are coarser than the stream's


class Account:
    """A sum of records, in the order of the stream."""

    def __init__(self) -> None:
        """Of nothing."""
        self.known = False  # whether all that was on record at the beginning is in it
        self.device_s = 0.0
        self.session_s = 0.0
        self._jobs: dict[str, Used] = {}

    def take(self, used: Usage) -> None:
        """One record."""
        own = self._jobs.setdefault(used.job, Used(lambda _: EVER))
        device_s, session_s = _billed(own)
        own.take(used)
        after = _billed(own)
        self.device_s += after[0] - device_s
        self.session_s += after[1] - session_s

    def cost(self, prices: Prices, at: datetime) -> float:
        """Of all that was used up to a time, as `nexus usage` says it."""
        return prices.cost(self.device_s, self.session_s, sum(own.stored(at) for own in self._jobs.values()))


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


def _billed(own: Used) -> tuple[float, float]:
    """Device-seconds and session-seconds."""
    sums = own.sums
    device_s = sum(one["device_s"] for (kind, _), one in sums.items() if kind in BILLED)
    return device_s, sum(one["session_s"] for one in sums.values())
