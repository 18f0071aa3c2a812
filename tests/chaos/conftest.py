"""One service for all tests of chaos, and what the two jobs come to in peace."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ops.bench.faults_rig import House, Outcome, house, rl, sft

names = (f"job-{n}" for n in itertools.count())  # no job has the name of another
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


def same(found: Outcome, calm: Outcome) -> None:
    """As if nothing had happened."""
    assert found.phase == "completed", found.reason
    assert (found.lost, found.twice, found.dead) == (0, 0, 0)
    assert found.numbers == calm.numbers, "weights, optimizer and generator are equal to the bit"
    assert (found.learned, found.used_records, found.used_steps) == (calm.learned, calm.used_records, calm.used_steps)


async def happened(service: House, numbers: set[int], within: float = 60.0) -> None:
    """Each of these faults has: one of the health manager's own may come after the jobs' end."""
    ends = time.monotonic() + within
    while service.note() or numbers - service.noted:
        assert time.monotonic() < ends, f"of the faults {numbers} only {service.noted & numbers} happened"
        await asyncio.sleep(0.1)


async def under_fire(service: House, peace: Peace, within: float = 240.0) -> None:
    """Both jobs of one tenant, and one of another beside them; all come to what they come to in peace."""
    jobs = [("acme", rl(next(names))), ("acme", sft(next(names))), ("beta", rl(next(names)))]
    for (_, spec), found in zip(jobs, await asyncio.gather(*(service.run(*job, within) for job in jobs)), strict=True):
        same(found, peace[spec.kind])
