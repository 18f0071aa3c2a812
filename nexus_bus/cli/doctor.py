"""`nexus doctor`: what this machine has, what is missing, and what to do about it."""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from nexus_bus import config
from nexus_bus.cli.options import console, json_option, print_json
from nexus_bus.errors import NexusError

FREE_GB = 5
PACKAGES = {  # distribution → (extra, what does not work without it)
    "torch": ("models", "inference and trainer workers"),
    "transformers": ("models", "inference and trainer workers"),
    "mujoco": ("envs", "the tabletop environment"),
    "gymnasium": ("envs", "Gymnasium environments"),
    "pyarrow": ("data", "datasets, hence SFT"),
    "metaworld": ("metaworld", "Meta-World tasks"),
    "minigrid": ("minigrid", "the environment without OpenGL"),
}


@dataclass(frozen=True)
class Check:
    """One thing looked at. `needed`: `nexus up` cannot do without."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    needed: bool = True


@click.command("doctor")
@json_option
def doctor_command(as_json: bool) -> int:
    """Check what this machine has; exit code 1 if something is missing that `nexus up` needs."""
    checks = list(_checks())
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        from rich.text import Text

        out = console()
        for check in checks:
            mark, style = ("ok  ", "green") if check.ok else ("MISSING ", "red") if check.needed else ("absent ", "yellow")
            text = Text(mark, style=style).append(f"{check.name}: {check.found}", style="default")
            out.print(text.append(f" → {check.advice}" if check.advice and not check.ok else ""), soft_wrap=True)
    return 1 if any(check.needed and not check.ok for check in checks) else 0


def _checks() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")
    yield _server()
    for name, (extra, without) in PACKAGES.items():
        found = importlib.util.find_spec(name) is not None
        what = importlib.metadata.version(name) if found else f"not installed; without it: {without}"
        yield Check(name, found, what, f"pip install 'nexus-bus[{extra}]'", needed=extra == "models")
    yield _rendering()
    yield from _venvs()
    yield _port()
    yield _disk()


def _server() -> Check:
    from nexus_bus.bus.server import find_binary

    try:
        return Check("nats-server", True, find_binary())
    except NexusError as error:
        return Check("nats-server", False, str(error))


def _rendering() -> Check:
    if importlib.util.find_spec("mujoco") is None:
        return Check("OpenGL", False, "not looked for: no mujoco", needed=False)
    from nexus_bus.envs.rendering import probe

    rendering: Any = probe()
    return Check(
        "OpenGL", rendering.backend is not None, rendering.backend or "neither EGL nor OSMesa", rendering.advice, needed=False
    )


def _venvs() -> Iterator[Check]:
    """Simulators with a virtual environment of their own; those nobody installed are no news."""
    from nexus_bus.envs.recipes import RECIPES, check, interpreter

    there = [name for name in RECIPES if interpreter(name) is not None]
    for name in there:
        wrong = check(name)
        yield Check(f"environment {name}", not wrong, wrong or "can be used", needed=False)  # what is wrong says what to do
    if absent := [name for name in RECIPES if name not in there]:
        yield Check("more environments", True, f"{', '.join(absent)}: `nexus env list`, then `nexus env install NAME`")
    yield _vulkan()


def _vulkan() -> Check:
    from nexus_bus.envs.rendering import VULKAN_ADVICE, vulkan

    found = vulkan()
    return Check(
        "Vulkan", bool(found), ", ".join(found) or "no driver; only ManiSkill draws with it", VULKAN_ADVICE, needed=False
    )


def _port() -> Check:
    from nexus_bus.homes import running_up

    home = config.home()
    if (pid := running_up(home)) is not None:
        return Check("service", True, f"runs on {home} (process {pid}) at {config.default_url()}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 4222))
        except OSError:
            return Check("port 4222", True, "taken by another program; `nexus up` takes a free one")
    return Check("port 4222", True, "free")


def _disk() -> Check:
    home = config.home()
    place = next(parent for parent in (home, *home.parents) if parent.exists())
    free = shutil.disk_usage(place).free / 1e9
    writable = os.access(place, os.W_OK)
    found = f"{free:.0f} GB free at {place}" + ("" if writable else ", not writable")
    return Check("disk", free > FREE_GB and writable, found, f"set NEXUS_HOME to a place with {FREE_GB} GB")
