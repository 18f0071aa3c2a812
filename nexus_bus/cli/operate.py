"""`nexus trace`, `config`: for whoever runs the service, or wonders what happened."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import click

from nexus_bus import config
from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option, print_json, provider_only
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
