"""`nexus watch`: jobs as they run."""

import asyncio
from datetime import UTC, datetime

import click
import msgspec

from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option
from nexus_bus.cli.usage import since_option
from nexus_bus.errors import BadJob, NotFound

EVERY_S = 0.5


@click.command("watch")
@click.argument("job", required=False)
@since_option
@bus_options
@json_option
@asynchronous
async def watch_command(job: str | None, since: datetime | None, url: str, tenant: str, as_json: bool) -> int:
    """Follow JOB until it has ended (exit code 1 if it did not complete), or all jobs until Ctrl-C.

    At a terminal it is a live picture, in a pipe one line per event; with --json one event per line, from the job's beginning.
    What happened to workers are events of the tenant `provider`.
    """
    async with connect(url, tenant) as client:
        if since is not None and (job is not None or not as_json):
            raise BadJob("--since: goes with --json and without JOB, whose events are all shown")
        if job is not None and await client.job(job) is None:
            raise NotFound(f"job: {tenant} has no job {job!r}; `nexus jobs` lists them")
        if as_json:
            if job is not None:
                async for event in client.watch(job):
                    click.echo(msgspec.json.encode(event).decode())
            else:
                start = since.replace(tzinfo=UTC) if since is not None else datetime.now(UTC)
                async for event in client.events(since=start):
                    click.echo(msgspec.json.encode(event).decode())
        else:
            from nexus_bus.cli.board import Board

            board = Board([client], job)
            with board.live(console()):
                while job is None or not board.ended:
                    await board.refresh()
                    await asyncio.sleep(EVERY_S)
                await board.refresh()
        if job is None:
            return 0
        state = await client.job(job)
        return 0 if state is not None and state.phase == "completed" else 1
