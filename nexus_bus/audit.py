"""Who asked for what, and what was decided: the gateway and the master write it, `nexus audit` reads it."""

from nexus_bus.bus import Bus
from nexus_bus.clock import now
from schemas.usage import Audit

DETAIL = 300  # characters: the log is everybody's, and the event has it all


async def audit(bus: Bus, tenant: str, action: str, job: str, outcome: str, detail: str, *, key: str, caller: str = "") -> None:
    """Note a decision. The same key again is the same decision, and stands there once.

    Args:
        key: makes it idempotent; of a decision about an order, the order's message id.
        caller: public key of who asked.
    """
    detail = detail if len(detail) <= DETAIL else f"{detail[:DETAIL]} …"
    entry = Audit(tenant=tenant, action=action, job=job, outcome=outcome, detail=detail, key=caller, submission=key, time=now())
    await bus.publish("audit", entry, msg_id=f"audit/{tenant}/{action}/{job}/{outcome}/{key}", tenant=tenant)
