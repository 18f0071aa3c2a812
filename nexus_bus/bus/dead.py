"""Dead letters: the worker itself stores them and then ends the message.

The server's own advisory fires only while somebody pulls, and a message past its last delivery would stay in a work queue for
ever. So consumers have no limit on the server; the count of deliveries is compared here.
"""

import re
from typing import TYPE_CHECKING

from nexus_bus.bus import headers as wire
from nexus_bus.clock import now
from schemas.base import NAME_PATTERN
from schemas.control import DeadLetter
from schemas.subjects import parse

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus
    from nexus_bus.bus.delivery import Delivery

NAME = re.compile(NAME_PATTERN)


async def bury(bus: "Bus", delivery: "Delivery", reason: str) -> None:
    """Store a message with the reason it was given up. Repeating it stores nothing twice."""
    letter = DeadLetter(
        stream=delivery.stream,
        subject=delivery.subject,
        msg_id=delivery.msg_id,
        reason=reason[:2000],
        deliveries=delivery.num_delivered,
        time=now(),
        headers=delivery.headers,
        payload=delivery.raw,
    )
    tenant = delivery.tenant if delivery.named else "_"  # a hand-made subject may hold anything
    msg_id = f"dead/{delivery.stream}/{delivery.published_ns}/{delivery.seq}"  # a memory stream counts from 1 again
    await bus.publish("dead", letter, msg_id=msg_id, stream=delivery.stream.lower(), tenant=tenant)


def belongs(letter: DeadLetter) -> tuple[str, str]:
    """Tenant and job of what was given up; empty where the subject, of an older version or made by hand, names none."""
    try:
        _, tokens = parse(letter.subject)
    except KeyError:
        return "", ""
    tenant, job = (name if NAME.match(name := tokens.get(token, "")) else "" for token in ("tenant", "job"))
    return tenant, job if tenant else ""


async def revive(bus: "Bus", letter: DeadLetter, seq: int) -> None:
    """Put the original of dead letter number `seq` back on its queue, once however often this is repeated."""
    given = letter.headers | {wire.MSG_ID: f"{letter.msg_id}/again/{seq}"}
    await bus.publisher.send(letter.subject, letter.payload, given, deadline=30.0)
