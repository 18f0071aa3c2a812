"""A tenant's own simulator or robot: `module:callable` becomes the environment `own` of the process that loads it.

The callable gives a Gymnasium environment, or LeRobot's EnvHub contract as it is: `make_env(n_envs=1, use_async_envs=False,
cfg=None)` that gives one, a vector of one, or `{suite: {number: vector}}`, whose tasks are then called `suite/number`. It is
named on the command line of whoever owns the machine, never in a message: importing it runs its code.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nexus_bus.envs import catalog, recipes
from nexus_bus.envs.entry import EnvironmentEntry, Options
from nexus_bus.envs.gymnasium_adapter import GymnasiumSimulator, action_of, pictures, resized, sentence, vector
from nexus_bus.envs.offered import ID, SUCCESS, VARIES, options
from nexus_bus.envs.rendering import own_context
from nexus_bus.errors import BadJob, NotFound
from schemas.job import EnvironmentSpec, Scalar
from schemas.policy import ActionSpec, ObservationSpec

DEFAULT = "default"  # the task of an environment that has one
LIMIT = 500  # steps, where it does not say


class _Own:
    """What was loaded. A robot can be opened once, so the environment that was measured is the one that is played in first."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._spare = _by_task(self._call())
        self.tasks = tuple(self._spare)
        self.limits = {task: _limit(env) for task, env in self._spare.items()}
        self.sentences = {task: sentence(env) for task, env in self._spare.items()}
        self.spaces = {task: _measure(task, env) for task, env in self._spare.items()}

    def take(self, task: str) -> Any:
        """An environment of this task, that nobody else has."""
        if task in self._spare:
            return self._spare.pop(task)
        made = _by_task(self._call())
        taken = made.pop(task)
        for other in made.values():
            other.close()
        return taken

    def _call(self) -> Any:
        known = inspect.signature(self._make).parameters
        asked: dict[str, Any] = {"n_envs": 1, "use_async_envs": False}
        if "cfg" in known and known["cfg"].default is inspect.Parameter.empty:  # LeRobot's; a default of its own knows better
            asked["cfg"] = None
        return self._make(**{name: value for name, value in asked.items() if name in known})


_loaded: list[_Own] = []


class OwnSimulator(GymnasiumSimulator):
    """One of its environments. The picture keeps its size."""

    def __init__(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> None:
        self._shapes = _loaded[-1].spaces[spec.task][1].cameras
        super().__init__(spec, {"image_size": 0, **options})

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        del options
        return _loaded[-1].take(spec.task)

    def _pictures(self) -> dict[str, np.ndarray]:
        seen = pictures(self._env, self._observation)
        return {name: resized(seen[name], shape[0], shape[1]) for name, shape in self._shapes.items()}


def register(target: str) -> None:
    """Load `module:callable` and put it into the catalogue of this process.

    Raises:
        NotFound: there is no such module or callable.
        BadJob: what it gives cannot be served; the text says why.
    """
    module, _, name = target.partition(":")
    try:
        make = getattr(importlib.import_module(module), name or "make_env")
    except (ImportError, AttributeError) as error:
        raise NotFound(f"--env {target}: {error}; give module:callable, found from the working directory") from error
    own = _Own(make)
    _loaded.append(own)

    def spaces(task: str, _: Options) -> tuple[ActionSpec, ObservationSpec]:
        return own.spaces[task]

    package = module.split(".")[0]
    catalog.ENVIRONMENTS[ID] = EnvironmentEntry(
        summary=f"{target}, on this machine",
        tasks={task: (own.sentences[task],) for task in own.tasks},
        options=options(max(own.limits.values())),
        adapter=f"{__name__}:{OwnSimulator.__name__}",
        packages=(),
        spaces=spaces,
        expert=False,
        gl=False,  # it draws as it likes
        varies=VARIES,
        success=SUCCESS,
        simulator=" ".join(filter(None, (target, recipes.version("", package)))),
    )


def _by_task(made: Any) -> dict[str, Any]:
    """Whatever a maker gave, as environments by task."""
    if not isinstance(made, Mapping):
        return {DEFAULT: _single(made)}
    found: dict[str, Any] = {}
    for suite, tasks in made.items():
        if isinstance(tasks, Mapping):
            found |= {f"{suite}/{number}": _single(env) for number, env in tasks.items()}
        else:
            found[str(suite)] = _single(tasks)
    if not found:
        raise BadJob("--env: it gave an empty dictionary, expected an environment by suite and number")
    return found


def _single(env: Any) -> Any:
    """The environment itself; of a vector, its only one: a session is one episode at a time."""
    if not hasattr(env, "num_envs"):
        if not all(hasattr(env, name) for name in ("reset", "step", "action_space")):
            raise BadJob(f"--env: it gave {type(env).__name__}, expected a Gymnasium environment (or LeRobot's make_env)")
        return own_context(env)
    inside = getattr(env, "envs", None)
    if env.num_envs != 1 or not inside:
        raise BadJob(
            f"--env: it gave a {type(env).__name__} of {env.num_envs}; expected one, in this process (n_envs=1, "
            "use_async_envs=False): a session plays one episode at a time, and the service makes the processes"
        )
    return own_context(inside[0])


def _limit(env: Any) -> int:
    inner, spec = getattr(env, "unwrapped", env), getattr(env, "spec", None)
    return int(getattr(inner, "_max_episode_steps", None) or getattr(spec, "max_episode_steps", None) or LIMIT)


def _measure(task: str, env: Any) -> tuple[ActionSpec, ObservationSpec]:
    action, began = action_of(env, task), env.reset(seed=0)  # what cannot be served does not move a robot first
    if not isinstance(began, tuple) or len(began) != 2:
        raise BadJob(f"--env: reset() of {task} gave {type(began).__name__}, expected Gymnasium's (observation, info)")
    cameras: Any = {name: picture.shape for name, picture in pictures(env, began[0]).items()}
    state = vector(began[0])
    if not np.isfinite(state).all():
        raise BadJob(f"--env: the state after reset() of {task} is {state.tolist()}, expected finite numbers")
    return action, ObservationSpec(cameras=cameras, state_size=state.size)
