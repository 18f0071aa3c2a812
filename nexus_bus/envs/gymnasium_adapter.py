"""Any Gymnasium environment as a simulator: the base of most adapters, which change it where theirs differ.

LeRobot's conventions are taken as they are: pictures are the observation's "pixels" (one, or one per camera), else what
`render` gives, scaled to `image_size`; the state is the observation if that is a vector, or its "agent_pos", "observation",
"state", "robot_state" or "environment_state"; the sentence is `task_description` or `task`; success is `info["is_success"]`.
"""

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from PIL import Image as Pillow

from nexus_bus.envs.rendering import own_context
from nexus_bus.envs.simulator import Moment, Observed, Simulator
from nexus_bus.errors import BadJob, NotFound
from schemas.job import EnvironmentSpec, Scalar
from schemas.policy import ActionSpec, ObservationSpec

CAMERA = "render"
_STATE_KEYS = ("agent_pos", "observation", "state", "robot_state", "environment_state")


class GymnasiumSimulator(Simulator):
    """One environment made by `gymnasium.make`; see the catalogue for its options. Gymnasium has no way to save an episode."""

    def __init__(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> None:
        self._size = int(options["image_size"])
        self._instruction = str(options.get("instruction", ""))
        self._env: Any = own_context(self._make(spec, options))
        self._observation: Any = None

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        del options
        return registered(spec.task, render_mode="rgb_array")

    def reset(self, seed: int) -> None:
        """See Simulator."""
        self._observation, _ = self._env.reset(seed=seed)

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        self._observation, reward, terminated, truncated, info = self._env.step(self._native(action))
        return Moment(float(reward), self._success(float(reward), info), bool(terminated), bool(truncated))

    def observe(self) -> Observed:
        """See Simulator."""
        return Observed(self._pictures(), self._state(), self._sentence())

    def close(self) -> None:
        """See Simulator."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _native(self, action: np.ndarray) -> Any:
        return action.astype(self._env.action_space.dtype)

    def _success(self, reward: float, info: dict[str, Any]) -> bool:
        del reward
        self.silent = "is_success" not in info and "success" not in info  # conformance.py tells
        return bool(info.get("is_success", info.get("success", False)))

    def _state(self) -> np.ndarray:
        return vector(self._observation)

    def _sentence(self) -> str:
        return self._instruction or sentence(self._env)

    def _pictures(self) -> dict[str, np.ndarray]:
        return {name: resized(one, self._size, self._size) for name, one in pictures(self._env, self._observation).items()}


def registered(task: str, **arguments: Any) -> Any:
    """`gymnasium.make` for names that exist. Raises NotFound.

    Never "module:Id", which would import whatever a tenant names.
    """
    if task not in gymnasium.registry:
        raise NotFound(f"environment.task: Gymnasium has no registered environment {task!r} here")
    try:
        return gymnasium.make(task, **arguments)
    except (gymnasium.error.Error, ImportError) as error:
        raise NotFound(f"environment.task: {task} cannot be made here: {error}") from error


def pictures(env: Any, observation: Any) -> dict[str, np.ndarray]:
    """What it shows now, by camera, HWC uint8. Raises BadJob where there is no picture."""
    found = observation.get("pixels") if isinstance(observation, Mapping) else None
    if found is None:
        with suppress(NotImplementedError):  # it does not draw, which is told below
            found = env.render()
    if found is None:
        raise BadJob("environment.task: it shows no picture: give observation['pixels'], or render() with rgb_array")
    named = dict(found) if isinstance(found, Mapping) else {CAMERA: found}
    for name, picture in named.items():
        named[name] = np.asarray(picture)
        if named[name].ndim != 3 or named[name].shape[2] != 3 or named[name].dtype != np.uint8:
            raise BadJob(
                f"environment.task: picture {name!r} is {named[name].dtype} of shape {list(named[name].shape)}, expected uint8 "
                "[height, width, 3]: give observation['pixels'], or render_mode='rgb_array'"
            )
    return named


def vector(observation: Any) -> np.ndarray:
    """The state, float32 `[S]`; empty where there are only pictures. Raises BadJob where none can be told."""
    if isinstance(observation, Mapping):
        key = next((name for name in _STATE_KEYS if name in observation), None)
        if key is None:
            if "pixels" in observation:
                return np.zeros(0, np.float32)
            raise BadJob(f"environment.task: no state among the observation's keys {sorted(observation)}")
        observation = observation[key]
    if isinstance(observation, Mapping):  # parts of a robot, in their own order
        parts = [vector(part) for part in observation.values()]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return np.asarray(observation, np.float32).ravel()


def sentence(env: Any) -> str:
    """LeRobot's `task_description`, or `task`."""
    inner = getattr(env, "unwrapped", env)
    return next((text for name in ("task_description", "task") if isinstance(text := getattr(inner, name, None), str)), "")


def resized(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """The picture in another size, each new pixel the mean of what it covers."""
    if picture.shape[:2] == (height, width):
        return np.ascontiguousarray(picture)
    return np.array(Pillow.fromarray(picture).resize((width, height), Pillow.Resampling.BOX))


def action_of(env: Any, task: str) -> ActionSpec:
    """Size and bounds of what it takes. Raises BadJob for what cannot be served."""
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1 or not space.is_bounded():
        raise BadJob(f"environment.task: {task} takes {space}; only a bounded vector Box can be served")
    return ActionSpec(size=int(space.shape[0]), low=space.low.tolist(), high=space.high.tolist())


@functools.lru_cache(maxsize=64)
def _measured(task: str) -> tuple[ActionSpec, tuple[str, ...], int]:
    env = registered(task)  # without a picture, which would need a GL context in whatever process asks
    try:
        observation, _ = env.reset(seed=0)
        pixels = observation.get("pixels") if isinstance(observation, Mapping) else None
        cameras = tuple(pixels) if isinstance(pixels, Mapping) else (CAMERA,)
        return action_of(env, task), cameras, vector(observation).size
    finally:
        env.close()


def spaces(task: str, options: dict[str, Scalar]) -> tuple[ActionSpec, ObservationSpec]:
    """What a policy must fit, asked of the environment itself, once per process. Raises NotFound, BadJob."""
    action, cameras, state_size = _measured(task)
    size = int(options["image_size"])
    return action, ObservationSpec(cameras=dict.fromkeys(cameras, (size, size, 3)), state_size=state_size)  # type: ignore[arg-type]
