"""ALOHA (gym-aloha): two ViperX arms in MuJoCo, as LeRobot shows it: the camera above, and 14 joint positions.

The simulator draws three pictures of 640 × 480 at every step, wanted or not (2 to 4 steps a second in software). Here one is
drawn when somebody looks.
"""

import dataclasses
from typing import Any

import gym_aloha  # noqa: F401 # pyright: ignore[reportMissingImports] - has a venv of its own
import numpy as np

from nexus_bus.envs.catalog import ENVIRONMENTS
from nexus_bus.envs.gymnasium_adapter import GymnasiumSimulator, registered
from nexus_bus.envs.simulator import Moment
from schemas.job import EnvironmentSpec, Scalar

_NAMES = {"transfer-cube": "AlohaTransferCube-v0", "insertion": "AlohaInsertion-v0"}
_BLANK = np.zeros((1, 1, 3), np.uint8)


class Aloha(GymnasiumSimulator):
    """One task; see the catalogue for its options."""

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        self._own = options["reward"] == "own"
        self._instruction = ENVIRONMENTS["aloha"].tasks[spec.task][0]
        made = registered(f"gym_aloha/{_NAMES[spec.task]}", obs_type="pixels_agent_pos", render_mode="rgb_array").unwrapped
        task = made._env.task  # noqa: SLF001 - the only way to leave its pictures out
        task.get_observation = lambda physics: {"qpos": task.get_qpos(physics), "images": {"top": _BLANK}}
        return made

    def reset(self, seed: int) -> None:
        """See Simulator."""
        super().reset(seed % 2**32)  # it seeds NumPy's old generator

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        moment = super().act(action)
        return moment if self._own else dataclasses.replace(moment, reward=float(moment.success))

    def _state(self) -> np.ndarray:
        return np.asarray(self._observation["agent_pos"], np.float32)

    def _pictures(self) -> dict[str, np.ndarray]:
        physics = self._env._env.physics  # noqa: SLF001 - theirs draws in one size only
        return {"top": physics.render(height=self._size * 3 // 4, width=self._size, camera_id="top")}
