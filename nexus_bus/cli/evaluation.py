"""`nexus eval`, `report`, `compare`: scores, what is behind them, and which of two is better."""

from pathlib import Path
from typing import Any

import click
import msgspec

from nexus_bus.cli.jobs import answer, ended, wait_option
from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option, pairs, print_json
from nexus_bus.errors import BadJob

EPISODES, SEED = 60, 10_000


@click.command("eval")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--policy", metavar="JOB@N", help="The version; `@latest` is the newest.")
@click.option(
    "--protocol",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Tasks, trials, seeds and rules, as a file.",
)
@click.option("--env", "environment", metavar="ID:TASK", help="Environment and task.  [default: those the job trained in]")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="Environment option, with --env.")
@click.option(
    "--episodes",
    type=click.IntRange(1),
    help="How many of each task.",
    show_default=f"{EPISODES}, or as many as a task has recorded starts",
)
@click.option("--seed", type=click.IntRange(0), help="Trial i runs with seed + i.", show_default=str(SEED))
@click.option("--name", help="Name of the evaluation job.  [default: from policy and protocol]")
@bus_options
@wait_option
@json_option
@asynchronous
async def eval_command(
    file: Path | None,
    policy: str | None,
    protocol: Path | None,
    environment: str | None,
    options: tuple[str, ...],
    url: str,
    tenant: str,
    wait: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Evaluate one policy version: --policy with --protocol or with flags, or an eval document in FILE.

    The same again goes on with what is missing: an evaluation that rests, was cancelled or failed keeps its episodes.
    """
    name: str | None = given.pop("name")
    flags = {key: value for key, value in given.items() if value is not None}
    if (file is not None and (policy or protocol)) or not (file or policy or protocol):
        raise click.UsageError("give either --policy JOB@N or an eval document, e.g. `nexus eval --policy pick@3`")
    if protocol is not None and (environment or options or flags):
        raise click.UsageError("--protocol says it all; leave out --env, --option, --episodes and --seed, or change the file")
    async with connect(url, tenant) as client:
        if file is not None:
            from nexus_bus.documents import job_spec

            spec = job_spec(file)
            if spec.kind != "eval":
                raise BadJob(f"kind: {file} is a {spec.kind} job; `nexus submit` sends those")
            return await answer(client, await client.submit(spec), wait, as_json)
        if protocol is not None:
            ref, where, evaluation = _by_protocol(protocol, policy)
            ref = await _pinned(client, ref)
        else:
            from nexus_bus.evaluation.protocol import default_of

            ref = policy or ""
            where = await _environment(client, ref, environment, options)
            evaluation = msgspec.structs.replace(default_of(where), **flags)
        return await _evaluate(client, ref, where, evaluation, name, wait, as_json)


def _by_protocol(file: Path, policy: str | None) -> tuple[str, Any, Any]:
    """Policy, environment and evaluation that a protocol means."""
    from nexus_bus import documents
    from nexus_bus.errors import Refused
    from nexus_bus.evaluation.protocol import parts

    protocol = documents.protocol(file)
    ref = policy or protocol.policy
    if ref is None:
        raise click.UsageError(f"{file} names no policy: give --policy JOB@N")
    try:
        return ref, *parts(protocol)
    except Refused as error:
        raise documents.located(file, error) from error


async def _pinned(client: Any, ref: str) -> str:
    """`@latest` as a number, unless the job still makes versions: then the evaluation waits for its last one."""
    from schemas.plan import TERMINAL

    if not ref.endswith("@latest"):
        return ref
    state = await client.job(ref.partition("@")[0])
    return ref if state is not None and state.phase not in TERMINAL else (await client.policy(ref)).id


async def _evaluate(client: Any, policy: str, where: Any, evaluation: Any, name: str | None, wait: bool, as_json: bool) -> int:
    """Begin an evaluation, or go on with the same one."""
    from nexus_bus.client.client import evaluation_name
    from schemas.plan import TERMINAL

    name = name or evaluation_name(policy, where, evaluation)
    state = await client.job(name)
    if state is None:
        submission = await client.evaluate(policy, where, evaluation=evaluation, name=name)
        return await answer(client, submission, wait, as_json)
    from nexus_bus.evaluation.protocol import departures

    if other := departures(state.plan, policy, where, evaluation):
        raise BadJob(f"name: a job {name!r} exists, and it is not the one asked for: {'; '.join(other)}; choose another --name")
    said = f"is {state.phase}"
    if state.phase in ("failed", "cancelled") or (state.phase == "paused" and not state.limit):
        said = await client.resume(name)
    elif wait and state.phase not in TERMINAL:
        said = "goes on"
    if wait:
        return await ended(client, name, as_json)
    if as_json:
        print_json({"job": name, "submission": state.submission, "message": said})
    else:
        there = evaluation.total if state.phase == "completed" else len(state.finished_episodes)
        click.echo(f"{name}: {said}, {there} of {evaluation.total} episodes are there")
        click.echo(f"`nexus report {name}` shows them", err=True)
    return 0


async def _environment(client: Any, policy: str, environment: str | None, options: tuple[str, ...]) -> Any:
    """The environment asked for, or the one the policy's job trained in."""
    from schemas.job import EnvironmentSpec

    if environment is None:
        if options:
            raise click.UsageError("--option needs --env")
        state = await client.job(policy.partition("@")[0])
        if state is None or state.plan.spec.environment is None:
            raise BadJob(f"environment: the job of {policy!r} names none; give --env ID:TASK (`nexus catalog` lists them)")
        return state.plan.spec.environment
    name, _, task = environment.partition(":")
    return EnvironmentSpec(id=name, task=task, options={key: _scalar(text) for key, text in pairs(options, "--option").items()})


def _scalar(text: str) -> str | int | float | bool:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, int | float | bool) else text


@click.command("report")
@click.argument("job")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write report.html, manifest.json, episodes and films there.",
)
@bus_options
@json_option
@asynchronous
async def report_command(job: str, out: Path | None, url: str, tenant: str, as_json: bool) -> None:
    """What a job's evaluations gave: success by task with intervals, returns, where time went; with --out a page with films."""
    async with connect(url, tenant) as client:
        made, episodes = await client.reported(job)
        films = {}
        for name in dict.fromkeys(one.film for one in episodes if one.film) if out is not None else ():
            if (film := await client.film(job, name)) is not None:
                films[name] = film
    if out is not None:
        from nexus_bus.evaluation.files import write

        files = write(out, made, episodes, films)
        if not as_json:
            click.echo(f"{files[0]}: {len(episodes)} episodes, {len(films)} films")
    if as_json:
        print_json(made)
    elif out is None:
        from nexus_bus.cli.show_scores import report_view

        console().print(report_view(made))


@click.command("compare")
@click.argument("a")
@click.argument("b", required=False)
@bus_options
@json_option
@asynchronous
async def compare_command(a: str, b: str | None, url: str, tenant: str, as_json: bool) -> None:
    """B against A, trial by trial. Each is JOB, JOB:before, JOB:after or a JOB@N; without B: before and after of A."""
    async with connect(url, tenant) as client:
        made = await client.compare(a, b)
    if as_json:
        print_json(made)
        return
    from nexus_bus.cli.show_scores import comparison_view

    console().print(comparison_view(made))
