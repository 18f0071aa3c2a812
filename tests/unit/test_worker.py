"""The frame of every role: a worker must not live on without one of its loops."""

import asyncio
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
import structlog

from nexus_bus.bus import EmbeddedServer
from nexus_bus.config import RolloutConfig
from nexus_bus.errors import Denied
from nexus_bus.tenants import tenants_of
from nexus_bus.worker import Context, Pulse, _beat, _serve, side_by_side


async def test_a_loop_that_fails_ends_the_others_and_says_why() -> None:
    cancelled = asyncio.Event()

    async def serves() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("this loop broke")

    with pytest.raises(RuntimeError, match="this loop broke"):
        await side_by_side(serves(), fails())
    await asyncio.wait_for(cancelled.wait(), 30)


async def test_a_drained_loop_ends_the_rest_quietly() -> None:
    async def drains() -> None:
        await asyncio.sleep(0)

    started = asyncio.get_running_loop().time()
    await side_by_side(drains(), asyncio.sleep(600))
    assert asyncio.get_running_loop().time() - started < 60


async def test_an_event_says_no_more_than_fits_however_much_an_error_quotes() -> None:
    bus = Mock(publish=AsyncMock())
    log = cast(Any, structlog.get_logger())
    context = Context("master", "master-0", bus, None, asyncio.Event(), Pulse(), log, "host")
    await context.event("job.refused", "acme", job="pick", key="1", message=f"begins {'x' * 900_000} ends")
    await context.event("job.refused", "acme", job="pick", key="2", message="short")
    long, short = (call.args[1].message for call in bus.publish.await_args_list)
    assert len(long) < 2100
    assert long.startswith("begins xxx")
    assert long.endswith("xxx ends")
    assert short == "short"


async def test_the_alive_file_grows_old_while_a_worker_holds_work_and_does_not_move(tmp_path: Path, eventually: Any) -> None:
    file, bus, pulse = tmp_path / "alive", Mock(cast=AsyncMock(), up=asyncio.Event()), Pulse(state="running")
    settings = RolloutConfig(url="nats://nowhere:1", alive_file=str(file))
    log = cast(Any, structlog.get_logger())
    beating = asyncio.create_task(
        _beat(Context("rollout", "rollout-0", bus, settings, asyncio.Event(), pulse, log, "host"), 0.01)
    )

    async def beats(more: int) -> None:
        """So many heartbeats later."""
        wanted = bus.cast.await_count + more
        await eventually(lambda: bus.cast.await_count >= wanted)

    bus.up.set()
    await eventually(file.is_file)
    assert file.read_text() == "running"  # idle: it lives

    pulse.busy = 1
    await beats(2)
    file.unlink()
    await beats(3)
    assert not file.exists()  # busy, and nothing moves: whoever looks sees an old file, or here none

    pulse.progress += 1
    await eventually(file.is_file)

    bus.up.clear()
    await beats(2)
    file.unlink()
    await eventually(file.is_file)  # the bus is away: that is no fault of the worker

    pulse.state = "draining"
    await eventually(lambda: file.read_text() == "draining")
    beating.cancel()


async def test_a_worker_with_a_tenants_credentials_says_so_at_once(server: EmbeddedServer, tmp_path: Path) -> None:
    async with tenants_of(server.url, server.authority) as operator:
        (tmp_path / "acme.creds").write_text((await operator.add("acme")).creds)

    async def never(_: Context) -> None:
        raise AssertionError

    settings = RolloutConfig(url=server.url, creds=str(tmp_path / "acme.creds"))
    with pytest.raises(Denied, match=r"creds: these speak for the tenant 'acme'; a worker needs the provider's"):
        await _serve("rollout", "rollout-0", settings, never)
