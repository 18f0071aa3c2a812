"""One service for all tests of chaos, and what the two jobs come to in peace."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ops.bench.faults_rig import House, Outcome, house, rl, sft

Peace = dict[str, Outcome]  # by kind of job


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """Real processes, each of which may be killed and comes back."""
    async with house(tmp_path_factory.mktemp("chaos")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def peace(service: House) -> Peace:
    """The jobs undisturbed, each alone."""
    found = {spec.kind: await service.run("calm", spec) for spec in (rl("rl"), sft("sft"))}
    for one in found.values():
        assert one.phase == "completed", one.reason
        assert one.learned == one.used_records == one.expected
    return found
