"""The environments a job may name: tasks, options with their defaults, and what a policy sees and gives. Loads no simulator.

The master checks a job against it (`nexus plan`, `nexus catalog`), and workers/environment.py builds sessions by it.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from nexus_bus.envs import recipes
from nexus_bus.envs.benchmarks import BENCHMARKS
from nexus_bus.envs.entry import END, SIZE, EnvironmentEntry, Option, Options, box, observation, steps
from nexus_bus.envs.offered import START, is_own
from nexus_bus.envs.simulator import Simulator
from nexus_bus.errors import BadJob, NotFound
from nexus_bus.nearest import nearest
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec

__all__ = ["ENVIRONMENTS", "EnvDescription", "EnvironmentEntry", "Option", "build", "describe", "entry_of", "options_of"]


Own = Mapping[str, EnvironmentEntry]  # a tenant's own environments, by id
NO_OWN: Own = {}


@dataclass(frozen=True)
class EnvDescription:
    """What a policy must fit, known without opening a session."""

    action: ActionSpec
    observation: ObservationSpec
    max_steps: int
    instructions: list[str]
    simulator: str  # name, revision and versions; kept with every score
    expert: bool
    success: str  # the rule
    varies: str  # why the same seed may give another episode; empty: it gives the same


_COLOURS = ("red", "green", "blue", "yellow")
TABLETOP_STATES = {"tip": 3, "tip_velocity": 6, "tip_previous": 6, "tip_velocity_previous": 9}


def _tabletop(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    state = TABLETOP_STATES[str(options["state"])]
    return box(3), observation(options, state, *str(options["cameras"]).split("+"))


def _tabletop_sentences(task: str, options: Options) -> tuple[str, ...]:
    shown = _COLOURS[: int(options["blocks"])]
    target = str(options["target"])
    if target != "any" and target not in shown:
        raise BadJob(f"environment.options.target: no {target} block among {', '.join(shown)}; raise `blocks`")
    asked = shown if target == "any" else (target,)
    return tuple(text.format(colour=colour) for colour in asked for text in ENVIRONMENTS["tabletop"].tasks[task])


def _metaworld(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    action = ActionSpec(size=4, low=[-1.0] * 4, high=[1.0] * 4, gripper="minus_open")
    return action, observation(options, 4, "corner2")


def _minigrid(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    return box(7), observation(options, 4, "grid")


def _gymnasium(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    module = importlib.import_module("nexus_bus.envs.gymnasium_adapter")  # only here: its spaces are known to gymnasium alone
    return module.spaces(task, options)


ENVIRONMENTS: dict[str, EnvironmentEntry] = {
    "tabletop": EnvironmentEntry(
        summary="coloured blocks and a gripper tip on a table (MuJoCo), made for this project",
        tasks={
            "touch": ("touch the {colour} block",),
            "reach": ("move above the {colour} block",),
            "push": ("push the {colour} block to the left", "push the {colour} block to the right"),
            "slide": ("push the {colour} block forward", "push the {colour} block back"),
        },
        options={
            "blocks": Option(3, "how many blocks, in the order red, green, blue, yellow", bounds=(1, 4)),
            "target": Option("any", "always ask for this colour", choices=("any", *_COLOURS)),
            "state": Option("tip", f"what the state holds {TABLETOP_STATES}", choices=tuple(TABLETOP_STATES)),
            "reward": Option("sparse", "1 at success, or progress added to it", choices=("sparse", "dense")),
            "speed": Option(0.02, "metres that an action of 1 moves the tip", bounds=(0.002, 0.06)),
            "cameras": Option("front", "which pictures", choices=("front", "top", "front+top")),
            "image_size": SIZE,
            "max_steps": steps(50, 1000),
            "end_on_success": END,
        },
        adapter="nexus_bus.envs.tabletop:Tabletop",
        packages=("mujoco",),
        extra="envs",
        fps=12,
        spaces=_tabletop,
        sentences=_tabletop_sentences,
    ),
    "metaworld": EnvironmentEntry(
        summary="four tasks of Meta-World with written instructions; fast rendering, so not for published scores",
        tasks={
            "reach": ("reach the goal position",),
            "button-press-topdown": ("press the button from the top",),
            "drawer-open": ("open the drawer",),
            "drawer-close": ("close the drawer",),
        },
        options={
            "rendering": Option(
                "fast", "fast: no shadows, multisampling or reflections; full: as shipped", choices=("fast", "full")
            ),
            "reward": Option("sparse", "1 at success, or Meta-World's own divided by 10", choices=("sparse", "dense")),
            "image_size": SIZE,
            "max_steps": steps(200, 500),
            "end_on_success": END,
        },
        adapter="nexus_bus.envs.metaworld:MetaWorld",
        packages=("metaworld", "mujoco"),
        extra="metaworld",
        fps=80,
        spaces=_metaworld,
        success="info['success']",
    ),
    "minigrid": EnvironmentEntry(
        summary="BabyAI rooms seen from above; draws with NumPy, so it needs no OpenGL",
        tasks={
            "goto": ("go to the {colour} {object}", "go to a {colour} {object}"),
            "goto-red-ball": ("go to the red ball",),
            "pickup": ("pick up the {colour} {object}", "pick up a {object}"),
        },
        options={"image_size": SIZE, "max_steps": steps(64, 1000), "end_on_success": END},
        adapter="nexus_bus.envs.minigrid:MiniGrid",
        packages=("minigrid", "gymnasium"),
        extra="minigrid",
        spaces=_minigrid,
        gl=False,
    ),
    "gymnasium": EnvironmentEntry(
        summary="any registered Gymnasium environment with a bounded Box action; the task is its id",
        tasks={},
        options={
            "instruction": Option("", "the sentence given to the policy"),
            "image_size": SIZE,
            "max_steps": steps(200, 10_000),
            "end_on_success": END,
        },
        adapter="nexus_bus.envs.gymnasium_adapter:GymnasiumSimulator",
        packages=("gymnasium",),
        extra="envs",
        spaces=_gymnasium,
        expert=False,
        success="info['is_success'] or info['success']",
        revision=2,
        varies="whether a registered environment repeats itself is its own affair, and was not checked",
    ),
    **BENCHMARKS,
}


def entry_of(spec: EnvironmentSpec, own: Own = NO_OWN) -> EnvironmentEntry:
    """The catalogue entry; `own` are the tenant's own ones. Raises NotFound listing what exists."""
    entry = ENVIRONMENTS.get(spec.id) or own.get(spec.id)
    if entry is None and is_own(spec.id):
        raise NotFound(f"environment.id: no worker of yours serves {spec.id!r} right now; start one first: {START}")
    if entry is None:
        raise NotFound(f"environment.id: no environment {spec.id!r}{nearest(spec.id, {**ENVIRONMENTS, **own})}")
    if entry.tasks and spec.task not in entry.tasks:
        raise NotFound(f"environment.task: {spec.id} has no task {spec.task!r}{nearest(spec.task, entry.tasks)}")
    return entry


def options_of(spec: EnvironmentSpec, own: Own = NO_OWN) -> Options:
    """The spec's options, checked, with defaults filled in. Raises NotFound, BadJob."""
    entry = entry_of(spec, own)
    unknown = sorted(set(spec.options) - set(entry.options))
    if unknown:
        raise BadJob(f"environment.options.{unknown[0]}: {spec.id} has no such option{nearest(unknown[0], entry.options)}")
    return {name: option.check(name, spec.options.get(name, option.default)) for name, option in entry.options.items()}


def describe(spec: EnvironmentSpec, own: Own = NO_OWN) -> EnvDescription:
    """What a policy must fit. Raises NotFound or BadJob, listing what exists."""
    entry, options = entry_of(spec, own), options_of(spec, own)
    action, seen = entry.spaces(spec.task, options)
    if entry.sentences:
        instructions = entry.sentences(spec.task, options)
    else:
        instructions = entry.tasks.get(spec.task) or (str(options.get("instruction", "")),)
    limit, version = int(options["max_steps"]), entry.simulator or _versions(spec.id, entry)
    return EnvDescription(action, seen, limit, list(instructions), version, entry.expert, entry.success, entry.varies)


def build(spec: EnvironmentSpec) -> Simulator:
    """Open the simulator itself. Raises NotFound if its packages are not installed here, Unavailable without OpenGL."""
    entry, options = entry_of(spec), options_of(spec)
    if entry.gl:
        importlib.import_module("nexus_bus.envs.rendering").require()
    module, name = entry.adapter.split(":")
    try:
        adapter = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        how = f"pip install 'nexus-bus[{entry.extra}]'" if entry.extra else f"nexus env install {entry.venv}"
        raise NotFound(f"environment {spec.id}: {error.name} is not installed here: {how}") from error
    return adapter(spec, options)


def _versions(name: str, entry: EnvironmentEntry) -> str:
    versions = [f"{package} {recipes.version(entry.venv, package) or 'not installed'}" for package in entry.packages]
    return f"{name}-{entry.revision} ({', '.join(versions)})"
