"""`nexus metrics` from outside: what Prometheus reads is what is on the bus, and nothing once the bus is away."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
from bus_examples import example
from prometheus_client.parser import text_string_to_metric_families

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.topology import ensure_job, ensure_tenant
from nexus_bus.cli import main
from nexus_bus.metrics import BY_TENANT, METRICS
from nexus_bus.registry import job_key
from schemas.control import Heartbeat
from schemas.inference import InferenceRequest
from schemas.plan import JobState
from schemas.rollout import RolloutRecord
from schemas.usage import Usage

pytestmark = pytest.mark.timeout(240)

Numbers = dict[tuple[str, ...], float]
Scrape = Callable[[], Awaitable[dict[str, Numbers]]]


@pytest.fixture
def exporter(server: EmbeddedServer) -> Iterator[Callable[..., Scrape]]:
    """`scrape = exporter("--by-tenant")` runs the command; `await scrape()` gives numbers by metric and label values.

    Label values stand in the order of the labels' names.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> Scrape:
        environment = os.environ | {"NEXUS_URL": server.url, "NEXUS_CREDS": str(server.creds)}
        process = subprocess.Popen(
            [sys.executable, "-m", "nexus_bus.cli", "metrics", "--listen", "127.0.0.1:0", *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]

        def fetch() -> dict[str, Numbers]:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own address
                text = answer.read().decode()
            found: defaultdict[str, Numbers] = defaultdict(dict)
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found[sample.name][tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
            return found

        return lambda: asyncio.to_thread(fetch)

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(60) == 0  # SIGTERM ends it well
        assert process.stdout is not None
        process.stdout.close()


async def test_queues_workers_jobs_and_device_time_are_what_is_on_the_bus(
    bus: Bus, exporter: Callable[..., Scrape], eventually: Any
) -> None:
    scrape = exporter()
    await eventually(lambda: _follows(bus, scrape), within=60)

    await ensure_tenant(bus, "acme")
    await ensure_tenant(bus, "globex")
    await ensure_job(bus, "acme", "touch")
    request, record = example(InferenceRequest, full=False), example(RolloutRecord, full=False)
    for tenant, count in (("acme", 3), ("globex", 2)):
        for n in range(count):
            await bus.publish("infer.request", request, msg_id=f"{tenant}/{n}", tenant=tenant)
    mine = msgspec.structs.replace(record, tenant="acme", job="touch")
    await bus.publish("train.record", mine, msg_id="record", tenant="acme", job="touch")
    state = example(JobState, full=False)
    for tenant, job, phase, lag in (("acme", "touch", "training", 1.0), ("globex", "push", "training", 4.0)):
        running = msgspec.structs.replace(state, phase=phase, metrics={"lag": lag})
        await bus.kv("registry").put(job_key(tenant, job), running)
    await bus.kv("registry").put(job_key("acme", "old"), msgspec.structs.replace(state, phase="completed"))
    for n, (tenant, job, device_s) in enumerate((("acme", "touch", 2.5), ("globex", "push", 1.5), ("provider", "idle", 8.0))):
        used = Usage(tenant=tenant, job=job, worker="w", kind="inference", device_s=device_s, time="2026-01-01T00:00:00Z")
        await bus.publish("usage", used, msg_id=f"used/{n}", tenant=tenant, job=job)

    async def told() -> dict[str, Numbers] | None:
        for n in range(2):  # heartbeats are repeated: one is forgotten after seconds
            beat = Heartbeat(
                role="environment", worker=f"environment-{n}", host="here", pid=1, state="running", busy=n == 0,
                progress=1, time=time.time(), gauges={"sessions": 5.0},
            )  # fmt: skip
            await bus.cast("health.beat", beat, role="environment", worker=beat.worker)
        numbers = await scrape()
        whole = numbers["nexus_queue_waiting"].get(("TRAINING", "trainer")) == 1
        whole = whole and numbers["nexus_device_seconds_total"].get(("inference", "idle")) == 8
        return numbers if whole and numbers["nexus_workers"]["environment", "running"] == 2 else None

    numbers = await eventually(told, within=60)
    assert numbers["nexus_queue_waiting"]["INFERENCE", "inference"] == 5  # of both tenants
    assert numbers["nexus_queue_waiting"]["ROLLOUT", "rollout"] == 0  # there from the start
    assert numbers["nexus_queue_in_flight"]["INFERENCE", "inference"] == 0
    assert 0 < numbers["nexus_queue_oldest_age_seconds"]["INFERENCE",] < 60
    assert numbers["nexus_queue_oldest_age_seconds"]["JOBS",] == 0
    assert 0 < numbers["nexus_stream_filled_ratio"]["TRAINING",] < 1
    assert numbers["nexus_stream_filled_ratio"]["DEAD",] == 0
    assert numbers["nexus_workers_busy"]["environment",] == 1
    assert numbers["nexus_sessions"][()] == 10
    assert (numbers["nexus_jobs"]["training",], numbers["nexus_jobs"]["completed",], numbers["nexus_jobs"]["failed",]) == (
        2,
        1,
        0,
    )
    assert (numbers["nexus_lag_versions_mean"][()], numbers["nexus_lag_versions_max"][()]) == (2.5, 4)
    assert numbers["nexus_device_seconds_total"]["inference", "jobs"] == 4
    assert set(numbers) == set(METRICS)
    named = [name for name, samples in numbers.items() if "acme" in repr(samples)]
    assert named == []  # no tenant's name, unless it is asked for


async def test_by_tenant_adds_numbers_and_changes_none(bus: Bus, exporter: Callable[..., Scrape], eventually: Any) -> None:
    scrape = exporter("--by-tenant")
    await eventually(lambda: _follows(bus, scrape), within=60)
    await ensure_tenant(bus, "acme")
    await bus.publish("infer.request", example(InferenceRequest, full=False), msg_id="one", tenant="acme")
    state = msgspec.structs.replace(example(JobState, full=False), phase="training")
    await bus.kv("registry").put(job_key("acme", "touch"), state)
    used = Usage(tenant="acme", job="touch", worker="w", kind="training", device_s=2.5, time="2026-01-01T00:00:00Z")

    async def told() -> dict[str, Numbers] | None:
        await bus.publish("usage", used, msg_id="used", tenant="acme", job="touch")
        numbers = await scrape()
        return numbers if BY_TENANT.keys() <= numbers.keys() and numbers["nexus_jobs"]["training",] else None

    numbers = await eventually(told, within=60)
    assert numbers["nexus_tenant_queue_messages"] == {("INFERENCE", "acme"): 1}
    assert numbers["nexus_tenant_jobs"] == {("training", "acme"): 1}
    assert numbers["nexus_tenant_device_seconds_total"] == {("training", "acme"): 2.5}
    assert numbers["nexus_queue_waiting"]["INFERENCE", "inference"] == 1


async def test_while_the_bus_is_away_nothing_is_told_but_that(
    bus: Bus, exporter: Callable[..., Scrape], crash: Any, eventually: Any
) -> None:
    scrape = exporter()
    await eventually(lambda: _up(scrape), within=60)
    crash.kill()

    async def down() -> bool:
        return await scrape() == {"nexus_up": {(): 0}}

    await eventually(down, within=60)
    crash.restart()
    await eventually(lambda: _up(scrape), within=60)


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1:http", "127.0.0.1:70000"])
def test_a_wrong_address_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--listen", address]) == 2
    assert f"{address!r} is not of the form HOST:PORT" in capsys.readouterr().err


async def _follows(bus: Bus, scrape: Scrape) -> bool:
    """Whether it reads what is used: of what was on record before it began to, it says nothing."""
    used = Usage(tenant="provider", job="warm", worker="w", kind="inference", device_s=1.0, time="2026-01-01T00:00:00Z")
    await bus.publish("usage", used, msg_id=f"warm/{time.monotonic_ns()}", tenant="provider", job="warm")
    return ("inference", "warm") in (await scrape()).get("nexus_device_seconds_total", {})


async def _up(scrape: Scrape) -> bool:
    return (await scrape())["nexus_up"][()] == 1
