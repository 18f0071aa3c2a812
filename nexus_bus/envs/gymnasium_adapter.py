"""Any Gymnasium environment as a simulator: the base that minigrid.py and metaworld.py change where theirs differ.

The state is the observation if that is a vector, or its entry "observation", "agent_pos" or "state"; the picture is what
`render` gives, scaled to `image_size`; success is `info["is_success"]` or `info["success"]`.
"""

import functools
from typing import Any

import gymnasium
import numpy as np
from PIL import Image as Pillow

from nexus_bus.envs.simulator import Moment, Observed
from nexus_bus.errors import BadJob, NotFound
from schemas.job import EnvironmentSpec, Scalar
from schemas.policy import ActionSpec, ObservationSpec

CAMERA = "render"
_STATE_KEYS = ("observation", "agent_pos", "state")


class GymnasiumSimulator:
    """One environment made by `gymnasium.make`; see the catalogue for its options."""

    camera = CAMERA

    def __init__(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> None:
        self._size = int(options["image_size"])
        self._instruction = str(options.get("instruction", ""))
        self._env: Any = self._make(spec, options)
        self._observation: Any = None

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        del options
        return _registered(spec.task, render_mode="rgb_array")

    def reset(self, seed: int) -> None:
        """See Simulator."""
        self._observation, _ = self._env.reset(seed=seed)

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        self._observation, reward, terminated, truncated, info = self._env.step(self._native(action))
        return Moment(float(reward), self._success(float(reward), info), bool(terminated), bool(truncated))

    def observe(self) -> Observed:
        """See Simulator."""
        return Observed({self.camera: self._picture()}, self._state(), self._sentence())

    def expert(self) -> np.ndarray:
        """See Simulator."""
        raise NotFound("this environment has no scripted expert")

    def save(self) -> bytes:
        """See Simulator: Gymnasium has no way to save an episode."""
        raise NotFound("this simulator cannot save an episode; play it again from its seed")

    def restore(self, state: bytes) -> None:
        """See Simulator."""
        del state
        raise NotFound("this simulator cannot restore an episode; play it again from its seed")

    def close(self) -> None:
        """See Simulator."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _native(self, action: np.ndarray) -> Any:
        return action.astype(self._env.action_space.dtype)

    def _success(self, reward: float, info: dict[str, Any]) -> bool:
        del reward
        return bool(info.get("is_success", info.get("success", False)))

    def _state(self) -> np.ndarray:
        return _vector(self._observation)

    def _sentence(self) -> str:
        return self._instruction

    def _picture(self) -> np.ndarray:
        picture = np.asarray(self._env.render(), np.uint8)
        if picture.shape[:2] == (self._size, self._size):
            return picture
        return np.array(Pillow.fromarray(picture).resize((self._size, self._size), Pillow.Resampling.BOX))


@functools.lru_cache(maxsize=64)
def _measure(task: str) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    env = _registered(task)
    try:
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1 or not space.is_bounded():
            raise BadJob(f"environment.task: {task} takes {space}; only a bounded vector Box can be served")
        observation, _ = env.reset(seed=0)
        return tuple(space.low.tolist()), tuple(space.high.tolist()), _vector(observation).size
    finally:
        env.close()


def spaces(task: str, options: dict[str, Scalar]) -> tuple[ActionSpec, ObservationSpec]:
    """What a policy must fit, asked of the environment itself, once per process. Raises NotFound, BadJob."""
    low, high, state_size = _measure(task)
    size = int(options["image_size"])
    action = ActionSpec(size=len(low), low=list(low), high=list(high))
    return action, ObservationSpec(cameras={CAMERA: (size, size, 3)}, state_size=state_size)


def _registered(task: str, **arguments: Any) -> Any:
    # Never "module:Id", which would import whatever a tenant names.
    if task not in gymnasium.registry:
        raise NotFound(f"environment.task: Gymnasium has no registered environment {task!r} here")
    try:
        return gymnasium.make(task, **arguments)
    except (gymnasium.error.Error, ImportError) as error:
        raise NotFound(f"environment.task: {task} cannot be made here: {error}") from error


def _vector(observation: Any) -> np.ndarray:
    if isinstance(observation, dict):
        key = next((name for name in _STATE_KEYS if name in observation), None)
        if key is None:
            raise BadJob(f"environment.task: no state among the observation's keys {sorted(observation)}")
        observation = observation[key]
    return np.asarray(observation, np.float32).ravel()
