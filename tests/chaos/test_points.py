"""Each role is killed at each point where something of its work is done and something is not: nothing is lost, nothing twice.

Weights, optimizer and generator come out equal to the bit to those of the same job in peace, and so does the usage.
"""

import asyncio

import pytest

from ops.bench.faults_rig import House, meddling, rl, sft
from tests.chaos.conftest import Peace, happened, names, same, under_fire

pytestmark = [pytest.mark.gl, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

# What is hit surely by the three jobs: by the first process of the role that comes there, once per line.
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
        "environment before-call/env.session 4 kill",  # with all its sessions
        "environment after-call/env.open 2 kill",
        "environment after-publish/train.batch 5 kill",  # half of an order is fed
    ],
    "trainer and inference": [
        "trainer after-write/policy 1 kill",  # version 0 is out, and no state
        "trainer after-compute 2 kill",
        "trainer after-write/state 2 kill",  # committed, and nobody knows
        "inference after-compute 2 kill",
        "inference after-publish/usage 1 kill",  # answered and on record, not acknowledged
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
    "gateway and health": [
        "gateway before-call/api.job.submit 1 kill",
        "gateway after-call/api.job.submit 1 kill",
        "rollout after-handle 1 kill",
        "health after-publish/event 1 kill",  # while it has the other one restarted
    ],
    "everybody stands still": [
        "trainer after-compute 1 freeze 2",
        "trainer after-write/state 1 freeze 2",
        "rollout after-publish/train.record 1 freeze 2",
        "environment after-call/env.session 1 freeze 2",
        "inference after-compute 1 freeze 2",
        "master after-publish/rollout.run 1 freeze 2",
    ],
}
MORE = {  # that take a start of torch each, or another recording
    "trainer": [
        "trainer after-write/slot 1 kill",  # the lease is taken, nothing else
        "trainer after-blob 1 kill",  # of a state that nobody refers to
        "trainer after-write/policy 2 kill",  # a version is out whose commit never came
        "trainer after-publish/usage 1 kill",
        "trainer after-publish/job.report 2 kill",
        "trainer after-publish/event 1 kill",
        "trainer after-ack 1 kill",
    ],
    "inference": [
        "inference after-cast/infer.reply 2 kill",
        "inference after-ack 1 kill",
    ],
    "environment": [
        "environment before-handle/env.prepare 1 kill",
        "environment after-publish/job.report 1 kill",  # it is said that the dataset is there
        "environment before-handle/env.feed 1 kill",
        "environment after-handle/env.feed 1 kill",
        "environment after-call/env.session 9 kill",
    ],
}


async def dying(service: House, peace: Peace, lines: list[str], within: float = 240.0) -> None:
    """The jobs, while these faults happen."""
    numbers = service.plan(*lines)
    try:
        await under_fire(service, peace, within)
        await happened(service, set(numbers))
    finally:
        service.withdraw(numbers)


@pytest.mark.parametrize("who", DEATHS)
async def test_dying_between_any_two_steps_of_its_work_changes_nothing(service: House, peace: Peace, who: str) -> None:
    await dying(service, peace, DEATHS[who])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", MORE)
async def test_nor_does_dying_at_its_other_points(service: House, peace: Peace, who: str) -> None:
    await dying(service, peace, MORE[who], 350.0)


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
