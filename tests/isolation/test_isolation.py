"""Nobody else's: every attack of a tenant with valid credentials gets nothing but an error that tells it nothing."""

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from nexus_bus.bus import EmbeddedServer
from tests.conftest import free_port
from tests.isolation.attacks import ATTACKS, Attack, carry_out
from tests.isolation.siege import Siege, besieged

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def siege(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Siege]:
    """One field for all attacks: what an attack leaves behind, the next one finds."""
    server = EmbeddedServer(tmp_path_factory.mktemp("isolation") / "nats", port=free_port()).start()
    try:
        async with besieged(server.url, server.authority) as siege:
            yield siege
    finally:
        server.stop()
        shutil.rmtree(server.directory)


@pytest.mark.parametrize("fenced", [True, False], ids=["issued", "unfenced"])
@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: one.name)
async def test_nothing_is_got_by(siege: Siege, one: Attack, fenced: bool) -> None:
    assert await carry_out(siege, one, fenced=fenced) is None, one.tries
