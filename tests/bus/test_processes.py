"""Sessions of one kind in several simulator processes of a worker: what the death of one of them costs."""

import pytest
from playing import one_process_dies_in_a_call, playing

from nexus_bus.bus import Bus, EmbeddedServer
from schemas.job import EnvironmentSpec
from tests.conftest import Eventually

OPTIONS = {"image_size": 64, "max_steps": 18, "end_on_success": False}


@pytest.mark.gl
async def test_a_process_that_is_killed_costs_its_own_session_a_fault_and_the_other_plays_on(
    bus: Bus, server: EmbeddedServer, eventually: Eventually
) -> None:
    spec = EnvironmentSpec(id="tabletop", task="touch", options=OPTIONS)
    async with playing(bus, server.url, spec, eventually, processes=2) as player:
        await one_process_dies_in_a_call(player, eventually)
