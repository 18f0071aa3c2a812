"""ManiSkill 3 (SAPIEN): tabletop tasks of a Franka arm whose assets ship in the wheel. It draws with Vulkan.

Quaternions are wxyz, rotations of actions Euler XYZ. Goals that ManiSkill hides from its sensors are shown here, because the
sentence speaks of them. Its own observations take a picture at every step; here one is taken when somebody looks.
"""

from typing import Any

import mani_skill.envs  # noqa: F401 # pyright: ignore[reportMissingImports] - has a venv of its own
import numpy as np

from nexus_bus.envs.catalog import ENVIRONMENTS
from nexus_bus.envs.gymnasium_adapter import GymnasiumSimulator, registered
from nexus_bus.envs.simulator import Moment
from schemas.job import EnvironmentSpec, Scalar


class ManiSkill(GymnasiumSimulator):
    """One task; see the catalogue for its options."""

    def _make(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> Any:
        self._dense = options["reward"] == "own"
        self._instruction = ENVIRONMENTS["maniskill"].tasks[spec.task][0]
        made = registered(
            "".join(word.capitalize() for word in spec.task.split("-")) + "-v1",
            obs_mode="rgb",
            control_mode="pd_ee_delta_pose",
            reward_mode="normalized_dense" if self._dense else "sparse",
            sensor_configs={"width": self._size, "height": self._size},
            sim_backend="physx_cpu",
            render_backend=str(options["renderer"]),
        ).unwrapped
        made.get_obs = lambda *_args, **_kwargs: {}
        return made

    def reset(self, seed: int) -> None:
        """See Simulator."""
        super().reset(seed % 2**31)  # it seeds NumPy's old generator
        hidden = self._env._hidden_objects  # noqa: SLF001 - there is no public switch
        while hidden:
            hidden.pop().show_visual()

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        _, reward, terminated, _, info = self._env.step(action.astype(np.float32))
        success = bool(info["success"].item())
        return Moment(float(reward.item()) if self._dense else float(success), success, bool(terminated.item()) and not success)

    def _state(self) -> np.ndarray:
        agent = self._env.agent
        return np.concatenate([agent.robot.get_qpos()[0].numpy(), agent.tcp_pose.raw_pose[0].numpy()]).astype(np.float32)

    def _pictures(self) -> dict[str, np.ndarray]:
        seen = type(self._env).get_obs(self._env)
        return {"base": np.ascontiguousarray(seen["sensor_data"]["base_camera"]["rgb"][0].numpy())}
