"""The Fetch arm of gymnasium-robotics (MuJoCo): reach, push, slide, pick and place, with the goal drawn into the picture.

The state is the gripper's position and its two fingers; objects and goal are only seen. Their `render` runs the forward pass
once more to place the goal, and the next action starts from what that left behind; so pictures are drawn from a copy.
"""

import dataclasses
from typing import Any

import gymnasium_robotics  # noqa: F401 # pyright: ignore[reportMissingImports] - has a venv of its own
import mujoco as _mujoco
import numpy as np

from nexus_bus.envs import rendering
from nexus_bus.envs.catalog import ENVIRONMENTS
from nexus_bus.envs.gymnasium_adapter import GymnasiumSimulator, registered
from nexus_bus.envs.simulator import Moment
from schemas.job import EnvironmentSpec, Scalar

mujoco: Any = _mujoco  # its compiled half has no stubs

_NAMES = {"reach": "FetchReach", "push": "FetchPush", "slide": "FetchSlide", "pick-and-place": "FetchPickAndPlace"}
_ALL = mujoco.mjtState.mjSTATE_INTEGRATION


class Fetch(GymnasiumSimulator):
    """One task; see the catalogue for its options."""

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        self._own = options["reward"] == "own"
        self._instruction = ENVIRONMENTS["fetch"].tasks[spec.task][0]
        made = registered(f"{_NAMES[spec.task]}-v4")
        env = made.unwrapped  # its own limit is the session's
        self._copy: Any = mujoco.MjData(env.model)
        self._target = mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_SITE, "target0")
        self._renderer: Any = None
        self._camera = mujoco.MjvCamera()
        for name, value in env.mujoco_renderer.default_cam_config.items():
            setattr(self._camera, name, value)
        return env

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        moment = super().act(action)
        return moment if self._own else dataclasses.replace(moment, reward=float(moment.success))

    def _state(self) -> np.ndarray:
        seen = self._observation["observation"]
        fingers = 9 if self._env.has_object else 3
        return np.concatenate([seen[:3], seen[fingers : fingers + 2]]).astype(np.float32)

    def _pictures(self) -> dict[str, np.ndarray]:
        model, copy = self._env.model, self._copy
        state = np.empty(mujoco.mj_stateSize(model, _ALL))
        mujoco.mj_getState(model, self._env.data, state, _ALL)
        mujoco.mj_setState(model, copy, state, _ALL)
        model.site_pos[self._target] = self._env.goal - model.body_pos[model.site_bodyid[self._target]]  # drawn, no more
        mujoco.mj_forward(model, copy)
        if self._renderer is None:
            model.vis.global_.offwidth = model.vis.global_.offheight = self._size
            self._renderer = mujoco.Renderer(model, self._size, self._size)
        self._renderer.update_scene(copy, self._camera)
        return {"front": self._renderer.render().copy()}

    def close(self) -> None:
        """See Simulator."""
        renderer, self._renderer = self._renderer, None
        if renderer is not None:
            rendering.close(renderer)
        super().close()
