"""panda-gym: a Franka arm in PyBullet, whose own rasteriser needs no OpenGL. The policy sees the arm's state and the picture.

The state is the gripper's position and velocity, and how far it is open where it can be; objects and goal are only seen.
"""

import dataclasses
from typing import Any

import numpy as np
import panda_gym  # noqa: F401 # pyright: ignore[reportMissingImports] - has a venv of its own

from nexus_bus.envs.catalog import ENVIRONMENTS
from nexus_bus.envs.gymnasium_adapter import GymnasiumSimulator, registered
from nexus_bus.envs.simulator import Moment
from schemas.job import EnvironmentSpec, Scalar


class Panda(GymnasiumSimulator):
    """One task; see the catalogue for its options."""

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        self._own = options["reward"] == "own"
        self._instruction = ENVIRONMENTS["panda"].tasks[spec.task][0]
        name = "".join(word.capitalize() for word in spec.task.split("-"))
        made = registered(f"Panda{name}-v3", render_mode="rgb_array", render_width=self._size, render_height=self._size)
        return made.unwrapped  # its own limit is the session's

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        moment = super().act(action)
        return moment if self._own else dataclasses.replace(moment, reward=float(moment.success))

    def _state(self) -> np.ndarray:
        return np.asarray(self._env.robot.get_obs(), np.float32)

    def _pictures(self) -> dict[str, np.ndarray]:
        return {"front": np.ascontiguousarray(self._env.render())}
