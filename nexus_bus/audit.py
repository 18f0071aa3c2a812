"""Who decided what, on whose behalf: the master writes it, `nexus audit` reads it."""

from nexus_bus.bus import Bus
from nexus_bus.clock import now
from schemas.usage import Audit


async def audit(bus: Bus, tenant: str, action: str, job: str, outcome: str, detail: str, *, key: str) -> None:
    """Note a decision. The same key again is the same decision, and stands there once."""
    entry = Audit(tenant=tenant, action=action, job=job, outcome=outcome, detail=detail, time=now())
    await bus.publish("audit", entry, msg_id=f"audit/{tenant}/{action}/{job}/{outcome}/{key}", tenant=tenant)
