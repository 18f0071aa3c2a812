"""What a tenant asks for itself and pays for is refused once its budget is used up, as its jobs rest then. The gateway's."""

import asyncio
import time

from nexus_bus import pricing, registry
from nexus_bus.bus import Bus
from nexus_bus.errors import Refused, Unavailable
from nexus_bus.quotas import used_up
from nexus_bus.spending import Spending
from schemas.tenant import TenantRecord

FRESH_S = 1.0  # that what was found counts for: as often as the master looks
LOOKS, LOOK_S = 150, 0.02  # for what is on record to be summed up


class Budgets:
    """Looks at whoever asks."""

    def __init__(self, bus: Bus) -> None:
        """Follows nobody yet. Raises Refused as pricing.load does."""
        self._kv = bus.kv("registry")
        self._spending = Spending(bus)
        self._prices = pricing.load()
        self._found: dict[str, tuple[float, str]] = {}  # by tenant: when, and why it may not

    async def check(self, tenant: str) -> None:
        """Go on if there is something left.

        Raises:
            Refused: a budget is used up; names it, what was used, and who can raise it.
            Unavailable: what the tenant has used is still being counted.
        """
        at, why = self._found.get(tenant, (0.0, ""))
        if (clock := time.monotonic()) >= at + FRESH_S:
            why = await self._look(tenant)
            self._found[tenant] = clock, why
        if why:
            raise Refused(why)

    async def _look(self, tenant: str) -> str:
        entry = await self._kv.get(registry.account_key(tenant), TenantRecord)
        if entry is None or (entry.value.limits.device_s is None and entry.value.limits.money is None):
            self._spending.forget(tenant)
            return ""
        for _ in range(LOOKS):
            if (account := self._spending.of(tenant)).known:
                return next((bar.why for bar in used_up(entry.value.limits, account, self._prices)), "")
            await asyncio.sleep(LOOK_S)
        raise Unavailable("limits: what you have used is being summed up; ask again")
