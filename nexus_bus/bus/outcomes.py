"""What may become of a message: a closed set, turned into ack, nak or term in one place (consume.py)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """Handled; acknowledge it."""


@dataclass(frozen=True)
class Retry:
    """Not now; try again after `delay` seconds.

    A retry that `counts` is a failed attempt: after the durable's `max_deliver` of them the message is a dead letter. One
    that does not (something it needs is away) is waited for with the message in hand.
    """

    delay: float = 1.0
    reason: str = ""
    counts: bool = True


@dataclass(frozen=True)
class Reject:
    """Never; to the dead letters with the reason."""

    reason: str


Outcome = Done | Retry | Reject
