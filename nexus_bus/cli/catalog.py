"""`nexus catalog`: what a job may name."""

import asyncio
import os
from typing import Any

import click

from nexus_bus import config
from nexus_bus.cli.options import bus_options, connect, console, json_option, print_json
from nexus_bus.errors import NexusError


@click.command("catalog")
@click.argument("name", required=False)
@bus_options
@json_option
def catalog_command(name: str | None, url: str, tenant: str, as_json: bool) -> None:
    """Bases, heads, environments, tasks and options that a job document may name; NAME shows one of them whole.

    Where a service is known, its tenant's own environments and datasets too. NAME may be a checkpoint's directory or hub id:
    what a plan would find there.
    """
    from nexus_bus.client.catalog import elsewhere, shipped

    found = shipped(name)
    if name is None or not any(name in entries for entries in found.values()):
        for kind, entries in _own(url, tenant).items():
            found[kind] = found.get(kind, {}) | entries
    if name is not None:
        found = {kind: {name: entries[name]} for kind, entries in found.items() if name in entries} or elsewhere(name)
    if as_json:
        print_json(found)
        return
    from rich.text import Text

    out = console()
    for kind, entries in found.items():
        for key, entry in entries.items():
            out.print(Text(f"{kind} ").append(key, style="bold").append(f"  {entry.get('summary', entry.get('path', ''))}"))
            if "rl" in entry:
                out.print(Text(f"    {'SFT and RL' if entry['rl'] else 'SFT only'}; tier {', '.join(entry['tiers'])}"))
            if kind == "base":
                out.print(Text(f"    {entry['path']}", style="dim"))
                appended = "heads may append tokens" if entry["suffixes"] else "heads may not append tokens"
                out.print(Text(f"    tier {', '.join(entry['tiers'])}; {appended}"))
            for task, sentences in entry.get("tasks", {}).items():
                out.print(Text(f"    task {task}: “{'”, “'.join(sentences)}”"))
            for option, (default, meaning) in entry.get("options", {}).items():
                out.print(Text(f"    {option} = {default!r}  ").append(meaning, style="dim"))
            for feature, shape in entry.get("features", {}).items():
                out.print(Text(f"    {feature}  ").append("×".join(map(str, shape)), style="dim"))


def _own(url: str, tenant: str) -> dict[str, dict[str, Any]]:
    """What is the tenant's alone; nothing, and no word about it, where no service is known."""
    if url == config.FALLBACK and not {"NEXUS_URL", config.CREDS} & os.environ.keys() and not config.started():
        return {}
    from nexus_bus import logs
    from nexus_bus.client.catalog import dataset, own_environment

    found: dict[str, dict[str, Any]] = {"environment": {}, "dataset": {}}

    async def ask() -> None:
        async with connect(url, tenant) as client:
            found["environment"] = {one.environment: own_environment(one) for one in await client.own_environments()}
            found["dataset"] = {one.dataset: dataset(one) for one in await client.datasets()}

    logs.start("cli", "nexus", "error")
    try:
        asyncio.run(ask())
    except NexusError as error:
        click.echo(f"what is your own is not all listed: {error}", err=True)
    return found
