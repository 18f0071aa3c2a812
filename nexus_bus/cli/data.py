"""`nexus data`: look at datasets, check, convert and record them. All on this machine; no server is asked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from nexus_bus.cli.options import console, json_option, pairs, print_json
from nexus_bus.errors import NotFound, Refused

Tell = Callable[[int, int], None]
DIRECTORY = click.Path(path_type=Path)
replace_option = click.option("--replace", is_flag=True, help="TARGET is a dataset already: put this one in its place.")


@click.group("data")
def data_command() -> None:
    """Datasets: LeRobot v2.0, v2.1 and v3.0, and LIBERO's HDF5 demonstrations."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise NotFound("pyarrow is not installed here: pip install 'nexus-bus[data]'") from error


@data_command.command("inspect")
@click.argument("dataset", type=DIRECTORY)
@json_option
def data_inspect(dataset: Path, as_json: bool) -> None:
    """Features, episodes, cameras, sizes and tasks of DATASET, a directory."""
    from nexus_bus.data.summary import summarize

    found = summarize(dataset)
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(f"{found.dataset}: LeRobot {found.version}, robot {found.robot}, {found.fps:g} frames a second", markup=False)
    out.print(
        f"{found.episodes} episodes of {found.length_min} to {found.length_max} frames, median {found.length_median:g}; "
        f"{found.frames} frames, {found.seconds / 60:.1f} min; {found.files} files, {_bytes(found.bytes)}"
    )
    from rich.table import Table
    from rich.text import Text

    table = Table("feature", "dtype", "shape", "codec", box=None, pad_edge=False)
    for key, feature in (found.features | found.cameras).items():
        shape = "×".join(map(str, feature["shape"]))
        table.add_row(Text(key), Text(feature["dtype"]), shape, Text(feature.get("codec", "")))
    out.print(table)
    table = Table("task", "episodes", box=None, pad_edge=False)
    for task, count in found.tasks.items():
        table.add_row(Text(task), str(count))
    out.print(table)


@data_command.command("check")
@click.argument("dataset", type=DIRECTORY)
@click.option("--pictures", "every", type=click.IntRange(0), default=1, show_default=True,
              help="Look at every so many pictures; 0: at none.")  # fmt: skip
@json_option
@click.pass_context
def data_check(context: click.Context, dataset: Path, every: int, as_json: bool) -> None:
    """Find what is wrong with DATASET, and in which episode and frame. Exit code 1 if there are errors."""
    from nexus_bus.data.check import check

    with _progress("checking") as tell:
        report = check(dataset, every=every, progress=tell)
    if as_json:
        print_json(report)
    else:
        from rich.text import Text

        out = console()
        for finding in report.findings:
            named = (("episode ", finding.episode), ("frame ", finding.frame), ("", finding.key))
            where = ", ".join(f"{name}{value}" for name, value in named if value is not None)
            line = Text(f"{finding.severity} ", style="red" if finding.severity == "error" else "yellow")
            out.print(line.append(f"{finding.code} [{where}] {finding.text}", "default"))
        for code, count in report.more.items():
            out.print(f"… and {count} more of {code}")
        warnings = len(report.findings) - report.errors
        out.print(
            f"{report.dataset}: {report.episodes} episodes, {report.frames} frames, {report.pictures} pictures looked at: "
            f"{report.errors} errors, {warnings} warnings",
            markup=False,
        )
    if report.errors:
        context.exit(1)


@data_command.command("convert")
@click.argument("source", type=DIRECTORY)
@click.argument("target", type=DIRECTORY)
@click.option("--pictures", type=click.Choice(["keep", "image", "video"]), default="keep", show_default=True,
              help="image: exact; video: small; keep: as they are, and image for HDF5.")  # fmt: skip
@click.option("--drop", multiple=True, metavar="FEATURE", help="Leave this feature out; may be repeated.")
@click.option("--turn/--no-turn", default=True, show_default=True, help="Turn HDF5's pictures by 180°, as policies expect.")
@replace_option
@json_option
def data_convert(
    source: Path, target: Path, pictures: Any, drop: tuple[str, ...], turn: bool, replace: bool, as_json: bool
) -> None:
    """Write SOURCE anew as LeRobot v3.0 at TARGET, with statistics computed over all frames.

    SOURCE is a LeRobot dataset of any version, an HDF5 file of demonstrations, or a directory of such files.
    """
    from nexus_bus.data.convert import convert

    _free(target, replace)
    with _progress("converting") as tell:
        info = convert(source, target, pictures=pictures, drop=drop, turn=turn, progress=tell)
    if as_json:
        print_json(info)
    else:
        click.echo(f"{target}: {info.episodes} episodes, {info.frames} frames")


@data_command.command("record")
@click.argument("environment")
@click.argument("target", type=DIRECTORY)
@click.option("--task", required=True, help="A task of that environment; `nexus catalog` lists them.")
@click.option("--episodes", type=click.IntRange(1), default=50, show_default=True, help="Successful episodes to keep.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed records the same bytes.")
@click.option("--noise", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Standard deviation added to what is executed, not to what is recorded.")  # fmt: skip
@click.option("--option", "-o", "options", multiple=True, metavar="KEY=VALUE", help="An option of the environment.")
@click.option("--pictures", type=click.Choice(["image", "video"]), default="image", show_default=True,
              help="image: exact; video: small.")  # fmt: skip
@replace_option
@json_option
def data_record(  # noqa: PLR0913 - an option each
    *, environment: str, target: Path, task: str, episodes: int, seed: int, noise: float, options: tuple[str, ...],
    pictures: str, replace: bool, as_json: bool,
) -> None:  # fmt: skip
    """Record the scripted expert of ENVIRONMENT into a LeRobot v3.0 dataset at TARGET."""
    import yaml

    from nexus_bus.data.record import record_expert
    from schemas.job import EnvironmentSpec, ExpertSpec

    _free(target, replace)
    values = {key: yaml.safe_load(value) for key, value in pairs(options, "--option").items()}
    spec = EnvironmentSpec(id=environment, task=task, options=values)
    with _progress("recording") as tell:
        info = record_expert(
            spec,
            ExpertSpec(episodes=episodes, seed=seed, noise=noise),
            target,
            progress=lambda kept, _: tell(kept, episodes),
            pictures=pictures,
        )
    if as_json:
        print_json(info)
    else:
        click.echo(f"{target}: {info.episodes} episodes, {info.frames} frames, {info.success:.0%} of {info.attempts} tries")


def _free(target: Path, replace: bool) -> None:
    if not replace and (target / "meta/info.json").exists():
        raise Refused(f"{target}: is a dataset already; name another directory, or say --replace")


@contextmanager
def _progress(what: str) -> Iterator[Tell]:
    """A bar on stderr, where somebody watches; stdout is for the result."""
    from rich.console import Console
    from rich.progress import Progress

    err = Console(stderr=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as shown:
        bar = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(bar, completed=done, total=total)


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
