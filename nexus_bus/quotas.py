"""What a tenant may do right now: its own limits or the service's, against what it has used and keeps. The master's.

A limit that is set, raised or lifted counts at the next look. What it stops:
  jobs, slots      further jobs, which wait in line; lowered below what runs, they stop nothing that runs
  queued           further submissions, which are refused
  stored_bytes     training jobs, which rest or wait, and imports, which are refused; eval jobs keep nothing, and go on
  device_s, money  all jobs, which rest or wait; a tenant's own sessions and requests to act, which are refused (budgets.py)
  phase suspended  all jobs, which rest; submissions and imports, which are refused
What rests because of one of these goes on by itself once it may: nobody decided about the job, so nobody has to resume it.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from nexus_bus import pricing, registry
from nexus_bus.admission import Bar, Limits
from nexus_bus.allowances import NO_LIMITS, Allowances
from nexus_bus.bus import Bus
from nexus_bus.pricing import Prices
from nexus_bus.roster import Roster
from nexus_bus.spending import Account, Spending
from nexus_bus.stored import Keeping
from schemas.tenant import ServiceTerms, TenantLimits, TenantRecord

MORE = "; ask the provider for more"
LESS = "; keep fewer versions (retention.keep, `nexus policies unpin`), or ask the provider for more"


class Quotas:
    """Looks at one tenant at a time, as often as it is asked."""

    def __init__(self, bus: Bus, roster: Roster, service: Limits) -> None:
        """`service` holds where a tenant has no limit of its own. Raises Refused as pricing.load does."""
        self._log, self._kv = bus.log, bus.kv("registry")
        self._roster, self._service = roster, service
        self._prices = pricing.load()
        self._warned: set[str] = set()
        self.allowances = Allowances(bus)
        self.spending = Spending(bus)
        self.keeping = Keeping(bus)

    async def announce(self) -> None:
        """Tell whoever shows limits what holds where a tenant has none of its own, and whether there are prices."""
        currency = self._prices.currency if self._prices is not None else ""
        terms = ServiceTerms(jobs=self._service.jobs, queued=self._service.queued, currency=currency)
        await self._kv.put(registry.SERVICE, terms)

    async def of(self, tenant: str) -> Limits:
        """What holds for a tenant at this moment."""
        record, limits = self.allowances.record(tenant), self.allowances.of(tenant)
        if record is not None and record.phase == "removed":
            limits = NO_LIMITS  # nobody follows what it has used any more
        recorded = await self._roster.dataset_bytes(tenant)
        return Limits(
            jobs=limits.jobs or self._service.jobs,
            queued=limits.queued or self._service.queued,
            slots=limits.slots,
            bars=(*_suspension(record), *self._budgets(tenant, limits), *self._storage(tenant, limits, recorded)),
            closed=_closed(record),
            sure=self._sure(tenant, limits),
            jobs_by="limits.jobs" if limits.jobs else self._service.jobs_by,
            queued_by="limits.queued" if limits.queued else self._service.queued_by,
        )

    def _sure(self, tenant: str, limits: TenantLimits) -> bool:
        budget = limits.device_s is not None or limits.money is not None
        kept = limits.stored_bytes is None or self.keeping.of(tenant).known
        return kept and (not budget or self.spending.of(tenant).known)

    def _budgets(self, tenant: str, limits: TenantLimits) -> Iterator[Bar]:
        if limits.device_s is None and limits.money is None:
            self.spending.forget(tenant)
            return
        if limits.money is not None and self._prices is None:
            self._warn(tenant)
        yield from used_up(limits, self.spending.of(tenant), self._prices)

    def _storage(self, tenant: str, limits: TenantLimits, recorded: int) -> Iterator[Bar]:
        most = limits.stored_bytes
        if most is None:
            self.keeping.forget(tenant)
        elif (size := self.keeping.of(tenant).size() + recorded) >= most:
            yield Bar(
                "stored_bytes",
                f"limits.stored_bytes: {size:,} of your {most:,} bytes are kept; keep fewer versions{LESS}",
                True,
            )

    def _warn(self, tenant: str) -> None:
        if tenant not in self._warned:
            self._warned.add(tenant)
            self._log.warning("a limit of money counts for nothing: the settings file has no [prices]", tenant=tenant)


def used_up(limits: TenantLimits, account: Account, prices: Prices | None) -> Iterator[Bar]:
    """Budgets of which nothing is left. Without prices there is none of money."""
    if limits.device_s is not None and account.device_s >= limits.device_s:
        yield Bar("device_s", f"limits.device_s: {account.device_s:.1f} of your {limits.device_s:g} s are used{MORE}")
    if limits.money is None or prices is None:
        return
    if (cost := account.cost(prices, datetime.now(UTC))) >= limits.money:
        yield Bar("money", f"limits.money: {cost:.2f} of your {limits.money:g} {prices.currency} are used{MORE}")


def _suspension(record: TenantRecord | None) -> Iterator[Bar]:
    if why := _closed(record):
        yield Bar("suspended", why)


def _closed(record: TenantRecord | None) -> str:
    if record is None or record.phase == "active":
        return ""
    return f"{record.phase} by the provider" + (f": {record.reason}" if record.reason else "")
