"""CALVIN: one of its 34 tasks at a time in its table of coloured blocks, from a checkout that NEXUS_CALVIN names (PyBullet).

The checkout is `mees/calvin` with its submodule calvin_env, which no package registry has. Success is its own oracle, which
compares now with the start of the episode. Rotations are Euler XYZ, and the gripper's number is its sign: +1 opens, -1 closes.
Its own observations take both pictures at every step; here they are taken when somebody looks.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from nexus_bus.envs.benchmarks import calvin_sentence
from nexus_bus.envs.simulator import Moment, Observed, Simulator
from nexus_bus.errors import NotFound
from schemas.job import EnvironmentSpec, Scalar

CHECKOUT = "NEXUS_CALVIN"
ORACLE = Path("calvin_models/conf/callbacks/rollout/tasks/new_playtable_tasks.yaml")
CAMERAS = {"static": "rgb_static", "gripper": "rgb_gripper"}


def checkout() -> Path:
    """Where CALVIN is. Raises NotFound saying what to set."""
    root = Path(os.environ.get(CHECKOUT, ""))
    if not os.environ.get(CHECKOUT) or not (root / "calvin_env" / "conf").is_dir():
        named = os.environ.get(CHECKOUT, "")
        raise NotFound(
            f"environment calvin: {CHECKOUT} names {named!r}, expected a checkout of mees/calvin with its submodule calvin_env"
        )
    return root


class Calvin(Simulator):
    """One task; see the catalogue for its options. It cannot save: CALVIN's own way is a pickle."""

    def __init__(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> None:
        root = checkout()
        sys.path.insert(0, str(root / "calvin_env"))
        import hydra  # pyright: ignore[reportMissingImports] - has a venv of its own
        from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

        self._task = spec.task
        with hydra.initialize_config_dir(str(root / "calvin_env" / "conf"), version_base=None):
            config = hydra.compose(
                "config_data_collection",
                overrides=["cameras=static_and_gripper", f"scene=calvin_scene_{options['scene']}", "use_vr=false"],
            )
        # No window, no EGL plugin (it ends the process where it does not load), and what the oracle compares.
        quiet = {"show_gui": False, "use_vr": False, "use_egl": False, "use_scene_info": True}
        self._env: Any = hydra.utils.instantiate(config.env, **quiet)
        self._oracle: Any = hydra.utils.instantiate(OmegaConf.load(root / ORACLE))
        self._draw = self._env.get_camera_obs
        self._env.get_camera_obs = lambda: ({}, {})
        self._seen: dict[str, Any] = {}
        self._start: dict[str, Any] = {}

    def reset(self, seed: int) -> None:
        """See Simulator."""
        self._env.seed(seed % 2**32)
        self._env.scene.np_random = self._env.np_random  # it kept the generator it was made with
        self._seen = self._env.reset()
        self._start = self._env.get_info()

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        action = np.array(action)
        action[6] = 1.0 if action[6] > 0 else -1.0  # anything else fails an assertion of its
        self._seen, _, _, info = self._env.step(action)
        success = bool(self._oracle.get_task_info_for_set(self._start, info, {self._task}))
        return Moment(float(success), success)

    def observe(self) -> Observed:
        """See Simulator."""
        pictures, _ = self._draw()
        shown = {name: np.ascontiguousarray(pictures[key], np.uint8) for name, key in CAMERAS.items()}
        return Observed(shown, np.asarray(self._seen["robot_obs"][:7], np.float32), calvin_sentence(self._task))

    def close(self) -> None:
        """See Simulator."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
