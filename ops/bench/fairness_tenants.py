"""What tenants' accounts cost and what they are worth: adding one to a live bus, attacks, and whether the bill adds up."""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from nexus_bus.bus import Bus, EmbeddedServer, ensure_topology
from nexus_bus.client import Client
from nexus_bus.tenants import tenants_of
from nexus_bus.worker import Context, Pulse
from workers.gateway import Gateway

ADDED = 40
PUMPS = 4  # requests of another tenant in flight meanwhile


async def adding(*, quick: bool) -> dict[str, float]:
    """From nothing to the first answered call of a new tenant, on a bus that another one keeps busy."""
    count = 8 if quick else ADDED
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory) / "nats").start()
        bus = await Bus.connect(server.url, name="gateway", creds=server.creds)
        try:
            await ensure_topology(bus)
            await Gateway(Context("gateway", "gateway-0", bus, None, asyncio.Event(), Pulse(), bus.log, "bench")).open()
            return await _added(server, Path(directory), count)
        finally:
            await bus.close()
            server.stop()


async def _added(server: EmbeddedServer, directory: Path, count: int) -> dict[str, float]:
    async with tenants_of(server.url, server.authority) as tenants:
        creds = directory / "neighbour.creds"
        creds.write_text((await tenants.add("neighbour")).creds)
        neighbour = await Client.connect(server.url, creds=creds)
        failed, answered, ended = 0, 0, asyncio.Event()

        async def pump() -> None:
            nonlocal failed, answered
            while not ended.is_set():
                try:
                    await neighbour.job("nothing")
                    answered += 1
                except Exception:  # noqa: BLE001 - whatever it is, the neighbour was disturbed
                    failed += 1

        pumps = [asyncio.create_task(pump()) for _ in range(PUMPS)]
        alone, whole = list[float](), list[float]()
        for number in range(count):
            began = time.perf_counter()
            issued = await tenants.add(f"tenant-{number}")
            alone.append(time.perf_counter() - began)
            creds.write_text(issued.creds)
            client = await Client.connect(server.url, creds=creds)
            await client.account()
            whole.append(time.perf_counter() - began)
            await client.close()
        ended.set()
        await asyncio.gather(*pumps)
        await neighbour.close()
    return {
        "tenant_add_ms": statistics.median(alone) * 1e3,
        "tenant_add_worst_ms": max(alone) * 1e3,
        "tenant_first_answer_ms": statistics.median(whole) * 1e3,
        "tenant_add_others_failed": float(failed),
        "tenant_add_others_answered": float(answered),
    }


async def attacked() -> dict[str, Any]:
    """Every attack of tests/isolation, on a server of its own."""
    from tests.isolation.attacks import run_all

    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory) / "nats").start()
        try:
            found = await run_all(server.url, server.authority)
        finally:
            server.stop()
    got = {name: evidence for name, evidence in found.items() if evidence is not None}
    for name, evidence in got.items():
        print(f"attack {name!r} got something: {evidence}")
    return {"attacks": len(found), "attacks_that_got_something": len(got)}
