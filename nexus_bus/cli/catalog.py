"""`nexus catalog`: what a job may name."""

from typing import Any

import click

from nexus_bus.cli.options import console, json_option, print_json
from nexus_bus.errors import NotFound


@click.command("catalog")
@click.argument("name", required=False)
@json_option
def catalog_command(name: str | None, as_json: bool) -> None:
    """Bases, heads, environments, tasks and options that a job document may name; NAME shows one of them whole.

    NAME may be a checkpoint's directory or hub id, too: what a plan would find there.
    """
    from nexus_bus.envs.catalog import ENVIRONMENTS
    from nexus_bus.models.bases import SHIPPED

    found: dict[str, dict[str, Any]] = {
        "base": {key: _base(key) for key in SHIPPED},
        "family": _families(),
        "head": _heads(name),
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
        found = {kind: {name: entries[name]} for kind, entries in found.items() if name in entries} or _elsewhere(name)
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


def _heads(name: str | None) -> dict[str, dict[str, Any]]:
    """Shipped heads whole; installed ones by name, for only the one that is asked for is imported."""
    from nexus_bus.models.catalog import HEADS, head_entry, installed

    points = installed()
    whole = HEADS if name not in points else {**HEADS, name: head_entry(name)}
    found: dict[str, dict[str, Any]] = {
        key: {"summary": head.summary, "rl": head.rl, "tiers": head.tiers, "options": _options(head.options)}
        for key, head in whole.items()
    }
    for key, point in points.items():
        found.setdefault(key, {"summary": f"installed: {point.value}; `nexus catalog {key}` shows its options"})
    return found


def _base(name: str) -> dict[str, Any]:
    """A backbone, with what a plan checks of it."""
    from nexus_bus.models.bases import describe_backbone

    info = describe_backbone(name)
    return {
        "summary": f"a {info.model_type}, {info.hidden} wide, {info.layers} layers; {info.tokens_per_view} tokens a view of "
        f"{info.image_size} pixels, {info.max_tokens} a prompt, {info.query_tokens} of them queries",
        "model_type": info.model_type,
        "hidden": info.hidden,
        "layers": info.layers,
        "image_size": info.image_size,
        "image_step": info.image_step,
        "tokens_per_view": info.tokens_per_view,
        "max_tokens": info.max_tokens,
        "query_tokens": info.query_tokens,
        "tiers": info.tiers,
        "suffixes": info.suffixes,
        "path": str(info.path),
    }


def _elsewhere(name: str) -> dict[str, dict[str, Any]]:
    """A base that does not ship."""
    try:
        return {"base": {name: _base(name)}}
    except NotFound as error:
        raise NotFound(f"{name!r} is neither a head nor an environment, and as a base: {error}") from None


def _families() -> dict[str, dict[str, Any]]:
    """Kinds of checkpoints that a directory or a hub id may hold."""
    from nexus_bus.models.bases import KINDS, PAIR, PAIR_TEXTS, PAIR_VISIONS

    pair = f"a nexus.json that names a vision encoder ({', '.join(PAIR_VISIONS)}) and a text encoder ({', '.join(PAIR_TEXTS)})"
    tiers = "tier frozen, lora"
    return {
        **{
            key: {"summary": f"{tiers}; heads may append tokens" if kind.suffixes else tiers, "suffixes": kind.suffixes}
            for key, kind in KINDS.items()
        },
        PAIR: {"summary": f"{pair}; tier frozen", "suffixes": False},
    }


def _options(options: Any) -> dict[str, tuple[Any, str]]:
    return {name: (option.default, option.meaning) for name, option in options.items()}
