"""`nexus plan`, `submit`, `jobs`, `cancel`, `pause`, `resume`: a tenant's jobs."""

from pathlib import Path
from typing import Any

import click
import msgspec

from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option, print_json
from nexus_bus.errors import BadJob, NexusError, NotFound, Refused

document_argument = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
wait_option = click.option(
    "--wait", is_flag=True, help="Show how far it is, and return at its end; exit code 1 if it did not complete."
)


@click.command("plan")
@document_argument
@bus_options
@json_option
@asynchronous
async def plan_command(file: Path, url: str, tenant: str, as_json: bool) -> None:
    """Compile a job document and print the plan. Nothing is sent.

    A server is asked only about what is there alone: the policy that `init` names, a dataset, an environment of your own.
    """
    from nexus_bus.documents import job_spec, located
    from nexus_bus.envs.offered import is_own
    from nexus_bus.plan import compile_plan

    spec = job_spec(file)
    init, notes, own = None, list[str](), {}
    if spec.environment is not None and is_own(spec.environment.id):
        try:
            async with connect(url, tenant) as client:
                own = await _own(client, spec)
        except Refused as error:
            raise located(file, error) from error
    if spec.init is not None:
        try:
            async with connect(url, tenant) as client:
                init = await _init(client, spec.init)
        except NexusError as error:
            notes.append(f"init was not looked up, so whether it fits is known only when the job is sent: {error}")
    try:
        plan = compile_plan(spec, tenant, init, own=own)
        if note := await _data(url, tenant, plan):
            notes.append(note)
    except Refused as error:
        raise located(file, error) from error
    plan = msgspec.structs.replace(plan, notes=[*plan.notes, *notes])
    if as_json:
        print_json(plan)
        return
    from nexus_bus.cli.show import plan_view

    console().print(plan_view(plan))


async def _data(url: str, tenant: str, plan: Any) -> str:
    """What is not known of the dataset that a job reads. Raises BadJob for one that is not there, or does not fit."""
    if plan.spec.data is None:
        return ""
    from nexus_bus.plan_data import absent, misfit, place, reads

    if not (dataset := reads(plan.spec)):
        return ""
    try:
        async with connect(url, tenant) as client:
            found = await client.dataset(dataset)
            others = [] if found is not None else [one.dataset for one in await client.datasets()]
    except NexusError as error:
        return f"data.dataset was not looked up, so whether it fits is known only when the job is sent: {error}"
    if found is None:
        raise BadJob(absent(dataset, others))
    if wrong := misfit(found, place(plan.spec), plan.action, plan.observation):
        raise BadJob(wrong)
    return ""


async def _own(client: Any, spec: Any) -> Any:
    """The job's own environment with the tasks that it names, as a worker serves it now."""
    from nexus_bus.envs.offered import entries
    from schemas.environment import OwnOffer, OwnTask
    from schemas.job import EnvironmentSpec

    environment: EnvironmentSpec = spec.environment
    named = (spec.evaluation.tasks if spec.evaluation is not None else ()) or (environment.task,)
    found = {task: await client.environment(msgspec.structs.replace(environment, task=task)) for task in named}
    tasks = {
        task: OwnTask(action=one.action, observation=one.observation, max_steps=one.max_steps, instruction=one.instructions[0])
        for task, one in found.items()
    }
    simulator = next(one.simulator for one in found.values())
    return entries([OwnOffer(environment=environment.id, worker="plan", sessions=1, tasks=tasks, simulator=simulator)])


async def _init(client: Any, ref: str) -> Any:
    """The version, or the spec of the job that will make it."""
    try:
        return await client.policy(ref)
    except NotFound:
        parent = await client.job(ref.partition("@")[0])
        if parent is None:
            raise
        return parent.plan.spec


@click.command("submit")
@document_argument
@bus_options
@wait_option
@json_option
@asynchronous
async def submit_command(file: Path, url: str, tenant: str, wait: bool, as_json: bool) -> int:
    """Send a job document (TOML, YAML or JSON) and print the master's answer."""
    from nexus_bus.documents import job_spec, located

    spec = job_spec(file)
    async with connect(url, tenant) as client:
        try:
            submission = await client.submit(spec)
        except Refused as error:
            raise located(file, error) from error
        return await answer(client, submission, wait, as_json)


async def answer(client: Any, submission: Any, wait: bool, as_json: bool) -> int:
    """Say that a job was taken, or wait for its end and say how it ended."""
    if wait:
        return await ended(client, submission.job, as_json)
    if as_json:
        print_json({"job": submission.job, "submission": submission.id, "message": submission.message})
    else:
        click.echo(f"{submission.job}: {submission.message}")
        click.echo(f"`nexus watch {submission.job}` follows it", err=True)
    return 0


async def ended(client: Any, job: str, as_json: bool) -> int:
    """Wait for a job's end and say how it ended; the exit code."""
    from nexus_bus.cli.waiting import wait

    state = await wait(client, job, quiet=as_json)
    if as_json:
        print_json(state)
    else:
        from nexus_bus.cli.show import success

        scores = success(state)
        click.echo(": ".join(filter(None, (f"{job} {state.phase}", state.reason, scores and f"success {scores}"))))
    return 0 if state.phase == "completed" else 1


@click.command("jobs")
@bus_options
@json_option
@asynchronous
async def jobs_command(url: str, tenant: str, as_json: bool) -> None:
    """List jobs, oldest first."""
    async with connect(url, tenant) as client:
        states = await client.jobs()
    if as_json:
        print_json(states)
        return
    from nexus_bus.cli.show import jobs_table

    console().print(jobs_table(states) if states else f"{tenant} has no jobs; `nexus submit FILE` sends one")


@click.command("cancel")
@click.argument("job")
@click.option("--reason", default="", help="A sentence for the record.")
@bus_options
@asynchronous
async def cancel_command(job: str, reason: str, url: str, tenant: str) -> None:
    """Stop a job. Its newest policy version stays."""
    async with connect(url, tenant) as client:
        await client.cancel(job, reason)
    click.echo(f"{job}: cancellation sent")


@click.command("pause")
@click.argument("job")
@click.option("--reason", default="", help="A sentence for the record.")
@bus_options
@asynchronous
async def pause_command(job: str, reason: str, url: str, tenant: str) -> None:
    """Let a job rest. It keeps what it has learned, and gives its place to others until `nexus resume`."""
    async with connect(url, tenant) as client:
        said = await client.pause(job, reason)
    click.echo(f"{job} is paused: {said}")


@click.command("resume")
@click.argument("job")
@click.option("--add-device-s", type=click.FloatRange(0), default=0.0, help="Device-seconds more than its budget had.")
@bus_options
@asynchronous
async def resume_command(job: str, add_device_s: float, url: str, tenant: str) -> None:
    """Go on with a paused job where it stopped. An evaluation that failed or was cancelled plays what is missing."""
    async with connect(url, tenant) as client:
        said = await client.resume(job, add_device_s=add_device_s)
    click.echo(f"{job} {said}")
