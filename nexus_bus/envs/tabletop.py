"""The default environment: coloured blocks on a table, a gripper tip, and a sentence that says what to do (MuJoCo).

World frame: x towards the camera, y to the right in the picture, z up; metres. An action moves the tip by up to `speed`
along each axis and takes 80 ms of physics. "left", "right", "forward" (away from the viewer) and "back" are the picture's.
"""

import atexit
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import mujoco as _mujoco
import numpy as np

from nexus_bus.envs import rendering
from nexus_bus.envs.simulator import Moment, Observed
from nexus_bus.errors import BadMessage
from schemas.job import EnvironmentSpec, Scalar

mujoco: Any = _mujoco  # its compiled half has no stubs

COLOURS = {"red": "0.9 0.1 0.1", "green": "0.1 0.75 0.15", "blue": "0.15 0.25 0.95", "yellow": "0.95 0.85 0.1"}
DIRECTIONS = {"left": (0.0, -1.0), "right": (0.0, 1.0), "forward": (-1.0, 0.0), "back": (1.0, 0.0)}
# What each task may ask for: the sentence ends with one of these.
ENDINGS = {"touch": ("",), "reach": ("",), "push": ("left", "right"), "slide": ("forward", "back")}

HALF = 0.025  # half the side of a block
TIP_RADIUS = 0.016
TIP_START = 0.12  # height of the tip at reset
PUSH_DISTANCE = 0.06  # success of push and slide
REACH_RADIUS = 0.03  # success of reach: this close to the vertical through the block, above its top
SPACING = 0.11  # least distance of two blocks at reset
CLEARANCE = 0.08  # least horizontal distance of the target from the tip at reset
SUBSTEPS = 20
TIMESTEP = 0.004

_BLOCK = (
    '<body name="b{i}" pos="0 0 .025"><freejoint name="j{i}"/><geom name="g{i}" type="box" size=".025 .025 .025" mass=".05" '
    'rgba="{rgba} 1" friction="0.6 .005 .0001"/></body>'
)
_SCENE = """<mujoco>
<option timestep="{timestep}" integrator="implicitfast" cone="pyramidal" iterations="20"><flag autoreset="disable"/></option>
<visual><quality shadowsize="0" offsamples="0"/><global offwidth="{size}" offheight="{size}"/>
<headlight ambient=".5 .5 .5" diffuse=".5 .5 .5" specular="0 0 0"/></visual>
<worldbody>
<geom name="table" type="box" size=".4 .4 .02" pos="0 0 -.02" rgba=".55 .45 .35 1" friction="0.6 .005 .0001"/>
<camera name="front" pos=".62 0 .55" xyaxes="0 1 0 -.66 0 .75"/>
<camera name="top" pos="0 0 .8" xyaxes="0 1 0 -1 0 0"/>
<site name="zone_right" type="cylinder" size=".05 .001" pos="0 .2 .001" rgba=".9 .9 .9 1"/>
<site name="zone_left" type="cylinder" size=".05 .001" pos="0 -.2 .001" rgba=".9 .9 .9 1"/>
{blocks}
<body name="tip" pos="0 0 {start}">
<joint name="x" type="slide" axis="1 0 0" damping="20"/><joint name="y" type="slide" axis="0 1 0" damping="20"/>
<joint name="z" type="slide" axis="0 0 1" damping="20"/>
<geom name="tip" type="capsule" fromto="0 0 0 0 0 .12" size=".016" mass=".3" rgba=".15 .15 .18 1"/></body>
</worldbody>
<actuator><position joint="x" kp="400"/><position joint="y" kp="400"/><position joint="z" kp="400"/></actuator>
</mujoco>"""
_LOW = np.array([-0.32, -0.36, -0.105])  # reach of the tip's set point, relative to its start
_HIGH = np.array([0.32, 0.36, 0.05])
_ORIGIN = np.array([0.0, 0.0, TIP_START])
_STATE_SCALE = np.array([3.0, 3.0, 6.0])
_FULL = mujoco.mjtState.mjSTATE_INTEGRATION


class _Saved(msgspec.Struct):
    physics: bytes
    target: int
    ending: str
    origin: list[float]
    previous: list[float]


@dataclass
class _Stage:
    """A model and the one renderer for it in this thread, shared by all sessions that look the same."""

    model: Any  # mujoco.MjModel
    size: int
    users: int = 0
    _renderer: Any = field(default=None, repr=False)

    def draw(self, data: Any, camera: str) -> np.ndarray:
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self.model, self.size, self.size)
            atexit.unregister(_close_stages)
            atexit.register(_close_stages)  # what is registered last runs first, and EGL registered its own end just before
        self._renderer.update_scene(data, camera)
        return self._renderer.render().copy()

    def close(self) -> None:
        if self._renderer is not None:
            rendering.close(self._renderer)
            self._renderer = None


_stages: dict[tuple[int, int, int], _Stage] = {}


def _close_stages() -> None:  # a renderer that outlives EGL complains while the interpreter ends
    while _stages:
        _stages.popitem()[1].close()


class Tabletop:
    """One tabletop episode at a time; see the catalogue for its options."""

    def __init__(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> None:
        self._task = spec.task
        self._state_kind = str(options["state"])
        self._cameras = str(options["cameras"]).split("+")
        self._dense = options["reward"] == "dense"
        self._speed = float(options["speed"])
        self._colours = list(COLOURS)[: int(options["blocks"])]
        self._fixed_target = str(options["target"])
        self._key = (threading.get_ident(), int(options["image_size"]), len(self._colours))
        if self._key not in _stages:
            _stages[self._key] = _Stage(mujoco.MjModel.from_xml_string(_scene(self._colours, self._key[1])), self._key[1])
        self._stage: _Stage | None = _stages[self._key]
        self._stage.users += 1
        self._model = self._stage.model
        self._data = mujoco.MjData(self._model)
        self._tip_geom = self._model.geom("tip").id
        self._target = 0
        self._ending = ""
        self._origin = np.zeros(3)
        self._previous = np.zeros(3)

    def reset(self, seed: int) -> None:
        """Place blocks and tip, choose what to ask for. See Simulator."""
        rng = np.random.Generator(np.random.PCG64(seed))
        count = len(self._colours)
        if self._fixed_target == "any":
            self._target = int(rng.integers(count))
        else:
            self._target = self._colours.index(self._fixed_target)
        endings = ENDINGS[self._task]
        self._ending = endings[int(rng.integers(len(endings)))]
        tip = rng.uniform(-0.05, 0.05, 2)
        while True:  # a few draws at most: the table is much larger than the blocks
            places = rng.uniform([-0.18, -0.22], [0.18, 0.22], (count, 2))
            apart = all(math.dist(places[i], places[j]) > SPACING for i in range(count) for j in range(i))
            if apart and math.dist(places[self._target], tip) > CLEARANCE:
                break
        mujoco.mj_resetData(self._model, self._data)
        for i, place in enumerate(places):
            self._data.qpos[7 * i : 7 * i + 7] = [*place, HALF, 1, 0, 0, 0]
        self._data.qpos[-3:] = [*tip, 0.0]
        self._data.ctrl[:] = self._data.qpos[-3:]
        mujoco.mj_forward(self._model, self._data)
        self._origin = self._block().copy()
        self._previous = np.zeros(3)

    def act(self, action: np.ndarray) -> Moment:
        """Move the tip's set point by `speed` times the action. See Simulator."""
        before = self._potential() if self._dense else 0.0
        self._data.ctrl[:] = np.clip(self._data.ctrl + action * self._speed, _LOW, _HIGH)
        mujoco.mj_step(self._model, self._data, nstep=SUBSTEPS)
        mujoco.mj_fwdPosition(self._model, self._data)  # a step leaves bodies and contacts one substep behind
        self._previous = np.array(action)
        success = self._success()
        shaped = self._potential() - before if self._dense else 0.0
        return Moment(reward=float(success) + shaped, success=success)

    def observe(self) -> Observed:
        """See Simulator."""
        if self._stage is None:
            raise ValueError("the tabletop is closed")
        images = {camera: self._stage.draw(self._data, camera) for camera in self._cameras}
        return Observed(images, self._state(), self._instruction())

    def expert(self) -> np.ndarray:
        """Drive over the block and down, or behind it and through."""
        tip, block = self._tip(), self._block()
        if self._task in ("touch", "reach"):
            delta = block + np.array([0.0, 0.0, 0.035 if self._task == "touch" else 0.09]) - tip
            if np.hypot(delta[0], delta[1]) > 0.025:  # travel above the other blocks
                delta[2] = max(delta[2], 0.09 - tip[2])
        else:
            delta = self._push(tip, block)
        return np.clip(delta / self._speed, -1.0, 1.0)

    def save(self) -> bytes:
        """See Simulator."""
        physics = np.empty(mujoco.mj_stateSize(self._model, _FULL))
        mujoco.mj_getState(self._model, self._data, physics, _FULL)
        saved = _Saved(physics.tobytes(), self._target, self._ending, self._origin.tolist(), self._previous.tolist())
        return msgspec.msgpack.encode(saved)

    def restore(self, state: bytes) -> None:
        """See Simulator. Raises BadMessage for a state of another scene."""
        try:
            saved = msgspec.msgpack.decode(state, type=_Saved)
            physics = np.frombuffer(saved.physics).copy()
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadMessage(f"state: not a saved tabletop: {error}") from error
        fits = physics.size == mujoco.mj_stateSize(self._model, _FULL) and 0 <= saved.target < len(self._colours)
        if not fits or saved.ending not in ENDINGS[self._task] or not np.isfinite(physics).all():
            raise BadMessage("state: saved from a tabletop with another task or number of blocks")
        mujoco.mj_setState(self._model, self._data, physics, _FULL)
        mujoco.mj_fwdPosition(self._model, self._data)
        self._target, self._ending = saved.target, saved.ending
        self._origin, self._previous = np.array(saved.origin), np.array(saved.previous)

    def close(self) -> None:
        """See Simulator."""
        stage, self._stage = self._stage, None
        if stage is None:
            return
        stage.users -= 1
        if stage.users == 0:
            stage.close()
            _stages.pop(self._key, None)

    def _tip(self) -> np.ndarray:
        return self._data.qpos[-3:] + _ORIGIN

    def _block(self) -> np.ndarray:
        return self._data.qpos[7 * self._target : 7 * self._target + 3]

    def _direction(self) -> np.ndarray:
        return np.array([*DIRECTIONS[self._ending], 0.0])

    def _pushed(self) -> float:
        return float((self._block() - self._origin) @ self._direction())

    def _success(self) -> bool:
        if self._task == "touch":
            pairs = self._data.contact.geom
            block = self._model.geom(f"g{self._target}").id
            return bool(((pairs == self._tip_geom).any(1) & (pairs == block).any(1)).any())
        if self._task == "reach":
            delta = self._tip() - self._block()
            return bool(np.hypot(delta[0], delta[1]) < REACH_RADIUS and delta[2] > HALF)
        return self._pushed() > PUSH_DISTANCE

    def _potential(self) -> float:
        """Closeness to success, rising by about one over an episode; its difference is the dense reward (Ng et al. 1999)."""
        tip, block = self._tip(), self._block()
        if self._task == "touch":
            return -float(np.linalg.norm(tip - block - [0.0, 0.0, HALF + TIP_RADIUS])) / 0.3
        if self._task == "reach":
            return -float(np.linalg.norm((tip - block)[:2])) / 0.3
        behind = block - 0.045 * self._direction()
        return -0.5 * float(np.linalg.norm(tip - behind)) / 0.3 + 0.5 * self._pushed() / PUSH_DISTANCE

    def _push(self, tip: np.ndarray, block: np.ndarray) -> np.ndarray:
        along = self._direction()
        across = np.array([along[1], along[0], 0.0])
        offset = block - tip
        behind = float(offset @ along)
        if abs(offset @ across) < 0.012 and behind > 0.03 and tip[2] < 0.05:  # lined up and down: go through it
            return 0.05 * along + across * (offset @ across) + np.array([0.0, 0.0, HALF - tip[2]])
        delta = block - 0.06 * along - tip
        near = np.hypot(delta[0], delta[1]) < 0.012
        delta[2] = (HALF if near else 0.09) - tip[2]
        return delta

    def _state(self) -> np.ndarray:
        parts: list[Any] = [self._tip() * _STATE_SCALE]
        if "velocity" in self._state_kind:
            parts.append(self._data.qvel[-3:])
        if "previous" in self._state_kind:
            parts.append(self._previous)
        return np.concatenate(parts).astype(np.float32)

    def _instruction(self) -> str:
        return sentence(self._task, self._colours[self._target], self._ending)


def sentence(task: str, colour: str, ending: str = "") -> str:
    """The one wording of each request."""
    if task == "push":
        return f"push the {colour} block to the {ending}"
    if task == "slide":
        return f"push the {colour} block {ending}"
    return f"{'touch' if task == 'touch' else 'move above'} the {colour} block"


def _scene(colours: list[str], size: int) -> str:
    blocks = "".join(_BLOCK.format(i=i, rgba=COLOURS[colour]) for i, colour in enumerate(colours))
    return _SCENE.format(timestep=TIMESTEP, size=size, blocks=blocks, start=TIP_START)
