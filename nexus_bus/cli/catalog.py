"""`nexus catalog`: what a job may name."""

from typing import Any

import click

from nexus_bus.cli.options import console, json_option, print_json


@click.command("catalog")
@click.argument("name", required=False)
@json_option
def catalog_command(name: str | None, as_json: bool) -> None:
    """Heads, environments, tasks and options that a job document may name; NAME shows one of them whole."""
    from nexus_bus.envs.catalog import ENVIRONMENTS
    from nexus_bus.models.catalog import HEADS, SHIPPED

    found: dict[str, dict[str, Any]] = {
        "base": {key: {"path": str(path)} for key, path in SHIPPED.items()},
        "head": {
            key: {"summary": head.summary, "rl": head.rl, "tiers": head.tiers, "options": _options(head.options)}
            for key, head in HEADS.items()
        },
        "environment": {
            key: {
                "summary": env.summary,
                "tasks": dict(env.tasks),
                "options": _options(env.options),
                "expert": env.expert,
                "gl": env.gl,
            }
            for key, env in ENVIRONMENTS.items()
        },
    }
    if name is not None:
        found = {kind: {name: entries[name]} for kind, entries in found.items() if name in entries}
        if not found:
            from nexus_bus.errors import NotFound

            raise NotFound(f"{name!r} is neither a base, a head nor an environment; `nexus catalog` lists them")
    if as_json:
        print_json(found)
        return
    from rich.text import Text

    out = console()
    for kind, entries in found.items():
        for key, entry in entries.items():
            out.print(Text(f"{kind} ").append(key, style="bold").append(f"  {entry.get('summary', entry.get('path', ''))}"))
            if kind == "head":
                out.print(Text(f"    {'SFT and RL' if entry['rl'] else 'SFT only'}; tier {', '.join(entry['tiers'])}"))
            for task, sentences in entry.get("tasks", {}).items():
                out.print(Text(f"    task {task}: “{'”, “'.join(sentences)}”"))
            for option, (default, meaning) in entry.get("options", {}).items():
                out.print(Text(f"    {option} = {default!r}  ").append(meaning, style="dim"))


def _options(options: Any) -> dict[str, tuple[Any, str]]:
    return {name: (option.default, option.meaning) for name, option in options.items()}
