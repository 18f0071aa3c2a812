"""`nexus up` from outside: one command starts it, it survives its server's crash, and one command ends it."""

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


async def test_up_works_is_up_once_and_goes_down(nexus: Nexus, tmp_path: Path, eventually: Any):
    started = nexus("up", "--detach", "--port", str(free_port()), *NOBODY)
    assert started.returncode == 0, started.stderr
    home = tmp_path / "home"
    pid = running_up(home)
    assert pid is not None
    family = psutil.Process(pid).children(recursive=True)
    assert len(family) >= 3  # the server, the master, the Health Manager

    again = nexus("up", *NOBODY)
    assert again.returncode == 1
    assert f"(process {pid})" in again.stderr
    assert "nexus down" in again.stderr

    def works() -> dict[str, dict[str, Any]]:
        return {one["worker"]: one for one in json.loads(nexus("workers", "--json").stdout)}

    assert nexus("scale", "environment=1").stdout.startswith("environment: 0 → 1 on ")
    await eventually(lambda: works().get("environment-0", {}).get("state") == "running", within=60)
    found = works()
    assert set(found) == {"master-0", "health-0", "gateway-0", "environment-0"}
    assert all(one["answers"] for one in found.values())
    assert found["master-0"]["pid"] in [process.pid for process in psutil.Process(pid).children()]
    assert "environment-0" in nexus("ps").stdout
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
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert not (home / "url").exists()
    assert nexus("down").stdout == f"nothing runs on {home}\n"
    assert nexus("jobs", "--url", "nats://127.0.0.1:1").returncode == 1  # whoever else may listen on 4222
