"""`nexus trace`, `dead`, `config`: for whoever runs the service, or wonders what happened."""

import uuid
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from nexus_bus import config
from nexus_bus.cli.options import Group, asynchronous, bus_options, connect, console, json_option, print_json, provider_only
from nexus_bus.errors import NotFound

TRACES = 20  # listed


@click.command("trace")
@click.argument("trace", required=False, metavar="[ID]")
@bus_options
@json_option
@asynchronous
async def trace_command(trace: str | None, url: str, tenant: str, as_json: bool) -> None:
    """The waterfall of one trace: ID is a trace id or its beginning, or JOB@N. Without ID: the newest traces."""
    traces: dict[str, list[Any]] = defaultdict(list)
    async with connect(url, tenant) as client:
        provider_only(client, "trace")
        if trace and "@" in trace:
            version = await client.policy(trace)
            trace = version.trace.split("-")[1] if version.trace.count("-") == 3 else ""
            if not trace:
                raise NotFound(f"trace: {version.id} was published without one")
        async for item in client.bus.tail("trace", since="all", follow=False, worker="*"):
            for span in item.message.spans:
                if not trace or span.trace_id.startswith(trace.lower()):
                    traces[span.trace_id].append(span)
    if trace and not traces:
        raise NotFound(f"trace: no span of {trace!r} is kept; `nexus trace` lists the newest")
    if trace and len(traces) > 1:
        raise NotFound(f"trace: {trace!r} begins {len(traces)} traces; give more of the id")
    if trace:
        ((_, spans),) = traces.items()
        if as_json:
            print_json(spans)
            return
        from nexus_bus.waterfall import render

        out = console()
        out.print(render(spans, width=min(out.width, 160)), highlight=False, markup=False, soft_wrap=True)
        return
    _list(traces, as_json)


def _list(traces: dict[str, list[Any]], as_json: bool) -> None:
    newest = sorted(traces.items(), key=lambda pair: -max(span.end_ns for span in pair[1]))[:TRACES]
    rows = []
    for key, spans in newest:
        first, start = min(spans, key=lambda span: span.start_ns), min(span.start_ns for span in spans)
        rows.append(
            {
                "trace": key,
                "began": datetime.fromtimestamp(start / 1e9, UTC).isoformat()[:19],
                "seconds": (max(span.end_ns for span in spans) - start) / 1e9,
                "spans": len(spans),
                "name": first.name,
                "job": f"{first.attributes.get('tenant', '')}/{first.attributes.get('job', '')}".strip("/"),
            }
        )
    if as_json:
        print_json(rows)
        return
    from nexus_bus.cli.show import listing

    table = listing("trace", "began", "seconds", "spans", "begins with", "job", right=("seconds", "spans"))
    for row in rows:
        table.add_row(row["trace"], row["began"], f"{row['seconds']:.3f}", str(row["spans"]), row["name"], row["job"])
    console().print(table if rows else "no traces are kept")


@click.group("dead", cls=Group)
def dead_command() -> None:
    """Messages that were given up, each with the reason and the original."""


async def _letters(client: Any, number: int | None = None) -> list[tuple[int, Any]]:
    provider_only(client, "dead")
    found = [(item.seq, item.message) async for item in client.bus.tail("dead", since="all", follow=False)]
    if number is None:
        return found
    chosen = [pair for pair in found if pair[0] == number]
    if not chosen:
        raise NotFound(f"dead letter {number} does not exist; `nexus dead list` shows what there is")
    return chosen


@dead_command.command("list")
@bus_options
@json_option
@asynchronous
async def dead_list(url: str, tenant: str, as_json: bool) -> None:
    """One line per dead letter, of all tenants."""
    async with connect(url, tenant) as client:
        letters = await _letters(client)
    if as_json:
        print_json([{"number": seq, "subject": x.subject, "reason": x.reason, "time": x.time} for seq, x in letters])
        return
    from nexus_bus.cli.show import listing

    table = listing("number", "time", "subject", "deliveries", "reason", right=("number", "deliveries"))
    for seq, letter in letters:
        table.add_row(str(seq), letter.time[:19], letter.subject, str(letter.deliveries), letter.reason)
    console().print(table if letters else "no dead letters")


@dead_command.command("show")
@click.argument("number", type=int)
@bus_options
@asynchronous
async def dead_show(number: int, url: str, tenant: str) -> None:
    """One dead letter as JSON, with its payload where that can be read."""
    async with connect(url, tenant) as client:
        ((_, letter),) = await _letters(client, number)
    print_json(msgspec.structs.asdict(letter) | {"payload": _readable(letter.payload, letter.headers)})


def _readable(payload: bytes, headers: dict[str, str]) -> Any:
    decode = msgspec.json.decode if "json" in headers.get("Content-Type", "json") else msgspec.msgpack.decode
    try:
        return decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return repr(payload[:2000])


async def _on_record(bus: Any, action: str, number: int, letter: Any) -> None:
    """Note who decides about a dead letter, before it is done: in the log of whom it belongs to, where its subject says so."""
    from nexus_bus.audit import audit
    from nexus_bus.bus.dead import belongs
    from schemas.base import PROVIDER

    tenant, job = belongs(letter)
    detail = f"dead letter {number}, {letter.subject}: {letter.reason}"
    await audit(bus, tenant or PROVIDER, action, job, "asked", detail, key=uuid.uuid4().hex, caller=bus.key)


@dead_command.command("retry")
@click.argument("number", type=int)
@bus_options
@asynchronous
async def dead_retry(number: int, url: str, tenant: str) -> None:
    """Put the original back on its queue; the dead letter stays until it is dropped."""
    from nexus_bus.bus.dead import revive

    async with connect(url, tenant) as client:
        ((seq, letter),) = await _letters(client, number)
        await _on_record(client.bus, "dead.retry", seq, letter)
        await revive(client.bus, letter, seq)
    click.echo(f"{letter.subject}: sent again")


@dead_command.command("drop")
@click.argument("number", type=int)
@bus_options
@asynchronous
async def dead_drop(number: int, url: str, tenant: str) -> None:
    """Forget a dead letter."""
    async with connect(url, tenant) as client:
        ((seq, letter),) = await _letters(client, number)
        await _on_record(client.bus, "dead.drop", seq, letter)
        await client.bus.forget("DEAD", number)
    click.echo(f"dropped {number}")


@click.command("config")
@click.argument("role", type=click.Choice(list(config.ROLES)))
@json_option
def config_command(role: str, as_json: bool) -> None:
    """Settings of a role that are in force here, and where each value comes from."""
    loaded = config.load(role)
    if as_json:
        print_json({"values": loaded.value, "sources": loaded.sources})
        return
    from nexus_bus.cli.show import listing

    table = listing("setting", "value", "from")
    for row in loaded.rows():
        table.add_row(*row)
    console().print(table)
