"""`nexus up` from outside: one command starts it, it survives its server's crash, and one command ends it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nexus_bus.homes import running_up
from tests.conftest import free_port

pytestmark = pytest.mark.timeout(400)

NOBODY = [flag for role in ("inference", "trainer", "rollout", "environment") for flag in (f"--{role}", "0")]
Nexus = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def nexus(tmp_path: Path) -> Iterator[Nexus]:
    """`nexus("jobs")`, on a home of this test."""
    home = tmp_path / "home"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEXUS_")} | {"NEXUS_HOME": str(home)}

    def nexus(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nexus_bus.cli", *arguments],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip

    yield nexus
    if (pid := running_up(home)) is not None:
        os.kill(pid, signal.SIGKILL)


def three(process: psutil.Process) -> list[psutil.Process]:
    """What descends from it, once that is three."""
    family = process.children(recursive=True)
    return family if len(family) >= 3 else []


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def test_up_works_is_up_once_and_goes_down(nexus: Nexus, tmp_path: Path, eventually: Any):
    started = nexus("up", "--detach", "--port", str(free_port()), *NOBODY)
    assert started.returncode == 0, started.stderr
    home = tmp_path / "home"
    pid = running_up(home)
    assert pid is not None
    family = await eventually(lambda: three(psutil.Process(pid)), within=60)  # the server, the master, the Health Manager

    again = nexus("up", *NOBODY)
    assert again.returncode == 1
    assert f"(process {pid})" in again.stderr
    assert "nexus down" in again.stderr

    def works() -> dict[str, dict[str, Any]]:
        return {one["worker"]: one for one in json.loads(nexus("workers", "--json").stdout)}

    assert nexus("scale", "environment=1").stdout.startswith("environment: 0 → 1 on ")

    def all_work() -> dict[str, dict[str, Any]] | None:  # one look misses who takes a moment longer to answer
        found = works()
        there = set(found) == {"master-0", "health-0", "gateway-0", "environment-0"}
        there = there and all(one["answers"] and one["state"] == "running" for one in found.values())
        return found if there else None

    found = await eventually(all_work, within=60)
    assert found["master-0"]["pid"] in [process.pid for process in psutil.Process(pid).children()]
    await eventually(lambda: "environment-0" in nexus("ps").stdout, within=60)
    nexus("scale", "environment=0")
    await eventually(lambda: set(works()) == {"master-0", "health-0", "gateway-0"}, within=60)
    refused = nexus("scale", "gateway=0")
    assert (refused.returncode, refused.stdout) == (2, "")

    document = tmp_path / "bad.toml"
    document.write_text('kind = "rl"\nname = "a"\nenvironment = {id = "tabletop", task = "lift"}\n')
    refused = nexus("submit", str(document))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"nexus: {document}:3: environment.task: tabletop has no task 'lift'")

    os.kill(int((home / "nats" / "nats.pid").read_text()), signal.SIGKILL)
    await eventually(lambda: nexus("jobs").stdout == "default has no jobs; `nexus submit FILE` sends one\n", within=60)

    family += psutil.Process(pid).children(recursive=True)
    down = nexus("down")
    assert (down.returncode, down.stdout) == (0, f"stopped process {pid}\n")
    await eventually(lambda: not any(lives(process) for process in family))  # whose parent died, dies a moment later
    assert not (home / "url").exists()
    assert nexus("down").stdout == f"nothing runs on {home}\n"
    assert nexus("jobs", "--url", "nats://127.0.0.1:1").returncode == 1  # whoever else may listen on 4222
