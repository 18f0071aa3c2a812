"""Who asked for what, and what was decided: the gateway, the master, hosts and the operator's commands write it, `nexus audit`
reads it.
"""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from nexus_bus.bus import Bus, Incoming
from nexus_bus.bus.headers import CALLER
from nexus_bus.clock import now
from schemas.usage import Audit

REQUEST_INFO = "Nats-Request-Info"
# Calls that are noted once they are done: of which job, and what.
NOTED: dict[str, Callable[[Any], tuple[str, str]]] = {
    "policy.read": lambda query: (query.policy.partition("@")[0], query.policy),
    "policy.upload": lambda chunk: ("_", chunk.upload),
    "env.open": lambda ask: ("_", f"{ask.environment.id}:{ask.environment.task}"),
    "env.offer": lambda offer: ("_", f"{offer.environment} of {offer.worker}"),
}
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


class Notes:
    """Of what is asked over and over, piece by piece: one entry for each thing and key in every hour of the clock. Requests to
    act and calls on sessions are too many even for that; usage has them.
    """

    def __init__(self, bus: Bus) -> None:
        """Nothing was noted yet."""
        self._bus = bus
        self._hour, self._noted = 0, set[tuple[str, ...]]()

    async def note(self, tenant: str, action: str, message: Any, by: str) -> None:
        """Note that it was done, unless it stands there. Several gateways that are asked at once make one entry."""
        job, what = NOTED[action](message)
        if (hour := int(time.time() // 3600)) != self._hour:
            self._hour, self._noted = hour, set()
        one = tenant, action, what, by
        if one not in self._noted:
            key = hashlib.sha256("\n".join((str(hour), *one)).encode()).hexdigest()[:32]  # what is asked for may be any text
            await audit(self._bus, tenant, action, job, "ok", what, key=key, caller=by)
            self._noted.add(one)


async def audit(bus: Bus, tenant: str, action: str, job: str, outcome: str, detail: str, *, key: str, caller: str = "") -> None:
    """Note a decision. The same key again is the same decision, and stands there once.

    Args:
        key: makes it idempotent; of a decision about an order, the order's message id.
        caller: public key of who asked; empty for what the service decided by itself.
    """
    detail = detail if len(detail) <= DETAIL else f"{detail[:DETAIL]} …"
    entry = Audit(tenant=tenant, action=action, job=job, outcome=outcome, detail=detail, key=caller, submission=key, time=now())
    await bus.publish("audit", entry, msg_id=f"audit/{tenant}/{action}/{job}/{outcome}/{key}", tenant=tenant)
