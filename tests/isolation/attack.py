"""The list of attacks, each named by its function: what it tries, and how to find out whether it got something."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.isolation.attacker import Attacker
from tests.isolation.siege import INTRUDER, Siege

Attempt = Callable[[Siege, Attacker], Awaitable[str | None]]


@dataclass(frozen=True)
class Attack:
    """One of them. `attempt` returns evidence of success, or None; the watchmen look for more."""

    name: str
    tries: str
    attempt: Attempt
    tenant: str = INTRUDER


ATTACKS: list[Attack] = []


def attack(tries: str, *, tenant: str = INTRUDER) -> Callable[[Attempt], Attempt]:
    """Put a function on the list."""

    def listed(attempt: Attempt) -> Attempt:
        ATTACKS.append(Attack(getattr(attempt, "__name__", ""), tries, attempt, tenant))
        return attempt

    return listed
