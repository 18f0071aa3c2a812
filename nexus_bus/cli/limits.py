"""A tenant's limits on the command line: flags, the table of what holds, and what is to be known of one that holds nothing."""

from typing import Any

import click

from schemas.tenant import ServiceTerms, TenantLimits

LIMITS = {
    "weight": "Of its share of device time among those who wait.",
    "jobs": "Running at once; those beyond wait in line.",
    "queued": "Waiting in line; those beyond are refused.",
    "slots": "Training jobs at once; those beyond wait in line.",
    "sessions": "Environment sessions at once, over all workers.",
    "stored_bytes": "Weights and recorded data kept; beyond it nothing new begins.",
    "device_s": "Device-seconds over all time; at its end every job pauses.",
    "money": "In the currency of [prices], over all time; at its end every job pauses.",
    "payload_bytes": "Of one message.",
    "connections": "Open at once.",
    "subscriptions": "Open at once.",
}
NOTHING = "Counts for nothing: the service has no [prices]"


def limit_options(command: Any) -> Any:
    """A flag for each limit."""
    for name, summary in reversed(LIMITS.items()):
        command = click.option(f"--{name.replace('_', '-')}", name, metavar="N", help=summary)(command)
    return command


def limits_table(limits: TenantLimits, terms: ServiceTerms | None, used: dict[str, float] | None = None) -> Any:
    """All limits for people, and if it is known, how much of each is taken."""
    from rich.text import Text

    from nexus_bus.cli.show import listing

    table = listing("limit", "may take", *(["taken"] if used is not None else []), "", right=("may take", "taken"))
    for name, summary in LIMITS.items():
        taken = [] if used is None else [_value(round(used[name], 3)) if name in used else ""]
        void = name == "money" and _for_nothing(limits, terms)
        table.add_row(name, shown(limits, name, terms), *taken, Text(f"{NOTHING}." if void else summary))
    return table


def shown(limits: TenantLimits, name: str, terms: ServiceTerms | None) -> str:
    """One limit for people: the number that holds, whoever set it, or that there is none."""
    if (own := getattr(limits, name)) is not None:
        return _value(own)
    if name in ("jobs", "queued"):
        return f"{getattr(terms, name):,} (the service's)" if terms is not None else "as the service"
    return "as workers hold" if name == "sessions" else "no limit"


def _value(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.10g}"


def _for_nothing(limits: TenantLimits, terms: ServiceTerms | None) -> bool:
    return limits.money is not None and terms is not None and not terms.currency


def warn(limits: TenantLimits, terms: ServiceTerms | None) -> None:
    """A limit of money is kept where there are no prices, which may come; but whoever sets it has to know."""
    from nexus_bus import pricing

    if _for_nothing(limits, terms):
        click.echo(f"money: {NOTHING[0].lower()}{NOTHING[1:]}; the settings file of its master takes them", err=True)
    elif limits.money is not None and terms is None and pricing.load() is None:
        click.echo(
            "money: counts for nothing without [prices]; the settings here have none, and no master has told its own", err=True
        )
