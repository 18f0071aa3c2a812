"""`nexus up` says once that a worker of each role runs here, and what to do next."""

import asyncio
from pathlib import Path
from typing import Any

from nexus_bus.bus import Bus, Card, Presence
from nexus_bus.cli.ready import when_ready
from tests.conftest import Eventually

COUNTS: dict[str, int] = {"master": 1, "rollout": 2, "trainer": 0}


async def test_it_is_ready_when_each_role_runs_on_this_host(bus: Bus, tmp_path: Path, eventually: Eventually) -> None:
    states = {"master": "running", "rollout": "starting"}

    async def present(role: str, host: str) -> Presence:
        def says() -> tuple[int, Any]:
            return 0, {"state": states[role] if host == "here" else "running"}

        return await Presence(bus, Card(role, {"worker": role, "host": host}, "subject", ""), says).start()

    there = [await present("rollout", "elsewhere"), await present("master", "here"), await present("rollout", "here")]
    said: list[str] = []
    looks: list[float] = []
    telling = asyncio.create_task(when_ready(bus, tmp_path, "here", COUNTS, said.append))
    watching = await bus.listen("$SRV.STATS", lambda _: _note(looks))
    await eventually(lambda: len(looks) >= 3)
    assert said == [], "another host's does not count, nor one that starts"
    states["rollout"] = "running"
    await asyncio.wait_for(telling, 30)
    (line,) = said
    assert line.startswith("ready: master, rollout. In another terminal")
    assert f"NEXUS_HOME={tmp_path}" in line
    assert "`nexus submit FILE`" in line
    for one in (*there, watching):
        await one.stop()


async def _note(looks: list[float]) -> None:
    looks.append(asyncio.get_running_loop().time())
