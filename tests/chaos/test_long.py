"""What takes minutes: random faults, half a minute without the server, full queues, a trainer that wakes up too late.

NEXUS_CHAOS_MINUTES draws other faults every time, for so long.
"""

import asyncio
import contextlib
import gc
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nexus_bus.bus import Bus
from nexus_bus.errors import Unavailable
from ops.bench.faults import POINTS
from ops.bench.faults_rig import COUNTS, House, house, meddling, rl, sft
from tests.chaos.conftest import Peace, happened, names, same, under_fire

MINUTES = float(os.environ.get("NEXUS_CHAOS_MINUTES", "0"))
EXAMPLES = round(MINUTES * 6) or 12

pytestmark = [
    pytest.mark.slow, pytest.mark.gl, pytest.mark.timeout(900 + 120 * MINUTES), pytest.mark.asyncio(loop_scope="session")
]  # fmt: skip


@st.composite
def planned(draw: st.DrawFn) -> str:
    """A line of a plan; for trainers, who are taken for victims of their records after a third death, it is a rare one."""
    role = draw(st.sampled_from(["rollout"] * 4 + ["environment"] * 4 + ["master"] * 4 + ["gateway", "trainer", "inference"]))
    action = draw(st.sampled_from(["kill", "kill", "kill", "freeze 0.5", "freeze 2.5"]))
    return f"{role} {draw(st.sampled_from(POINTS[role]))} {draw(st.integers(1, 6))} {action}"


MOMENT = st.floats(0.0, 4.0)
WORKERS = ["rollout-0", "environment-0", "master-0", "health-0"]
SCHEDULES = st.fixed_dictionaries(
    {
        "plan": st.lists(planned(), min_size=1, max_size=6),
        "kills": st.lists(st.tuples(MOMENT, st.sampled_from(WORKERS)), max_size=2),
        "server": st.lists(st.tuples(MOMENT, st.sampled_from([0.0, 0.5, 2.5])), max_size=2),  # frozen for so long, or killed
        "meddled": st.booleans(),
    }
)


@settings(
    max_examples=EXAMPLES, derandomize=not MINUTES, deadline=None, database=None, print_blob=True,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(schedule=SCHEDULES)
async def test_whatever_happens_the_jobs_come_to_the_same(service: House, peace: Peace, schedule: dict[str, Any]) -> None:
    lines = service.plan(*_bearable(schedule["plan"]))
    jobs = [("acme", rl(next(names))), ("acme", sft(next(names))), ("beta", sft(next(names)))]
    async with contextlib.AsyncExitStack() as stack:
        if schedule["meddled"]:
            for tenant, spec in jobs[:2]:
                await stack.enter_async_context(meddling(service.bus, tenant, spec.name, len(lines)))
        work = asyncio.gather(*(service.run(tenant, spec, 240.0) for tenant, spec in jobs))
        began = time.monotonic()
        for at, what in sorted([*schedule["kills"], *schedule["server"]], key=lambda one: one[0]):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            if isinstance(what, str):
                service.kill(what)
            else:
                await (service.freeze_server(what) if what else service.restart_server())
        try:
            for (_, spec), found in zip(jobs, await work, strict=True):
                same(found, peace[spec.kind])
        finally:
            service.withdraw(lines)


def _bearable(lines: list[str]) -> list[str]:
    """At most two deaths of a trainer in one schedule."""
    deaths = [line for line in lines if line.startswith("trainer") and line.endswith("kill")]
    return [line for line in lines if line not in deaths[2:]]


# Attempts to connect that came to nothing are closed by the collector: nats-py leaves them to it.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_half_a_minute_without_the_server_changes_nothing(tmp_path: Path, peace: Peace) -> None:
    async with house(tmp_path, cut=True) as here:
        assert here.proxy is not None
        pids = {name: child.pid for name, child in here.supervisor.children.items()}
        work = asyncio.create_task(under_fire(here, peace, 200.0))
        while here.committed < 3:  # version 0 of each
            await asyncio.sleep(0.02)
            assert not work.done()
        here.proxy.cut()
        await asyncio.sleep(30)
        assert not work.done()
        here.proxy.join()
        await work
        died = {name for name, child in here.supervisor.children.items() if child.pid != pids[name]}
        assert died <= {"trainer-0"}, "who waits for the server lives; a trainer cut off within a commit begins it anew"
    gc.collect()


async def test_a_full_queue_is_waited_for_and_nothing_of_it_is_lost(service: House, peace: Peace) -> None:
    await _room(service.bus, "TRAINING", 4000)  # for no record and no batch
    try:
        work = asyncio.create_task(under_fire(service, peace, 200.0))
        for producer in ("rollout-0", "environment-0"):
            while "waits for room" not in (service.home / "logs" / f"{producer}.log").read_text():
                await asyncio.sleep(0.1)
                assert not work.done()
        await asyncio.sleep(5)
        assert not work.done()
    finally:
        await _room(service.bus, "TRAINING", 1 << 30)
    await work


async def _room(bus: Bus, stream: str, size: int) -> None:
    """Give a stream so many bytes."""
    config = (await bus.js.stream_info(stream)).config
    config.max_bytes = size
    await bus.js.update_stream(config)


async def test_a_trainer_that_wakes_up_too_late_commits_nothing(tmp_path: Path, peace: Peace) -> None:
    settings = {"NEXUS_TRAINER_LEASE_S": "2"}
    async with house(tmp_path, counts={**COUNTS, "trainer": 2}, settings=settings) as here:
        for _ in range(2):  # in the step and in the commit of whoever has a seat
            lines = here.plan("trainer after-compute 2 freeze 7", "trainer after-blob 2 freeze 7")
            await under_fire(here, peace, 200.0)
            await happened(here, set(lines))
        said = "".join((here.home / "logs" / f"trainer-{n}.log").read_text() for n in range(2))
        assert "lease lost" in said or "slot lost" in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own for the server's data."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def test_a_full_disk_stops_the_jobs_and_loses_nothing_of_them(small_disk: Path, tmp_path: Path, peace: Peace) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "nats").symlink_to(small_disk, target_is_directory=True)
    async with house(home) as here:
        ballast = small_disk / "ballast"
        work = asyncio.create_task(under_fire(here, peace, 300.0))
        while here.committed < 3:
            await asyncio.sleep(0.02)
            assert not work.done()
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(4096))
        await asyncio.sleep(15)
        with pytest.raises(Unavailable):
            await here.bus.blobs.put(bytes(1 << 20), deadline=3)
        assert not work.done(), "with no room, nothing is committed"
        ballast.unlink()
        await here.restart_server()  # it gives JetStream up when the disk is full, until it is started again
        await work
