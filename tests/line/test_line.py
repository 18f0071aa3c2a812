"""From a job event to a policy, through six real processes. Small jobs: whether they learn much is for the demo to show."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from nexus_bus.client import Client
from nexus_bus.errors import BadJob
from nexus_bus.tensors import encode_image, from_tensor, to_tensor
from schemas.environment import Observation
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import DataSpec, EnvironmentSpec, EvaluationSpec, ExpertSpec, HeadSpec, JobSpec, Ppo, Sft
from schemas.plan import JobState
from tests.line.conftest import Service, ended

pytestmark = [pytest.mark.gl, pytest.mark.timeout(300)]

TOUCH = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1, "max_steps": 12, "reward": "dense"})


def sft(name: str, steps: int = 40, head: str = "oft") -> JobSpec:
    return JobSpec(
        kind="sft", name=name, head=HeadSpec(type=head, horizon=4), environment=TOUCH,
        data=DataSpec(expert=ExpertSpec(episodes=4)), algorithm=Sft(steps=steps, batch_size=8, publish_every=20),
        evaluation=EvaluationSpec(episodes=6), seed=1,
    )  # fmt: skip


def rl(name: str, updates: int = 3, init: str | None = None) -> JobSpec:
    return JobSpec(
        kind="rl", name=name, init=init, head=None if init else HeadSpec(horizon=4), environment=TOUCH,
        algorithm=Ppo(updates=updates, episodes_per_update=6, minibatch=16), evaluation=EvaluationSpec(episodes=6), seed=2,
    )  # fmt: skip


async def test_an_sft_job_records_learns_and_is_evaluated_before_and_after(client: Client) -> None:
    await client.submit(sft("sft-line"))
    state = await ended(client, "sft-line")
    assert state.phase == "completed", state.reason
    assert state.frames > 10
    assert state.metrics["lag"] == 0, "data was made by no policy"
    assert {"success_before", "success_after"} <= set(state.scores)
    versions = await client.policies("sft-line")
    assert [policy.id for policy in versions] == ["sft-line@0", "sft-line@1", "sft-line@2"]
    assert [policy.parent for policy in versions] == [None, "sft-line@0", "sft-line@1"]
    assert versions[-1].contract.statistics_hash


async def test_the_simulator_that_demonstrations_are_recorded_with_is_charged(client: Client) -> None:
    await client.submit(msgspec.structs.replace(sft("sft-charged"), evaluation=None))
    assert (await ended(client, "sft-charged")).phase == "completed"
    async with asyncio.timeout(60):  # a worker says it within a second or so
        while not any([used.session_s > 0 and used.kind == "environment" async for used in client.usage("sft-charged")]):
            await asyncio.sleep(0.1)


async def test_an_rl_job_goes_on_from_a_policy_and_learns_every_record_once(client: Client) -> None:
    await client.submit(sft("warm", steps=20))
    await client.submit(rl("rl-line", init="warm@latest"))
    state = await ended(client, "rl-line")
    assert state.phase == "completed", state.reason
    assert state.metrics["records"] == 3 * 6, "each of 3 updates learned its 6 episodes, once"
    assert 0 < state.metrics["lag"] <= 1, "staleness stays within its bound of 1"
    assert [policy.n for policy in await client.policies("rl-line")] == [0, 1, 2, 3]


async def test_the_same_job_gives_the_same_weights(client: Client) -> None:
    for name in ("twin-a", "twin-b"):
        await client.submit(rl(name, updates=2))
    for name in ("twin-a", "twin-b"):
        assert (await ended(client, name)).phase == "completed"
    first, second = [[policy.weights.sha256 for policy in await client.policies(name)] for name in ("twin-a", "twin-b")]
    assert first == second, "two runs side by side, grouped with each other, end in the same bits"
    assert len(set(first)) == 3, "and every version differs from the one before"


async def test_an_eval_job_is_pinned_to_its_version_and_changes_nothing(client: Client) -> None:
    await client.submit(sft("pinned", steps=20))
    await ended(client, "pinned")
    before = [policy.weights.sha256 for policy in await client.policies("pinned")]
    spec = JobSpec(kind="eval", name="score", init="pinned@1", environment=TOUCH, evaluation=EvaluationSpec(episodes=5))
    await client.submit(spec)
    state = await ended(client, "score")
    assert state.phase == "completed", state.reason
    scores = [event.score async for event in client.watch("score") if event.score is not None]
    assert [(score.policy, score.episodes) for score in scores] == [("pinned@1", 5)]
    assert [policy.weights.sha256 for policy in await client.policies("pinned")] == before


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"base": "nowhere"}, "base"),
        ({"head": {"type": "foo"}}, "head"),
        ({"environment": {"id": "moon", "task": "touch"}}, "environment"),
        ({"environment": {"id": "tabletop", "task": "dance"}}, "task"),
        ({"init": "nobody@3"}, "init"),
        ({"algorithm": {"name": "sft"}}, "algorithm"),
    ],
)
async def test_a_bad_job_is_refused_by_the_name_of_its_field(client: Client, change: dict[str, object], names: str) -> None:
    document = {"kind": "rl", "name": "bad", "environment": {"id": "tabletop", "task": "touch"}} | change
    with pytest.raises(BadJob, match=names):
        await client.submit(document)


async def test_a_malformed_document_gets_an_event_and_the_next_job_works(client: Client) -> None:
    given = {"Nats-Msg-Id": "malformed-1", "Content-Type": "application/json"}
    await client.bus.publisher.send("job.submit.acme", b'{"kind": "rl", "name": 7}', given, 30.0)
    async with asyncio.timeout(60):
        async for item in client.bus.tail("event", since="all", tenant="acme", job="*"):
            if item.message.type == "job.refused" and item.message.submission == "malformed-1":
                assert "name" in item.message.message
                break
    quick = Ppo(updates=1, episodes_per_update=2)
    await client.submit(JobSpec(kind="rl", name="after-bad", head=HeadSpec(horizon=4), environment=TOUCH, algorithm=quick))
    assert (await ended(client, "after-bad")).phase == "completed"


@pytest.mark.parametrize("phase", ["preparing", "evaluating_before", "training"])
async def test_a_cancelled_job_ends_at_once_and_leaves_nothing_queued(client: Client, phase: str) -> None:
    name = f"cancelled-{phase.replace('_', '-')}"
    spec = rl(name, updates=50)
    await client.submit(spec)
    ends = time.monotonic() + 120
    while (state := await client.job(name)) is None or state.phase not in (phase, "training"):
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)
    await client.cancel(name, "enough")
    state = await ended(client, name, within=60)
    assert (state.phase, state.reason) == ("cancelled", "enough")
    while any(f".{name}" in on for on in [*await client.bus.queued("TRAINING"), *await client.bus.queued("ROLLOUT")]):
        assert time.monotonic() < ends + 60, "what came after the end is swept"
        await asyncio.sleep(0.2)
    with pytest.raises(BadJob, match="name"):
        await client.submit(spec)


async def ask(client: Client, request: InferenceRequest) -> InferenceReply:
    answers: asyncio.Queue[InferenceReply] = asyncio.Queue()

    async def answered(reply: InferenceReply, _headers: dict[str, str]) -> None:
        await answers.put(reply)

    inbox = await client.bus.inbox("infer.reply", answered)
    await client.bus.publish(
        "infer.request", request, msg_id=request.id, headers={"Nexus-Reply-To": inbox.subject}, tenant=client.tenant
    )
    reply = await asyncio.wait_for(answers.get(), 60)
    await inbox.stop()
    return reply


def seen(state: np.ndarray) -> Observation:
    picture = encode_image(np.zeros((96, 96, 3), np.uint8), "png")
    return Observation(images={"front": picture}, state=to_tensor(state), instruction="touch the red block")


async def test_inference_fails_closed(client: Client) -> None:
    await client.submit(sft("served", steps=20))
    await ended(client, "served")
    good = seen(np.zeros(3, np.float32))
    reply = await ask(client, InferenceRequest(id="ok", job="served", policy="served@1", observation=good))
    assert (reply.error, reply.policy) == ("", "served@1")
    assert reply.actions is not None
    assert from_tensor(reply.actions).shape == (4, 3)
    for number, (policy, observation, word) in enumerate(
        [
            ("served@99", good, "served@99"),
            ("served@1", seen(np.zeros(5, np.float32)), "state"),
            ("served@1", seen(np.full(3, np.nan, np.float32)), "finite"),
        ]
    ):
        reply = await ask(client, InferenceRequest(id=f"bad-{number}", job="served", policy=policy, observation=observation))
        assert word in reply.error
        assert reply.actions is None


async def _killed(client: Client, service: Service, worker: str, job: str, phase: str) -> JobState:
    """`kill -9` one worker while the job is in a phase, then wait for the job's end."""
    ends = time.monotonic() + 120
    while True:
        state = await client.job(job)
        if state is not None and state.phase == phase and state.done > 0:
            break
        assert time.monotonic() < ends, f"{job} never came to {phase}: {state}"
        await asyncio.sleep(0.02)
    os.kill(_pid(service, worker), signal.SIGKILL)
    return await ended(client, job)


def _pid(service: Service, worker: str) -> int:
    """The process that runs a worker of this service."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                became = (entry / "comm").read_text().strip() == worker  # a spare process, see nexus_bus/spare.py
                home = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if worker.encode() in words and service.url.encode() in words:
                return int(entry.name)
            if became and f"NEXUS_HOME={service.home}".encode() in home:
                return int(entry.name)
    raise AssertionError(f"{worker} does not run")


@pytest.mark.parametrize(
    ("worker", "phase"),
    [
        ("trainer-0", "training"),
        ("inference-0", "training"),
        ("rollout-0", "training"),
        ("environment-0", "training"),
        ("master-0", "training"),
        ("health-0", "training"),
    ],
)
async def test_killing_one_worker_delays_the_job_and_changes_nothing_else(
    client: Client, service: Service, worker: str, phase: str
) -> None:
    name = f"survives-{re.sub('-0$', '', worker)}"
    await client.submit(rl(name, updates=4))
    state = await _killed(client, service, worker, name, phase)
    assert state.phase == "completed", state.reason
    assert state.metrics["records"] == 4 * 6
    weights = [policy.weights.sha256 for policy in await client.policies(name)]
    undisturbed = "undisturbed"
    if await client.job(undisturbed) is None:
        await client.submit(rl(undisturbed, updates=4))
    assert (await ended(client, undisturbed)).phase == "completed"
    expected = [policy.weights.sha256 for policy in await client.policies(undisturbed)]
    assert weights == expected, "the same bits as if nothing had happened"


async def test_a_worker_that_somebody_else_told_to_end_comes_back(client: Client, service: Service) -> None:
    """It drains, as at SIGTERM it should; the host is still to have one."""
    pid = _pid(service, "gateway-0")
    os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(120):
        while "gateway-0 restarted as process" not in (service.home / "up.log").read_text():
            await asyncio.sleep(0.1)
    assert _pid(service, "gateway-0") != pid
    async with asyncio.timeout(60):
        async for item in client.bus.tail("event", tenant="provider", job="_"):
            if item.message.type == "worker.restarted" and item.message.data.get("worker") == "gateway-0":
                break
