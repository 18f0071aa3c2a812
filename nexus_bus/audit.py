"""Who asked for what, and what was decided: the gateway, the master, hosts and the operator's commands write it, `nexus audit`
reads it.
"""

import msgspec

from nexus_bus.bus import Bus, Incoming
from nexus_bus.bus.headers import CALLER
from nexus_bus.clock import now
from schemas.usage import Audit

REQUEST_INFO = "Nats-Request-Info"
DETAIL = 300  # characters: the log is everybody's, and the event has it all


class _Caller(msgspec.Struct):
    user: str = ""


def by_provider(incoming: Incoming) -> bool:
    """Whether a request came from the provider's own account. On one from another account the server says whose it is, whatever
    the message brought under that name.
    """
    return not incoming.headers.get(REQUEST_INFO)


def caller(incoming: Incoming) -> str:
    """Public key of who asked: of a tenant, as the server says; of the provider, as its requests say."""
    if by_provider(incoming):
        return incoming.headers.get(CALLER, "")
    try:
        return msgspec.json.decode(incoming.headers[REQUEST_INFO], type=_Caller).user
    except msgspec.MsgspecError:
        return "unreadable"


async def audit(bus: Bus, tenant: str, action: str, job: str, outcome: str, detail: str, *, key: str, caller: str = "") -> None:
    """Note a decision. The same key again is the same decision, and stands there once.

    Args:
        key: makes it idempotent; of a decision about an order, the order's message id.
        caller: public key of who asked; empty for what the service decided by itself.
    """
    detail = detail if len(detail) <= DETAIL else f"{detail[:DETAIL]} …"
    entry = Audit(tenant=tenant, action=action, job=job, outcome=outcome, detail=detail, key=caller, submission=key, time=now())
    await bus.publish("audit", entry, msg_id=f"audit/{tenant}/{action}/{job}/{outcome}/{key}", tenant=tenant)
