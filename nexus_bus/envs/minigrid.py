"""BabyAI rooms: the environment that draws with NumPy alone, for machines without any OpenGL.

The seven actions are discrete; a policy gives seven numbers in [-1, 1] and the largest one is done. The picture shows the
whole room from above, and the state is the agent's place in it and where it looks.
"""

import contextlib
from typing import Any

import numpy as np
from minigrid.envs.babyai.goto import GoToLocal, GoToRedBallGrey
from minigrid.envs.babyai.pickup import PickupLoc
from minigrid.utils.baby_ai_bot import BabyAIBot

from nexus_bus.envs.gymnasium_adapter import GymnasiumSimulator, resized
from nexus_bus.envs.simulator import Moment
from schemas.job import EnvironmentSpec, Scalar

_TASKS = {"goto": GoToLocal, "goto-red-ball": GoToRedBallGrey, "pickup": PickupLoc}
_ACTIONS = 7
CAMERA = "grid"


class MiniGrid(GymnasiumSimulator):
    """One BabyAI level; see the catalogue for its tasks."""

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        # Its own limit is the room's size; ours comes first because the session counts.
        env = _TASKS[spec.task](render_mode="rgb_array", max_steps=int(options["max_steps"]) + 1, highlight=False)
        env.tile_size = -(-self._size // max(env.width, env.height))
        return env

    def reset(self, seed: int) -> None:
        """See Simulator."""
        with contextlib.redirect_stdout(None):  # it prints every room it throws away
            super().reset(seed)
        self._bot = BabyAIBot(self._env)
        self._last: Any = None
        self._planned: Any = None

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        moment = super().act(action)
        self._last, self._planned = self._native(action), None
        return moment

    def expert(self) -> np.ndarray:
        """The BabyAI bot's action, one-hot in [-1, 1]. It has to be asked at every step, because it remembers."""
        if self._planned is None:
            self._planned = self._bot.replan(self._last)
        wanted = np.full(_ACTIONS, -1.0)
        wanted[int(self._planned)] = 1.0
        return wanted

    def _native(self, action: np.ndarray) -> Any:
        return int(np.argmax(action))

    def _success(self, reward: float, info: dict[str, Any]) -> bool:
        del info
        return reward > 0

    def _pictures(self) -> dict[str, np.ndarray]:
        return {CAMERA: resized(self._env.render(), self._size, self._size)}

    def _state(self) -> np.ndarray:
        x, y = self._env.agent_pos
        angle = self._env.agent_dir * np.pi / 2
        return np.array([x / self._env.width, y / self._env.height, np.cos(angle), np.sin(angle)], np.float32)

    def _sentence(self) -> str:
        return str(self._env.mission)
