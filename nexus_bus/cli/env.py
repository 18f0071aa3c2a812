"""`nexus env`: simulators whose packages clash with ours, each in a virtual environment of its own."""

from typing import Any

import click

from nexus_bus.cli.options import Group, console, json_option, print_json
from nexus_bus.errors import BadJob, EnvironmentFault


@click.group("env", cls=Group)
def env_command() -> None:
    """Simulators with packages of their own: each is installed once, and its sessions run there."""


@env_command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """Which there are, which are installed, and which environments a job may name for each."""
    from nexus_bus.envs.recipes import RECIPES, interpreter, missing, place

    rows: dict[str, dict[str, Any]] = {}
    for name, recipe in RECIPES.items():
        state = "absent" if interpreter(name) is None else "incomplete" if missing(name) else "installed"
        rows[name] = {
            "state": state, "place": str(place(name)), "megabytes": recipe.megabytes, "environments": _served(name),
            "pins": list(recipe.pins), "note": recipe.note,
        }  # fmt: skip
    if as_json:
        print_json(rows)
        return
    from rich.text import Text

    out = console()
    for name, row in rows.items():
        style = {"installed": "green", "absent": "dim", "incomplete": "red"}[row["state"]]
        line = Text(f"{name:<11}", style="bold").append(f"{row['state']:<11}", style=style)
        out.print(line.append(f"{row['megabytes']:>5} MB  {', '.join(row['environments'])}", style="not bold"), soft_wrap=True)
        if row["note"]:
            out.print(Text(f"           {row['note']}", style="dim"), soft_wrap=True)


@env_command.command("install")
@click.argument("name")
def install_command(name: str) -> None:
    """Make the virtual environment of NAME with exactly the versions that were seen working."""
    from nexus_bus.envs.recipes import check, install

    install(name, click.echo)
    wrong = check(name)
    if wrong:
        raise EnvironmentFault(f"{name}: the packages are there, but it cannot run here yet: {wrong}")
    click.echo(f"{name} can be used: {', '.join(_served(name))}")


@env_command.command("check")
@click.argument("name")
@click.option("--task", help="A task of the environment.  [default: its first]")
@click.option(
    "--resets",
    type=click.IntRange(0, 100_000),
    default=0,
    show_default=True,
    help="Also look for what so many resets leave behind, e.g. 200.",
)
def check_command(name: str, task: str | None, resets: int) -> int:
    """Run the conformance check on an environment, or on MODULE:CALLABLE of your own; 1 if it finds something.

    NAME is one of `nexus env list`, or an environment of `nexus catalog`.
    """
    from nexus_bus.envs import recipes
    from nexus_bus.envs.catalog import ENVIRONMENTS, entry_of
    from schemas.job import EnvironmentSpec

    if ":" in name:
        return _tell(name, recipes.conformance("", name, task or "", resets=resets), resets)
    environments = _served(name) if name in recipes.RECIPES else [name]
    found: list[str] = []
    for environment in environments:
        venv = ENVIRONMENTS[environment].venv if environment in ENVIRONMENTS else ""
        if venv and (wrong := recipes.check(venv)):
            raise EnvironmentFault(f"{venv}: {wrong}")
        tasks = ENVIRONMENTS[environment].tasks if environment in ENVIRONMENTS else {}
        chosen = task or next(iter(tasks), "")
        entry_of(EnvironmentSpec(id=environment, task=chosen))
        if not chosen:
            raise BadJob(f"--task: {environment} has no first task; name one")
        found += [f"{environment} {chosen}: {one}" for one in recipes.conformance(venv, environment, chosen, resets=resets)]
    return _tell(", ".join(environments), found, resets)


def _tell(name: str, found: list[str], resets: int) -> int:
    for finding in found:
        click.echo(finding)
    left_out = "" if resets else "not checked: what resets leave behind (--resets 200)"
    if not found:
        click.echo(f"{name} conforms{left_out and '; '}{left_out}")
    elif left_out:
        click.echo(left_out)
    return 1 if found else 0


def _served(name: str) -> list[str]:
    from nexus_bus.envs.catalog import ENVIRONMENTS

    return [environment for environment, entry in ENVIRONMENTS.items() if entry.venv == name]
