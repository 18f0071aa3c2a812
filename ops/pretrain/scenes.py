"""Random tabletop scenes, drawn with MuJoCo: one model whose geoms are moved, resized and recoloured for every picture.

No physics runs: poses are written where the renderer reads them, which gives thousands of different scenes a second where
compiling a model for each would give dozens. About half of the scenes keep the plain tabletop look of the project's own
environment (with jitter), the others vary everything; see `Style`.
"""

import colorsys
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nexus_bus.envs.rendering import require
from ops.pretrain.checkpoint import IMAGE_SIZE
from ops.pretrain.language import COLOURS, SHAPES

require()  # chooses the GL that works here, which mujoco asks for when it is imported
import mujoco as _mujoco  # noqa: E402

mujoco: Any = _mujoco  # its compiled half has no stubs

Array = NDArray[np.float64]
MAX_OBJECTS = 5
HSV = {
    "red": (0.0, 0.89, 0.9), "green": (0.346, 0.87, 0.75), "blue": (0.646, 0.84, 0.95), "yellow": (0.147, 0.89, 0.95),
    "orange": (0.075, 0.9, 0.95), "purple": (0.78, 0.7, 0.65), "cyan": (0.5, 0.75, 0.88), "pink": (0.91, 0.5, 0.95),
    "white": (0.0, 0.0, 0.95),
}  # fmt: skip
COLOUR_ODDS = np.array([5, 5, 5, 5, 2, 2, 2, 2, 1.0])
TIP_RADIUS, TIP_LENGTH = 0.016, 0.12
FRONT_POSITION = np.array([0.62, 0.0, 0.55])
FRONT_AXES = np.array([[0, 1, 0], [-0.66, 0, 0.75], [0.75, 0, 0.66]], float)  # right, up, backwards
TOP_POSITION = np.array([0.0, 0.0, 0.8])
TOP_AXES = np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 1]], float)
_CLUTTER, _ZONES, _WALLS = 5, 3, 3
_GEOM = {"block": 6, "ball": 2, "cylinder": 5, "button": 5}  # mjtGeom: box, sphere, cylinder


@dataclass
class Scene:
    """What a picture shows. Arrays are padded to MAX_OBJECTS; `uv` is 0..1 from the picture's top left corner."""

    count: int
    colour: NDArray[np.int8]
    shape: NDArray[np.int8]
    position: Array  # [MAX_OBJECTS, 3], centres, metres
    uv: Array  # [MAX_OBJECTS, 2]
    tip: Array  # [3]
    tip_uv: Array  # [2]
    metric: bool  # the camera is close to a known pose, so metres can be told from the picture


@dataclass(frozen=True)
class Style:
    """How far a scene strays from the plain look (False: everything varies) and which camera sees it."""

    plain: bool
    camera: str  # fixed, near, shaken, top or wild
    count: int | None = None
    basic_colours: bool = False


def _xml() -> str:
    names = ["table", "floor", *(f"wall{i}" for i in range(_WALLS)), *(f"zone{i}" for i in range(_ZONES))]
    names += [*(f"clutter{i}" for i in range(_CLUTTER)), *(f"object{i}" for i in range(MAX_OBJECTS))]
    boxes = "".join(f'<geom name="{name}" type="box" size=".1 .1 .1"/>' for name in [*names, "palm", "finger0", "finger1"])
    return f"""<mujoco><statistic extent="1" center="0 0 0"/>
<visual><quality shadowsize="0" offsamples="0"/><global offwidth="{IMAGE_SIZE}" offheight="{IMAGE_SIZE}"/>
<map znear=".02" zfar="20"/><headlight ambient=".5 .5 .5" diffuse=".5 .5 .5" specular="0 0 0"/></visual>
<worldbody><camera name="eye" pos="0 0 1"/><light name="lamp" pos="0 0 2" dir="0 0 -1" castshadow="false"/>
{boxes}<geom name="tip" type="capsule" size=".016 .06"/></worldbody></mujoco>"""


def _rotation(vector: Array) -> Array:
    quaternion, matrix = np.zeros(4), np.zeros(9)
    angle = float(np.linalg.norm(vector))
    mujoco.mju_axisAngle2Quat(quaternion, vector / angle if angle else np.array([0, 0, 1.0]), angle)
    mujoco.mju_quat2Mat(matrix, quaternion)
    return matrix.reshape(3, 3)


def _yaw(angle: float) -> Array:
    return _rotation(np.array([0.0, 0.0, angle]))


def random_style(rng: np.random.Generator) -> Style:
    """Draw a style with the shares used in pretraining."""
    camera = rng.choice(["fixed", "near", "shaken", "top", "wild"], p=[0.25, 0.38, 0.15, 0.07, 0.15])
    return Style(plain=bool(rng.random() < 0.5), camera=str(camera))


class Painter:
    """Owns the model and the renderer; belongs to the thread that made it."""

    def __init__(self) -> None:
        self._model = mujoco.MjModel.from_xml_string(_xml())
        self._data = mujoco.MjData(self._model)
        mujoco.mj_forward(self._model, self._data)
        self._renderer = mujoco.Renderer(self._model, IMAGE_SIZE, IMAGE_SIZE)
        self._id = {self._model.geom(i).name: i for i in range(self._model.ngeom)}

    def close(self) -> None:
        """Free the GL context."""
        self._renderer.close()

    def paint(self, rng: np.random.Generator, style: Style) -> tuple[NDArray[np.uint8], Scene]:
        """Draw one random scene of `style`: picture [96, 96, 3] and what is in it."""
        while True:  # until camera and objects fit together; two draws on average
            self._look(rng, style)
            scene = self._arrange(rng, style)
            if scene is not None:
                break
        self._dress(rng, style)
        self._light(rng, style)
        self._renderer.update_scene(self._data, "eye")
        image = self._renderer.render()
        return _develop(image, rng, style), scene

    def _put(self, name: str, position: Array, rgba: Any, size: Any = None, frame: Array | None = None) -> None:
        index = self._id[name]
        self._data.geom_xpos[index] = position
        self._data.geom_xmat[index] = (np.eye(3) if frame is None else frame).ravel()
        self._model.geom_rgba[index] = (*rgba, 1.0)
        if size is not None:
            self._model.geom_size[index] = size

    def _hide(self, name: str) -> None:
        self._model.geom_rgba[self._id[name]] = 0

    def _look(self, rng: np.random.Generator, style: Style) -> None:
        place, axes, fov = FRONT_POSITION, FRONT_AXES, 45.0
        if style.camera == "top":
            place, axes = TOP_POSITION, TOP_AXES
        if style.camera == "wild":
            place, axes, fov = _wild_camera(rng)
        spread = {"near": (0.006, 0.5, 0.3), "top": (0.006, 0.5, 0.3), "shaken": (0.03, 2.0, 1.5)}.get(style.camera)
        axes = axes / np.linalg.norm(axes, axis=1, keepdims=True)
        if spread is not None:
            place = place + rng.normal(0, spread[0], 3)
            axes = axes @ _rotation(rng.normal(0, math.radians(spread[1]), 3))
            fov += rng.normal(0, spread[2])
        self._data.cam_xpos[0] = place
        self._data.cam_xmat[0] = axes.T.ravel()
        self._model.cam_fovy[0] = fov

    def project(self, points: Array) -> Array:
        """Picture coordinates [n, 2] of world points [n, 3], 0..1 from the top left."""
        axes = self._data.cam_xmat[0].reshape(3, 3)
        local = (points - self._data.cam_xpos[0]) @ axes
        scale = 0.5 / math.tan(math.radians(self._model.cam_fovy[0]) / 2)
        depth = np.maximum(-local[:, 2:], 1e-3)
        return 0.5 + np.stack([local[:, 0], -local[:, 1]], axis=1) / depth * scale

    def _arrange(self, rng: np.random.Generator, style: Style) -> Scene | None:
        """Place objects and tip; None where they do not fit into the picture."""
        odds = [0.15, 0.2, 0.35, 0.25, 0.05]
        count = style.count or int(rng.choice(MAX_OBJECTS, p=odds)) + 1
        halves = np.full(count, 0.025) if style.plain else rng.uniform(0.016, 0.036, count)
        places = _places(rng, count, 0.1 if style.plain and rng.random() < 0.5 else 0.062)
        shape, colour = _identities(rng, count, style)
        tall = np.where(shape == SHAPES.index("button"), 0.35, 1.0) * halves
        position = np.zeros((MAX_OBJECTS, 3))
        position[:count] = np.column_stack([places, tall])
        tip = _tip(rng, position[:count], halves, tall)
        uv = np.full((MAX_OBJECTS, 2), 0.5)
        uv[:count] = self.project(position[:count])
        tip_uv = self.project(tip[None])[0]
        if np.abs(uv - 0.5).max() > 0.49 or np.abs(tip_uv - 0.5).max() > 0.52:
            return None
        turned = rng.random() < (0.4 if style.plain else 0.7)
        for i in range(MAX_OBJECTS):
            if i >= count:
                self._hide(f"object{i}")
                continue
            size = (halves[i], halves[i] if shape[i] == 0 else tall[i], tall[i])
            self._model.geom_type[self._id[f"object{i}"]] = _GEOM[SHAPES[shape[i]]]
            frame = _yaw(rng.uniform(0, math.pi)) if turned else None
            self._put(f"object{i}", position[i], _tint(COLOURS[colour[i]], rng, style), size, frame)
        self._gripper(rng, style, tip)
        pad = MAX_OBJECTS - count
        return Scene(
            count, np.pad(colour, (0, pad)).astype(np.int8), np.pad(shape, (0, pad)).astype(np.int8),
            position, uv, tip, tip_uv, style.camera != "wild",
        )  # fmt: skip

    def _gripper(self, rng: np.random.Generator, style: Style, tip: Array) -> None:
        fancy = not style.plain and rng.random() < 0.3
        radius, length = TIP_RADIUS, TIP_LENGTH
        rgb = np.clip(np.array([0.15, 0.15, 0.18]) + rng.normal(0, 0.02, 3), 0, 1)
        if not style.plain and rng.random() < 0.5:
            radius, length = radius * rng.uniform(0.8, 1.25), length * rng.uniform(0.8, 1.3)
            rgb = np.full(3, rng.uniform(0.05, 0.6)) + rng.uniform(-0.04, 0.04, 3)
        if fancy:  # two fingers and a palm instead of the capsule; the tip lies between the fingertips
            self._hide("tip")
            gap = np.array([0, rng.uniform(0.012, 0.03), 0])
            frame = _yaw(rng.uniform(0, math.pi) if rng.random() < 0.5 else 0.0)
            for name, side in (("finger0", 1), ("finger1", -1)):
                self._put(name, tip + frame @ (side * gap) + np.array([0, 0, 0.03]), rgb, (0.006, 0.006, 0.03), frame)
            self._put("palm", tip + np.array([0, 0, 0.085]), rgb, (0.015, 0.035, 0.025), frame)
            return
        for name in ("finger0", "finger1", "palm"):
            self._hide(name)
        self._put("tip", tip + np.array([0, 0, length / 2]), rgb, (radius, length / 2, 0))

    def _dress(self, rng: np.random.Generator, style: Style) -> None:
        wood = np.array([0.55, 0.45, 0.35])
        if style.plain:
            table, half = np.clip(wood + rng.normal(0, 0.03, 3), 0, 1), (0.4, 0.4)
        else:
            table = _muted(rng) if rng.random() < 0.7 else np.clip(wood + rng.normal(0, 0.1, 3), 0, 1)
            half = (0.4, 0.4) if rng.random() < 0.5 else tuple(rng.uniform(0.36, 0.8, 2))
        self._put("table", np.array([0, 0, -0.02]), table, (*half, 0.02))
        backdrop = not style.plain and rng.random() < 0.7
        if backdrop:
            self._put("floor", np.array([0, 0, -rng.uniform(0.1, 0.8)]), _muted(rng), (4, 4, 0.01))
            walls = [(-rng.uniform(0.6, 2), 0, 0.03, 4), (0, -rng.uniform(0.6, 2), 4, 0.03), (0, rng.uniform(0.6, 2), 4, 0.03)]
            for i, (x, y, a, b) in enumerate(walls):
                if rng.random() < 0.6:
                    self._put(f"wall{i}", np.array([x, y, 0.0]), _muted(rng), (a, b, 2))
                else:
                    self._hide(f"wall{i}")
        else:
            for name in ("floor", *(f"wall{i}" for i in range(_WALLS))):
                self._hide(name)
        usual = style.plain and rng.random() < 0.75
        for i in range(_ZONES):
            self._model.geom_type[self._id[f"zone{i}"]] = _GEOM["cylinder"]
            if usual and i < 2:
                self._put(f"zone{i}", np.array([0, 0.2 - 0.4 * i, 0.001]), (0.9, 0.9, 0.9), (0.05, 0.001, 0))
            elif not usual and rng.random() < 0.35:
                rgb = (0.9, 0.9, 0.9) if rng.random() < 0.6 else _muted(rng)
                self._put(f"zone{i}", np.array([*rng.uniform(-0.3, 0.3, 2), 0.001]), rgb, (rng.uniform(0.03, 0.07), 0.001, 0))
            else:
                self._hide(f"zone{i}")
        self._scatter(rng, style)

    def _scatter(self, rng: np.random.Generator, style: Style) -> None:
        """Things that no sentence names: grey and brown shapes, mostly at the rim."""
        share = 0.0 if style.plain else 0.25
        for i in range(_CLUTTER):
            if rng.random() >= share:
                self._hide(f"clutter{i}")
                continue
            angle, radius = rng.uniform(0, 2 * math.pi), rng.uniform(0.33, 0.6)
            size = rng.uniform(0.015, 0.07, 3)
            place = np.array([radius * math.cos(angle) - 0.1, radius * math.sin(angle), size[2]])
            self._model.geom_type[self._id[f"clutter{i}"]] = int(rng.choice([2, 5, 6]))
            self._put(f"clutter{i}", place, _muted(rng), size, _yaw(rng.uniform(0, math.pi)))

    def _light(self, rng: np.random.Generator, style: Style) -> None:
        head = self._model.vis.headlight
        spread = 0.04 if style.plain else 0.15
        head.ambient[:] = np.clip(0.5 + rng.normal(0, spread) + rng.normal(0, 0.02, 3), 0.15, 0.8)
        head.diffuse[:] = np.clip(0.5 + rng.normal(0, spread) + rng.normal(0, 0.02, 3), 0.1, 0.8)
        lamp = not style.plain and rng.random() < 0.5
        self._model.light_active[0] = lamp
        self._data.light_xpos[0] = rng.uniform([-1, -1, 0.8], [1, 1, 2])
        self._data.light_xdir[0] = -self._data.light_xpos[0] / np.linalg.norm(self._data.light_xpos[0])
        self._model.light_diffuse[0] = rng.uniform(0.1, 0.5)
        self._model.light_cutoff[0] = 80


def _wild_camera(rng: np.random.Generator) -> tuple[Array, Array, float]:
    azimuth, elevation = rng.uniform(-math.pi, math.pi), math.radians(rng.uniform(22, 85))
    target = np.array([*rng.uniform(-0.06, 0.06, 2), 0.03])
    back = np.array([math.cos(azimuth) * math.cos(elevation), math.sin(azimuth) * math.cos(elevation), math.sin(elevation)])
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    axes = np.stack([right, np.cross(back, right), back])
    return target + back * rng.uniform(0.65, 1.2), axes, float(rng.uniform(40, 60))


def _places(rng: np.random.Generator, count: int, spacing: float) -> Array:
    """Spots on the table, mostly where episodes begin, sometimes where a push may carry a block."""
    reach = np.array([0.2, 0.24]) if rng.random() < 0.7 else np.array([0.28, 0.33])
    spots: list[Array] = []
    while len(spots) < count:
        spot = rng.uniform(-reach, reach)
        if all(math.dist(spot, other) > spacing for other in spots):
            spots.append(spot)
    return np.array(spots)


def _identities(rng: np.random.Generator, count: int, style: Style) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shapes and colours such that no two objects share both."""
    odds = COLOUR_ODDS[: 4 if style.basic_colours else None] / COLOUR_ODDS[: 4 if style.basic_colours else None].sum()
    boxes = style.plain and (style.basic_colours or rng.random() < 0.85)
    repeat = not boxes and rng.random() < 0.25
    while True:
        shape = np.zeros(count, int) if boxes else rng.choice(len(SHAPES), count, p=[0.5, 0.2, 0.2, 0.1])
        colour = rng.choice(len(odds), count, replace=repeat, p=odds)
        if len(set(zip(shape.tolist(), colour.tolist(), strict=True))) == count:
            return shape, colour


def _tip(rng: np.random.Generator, position: Array, halves: Array, tall: Array) -> Array:
    """Anywhere in reach, or close to an object, as most frames of an episode are; never inside one."""
    roll = rng.random()
    if roll < 0.35:
        tip = rng.uniform([-0.3, -0.33, TIP_RADIUS], [0.3, 0.33, 0.17])
    elif roll < 0.5:
        tip = np.array([*rng.uniform(-0.06, 0.06, 2), rng.uniform(0.08, 0.15)])
    else:
        near = position[rng.integers(len(position))]
        tip = np.array([*(near[:2] + rng.normal(0, 0.05, 2)), rng.uniform(TIP_RADIUS, 0.12)])
    for centre, half, top in zip(position, halves, tall, strict=True):
        if np.abs(tip[:2] - centre[:2]).max() < half + TIP_RADIUS * 0.6:
            tip[2] = max(tip[2], centre[2] + top + TIP_RADIUS)
    return tip


def _tint(name: str, rng: np.random.Generator, style: Style) -> Array:
    hue, saturation, value = HSV[name]
    wide = 0.4 if style.plain else 1.0
    hue = (hue + rng.normal(0, 0.012) * wide) % 1
    saturation = float(np.clip(saturation + rng.normal(0, 0.08 if saturation else 0.02) * wide, 0, 1))
    return np.array(colorsys.hsv_to_rgb(hue, saturation, float(np.clip(value + rng.normal(0, 0.08) * wide, 0.3, 1))))


def _muted(rng: np.random.Generator) -> Array:
    """A colour for backgrounds: any hue, but pale, so that it does not pass for an object."""
    return np.array(colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.35), rng.uniform(0.15, 0.85)))


def _develop(image: NDArray[np.uint8], rng: np.random.Generator, style: Style) -> NDArray[np.uint8]:
    """What cameras and pipelines do to a picture: noise, and sizes smaller than ours scaled up."""
    if style.plain and rng.random() < 0.7:
        return image
    if rng.random() < 0.15:
        small = int(rng.choice([48, 64, 72, 84]))
        picture = Image.fromarray(image).resize((small, small), Image.Resampling.BOX)
        image = np.asarray(picture.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))
    if rng.random() < 0.2:
        noisy = image + rng.normal(0, rng.uniform(1, 6), image.shape)
        image = np.clip(noisy, 0, 255).astype(np.uint8)
    return image
