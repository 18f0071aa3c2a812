"""`nexus data push | list | drop`: a tenant's datasets at the service, over its account. Part of `nexus data`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from nexus_bus.cli import findings
from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option, print_json

EVERY = 10  # of a dataset's pictures, looked at before it is sent


@click.command("push")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--name", help="What jobs call it; default: the directory's name.")
@click.option("--replace", is_flag=True, help="A dataset of that name is there: put this one in its place.")
@click.option("--force", is_flag=True, help="Send it, whatever the check finds.")
@bus_options
@json_option
@asynchronous
async def data_push(
    directory: Path, name: str | None, replace: bool, force: bool, url: str, tenant: str, as_json: bool
) -> None:
    """Bring DIRECTORY, a LeRobot dataset, to the service. The same command again goes on where it was.

    It is checked here before it is sent, as `nexus data check` does but for nine of ten pictures; errors refuse it. Jobs then
    read it by `data = { dataset = "NAME" }`. It counts into what you keep.
    """
    _check(directory, force)
    async with connect(url, tenant) as client:
        with _progress() as tell:
            pushed = await client.push_dataset(directory, name=name, replace=replace, progress=tell)
    if as_json:
        print_json(pushed)
    else:
        click.echo(
            f"{pushed.dataset}: {pushed.episodes} episodes, {pushed.frames} frames, {pushed.files} files, {_mb(pushed.bytes)}; "
            f'jobs read it by data = {{ dataset = "{pushed.dataset}" }}'
        )


@click.command("list")
@bus_options
@json_option
@asynchronous
async def data_list(url: str, tenant: str, as_json: bool) -> None:
    """Datasets at the service that your jobs can name, and pushes that are not at their end."""
    async with connect(url, tenant) as client:
        found, unfinished = await client.datasets(), await client.unfinished_datasets()
    if as_json:
        print_json({"datasets": found, "unfinished": unfinished})
        return
    from rich.table import Table
    from rich.text import Text

    out = console()
    if not found and not unfinished:
        out.print(f"{tenant} has no datasets; `nexus data push DIR` brings one")
        return
    table = Table("dataset", "episodes", "frames", "size", "since", box=None, pad_edge=False)
    for one in found:
        table.add_row(Text(one.dataset), str(one.episodes), str(one.frames), _mb(one.bytes), one.time[:16].replace("T", " "))
    for one in unfinished:
        sent = f"{_mb(one.sent)} of {_mb(one.bytes)}"
        table.add_row(Text(f"{one.dataset} (unfinished)"), "", "", sent, one.time[:16].replace("T", " "))
    out.print(table)


@click.command("drop")
@click.argument("name")
@bus_options
@json_option
@asynchronous
async def data_drop(name: str, url: str, tenant: str, as_json: bool) -> None:
    """Take a dataset away from the service, for good; also what was sent of one that is not finished."""
    async with connect(url, tenant) as client:
        size = await client.drop_dataset(name)
    if as_json:
        print_json({"dataset": name, "bytes": size})
    else:
        click.echo(f"{name}: gone, {_mb(size)}")


def _check(directory: Path, force: bool) -> None:
    from rich.console import Console

    from nexus_bus.data.check import check
    from nexus_bus.errors import Refused

    err = Console(stderr=True, highlight=False)
    with _progress() as tell:
        report = check(directory, every=EVERY, progress=lambda done, total: tell("checking", done, total))
    findings.tell(report, err, "error", "warning")
    if report.errors and not force:
        raise Refused(f"{directory}: {findings.count(report)}, so that it was not sent; mend it, or send it by --force")


COMMANDS = (data_push, data_list, data_drop)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, where somebody watches; stdout is for the result."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    err = Console(stderr=True)
    shape = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*shape, console=err, transient=True, disable=not err.is_terminal) as shown:
        bars: dict[str, int] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                for bar in bars.values():
                    shown.remove_task(bar)  # type: ignore[arg-type]  # a TaskID is an int
                bars.clear()
                bars[what] = shown.add_task(what, total=total or None)
            shown.update(bars[what], completed=done, total=total or None)  # type: ignore[arg-type]

        yield tell


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
