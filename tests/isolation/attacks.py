"""All attacks, by theme; and all of them carried out, for pytest one by one, for the benchmark in one go."""

from pathlib import Path

from tests.isolation import (  # each puts its own on the list
    attacks_calls,  # noqa: F401
    attacks_data,  # noqa: F401
    attacks_environments,  # noqa: F401
    attacks_floods,  # noqa: F401
    attacks_headers,  # noqa: F401
    attacks_keys,  # noqa: F401
    attacks_listening,  # noqa: F401
    attacks_robots,  # noqa: F401
    attacks_streams,  # noqa: F401
)
from tests.isolation.attack import ATTACKS, Attack
from tests.isolation.attacker import attacker
from tests.isolation.siege import Siege, besieged


async def carry_out(siege: Siege, one: Attack, *, fenced: bool = True) -> str | None:
    """Attack; evidence that something was got, or None.

    Args:
        fenced: with the issued key; otherwise with one of the same account that has no permissions to keep it in.
    """
    await siege.tidy()
    async with attacker(siege.url, siege.creds(one.tenant, fenced=fenced), fenced) as intruder:
        said = await one.attempt(siege, intruder)
        return await siege.verdict(intruder, said)


async def run_all(url: str, authority: Path) -> dict[str, str | None]:
    """Every attack, on a running server whose operator's key lies in `authority`: by name, evidence of success or None."""
    async with besieged(url, authority) as siege:
        return {one.name: await carry_out(siege, one) for one in ATTACKS}
