"""A dataset recorded from a policy: real sessions behind a real gateway. Inference is this file's own, so that all is known."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import playing, simulators
from tenancy import written

from nexus_bus import registry
from nexus_bus.bus import Bus, Delivery, Done, EmbeddedServer, Outcome, inference_durable
from nexus_bus.client import recording
from nexus_bus.client.recording import record_policy
from nexus_bus.client.sync import Client, Session
from nexus_bus.clock import now
from nexus_bus.data.reader import Dataset
from nexus_bus.data.writer import DatasetInfo
from nexus_bus.envs.catalog import EnvDescription, describe
from nexus_bus.envs.session import Session as Simulation
from nexus_bus.errors import BadJob, ContractError, EnvironmentFault, NotFound
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.tenants import tenants_of
from nexus_bus.tensors import to_tensor
from schemas.environment import EnvironmentFound, SessionCall
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import EnvironmentSpec, HeadSpec
from schemas.policy import PolicyVersion
from tests.conftest import Eventually
from tests.own_worker import own_worker

pytestmark = pytest.mark.timeout(240)

SPEC = EnvironmentSpec(id="minigrid", task="goto", options={"image_size": 32, "max_steps": 10})
HORIZON = 4


def answered(seed: int, size: int = 7) -> np.ndarray:
    """What the policy does when it is asked with this seed."""
    return np.random.default_rng(seed).uniform(-1, 1, (HORIZON, size)).astype(np.float32)


class Inference:
    """Answers every request by its seed; `before` may do something first, of the number of the request."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.got = bus, list[InferenceRequest]()
        self.before: Callable[[int], Any] = lambda _: None
        self.size = 7  # of an action

    async def handle(self, delivery: Delivery) -> Outcome:
        request: InferenceRequest = delivery.message
        self.got.append(request)
        if (doing := self.before(len(self.got))) is not None:
            await doing
        reply = InferenceReply(id=request.id, policy=request.policy, actions=to_tensor(answered(request.seed, self.size)))
        await self.bus.cast_to(delivery.inbox, "infer.reply", reply)
        return Done()


async def published(bus: Bus, name: str, known: EnvDescription | EnvironmentFound, retired: str = "") -> None:
    """A version of acme's that fits this environment."""
    job, _, n = name.partition("@")
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"), head=HeadSpec(horizon=HORIZON), action=known.action,
        observation=known.observation,
    )  # fmt: skip
    version = PolicyVersion(
        id=name, tenant="acme", job=job, n=int(n), parent=None, contract=contract, created=now(), retired=retired,
        weights=await bus.blobs.put(b"weights"),
    )  # fmt: skip
    await bus.kv("registry").create(registry.policy_key("acme", job, int(n)), version)


@pytest.fixture
async def creds(server: EmbeddedServer, gateway: Any) -> Path:
    """acme's."""
    async with tenants_of(server.url, server.authority) as operator:
        return written(server, (await operator.add("acme")).creds, "acme.creds")


@pytest.fixture
async def inference(bus: Bus, server: EmbeddedServer, creds: Path, eventually: Eventually) -> AsyncIterator[Inference]:
    """acme has pick@0 and a retired pick@1; a gateway, an environment worker and this inference serve."""
    await published(bus, "pick@0", describe(SPEC))
    await published(bus, "pick@1", describe(SPEC), retired=now())
    serving, stop = Inference(bus), asyncio.Event()
    patient = replace(inference_durable("acme"), ack_wait=30.0)  # or a request comes twice, where the machine stalls
    async with playing(bus, server.url, SPEC, eventually):
        consuming = asyncio.create_task(bus.consume(patient, serving.handle, stop=stop))
        yield serving
        stop.set()
        await consuming


class Noting(Client):
    """Knows the names of the sessions that it had."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sessions: list[str] = []

    @contextmanager
    def session(self, *given: Any, **how: Any) -> Iterator[Session]:
        with super().session(*given, **how) as session:
            self.sessions.append(session.id)
            yield session


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[Noting]:
    with Noting(server.url, "acme") as client:
        yield client


@pytest.fixture
def record(client: Noting) -> Callable[..., Any]:
    """`await record(target, episodes=2, …)`, every episode kept."""

    async def recorded(root: Path, spec: EnvironmentSpec = SPEC, policy: str = "pick@0", **how: Any) -> DatasetInfo:
        how = {"episodes": 2, "seed": 3, "keep": "all"} | how
        return await asyncio.to_thread(record_policy, client, policy, spec, root, **how)

    return recorded


def digest(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


async def test_every_executed_action_is_a_frame_with_what_was_seen_before_it(
    inference: Inference, record: Any, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    info = await record(tmp_path / "set", progress=lambda *done: told.append(done))
    assert (info.episodes, info.frames, info.attempts) == (2, 20, 2)
    assert told == [(1, 1), (2, 2)]
    assert [(one.policy, one.greedy) for one in inference.got] == [("pick@0", True)] * 6, "asked at steps 0, 4 and 8 of each"
    dataset, simulation, requests = Dataset(tmp_path / "set"), Simulation(SPEC), iter(inference.got)
    assert [(one.begin, one.end) for one in dataset.episodes] == [(0, 10), (10, 20)]
    for trial in range(2):
        observed, chunk = simulation.reset(3, trial), list[np.ndarray]()
        for index in range(10 * trial, 10 * trial + 10):
            chunk = chunk or list(answered(next(requests).seed))
            action, frame = chunk.pop(0), dataset.frame(index)
            np.testing.assert_array_equal(frame.images["grid"], observed.images["grid"])
            np.testing.assert_array_equal(frame.state, observed.state)
            np.testing.assert_array_equal(frame.action, action)
            assert frame.instruction == observed.instruction
            observed = simulation.step(action[None]).observed
    simulation.close()


async def test_the_same_seed_records_the_same_bytes_and_another_one_others(
    inference: Inference, record: Any, tmp_path: Path
) -> None:
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        await record(tmp_path / name, seed=seed)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    assert digest(tmp_path / "one") != digest(tmp_path / "three")


async def test_a_policy_is_asked_as_often_as_is_said_and_may_sample(inference: Inference, record: Any, tmp_path: Path) -> None:
    await record(tmp_path / "set", EnvironmentSpec(id="minigrid", task="goto", options=SPEC.options, execute=1), greedy=False)
    assert [one.greedy for one in inference.got] == [False] * 20
    assert len({one.seed for one in inference.got}) == 20, "each decision draws its own"


async def test_a_simulator_that_dies_costs_its_episode_another_try_and_leaves_no_half_of_it(
    inference: Inference, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "PAUSE_S", 0.01)
    await record(tmp_path / "undisturbed")
    inference.got.clear()

    def before(asked: int) -> None:
        if asked == 5:  # in the middle of the second episode
            (child,) = simulators()
            child.kill()

    inference.before, said = before, list[str]()
    info = await record(tmp_path / "set", tell=said.append)
    assert (info.episodes, info.attempts) == (2, 2)
    assert len(said) == 1
    assert said[0].startswith("episode 1 is played again: ")
    assert digest(tmp_path / "set") == digest(tmp_path / "undisturbed")


async def test_a_session_that_is_gone_is_opened_again(
    inference: Inference, record: Any, client: Noting, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "PAUSE_S", 0.01)

    def before(asked: int) -> Any:
        if asked == 2:
            return bus.request("env.session", SessionCall(op="close"), timeout=10, tenant="acme", session=client.sessions[0])
        return None

    inference.before, said = before, list[str]()
    info = await record(tmp_path / "set", episodes=1, tell=said.append)
    assert (info.episodes, info.frames) == (1, 10)
    assert "is over or never was" in said[0]
    assert len(client.sessions) == 2


async def test_an_episode_that_fails_again_and_again_ends_the_recording_and_leaves_nothing(
    inference: Inference, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "PAUSE_S", 0.01)

    def before(_: int) -> None:
        for child in simulators():
            child.kill()

    inference.before = before
    with pytest.raises(EnvironmentFault, match=r"episode 0 of seed 3 failed 5 times: .*SIGKILL"):
        await record(tmp_path / "set")
    assert not (tmp_path / "set").exists()
    assert not (tmp_path / ".set.partial").exists()


async def test_only_successes_are_kept_if_asked_for_and_too_few_are_an_error(
    inference: Inference, record: Any, tmp_path: Path
) -> None:
    short = EnvironmentSpec(id="minigrid", task="goto", options=SPEC.options | {"max_steps": 1})
    with pytest.raises(ContractError, match=r"pick@0 in minigrid/goto: 0 successes in 20 tries"):
        await record(tmp_path / "set", short, episodes=1, keep="successes")
    assert not (tmp_path / "set").exists()


async def test_what_cannot_be_recorded_is_said_before_anything_is_played(
    inference: Inference, record: Any, tmp_path: Path
) -> None:
    other = EnvironmentSpec(id="minigrid", task="goto", options={"image_size": 64})
    with pytest.raises(ContractError, match=r"observation\.cameras: the environment has .*64"):
        await record(tmp_path / "set", other)
    with pytest.raises(NotFound, match="no task 'fly'"):
        await record(tmp_path / "set", EnvironmentSpec(id="minigrid", task="fly"))
    with pytest.raises(NotFound, match=r"pick@1 was retired"):
        await record(tmp_path / "set", policy="pick@1")
    with pytest.raises(BadJob, match="execute: 5 actions of a chunk of 4"):
        await record(tmp_path / "set", EnvironmentSpec(id="minigrid", task="goto", execute=5))
    assert inference.got == []
    assert not (tmp_path / "set").exists()


async def test_a_robot_of_the_tenants_own_is_recorded_in_the_same_way(
    inference: Inference, record: Any, client: Noting, bus: Bus, server: EmbeddedServer, creds: Path, tmp_path: Path
) -> None:
    arm, inference.size = EnvironmentSpec(id="own-arm", task="default", options={"max_steps": 6}), 2
    async with own_worker(server.url, creds, "--as", "arm"):
        await published(bus, "arm@0", await asyncio.to_thread(client.environment, arm))
        info = await record(tmp_path / "set", arm, "arm@0")
    assert (info.episodes, info.frames) == (2, 12)
    dataset = Dataset(tmp_path / "set")
    assert (dataset.fps, set(dataset.cameras)) == (10, {"render"})
    assert dataset.frame(0).instruction == "reach the spot of light"
    moved = dataset.frame(1).state - dataset.frame(0).state
    np.testing.assert_allclose(moved, 0.05 * dataset.frame(0).action, atol=1e-6)
