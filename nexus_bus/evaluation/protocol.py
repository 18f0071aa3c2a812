"""Protocols: a file becomes an eval job, a job says which protocol it follows, and two say in what they differ."""

from collections.abc import Collection
from typing import Any, NoReturn

import msgspec

from nexus_bus.envs.catalog import ENVIRONMENTS, NO_OWN, EnvDescription, Own, describe, entry_of, options_of
from nexus_bus.envs.offered import is_own
from nexus_bus.errors import BadJob
from schemas.evaluation import Protocol
from schemas.job import EnvironmentSpec, EvaluationSpec, JobSpec, Scalar
from schemas.plan import Plan

_AS_OPTIONS = (
    "max_steps",
    "wait_steps",
    "image_size",
    "orientation",
)  # options of the environments that have them
_FIXED: dict[str, Scalar] = {"wait_steps": 0, "orientation": "upright"}  # what those are that have no such option
_FREE = ("films", "policy")  # fields that change no score


def parts(protocol: Protocol) -> tuple[EnvironmentSpec, EvaluationSpec]:
    """The tables of a job document that mean this protocol.

    Raises:
        BadJob, NotFound: the environment has no such task or option, or cannot do what is asked; begins with the field.
    """
    known = ENVIRONMENTS.get(protocol.environment)
    tasks = protocol.tasks or tuple(known.tasks if known is not None else ())
    if known is not None and not tasks:
        raise BadJob(f"tasks: {protocol.environment} has no list of them; name those that you mean")
    entry = entry_of(EnvironmentSpec(id=protocol.environment, task=tasks[0] if tasks else ""))
    options = dict(protocol.options)
    for name in _AS_OPTIONS:
        value = getattr(protocol, name)
        if value is None:
            continue
        if name in options and options[name] != value:
            raise BadJob(f"{name}: {value}, and options.{name} is {options[name]}; say it once")
        if name in entry.options:
            options[name] = value
        elif value != _FIXED.get(name):
            _refuse(name, value, protocol.environment)
    if protocol.success == "last_step" and options.setdefault("end_on_success", False):
        raise BadJob('success: "last_step" means nothing where an episode ends at its first success; leave out end_on_success')
    environment = EnvironmentSpec(
        id=protocol.environment, task=tasks[0], options=options, execute=protocol.execute,
        image_encoding=protocol.image_encoding,
    )  # fmt: skip
    evaluation = EvaluationSpec(
        episodes=protocol.trials, seed=protocol.seed, success=protocol.success, simulator=protocol.simulator,
        films=protocol.films, tasks=tasks if len(tasks) > 1 else (),
    )  # fmt: skip
    return environment, evaluation


def _refuse(name: str, value: object, environment: str) -> NoReturn:
    fixed = f"its are {_FIXED[name]!r}" if name in _FIXED else "it has no such setting"
    raise BadJob(f"{name}: {value!r} cannot be had of {environment}: {fixed}; leave it out")


def described(environment: EnvironmentSpec, evaluation: EvaluationSpec | None, own: Own = NO_OWN) -> list[EnvDescription]:
    """What a policy must fit, of each task of an evaluation.

    Raises:
        NotFound, BadJob: a task that does not exist, is there twice, or does not fit the others.
    """
    tasks = evaluation.tasks if evaluation is not None else ()
    if len(set(tasks)) < len(tasks):
        twice = next(task for task in tasks if tasks.count(task) > 1)
        raise BadJob(f"evaluation.tasks: {twice!r} is there twice; more trials of each task are evaluation.episodes")
    found = [describe(msgspec.structs.replace(environment, task=task), own) for task in tasks or (environment.task,)]
    for task, one in zip(tasks, found, strict=bool(tasks)):
        if (one.action, one.observation) != (found[0].action, found[0].observation):
            first = next(iter(tasks))
            raise BadJob(f"evaluation.tasks: {task!r} has other actions or observations than {first!r}; evaluate it alone")
    return found


def protocol_of(plan: Plan, simulators: Collection[str] = ()) -> Protocol:
    """The whole protocol that a job's evaluations follow, with nothing left to defaults; `simulators` are those that played.

    Raises BadJob if the job evaluates nothing.
    """
    spec, evaluation = plan.spec, plan.spec.evaluation
    if evaluation is None or spec.environment is None:
        raise BadJob(f"job: {spec.name!r} evaluates nothing; `nexus eval --policy {spec.name}@latest` does")
    # Of a tenant's own environment the compiler has filled them in: it may be away by now.
    options = dict(spec.environment.options) if is_own(spec.environment.id) else options_of(spec.environment)
    own = {name: options.pop(name, _FIXED.get(name)) for name in _AS_OPTIONS}
    return Protocol(
        environment=spec.environment.id, tasks=evaluation.tasks or (spec.environment.task,), trials=evaluation.episodes,
        seed=evaluation.seed, success=evaluation.success, execute=plan.execute, options=options, films=evaluation.films,
        simulator=evaluation.simulator or " and ".join(sorted(simulators)), policy=spec.init if spec.kind == "eval" else None,
        image_encoding=spec.environment.image_encoding, **own,  # type: ignore[arg-type]  # options were checked
    )  # fmt: skip


def differences(a: Protocol, b: Protocol) -> list[str]:
    """In what two protocols differ, a phrase each; empty if scores under them can be compared."""
    found: list[str] = []
    for name in Protocol.__struct_fields__:
        one, other = getattr(a, name), getattr(b, name)
        if name == "options":
            found += [
                f"options.{key}: {one.get(key)!r} and {other.get(key)!r}"
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            ]
        elif name == "image_encoding" and "jpeg" not in (one, other):
            continue  # the others are exact
        elif name not in _FREE and one != other:
            found.append(f"{name}: {_brief(one)} and {_brief(other)}")
    return found


def departures(plan: Plan, policy: str, environment: EnvironmentSpec, evaluation: EvaluationSpec) -> list[str]:
    """In what an evaluation that is asked for is not the one of this plan, a phrase each; empty if it is the same.

    Raises NotFound, BadJob: the environment asked for does not exist, or has no such option.
    """
    spec = plan.spec
    if spec.kind != "eval" or spec.environment is None:
        return [f"kind: {spec.kind} and eval"]
    if is_own(environment.id):  # the plan has every option, and it may be away: what nobody named is as it was
        environment = msgspec.structs.replace(environment, options=spec.environment.options | environment.options)
    asked = msgspec.structs.replace(
        plan,
        spec=msgspec.structs.replace(spec, init=policy, environment=environment, evaluation=evaluation),
        execute=environment.execute or (spec.head.horizon if spec.head else plan.execute),
    )
    first = [] if spec.init == policy else [f"policy: {spec.init} and {policy}"]
    return first + differences(protocol_of(plan), protocol_of(asked))


def default_of(environment: EnvironmentSpec | None) -> EvaluationSpec:
    """What is evaluated where nobody says how: as many trials of a task as usual, and no more than its recorded states."""
    known = ENVIRONMENTS.get(environment.id) if environment is not None else None
    usual = EvaluationSpec()
    return msgspec.structs.replace(usual, episodes=min(usual.episodes, known.starts)) if known and known.starts else usual


def check_evaluation(environment: EnvironmentSpec, evaluation: EvaluationSpec) -> None:
    """Refuse what would be found out at the first episode, or never. Raises BadJob, which begins with the field.

    Which packages a simulator comes with, only those know who play it; that is looked at when they do.
    """
    if is_own(environment.id):
        return
    entry = entry_of(environment)
    if entry.starts and evaluation.episodes > entry.starts:
        raise BadJob(
            f"evaluation.episodes: {evaluation.episodes} trials of each task, but {environment.id} has {entry.starts} initial "
            f"states of each, and one played twice is no second trial; at most {entry.starts}"
        )
    here = describe(environment).simulator
    known = here.partition("(")[0] if entry.venv or "not installed" in here else here
    if evaluation.simulator and not evaluation.simulator.startswith(known):
        raise BadJob(
            f"evaluation.simulator: asked for is {evaluation.simulator!r}, here is {here!r}; leave it out to take that"
        )


def _brief(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else repr(value)


def eval_job(protocol: Protocol, policy: str, name: str) -> JobSpec:
    """The eval job of one policy under a protocol. Raises as `parts`."""
    environment, evaluation = parts(protocol)
    return JobSpec(kind="eval", name=name, init=policy, environment=environment, evaluation=evaluation)
