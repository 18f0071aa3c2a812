"""The frame of every role: a worker must not live on without one of its loops."""

import asyncio

import pytest

from nexus_bus.worker import side_by_side


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
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_drained_loop_ends_the_rest_quietly() -> None:
    async def drains() -> None:
        await asyncio.sleep(0)

    started = asyncio.get_running_loop().time()
    await side_by_side(drains(), asyncio.sleep(600))
    assert asyncio.get_running_loop().time() - started < 5
