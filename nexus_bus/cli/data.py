"""`nexus data`: look at datasets, check, convert and record them, on this machine. A server is asked only for a policy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from nexus_bus.cli import findings
from nexus_bus.cli.datasets import COMMANDS
from nexus_bus.cli.options import CONNECT_S, Group, bus_options, console, json_option, pairs, print_json
from nexus_bus.errors import NotFound, Refused

Tell = Callable[[int, int], None]
DIRECTORY = click.Path(path_type=Path)
replace_option = click.option("--replace", is_flag=True, help="TARGET is a dataset already: put this one in its place.")


@click.group("data", cls=Group)
def data_command() -> None:
    """Datasets: LeRobot v2.0, v2.1 and v3.0, and LIBERO's HDF5 demonstrations."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise NotFound("pyarrow is not installed here: pip install 'nexus-bus[data]'") from error


for _command in COMMANDS:  # what a service is asked for
    data_command.add_command(_command)


@data_command.command("inspect")
@click.argument("dataset", type=DIRECTORY)
@json_option
def data_inspect(dataset: Path, as_json: bool) -> None:
    """Features, episodes, cameras, sizes and tasks of DATASET, a directory."""
    from nexus_bus.data.layout import IMAGES
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
    cameras = {key if "." in key else IMAGES + key: feature for key, feature in found.cameras.items()}
    for key, feature in (found.features | cameras).items():
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
        from nexus_bus.data.check import counted

        out = console()
        findings.tell(report, out, "error", "warning", "notice")
        held = f"{counted(report.episodes, 'episode')}, {counted(report.frames, 'frame')}"
        looked = f"{counted(report.pictures, 'picture')} looked at"
        out.print(f"{report.dataset}: {held}, {looked}: {findings.count(report)}", markup=False, soft_wrap=True)
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
@click.argument("environment", nargs=-1, metavar="[ENVIRONMENT]")
@click.argument("target", type=DIRECTORY)
@click.option("--env", "given", metavar="ENVIRONMENT", help="The same as the argument.")
@click.option("--task", required=True, help="A task of that environment; `nexus catalog` lists them.")
@click.option("--policy", metavar="JOB@N", help="Let this version of the service play; default: the scripted expert, here.")
@click.option("--episodes", type=click.IntRange(1), default=50, show_default=True, help="Episodes to keep.")
@click.option("--keep", type=click.Choice(["successes", "all"]), default="successes", show_default=True, help="Which.")
@click.option("--seed", type=click.IntRange(0, 2**53), default=0, show_default=True,
              help="The same seed records the same bytes, where the simulator repeats itself.")  # fmt: skip
@click.option("--noise", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Of the expert: standard deviation added to what is executed, not to what is recorded.")  # fmt: skip
@click.option("--execute", type=click.IntRange(1), show_default="all",
              help="Of a policy: actions of a chunk that are executed before it is asked again.")  # fmt: skip
@click.option("--sample", is_flag=True, help="Of a policy: draw actions instead of taking the likeliest.")
@click.option("--option", "-o", "options", multiple=True, metavar="KEY=VALUE", help="An option of the environment.")
@click.option("--pictures", type=click.Choice(["image", "video"]), default="image", show_default=True,
              help="image: exact; video: small.")  # fmt: skip
@click.option("--fps", type=click.IntRange(1, 1000), show_default="the environment's, 10 of your own",
              help="Frames a second.")  # fmt: skip
@replace_option
@bus_options
@json_option
def data_record(  # noqa: PLR0913 - an option each
    *, environment: tuple[str, ...], target: Path, given: str | None, task: str, policy: str | None, episodes: int, keep: Any,
    seed: int, noise: float, execute: int | None, sample: bool, options: tuple[str, ...], pictures: str, fps: int | None,
    replace: bool, url: str, tenant: str, as_json: bool,
) -> None:  # fmt: skip
    """Record episodes of ENVIRONMENT into a LeRobot v3.0 dataset at TARGET.

    The scripted expert plays on this machine, and no server is asked. A policy plays in a session of the service, which may be
    a simulator or robot of your own (`own`, `own-NAME`); the dataset is written here.
    """
    import yaml

    from schemas.job import EnvironmentSpec, ExpertSpec

    named = (*environment, *filter(None, [given]))
    if len(named) != 1:
        raise click.UsageError(f"name one environment, by ENVIRONMENT or --env; {len(named)} are named")
    for flag, value, wanted in (("--noise", noise, not policy), ("--execute", execute, policy), ("--sample", sample, policy)):
        if value and not wanted:
            whose = "the expert; leave it or --policy out" if policy else "a policy; name one by --policy"
            raise click.UsageError(f"{flag} is of {whose}")
    _free(target, replace)
    values = {key: yaml.safe_load(value) for key, value in pairs(options, "--option").items()}
    spec = EnvironmentSpec(id=named[0], task=task, options=values, execute=execute)
    with _progress("recording") as tell:
        how: dict[str, Any] = {
            "keep": keep, "pictures": pictures, "fps": fps, "progress": lambda kept, _: tell(kept, episodes)
        }  # fmt: skip
        if policy is not None:
            info = _record_policy(url, tenant, policy, spec, target, episodes=episodes, seed=seed, greedy=not sample, **how)
        else:
            from nexus_bus.data.record import record_expert

            info = record_expert(spec, ExpertSpec(episodes=episodes, seed=seed, noise=noise), target, **how)
    if as_json:
        print_json(info)
    else:
        click.echo(
            f"{target}: {info.episodes} episodes, {info.frames} frames, {info.success:.0%} of {info.attempts} tries succeeded"
        )


def _record_policy(url: str, tenant: str, *what: Any, **how: Any) -> Any:
    from nexus_bus import logs
    from nexus_bus.client.recording import record_policy
    from nexus_bus.client.sync import Client

    logs.start("cli", "nexus", "error")
    with Client(url, tenant, timeout=CONNECT_S) as client:
        return record_policy(client, *what, tell=lambda text: click.echo(text, err=True), **how)


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
