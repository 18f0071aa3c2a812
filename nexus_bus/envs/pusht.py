"""PushT (gym-pusht): the environment of diffusion policy, as LeRobot shows it: pixels and the tip's position.

An action is where the tip shall go, in units of the 512 × 512 board, and so is the state; neither is scaled here.
"""

import dataclasses
import os
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory alone

import gym_pusht  # noqa: F401 # pyright: ignore[reportMissingImports] - has a venv of its own
import numpy as np

from nexus_bus.envs.gymnasium_adapter import GymnasiumSimulator, registered
from nexus_bus.envs.simulator import Moment
from schemas.job import EnvironmentSpec, Scalar


class PushT(GymnasiumSimulator):
    """See the catalogue for its options."""

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        del spec
        self._own = options["reward"] == "own"
        self._instruction = "push the T-shaped block onto the T-shaped target"
        # The state is cheap, and the picture is drawn for those steps that are looked at. Its own limit is the session's.
        made = registered("gym_pusht/PushT-v0", obs_type="state", observation_width=self._size, observation_height=self._size)
        return made.unwrapped

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        moment = super().act(action)
        return moment if self._own else dataclasses.replace(moment, reward=float(moment.success))

    def _state(self) -> np.ndarray:
        return np.asarray(self._observation[:2], np.float32)

    def _pictures(self) -> dict[str, np.ndarray]:
        return {"top": self._env._render()}  # noqa: SLF001 - `render` draws the action into the picture; observations do not
