"""A supervisor that ends, or tells of ends, while its children change: nobody is left behind."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from nexus_bus.children import Child
from nexus_bus.host import Supervisor
from schemas.control import ProcessExit
from tests.bus.test_host import DRAINS, Start, start  # noqa: F401 - a fixture
from tests.conftest import Eventually

pytestmark = pytest.mark.timeout(240)


async def test_a_worker_that_is_being_started_when_its_host_is_told_to_end_is_ended_too(
    start: Start,  # noqa: F811 - the fixture above
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = await start({"rollout": 1}, DRAINS)
    real, reached, opened = Child.start, asyncio.Event(), asyncio.Event()

    async def slow(self: Child, *given: Any) -> asyncio.subprocess.Process:
        reached.set()
        await opened.wait()
        return await real(self, *given)

    monkeypatch.setattr(Child, "start", slow)
    order = asyncio.create_task(running.order("rollout-0"))
    await eventually(reached.is_set)
    ending = asyncio.create_task(running.end())
    await eventually(lambda: running.supervisor._closing)
    child = running.supervisor.children["rollout-0"]
    opened.set()
    try:
        await asyncio.wait_for(ending, 60)
        await eventually(lambda: child.pid == 0 or not child.running)
    finally:
        order.cancel()
        if child.process is not None and child.running:
            child.process.kill()
    assert len(child.starts) == 2


async def test_ends_are_told_though_children_come_and_go_meanwhile(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(tmp_path, "nats://127.0.0.1:1")

    class Telling:
        async def cast(self, _name: str, ended: ProcessExit, **_tokens: str) -> None:
            told.append(ended.worker)
            supervisor.children["rollout-9"] = Child("rollout", "rollout-9", tmp_path)  # somebody scales this very moment

    supervisor._bus = cast(Any, Telling())
    for name in ("rollout-0", "rollout-1"):
        ended = ProcessExit(role="rollout", worker=name, host="h", pid=1, returncode=1)
        supervisor.children[name] = Child("rollout", name, tmp_path, ended=ended)
    await supervisor._tell_again()
    assert told == ["rollout-0", "rollout-1"]
