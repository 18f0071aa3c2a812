"""`nexus policies`: what was learned, what is kept of it, and where it comes from."""

import click

from nexus_bus.cli.options import Group, asynchronous, bus_options, connect, console, json_option, print_json
from nexus_bus.errors import NexusError


class _ListFirst(Group):
    """Lists when no other command is named: `nexus policies pick` is `nexus policies list pick`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group("policies", cls=_ListFirst)
def policies_command() -> None:
    """Policy versions. `nexus policies [JOB]` lists them; `nexus export JOB@N DIR` leaves with one."""


@policies_command.command("list")
@click.argument("job", required=False)
@bus_options
@json_option
@asynchronous
async def policies_list(job: str | None, url: str, tenant: str, as_json: bool) -> None:
    """List policy versions: of JOB, one JOB@N, or all. The default command."""
    async with connect(url, tenant) as client:
        versions = [await client.policy(job)] if job and "@" in job else await client.policies(job)
        removed = any(one.retired for one in versions) and (await client.account()).phase == "removed"
        if job and not versions and await client.job(job) is None:
            raise NexusError(f"policies: {tenant} has no job {job!r} and no policy of that name; `nexus policies` lists all")
    if as_json:
        print_json(versions)
        return
    from nexus_bus.cli.show import policies_table

    none = f"{job} has published no version yet" if job else f"{tenant} has no policies"
    console().print(policies_table(versions) if versions else none)
    if removed:
        click.echo(f"{tenant} was removed, and the weights of all its versions with it")


@policies_command.command("pin")
@click.argument("policy", metavar="JOB@N")
@bus_options
@json_option
@asynchronous
async def policies_pin(policy: str, url: str, tenant: str, as_json: bool) -> None:
    """Keep a version for good, whatever the retention of its job says."""
    await _pin(policy, True, url, tenant, as_json)


@policies_command.command("unpin")
@click.argument("policy", metavar="JOB@N")
@bus_options
@json_option
@asynchronous
async def policies_unpin(policy: str, url: str, tenant: str, as_json: bool) -> None:
    """Leave a version to the retention of its job again."""
    await _pin(policy, False, url, tenant, as_json)


async def _pin(policy: str, pinned: bool, url: str, tenant: str, as_json: bool) -> None:
    async with connect(url, tenant) as client:
        version = await client.pin(policy, pinned)
    if as_json:
        print_json(version)
    else:
        click.echo(f"{version.id}: {'pinned' if version.pinned else 'not pinned'}")


@policies_command.command("tree")
@click.argument("policy", metavar="JOB@N")
@bus_options
@json_option
@asynchronous
async def policies_tree(policy: str, url: str, tenant: str, as_json: bool) -> None:
    """Where a version comes from: its ancestors to the root, over all jobs. --json lists every one."""
    async with connect(url, tenant) as client:
        versions = await client.lineage(policy)
    if as_json:
        print_json(versions)
        return
    from nexus_bus.cli.show import lineage_table

    console().print(lineage_table(versions))
