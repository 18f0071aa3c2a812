"""`nexus export` and `nexus import`: a tenant leaves with a policy, or comes with one."""

from pathlib import Path

import click

from nexus_bus.cli.options import asynchronous, bus_options, connect, json_option, print_json

directory_argument = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


@click.command("export")
@click.argument("policy", metavar="JOB@N")
@directory_argument
@click.option("--training-state", is_flag=True, help="Also optimizer, generator and cursor; only the newest version has them.")
@click.option("--force", is_flag=True, help="DIR may hold something; an export there is replaced, other files stay.")
@bus_options
@json_option
@asynchronous
async def export_command(
    policy: str, directory: Path, training_state: bool, force: bool, url: str, tenant: str, as_json: bool
) -> None:
    """Write a policy version into DIR, as safetensors and JSON in the layout that peft and LeRobot users know."""
    async with connect(url, tenant) as client:
        paths = await client.export(policy, directory, training_state=training_state, force=force)
    if as_json:
        print_json([str(path) for path in paths])
        return
    for path in paths:
        click.echo(str(path))


@click.command("import")
@directory_argument
@click.option("--name", metavar="JOB", help="Register it as JOB@0.  [default: the job it was exported from]")
@bus_options
@json_option
@asynchronous
async def import_command(directory: Path, name: str | None, url: str, tenant: str, as_json: bool) -> None:
    """Register an exported policy as JOB@0; a job may then start from it with `init = "JOB@0"`."""
    async with connect(url, tenant) as client:
        imported = await client.import_policy(directory, name=name)
    if as_json:
        print_json({"policy": imported.policy, "message": imported.message})
    else:
        click.echo(imported.message)
