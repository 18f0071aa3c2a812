"""What a tenant asks for itself and pays for, at the end of its budget: refused at once, in the middle of an episode too."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from playing import playing

from nexus_bus import budgets, registry
from nexus_bus.budgets import Budgets
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.client import Client
from nexus_bus.clock import now
from nexus_bus.errors import NotFound, Refused, Unavailable
from nexus_bus.spending import Spending
from schemas.base import Tensor
from schemas.environment import Observation, SessionCall, SessionStep
from schemas.inference import InferenceRequest
from schemas.job import EnvironmentSpec
from schemas.tenant import TenantLimits, TenantRecord
from schemas.usage import Usage
from tests.conftest import Eventually
from workers.gateway import Gateway

SPEC = EnvironmentSpec(id="minigrid", task="goto", options={"image_size": 32, "max_steps": 10})
SEEN = Observation(images={}, state=Tensor(dtype="float32", shape=(1,), data=b"\0\0\0\0"), instruction="touch")
REQUEST = InferenceRequest(id="mine", job="pick", policy="pick@0", observation=SEEN)


async def limit(bus: Bus, **limits: Any) -> None:
    record = TenantRecord(name="acme", account="A" * 56, created="", limits=TenantLimits(**limits))
    await bus.kv("registry").put(registry.account_key("acme"), record)


async def use(bus: Bus, seconds: float, **fields: Any) -> None:
    used = Usage(tenant="acme", job="pick", worker="w", kind="inference", device_s=seconds, time=now())
    await bus.publish("usage", replace(used, **fields), msg_id=f"u/{seconds}/{fields}", tenant="acme", job=used.job)


async def told(call: Callable[[], Awaitable[Any]]) -> str:
    """Why it is refused; empty if it is not."""
    try:
        await call()
    except NotFound:
        return ""
    except Refused as error:
        return str(error)
    return ""


async def test_at_the_end_of_the_device_seconds_requests_and_sessions_are_refused_and_closing_is_not(
    bus: Bus, server: EmbeddedServer, gateway: Gateway, eventually: Eventually
) -> None:
    acme, other = Client(bus, "acme"), Client(bus, "globex")
    await limit(bus, device_s=10.0)
    await use(bus, 9.0)
    async with playing(bus, server.url, SPEC, eventually):
        async with acme.session(SPEC) as session:
            await session.reset(seed=1)
            await use(bus, 2.5)
            why = await eventually(lambda: told(session.render))
            assert why == "limits.device_s: 11.5 of your 10 s are used; ask the provider for more"
            assert await told(lambda: acme.call("infer.request", REQUEST, timeout=10.0)) == why
        close = SessionStep(session=session.id, call=SessionCall(op="close"))
        with pytest.raises(NotFound, match="is over or never was"):
            await other.for_tenant("acme").call("env.call", close, timeout=10.0)

        async def opened() -> bool:
            async with acme.session(SPEC) as another:
                return (await another.reset(seed=1)).end == "running"

        assert await told(opened) == why
        assert await told(lambda: other.call("infer.request", REQUEST, timeout=10.0)) == "", "another tenant goes on"
        await limit(bus, device_s=20.0)

        async def goes_on() -> bool:
            return not await told(opened)

        await eventually(goes_on)
    noted = {(one.action, one.detail, one.outcome) async for one in acme.audit()}
    assert noted == {("env.open", "minigrid:goto", "ok")}


async def test_the_budget_of_money_counts_sessions_too(
    bus: Bus, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    file = tmp_path / "nexus.toml"
    file.write_text('[prices]\ncurrency = "EUR"\nsession_s = 0.5\n')
    monkeypatch.setenv("NEXUS_CONFIG", str(file))
    gateway.budgets = Budgets(gateway.bus)
    acme = Client(bus, "acme")
    await limit(bus, money=1.0)
    assert await told(lambda: acme.call("infer.request", REQUEST, timeout=10.0)) == ""
    await use(bus, 0.0, kind="environment", job="_", session_s=3.0)
    why = await eventually(lambda: told(lambda: acme.call("infer.request", REQUEST, timeout=10.0)))
    assert why == "limits.money: 1.50 of your 1 EUR are used; ask the provider for more"


async def test_nothing_is_decided_by_half_a_sum(bus: Bus, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    counting, read = asyncio.Event(), Spending._follow

    async def slowly(*args: Any) -> None:
        await counting.wait()
        await read(*args)

    monkeypatch.setattr(Spending, "_follow", slowly)
    monkeypatch.setattr(budgets, "LOOKS", 3)
    await limit(bus, device_s=1.0)
    await use(bus, 2.0)
    with pytest.raises(Unavailable, match="is being summed up; ask again"):
        await gateway.budgets.check("acme")
    counting.set()
    monkeypatch.setattr(budgets, "LOOKS", 1500)
    with pytest.raises(Refused, match=r"2\.0 of your 1 s are used"):
        await gateway.budgets.check("acme")
