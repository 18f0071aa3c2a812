"""What a hostile tenant or an outage may do to the master and the Health Manager: everybody else goes on."""

import asyncio
import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nexus_bus import logs
from nexus_bus.bus import Bus, orders_durable
from nexus_bus.worker import Context, Pulse
from schemas.control import Heartbeat
from schemas.job import Budget, EnvironmentSpec, JobSpec, Ppo
from workers.health import Health
from workers.master import Master

SPEC = JobSpec(kind="rl", name="pick", environment=EnvironmentSpec(id="tabletop", task="touch"), algorithm=Ppo(updates=1))


def context(bus: Bus, role: Any, config: Any = None) -> Context:
    return Context(role, f"{role}-0", bus, config, asyncio.Event(), Pulse(), logs.get_logger(), "here")


async def submitted(master: Master, name: str, wall_s: float | None = None) -> None:
    await master.submit(msgspec.structs.replace(SPEC, name=name, budget=Budget(wall_s=wall_s)), "acme", f"s/{name}")


async def phase(bus: Bus, job: str) -> tuple[str, str]:
    entry = await bus.kv("registry").get(f"job.acme.{job}", dict)
    assert entry is not None
    return entry.value["phase"], entry.value.get("reason", "")


async def test_a_job_that_cannot_be_read_does_not_keep_the_others_waiting(bus: Bus, eventually: Any) -> None:
    master = Master(context(bus, "master"))
    await bus.kv("registry").put("job.acme.broken", {"plan": None})
    await submitted(master, "late", wall_s=1.0)

    async def failed() -> bool:
        await master.tick()
        return (await phase(bus, "late"))[0] == "failed"

    await eventually(failed)


async def test_a_report_that_is_lost_fails_its_job_by_name(bus: Bus, consuming: Any, eventually: Any) -> None:
    master = Master(context(bus, "master"))
    await submitted(master, "pick")
    consuming(master.handle, orders_durable("acme"), on_bad=master.refuse_undecodable, on_dead=master.given_up)
    report = b'{"job":"pick","kind":"learned","metrics":{"kl":null}}'
    await bus.publisher.send("job.report.acme.pick", report, {"Nats-Msg-Id": "r"}, 30.0)

    async def failed() -> bool:
        return (await phase(bus, "pick"))[0] == "failed"

    await eventually(failed)
    assert "$.metrics" in (await phase(bus, "pick"))[1]


async def test_a_submission_that_is_given_up_is_refused_with_the_reason(
    bus: Bus, consuming: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = Master(context(bus, "master"))

    async def broken(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(master, "submit", broken)
    once = dataclasses.replace(orders_durable("acme"), max_deliver=1)
    consuming(master.handle, once, on_bad=master.refuse_undecodable, on_dead=master.given_up)
    await bus.publish("job.submit", SPEC, msg_id="mine", tenant="acme")
    async with asyncio.timeout(30):
        async for item in bus.tail("event", tenant="acme", job="*"):
            assert (item.message.type, item.message.submission) == ("job.refused", "mine")
            break


async def test_heartbeats_that_an_outage_swallowed_are_no_fault_of_the_workers(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(beat_s=0.1, missed=2, starting_s=5.0, wedged_s=5.0, loop_window_s=60.0, loop_limit=5)
    health = Health(context(bus, "health", settings))
    restarted: list[str] = []

    async def lose(name: str, *_: object) -> None:
        restarted.append(name)

    monkeypatch.setattr(health, "lose", lose)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("workers.health.time", SimpleNamespace(monotonic=lambda: clock.now))
    beat = Heartbeat(
        role="trainer", worker="trainer-0", host="here", pid=1, state="running", busy=False, progress=0, time=time.time()
    )
    await health.beat(beat, {})
    bus.up.clear()
    clock.now += 0.4
    await health.look()
    bus.up.set()
    await health.look()
    assert restarted == []
    clock.now += 0.4
    await health.look()
    assert restarted == ["trainer-0"]
