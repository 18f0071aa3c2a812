"""Each role is killed at each point where something of its work is done and something is not: nothing is lost, nothing twice.

Weights, optimizer and generator come out equal to the bit to those of the same job in peace, and so does the usage.
"""

import asyncio
import itertools
from pathlib import Path

import pytest

from nexus_bus import faults
from nexus_bus.errors import Refused
from ops.bench.faults_rig import House, Outcome, meddling, rl, sft
from tests.chaos.conftest import Peace

pytestmark = [pytest.mark.gl, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

names = (f"job-{n}" for n in itertools.count())

# What is hit surely by the two jobs: by the first process of the role that comes there, once per line.
DEATHS = {
    "rollout": [
        "rollout before-handle/rollout.run 2 kill",
        "rollout after-publish/infer.request 3 kill",  # in the middle of an episode
        "rollout after-publish/train.record 1 kill",
        "rollout after-publish/job.report 2 kill",
        "rollout after-handle/rollout.run 1 kill",
        "rollout after-ack/rollout.run 1 kill",
    ],
    "environment": [
        "environment before-handle/env.prepare 1 kill",
        "environment after-publish/job.report 1 kill",
        "environment before-call/env.session 4 kill",  # with all its sessions
        "environment after-call/env.open 2 kill",
        "environment after-publish/train.batch 5 kill",  # half of an order is fed
        "environment after-handle/env.feed 1 kill",
    ],
    "inference": [
        "inference after-compute 2 kill",
        "inference after-cast/infer.reply 2 kill",
        "inference after-publish/usage 1 kill",  # answered and on record, not acknowledged
    ],
    "trainer": [
        "trainer after-write/slot 1 kill",  # the lease is taken, nothing else
        "trainer after-write/policy 1 kill",  # version 0 is out, and no state
        "trainer after-compute 2 kill",
        "trainer after-blob 2 kill",
        "trainer after-write/policy 1 kill",  # a version is out whose commit never came
        "trainer after-write/state 1 kill",  # committed, and nobody knows
        "trainer after-publish/usage 1 kill",
        "trainer after-publish/job.report 2 kill",
        "trainer after-ack 1 kill",
    ],
    "master": [
        "master before-handle/job.submit 1 kill",
        "master after-write/job 2 kill",
        "master after-publish/event 3 kill",
        "master after-publish/env.feed 1 kill",
        "master after-publish/rollout.run 3 kill",  # some orders of an update are out
        "master after-handle/job.report 2 kill",
        "master after-ack/job.report 1 kill",
    ],
    "gateway": ["gateway before-call/api.job.submit 1 kill", "gateway after-call/api.job.submit 1 kill"],
    "health": ["health after-publish/event 1 kill", "rollout after-handle 1 kill"],  # it dies while it has one restarted
    "frozen": [
        "trainer after-compute 1 freeze 2",
        "trainer after-write/state 1 freeze 2",
        "rollout after-publish/train.record 1 freeze 2",
        "environment after-call/env.session 1 freeze 2",
        "inference after-compute 1 freeze 2",
        "master after-publish/rollout.run 1 freeze 2",
    ],
}


def same(found: Outcome, calm: Outcome) -> None:
    """As if nothing had happened."""
    assert found.phase == "completed", found.reason
    assert (found.lost, found.twice, found.dead) == (0, 0, 0)
    assert found.numbers == calm.numbers, "weights, optimizer and generator are equal to the bit"
    assert (found.learned, found.used_records, found.used_steps) == (calm.learned, calm.used_records, calm.used_steps)


async def under_fire(service: House, peace: Peace) -> None:
    """Both jobs of one tenant, and one of another beside them."""
    jobs = [("acme", rl(next(names))), ("acme", sft(next(names))), ("beta", rl(next(names)))]
    for (_, spec), found in zip(jobs, await asyncio.gather(*(service.run(*job) for job in jobs)), strict=True):
        same(found, peace[spec.kind])


@pytest.mark.parametrize("role", DEATHS)
async def test_dying_between_any_two_steps_of_its_work_changes_nothing(service: House, peace: Peace, role: str) -> None:
    lines = service.plan(*DEATHS[role])
    try:
        await under_fire(service, peace)
        service.note()
        assert not set(lines) - service.noted, "each of the faults has happened"
    finally:
        service.withdraw(lines)


async def test_a_server_that_is_killed_twice_in_the_middle_changes_nothing(service: House, peace: Peace) -> None:
    work = asyncio.create_task(under_fire(service, peace))
    for _ in range(2):
        await asyncio.sleep(0.5)
        await service.restart_server()
    await work


async def test_records_sent_twice_and_delivered_in_another_order_are_learned_once_in_order(
    service: House, peace: Peace
) -> None:
    jobs = [sft(next(names)), rl(next(names))]
    async with (
        meddling(service.bus, "acme", jobs[0].name, 1) as first,
        meddling(service.bus, "acme", jobs[1].name, 2) as second,
    ):
        found = await asyncio.gather(*(service.run("acme", spec) for spec in jobs))
    for spec, one, did in zip(jobs, found, (first, second), strict=True):
        same(one, peace[spec.kind])
        assert did["doubled"], "the tenant's records were meddled with"
        assert did["taken"] > did["doubled"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trainer after-lunch 1 kill", "no point 'after-lunch'"),
        ("trainer after-write/state soon kill", "N is 'soon'"),
        ("trainer after-write/state 1 explode", "the action is 'explode'"),
        ("trainer after-write/state 1 freeze", "the action is 'freeze'"),
        ("trainer", "is not WORKER POINT N ACTION"),
    ],
)
async def test_a_plan_that_says_nothing_is_refused_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    plan = tmp_path / "plan"
    plan.write_text(f"# what is to happen\n{line}\n")
    with pytest.raises(Refused, match=f"line 2: .*{says}"):
        faults.Plan(plan, "trainer", "trainer-0")
