"""The demo's jobs, as a tenant would write them, and what becomes of them where no OpenGL library is to be had."""

import os
import platform
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from nexus_bus.envs.rendering import probe
from schemas.job import JobSpec

JOBS = Path(__file__).parent / "jobs"


class Workload(msgspec.Struct, frozen=True):
    """One tenant of the demo: the job that counts, and the short one that makes its starting policy."""

    tenant: str
    job: JobSpec
    warm: JobSpec | None = None


def workloads(seed: int, *, rendering: bool, scale: float = 1.0, base: str | None = None) -> list[Workload]:
    """Read the job documents; the seed reaches every one of them, and `scale` shortens the learning for a quick look."""
    found: list[Workload] = []
    for path in sorted(JOBS.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        shared = {"base": base} if base else {}
        jobs = {key: _spec(document[key] | shared, seed, rendering, scale) for key in ("warm", "job") if key in document}
        found.append(Workload(document["tenant"], jobs["job"], jobs.get("warm")))
    return found


def _spec(document: dict[str, Any], seed: int, rendering: bool, scale: float) -> JobSpec:
    document = document | {"seed": seed}
    algorithm = dict(document["algorithm"])
    for key in ("steps", "updates"):
        if key in algorithm:
            algorithm[key] = max(2, round(algorithm[key] * scale))
    if "steps" in algorithm:
        algorithm["warmup_steps"] = min(20, algorithm["steps"] // 4)
    if "expert" in document.get("data", {}):
        document["data"] = {"expert": document["data"]["expert"] | {"seed": seed * 1000 + 1}}
    document["algorithm"] = algorithm
    if not rendering:
        document["environment"] = _without_gl(document["environment"])
    return msgspec.convert(document, JobSpec)


def _without_gl(environment: dict[str, Any]) -> dict[str, Any]:
    """The grid world draws with NumPy alone. Success may differ much from the tabletop's: the demo says which one ran."""
    task = "goto" if environment["options"].get("blocks") == 3 else "goto-red-ball"
    kept = {key: environment[key] for key in ("execute",) if key in environment}
    return {"id": "minigrid", "task": task, **kept}


def ensure_rendering(console: Console) -> bool:
    """Find EGL, then OSMesa; else install OSMesa where we may; else say so and go without."""
    found = probe()
    if found.backend is not None:
        console.print(f"Rendering by {found.backend}.")
        return True
    console.print(f"[yellow]No OpenGL library found.[/] {found.advice}")
    if platform.system() == "Linux" and os.geteuid() == 0 and (apt := shutil.which("apt-get")):
        console.print("Installing libosmesa6 (this machine lets us) …")
        for command in ([apt, "update", "-qq"], [apt, "install", "-y", "-qq", "libosmesa6"]):
            subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)  # noqa: S603 - fixed words
        os.environ.pop("NEXUS_RENDERING", None)  # what the first probe found
        probe.cache_clear()
        if probe().backend is not None:
            return True
    console.print("[yellow]Going on with an environment that needs no OpenGL (minigrid).[/]")
    return False
