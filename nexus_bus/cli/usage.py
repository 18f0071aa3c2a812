"""`nexus usage` and `nexus audit`: what jobs used and cost, and who decided what."""

import csv
import sys
from datetime import UTC, datetime
from typing import Any

import click

from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option, print_json, provider_only

DIMENSIONS = ("tenant", "job", "kind", "day")
NUMBERS = {
    "device_s": ("device s", ".2f"),
    "session_s": ("session s", ".1f"),
    "stored_gb_day": ("GB days", ".4f"),
    "requests": ("requests", ".0f"),
    "records": ("records", ".0f"),
    "steps": ("steps", ".0f"),
}


class _Dimensions(click.ParamType):
    name = "dimensions"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(value.split(",")) if isinstance(value, str) else tuple(value)
        for name in names:
            if name not in DIMENSIONS:
                self.fail(f"{name!r} is none; give some of {','.join(DIMENSIONS)}", param, ctx)
        if len(set(names)) != len(names):
            self.fail(f"{value!r} names one twice", param, ctx)
        return names


def since_option(command: Any) -> Any:
    """`--since`."""
    formats = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]
    return click.option("--since", type=click.DateTime(formats), help="From this time on, in UTC.")(command)


def all_option(command: Any) -> Any:
    """`--all`."""
    return click.option("--all", "--all-tenants", "everybody", is_flag=True, help="Of every tenant.")(command)


@click.command("usage")
@click.argument("job", required=False)
@all_option
@click.option(
    "--by", type=_Dimensions(), default="tenant,job,kind", show_default=True, help=f"Sums by some of {','.join(DIMENSIONS)}."
)
@since_option
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@bus_options
@json_option
@asynchronous
async def usage_command(
    job: str | None,
    everybody: bool,
    by: tuple[str, ...],
    since: datetime | None,
    form: str,
    url: str,
    tenant: str,
    as_json: bool,
) -> None:
    """What jobs used: device-seconds, sessions, storage, requests, records and steps; and its price, where there are prices.

    What nobody's job asked for is the tenant `provider`'s, by what it was: idle, loading, canary, repeated.
    """
    from nexus_bus import pricing
    from nexus_bus.ledger import GAUGE, Ledger

    prices = pricing.load()
    start = since.replace(tzinfo=UTC) if since is not None else None
    ledger = Ledger(by, start, prices=prices)
    async with connect(url, tenant) as client:
        begin = start - GAUGE if start is not None else None
        if everybody:
            provider_only(client, "--all")
            async for item in client.bus.tail("usage", since=begin or "all", follow=False, job=job or "*"):
                ledger.take(item.message)
        else:
            async for record in client.usage(job or "", since=begin):
                ledger.take(record)
    if not (rows := ledger.rows()) and not everybody:
        _whose(client)
    if as_json or form == "json":
        print_json(rows)
    elif form == "csv":
        _csv(rows, by, prices is not None)
    else:
        _table(rows, by, prices)


def _whose(client: Any) -> None:
    """Nothing was found of one tenant, and the provider may have meant another."""
    if client.bus.tenant is None:
        click.echo(f"this is of {client.tenant!r} alone; --tenant NAME is of another, --all of everybody", err=True)


def _csv(rows: list[dict[str, Any]], by: tuple[str, ...], priced: bool) -> None:
    fields = [*by, *NUMBERS, "simulator_s", "group_sum", *(("cost", "currency") if priced else ())]
    writer = csv.DictWriter(sys.stdout, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _table(rows: list[dict[str, Any]], by: tuple[str, ...], prices: Any) -> None:
    from nexus_bus.cli.show import listing

    titles = [*(title for title, _ in NUMBERS.values()), "mean group", *((prices.currency,) if prices else ())]
    table = listing(*by, *titles, right=titles)
    for row in rows:
        grouped = row["requests"] + row["records"]
        numbers = [format(row[name], form) if row[name] else "" for name, (_, form) in NUMBERS.items()]
        mean = f"{row['group_sum'] / grouped:.1f}" if grouped and row["group_sum"] else ""
        money = [f"{row['cost']:,.4f}"] if prices else []
        table.add_row(*(row[name] for name in by), *numbers, mean, *money)
    if prices and len(rows) > 1:
        table.add_row(*("total", *[""] * (len(by) - 1)), *[""] * (len(NUMBERS) + 1), f"{sum(row['cost'] for row in rows):,.4f}")
    console().print(table if rows else "nothing was used yet")


@click.command("audit")
@all_option
@click.option("--job", help="Of one job alone.")
@since_option
@bus_options
@json_option
@asynchronous
async def audit_command(everybody: bool, job: str | None, since: datetime | None, url: str, tenant: str, as_json: bool) -> None:
    """What was asked for on behalf of a tenant and by which key, what came of it and why; oldest first.

    What concerns no tenant, as `nexus scale`, stands under the tenant `provider`.
    """
    start = since.replace(tzinfo=UTC) if since is not None else None
    async with connect(url, tenant) as client:
        if everybody:
            provider_only(client, "--all")
            items = client.bus.tail("audit", since=start or "all", follow=False)
            found = [item.message async for item in items]
        else:
            found = [entry async for entry in client.audit(since=start)]
    if not found and not everybody:
        _whose(client)
    entries = [entry for entry in found if job is None or entry.job == job]
    if as_json:
        print_json(entries)
        return
    from nexus_bus.cli.show import listing

    table = listing("time", "tenant", "key", "job", "action", "outcome", "detail")
    for entry in entries:
        key = f"{entry.key[:8]}…" if entry.key else ""
        table.add_row(entry.time[:19], entry.tenant, key, entry.job, entry.action, entry.outcome, entry.detail)
    console().print(table if entries else "nothing was decided yet")
