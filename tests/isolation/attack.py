"""The list of attacks, each named by its function: what it tries, and how to find out whether it got something."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.isolation.attacker import Attacker, attacker
from tests.isolation.siege import INTRUDER, Siege, besieged

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


async def carry_out(siege: Siege, one: Attack, *, fenced: bool = True) -> str | None:
    """Attack; evidence that something was got, or None."""
    async with attacker(siege.url, siege.creds(one.tenant, fenced=fenced), fenced) as intruder:
        said = await one.attempt(siege, intruder)
        return await siege.verdict(intruder, said)


async def run_all(url: str, authority: Path) -> dict[str, str | None]:
    """Every attack, on a running server: by name, evidence of success or None."""
    from tests.isolation import attacks  # noqa: F401 - fills the list

    async with besieged(url, authority) as siege:
        return {one.name: await carry_out(siege, one) for one in ATTACKS}
