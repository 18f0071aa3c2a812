"""What each tenant may take, as the provider set it last. Followed from the registry, so that a change counts at once.

Beside the line, in the master and in every worker that shares something out among tenants.
"""

from collections.abc import Callable

from nexus_bus import registry
from nexus_bus.bus import Bus
from schemas.tenant import TenantLimits, TenantRecord

NO_LIMITS = TenantLimits()


class Allowances:
    """Limits of all tenants. One nobody has set limits for has those of the service."""

    def __init__(self, bus: Bus) -> None:
        """Knows nobody until `follow` runs."""
        self._kv = bus.kv("registry")
        self._records: dict[str, TenantRecord] = {}
        self.changed: set[Callable[[str], None]] = set()  # called with the tenant's name

    def of(self, tenant: str) -> TenantLimits:
        """What a tenant may take."""
        record = self._records.get(tenant)
        return record.limits if record is not None else NO_LIMITS

    def record(self, tenant: str) -> TenantRecord | None:
        """Its account, or None where it has none."""
        return self._records.get(tenant)

    async def load(self) -> None:
        """Read what is there now, so that nothing is decided before the first news."""
        for key, entry in (await self._kv.entries(registry.account_key(""), TenantRecord)).items():
            self._records[registry.tenant_of(key)] = entry.value

    async def follow(self) -> None:
        """Take in every change, until cancelled."""
        async for key, entry in self._kv.watch(registry.account_key(""), TenantRecord):
            tenant = registry.tenant_of(key)
            before = self._records.get(tenant)
            if entry is None:
                self._records.pop(tenant, None)
            else:
                self._records[tenant] = entry.value
            if self._records.get(tenant) != before:
                for tell in list(self.changed):
                    tell(tenant)
