"""Which software or hardware GL this machine can draw with. Asked before mujoco is imported, which reads MUJOCO_GL once."""

import functools
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from nexus_bus.errors import Unavailable

Backend = Literal["egl", "osmesa"]

_MARK = "NEXUS_RENDERING"  # what a parent found holds for its children, which then need not probe again
_TRY = "import mujoco; c = mujoco.GLContext(8, 8); c.make_current(); c.free()"
_ADVICE = (
    "no OpenGL here: as root `apt-get install libosmesa6` (software) or `apt-get install libegl1 libgl1` (EGL), "
    "or choose an environment that draws without it, such as minigrid"
)
VULKAN_ADVICE = (
    "Vulkan comes with the driver of the GPU's vendor, or in software as root with `apt-get install mesa-vulkan-drivers` "
    "of Mesa 24.3 or newer (Debian 12: from bookworm-backports)"
)
_DRIVERS = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))


@dataclass(frozen=True)
class Rendering:
    """The working backend, or None and what to install."""

    backend: Backend | None
    advice: str = ""


@functools.lru_cache(maxsize=1)
def probe() -> Rendering:
    """Find a backend that really makes a context: EGL, then OSMesa; a MUJOCO_GL that is set is tried first.

    Each try runs in a process of its own, because a failed import of mujoco cannot be repeated. The result goes into
    MUJOCO_GL of this process and of all its children. Call it before mujoco is imported.
    """
    found = os.environ.get(_MARK)
    if found is None:
        wished = os.environ.get("MUJOCO_GL", "").lower()
        order = sorted(("egl", "osmesa"), key=lambda name: name != wished)
        found = next((name for name in order if _works(name)), "none")
        os.environ[_MARK] = found
    if found not in ("egl", "osmesa"):
        return Rendering(None, _ADVICE)
    os.environ["MUJOCO_GL"] = found
    # Mesa's own threads only wait for each other on small pictures: without them busy cores draw up to 4 times faster, the
    # pixels being the same.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    return Rendering(cast(Backend, found))


def require() -> None:
    """Make sure that mujoco can draw. Raises Unavailable with the package to install."""
    rendering = probe()
    if rendering.backend is None:
        raise Unavailable(rendering.advice)


def close(renderer: Any) -> None:
    """Close a `mujoco.Renderer` and leave the pictures of all others as they are.

    What was loaded for it is freed in whichever GL context is current, by itself or by the garbage collector: that may be
    another session's, which then loses its own textures and meshes.
    """
    context, loaded = renderer._gl_context, renderer._mjr_context  # noqa: SLF001 - no public way
    if context is not None and loaded is not None:
        context.make_current()
        loaded.free()
        renderer._mjr_context = None  # noqa: SLF001
    renderer.close()


def own_context(env: Any) -> Any:
    """The environment, whose Gymnasium renderer for MuJoCo from now on shows it alike in every session, and nothing of others.

    As it is, it draws and frees in whichever GL context is current. Of two environments in one process that is the last one's
    made: pictures of the other show its textures and meshes, and nothing at all once it is closed. What a closed one had loaded
    is freed when the garbage collector comes, in the context of the one that draws just then. And where a free camera
    looks depends on the moment that was drawn first; here it is the middle of the model as it was made.
    """
    renderer = getattr(getattr(env, "unwrapped", env), "mujoco_renderer", None)
    if renderer is None:
        return env
    draw, free = renderer.render, renderer.close

    def render(mode: str | None) -> Any:
        first = renderer.viewer is None
        viewer = renderer._get_viewer(mode)  # noqa: SLF001 - no public way
        viewer.make_context_current()
        if first and "lookat" not in (renderer.default_cam_config or {}):
            viewer.cam.lookat[:] = _middle(renderer.model)
        return draw(mode)

    def close() -> None:
        for viewer in renderer._viewers.values():  # noqa: SLF001 - no public way
            viewer.make_context_current()
            viewer.con.free()
        free()
        renderer._viewers.clear()  # noqa: SLF001 - a second close has nothing to free
        renderer.viewer = None

    renderer.render, renderer.close = render, close
    return env


def _middle(model: Any) -> Any:
    """As Gymnasium has it: the median of the places of all geometries, `[3]`."""
    mujoco: Any = importlib.import_module("mujoco")
    made = mujoco.MjData(model)
    mujoco.mj_forward(model, made)
    return np.median(made.geom_xpos, axis=0)


def vulkan() -> list[str]:
    """Names of the Vulkan drivers that are installed: VK_ICD_FILENAMES, else where drivers are listed."""
    given = [Path(name) for name in os.environ.get("VK_ICD_FILENAMES", "").split(os.pathsep) if name]
    files = given or [file for folder in _DRIVERS for file in folder.glob("*.json")]
    return sorted({file.name.removesuffix(".json") for file in files if file.is_file()})


def _works(backend: str) -> bool:
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and a constant
            [sys.executable, "-c", _TRY],
            env={**os.environ, "MUJOCO_GL": backend},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
