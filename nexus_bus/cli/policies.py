"""`nexus policies`: what was learned."""

from pathlib import Path

import click

from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option, print_json


@click.command("policies")
@click.argument("job", required=False)
@click.option(
    "--download", "directory", type=click.Path(file_okay=False, path_type=Path), help="Write one version (JOB@N) here."
)
@bus_options
@json_option
@asynchronous
async def policies_command(job: str | None, directory: Path | None, url: str, tenant: str, as_json: bool) -> None:
    """List policy versions, of JOB or of all jobs; or leave with one: `nexus policies pick@3 --download DIR`."""
    if directory is not None and "@" not in (job or ""):
        raise click.UsageError("--download needs one version, e.g. `nexus policies pick@3 --download DIR`")
    async with connect(url, tenant) as client:
        if directory is not None:
            for path in await client.download(job, directory):
                click.echo(str(path))
            return
        versions = [await client.policy(job)] if job and "@" in job else await client.policies(job)
    if as_json:
        print_json(versions)
        return
    from nexus_bus.cli.show import policies_table

    console().print(policies_table(versions) if versions else f"{tenant} has no policies")
