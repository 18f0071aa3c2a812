"""Evaluations on a real server: every (task, trial) recorded once whatever dies, resumed with what is missing, films in bounds,
and nothing of it for other tenants. Master, gateway and rollout workers are real; simulator and inference answer at once.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import structlog
from msgspec.structs import replace

from nexus_bus import __version__, config
from nexus_bus.bus import Bus, Delivery, Done, EmbeddedServer, ensure_tenant, inference_durable
from nexus_bus.client import Client
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadJob, EnvironmentFault
from nexus_bus.tensors import encode_image, to_tensor
from nexus_bus.worker import Context, Pulse
from schemas.environment import Observation, SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.evaluation import EvaluationEpisode
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import EnvironmentSpec, EvaluationSpec, JobSpec
from schemas.plan import TERMINAL, JobState
from tests.conftest import Eventually
from tests.unit.mastering import keep
from workers import master, rollout
from workers.gateway import Gateway

TASKS = ("touch", "reach")
PICTURE = encode_image(np.zeros((32, 32, 3), np.uint8), "png")
SEEN = Observation(images={"front": PICTURE}, state=to_tensor(np.zeros(3, np.float32)), instruction="touch the red block")


def spec(name: str, **evaluation: Any) -> JobSpec:
    given: dict[str, Any] = {"episodes": 5, "tasks": TASKS, "seed": 100, "films": 2}
    return JobSpec(
        kind="eval", name=name, init="kept@0", environment=EnvironmentSpec(id="tabletop", task="touch"),
        evaluation=EvaluationSpec(**given | evaluation),
    )  # fmt: skip


class Stage:
    """Simulators of one step, which succeed by their seed; it counts what is played to its end, and can hold episodes back."""

    def __init__(self, bus: Bus, url: str) -> None:
        self.bus, self.url = bus, url
        self.tasks: dict[str, str] = {}  # session → task
        self.trials: dict[str, tuple[int, int]] = {}  # session → (trial, seed)
        self.ended: Counter[tuple[str, int]] = Counter()
        self.gate = asyncio.Event()
        self.version = "toy-1"
        self.crashes: set[str] = set()  # tasks whose next step is a fault
        self.held = 10**6  # episodes that may end before the gate opens
        self.stop = asyncio.Event()
        self.running: list[tuple[asyncio.Task[Any], Bus]] = []

    async def open(self, request: SessionOpen, incoming: Any) -> SessionOpened:
        name = request.session or "s"
        self.tasks[name] = request.environment.task
        subject = f"env.session.{incoming.tokens['tenant']}.{name}"
        return SessionOpened(session=name, subject=subject, worker="w", version=self.version)

    async def call(self, request: SessionCall, incoming: Any) -> SessionReply:
        name = incoming.tokens["session"]
        if request.op == "reset":
            self.trials[name] = request.trial, request.seed
            return SessionReply(observation=SEEN, device_s=0.25)
        if request.op == "close":
            return SessionReply()
        if (task := self.tasks[name]) in self.crashes:
            self.crashes.remove(task)
            raise EnvironmentFault("the simulator crashed")
        trial, seed = self.trials[name]
        if sum(self.ended.values()) >= self.held:
            await self.gate.wait()
        self.ended[self.tasks[name], trial] += 1
        success = seed % 2 == 0
        return SessionReply(
            observation=SEEN, rewards=[float(success)], successes=[success], terminated=success, truncated=not success,
            end="success" if success else "time_limit", steps=1, device_s=0.5,
        )  # fmt: skip

    async def infer(self, delivery: Delivery) -> Done:
        request: InferenceRequest = delivery.message
        actions = to_tensor(np.zeros((4, 3), np.float32))
        reply = InferenceReply(id=request.id, policy=request.policy, actions=actions, device_s=0.125)
        await self.bus.cast_to(delivery.inbox, "infer.reply", reply)
        return Done()

    async def worker(self, role: Any, module: Any, **flags: Any) -> asyncio.Task[Any]:
        """Run a worker on a connection of its own."""
        bus = await Bus.connect(self.url, name=f"{role}-{len(self.running)}")
        settings: Any = config.load(role, flags=flags).value
        context = Context(role, bus.name, bus, settings, self.stop, Pulse(), structlog.get_logger(), "here")
        task = asyncio.create_task(module.main(context))
        self.running.append((task, bus))
        return task

    async def kill(self, task: asyncio.Task[Any]) -> None:
        """It says nothing more, not even that it goes."""
        bus = next(bus for one, bus in self.running if one is task)
        await bus.client.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()
        self.running = [one for one in self.running if one[0] is not task]


@pytest.fixture
async def stage(bus: Bus, server: EmbeddedServer, gateway: Gateway) -> AsyncIterator[Stage]:
    made = Stage(bus, server.url)
    await keep(bus)
    await ensure_tenant(bus, "acme")
    services = [
        await bus.serve("env.open", made.open, tenant="*"),
        await bus.serve("env.session", made.call, tenant="*", session="*"),
    ]
    inference = asyncio.create_task(bus.consume(inference_durable("acme"), made.infer, stop=made.stop, concurrency=8))
    await made.worker("master", master)
    yield made
    made.gate.set()
    made.stop.set()
    await asyncio.gather(inference, *(task for task, _ in made.running), return_exceptions=True)
    for _, connection in made.running:
        await connection.close()
    for service in services:
        await service.stop()


@pytest.fixture
def acme(bus: Bus) -> Client:
    return Client(bus, "acme")


async def ended(client: Client, job: str, eventually: Eventually) -> JobState:
    async def look() -> JobState | None:
        state = await client.job(job)
        return state if state is not None and state.phase in TERMINAL and state.closed else None

    return await eventually(look, within=60)


async def recorded(bus: Bus, job: str) -> Counter[tuple[str, int]]:
    """What is in the log, with nothing taken out."""
    items = bus.tail("eval.episode", since="all", follow=False, tenant="acme", job=job)
    return Counter([(item.message.task, item.message.trial) async for item in items])


ALL = {(task, trial): 1 for task in TASKS for trial in range(5)}


async def test_every_trial_is_recorded_and_counted_once_though_a_worker_dies_and_reports_are_lost(
    stage: Stage, acme: Client, bus: Bus, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: set[int] = set()
    real = rollout.Rollout._report

    async def report(self: rollout.Rollout, episode: Any, *rest: Any) -> None:
        if (index := episode.order.index) in (7, 8) and index not in lost:
            lost.add(index)
            raise RuntimeError("as if it were killed here: recorded, and not reported")
        await real(self, episode, *rest)

    monkeypatch.setattr(rollout.Rollout, "_report", report)
    stage.held = 3
    first = await stage.worker("rollout", rollout, concurrency=6, call_timeout_s=2.0)
    await acme.submit(spec("score"))
    await eventually(lambda: sum(stage.ended.values()) == 3)
    await stage.kill(first)
    stage.gate.set()
    await stage.worker("rollout", rollout, concurrency=3)
    state = await ended(acme, "score", eventually)
    assert (state.phase, state.reason) == ("completed", "")
    assert lost == {7, 8}
    assert await recorded(bus, "score") == ALL
    assert (state.scores["episodes_after"], state.scores["success_after"]) == (10.0, 0.6)
    episodes = await acme.episodes("score")
    assert [(one.task, one.trial, one.seed, one.success) for one in episodes[:3]] == [
        ("touch", 0, 100, True),
        ("reach", 0, 100, True),
        ("touch", 1, 101, False),
    ]
    one = episodes[0]
    assert (one.simulate_s, one.forward_s, one.end, one.length, one.simulator) == (0.75, 0.125, "success", 1, "toy-1")
    report_of = await acme.report("score")
    assert (report_of.evaluations[0].overall.successes, report_of.protocol.simulator) == (6, "toy-1")


@pytest.mark.parametrize("how", ["cancel", "pause"])
async def test_an_evaluation_that_was_stopped_plays_only_what_is_missing(
    stage: Stage, acme: Client, bus: Bus, eventually: Eventually, how: str
) -> None:
    stage.held = 4
    await stage.worker("rollout", rollout, concurrency=2)
    await acme.submit(spec("score"))

    async def counted() -> bool:
        state = await acme.job("score")
        return state is not None and len(state.finished_episodes) == 4

    await eventually(counted)
    before = dict(stage.ended)
    if how == "cancel":
        await acme.cancel("score", "enough")
        assert (await ended(acme, "score", eventually)).phase == "cancelled"
    else:
        await acme.pause("score")
    stage.gate.set()
    assert len((await acme.report("score")).evaluations[0].tasks) == 2, "what is there can be read"
    assert await acme.resume("score") == "goes on with evaluating_after"
    state = await acme.wait("score")
    assert (state.phase, state.scores["episodes_after"]) == ("completed", 10.0)
    assert await recorded(bus, "score") == ALL
    assert {key: stage.ended[key] for key in before} == before, "what was counted is not played again"
    endings = [event.type async for event in acme.events("score", follow=False) if event.type.startswith("job.c")]
    assert endings == (["job.cancelled"] if how == "cancel" else []) + ["job.completed"]


async def test_one_that_completed_is_not_resumed(stage: Stage, acme: Client, eventually: Eventually) -> None:
    await stage.worker("rollout", rollout)
    await acme.submit(spec("score", episodes=1))
    await ended(acme, "score", eventually)
    with pytest.raises(BadJob, match="'score' is completed, not paused"):
        await acme.resume("score")


async def test_one_whose_version_is_gone_is_not_resumed(stage: Stage, acme: Client, bus: Bus, eventually: Eventually) -> None:
    await acme.submit(spec("score"))
    await acme.cancel("score")
    await ended(acme, "score", eventually)
    await keep(bus, retired="2026-11-01T00:00:00+00:00")
    with pytest.raises(BadJob, match="init: kept@0 was retired meanwhile"):
        await acme.resume("score")


async def test_films_are_kept_of_the_first_of_each_outcome_whoever_played_and_are_the_tenants_own(
    stage: Stage, acme: Client, bus: Bus, eventually: Eventually
) -> None:
    for _ in range(2):
        await stage.worker("rollout", rollout, concurrency=4)
    await acme.submit(spec("score", episodes=10))
    await ended(acme, "score", eventually)
    episodes = await acme.episodes("score")
    films = {one.film: one for one in episodes if one.film}
    assert sorted(films) == ["after-failure-0", "after-failure-1", "after-success-0", "after-success-1"]
    for name, one in films.items():
        film = await acme.film("score", name)
        assert film is not None
        assert (film.task, film.trial, film.success) == (one.task, one.trial, one.success)
        assert (film.instruction, bool(film.data)) == ("touch the red block", True)
    assert await acme.film("score", "after-success-9") is None
    other = Client(bus, "globex")
    assert await other.film("score", "after-success-0") is None
    assert await other.episodes("score") == []
    await acme.submit(spec("dark", films=0))
    await ended(acme, "dark", eventually)
    assert {one.film for one in await acme.episodes("dark")} == {""}


async def test_another_simulator_than_the_protocols_is_refused_or_ends_the_evaluation_by_its_field(
    stage: Stage, acme: Client, eventually: Eventually
) -> None:
    here = describe(EnvironmentSpec(id="tabletop", task="touch")).simulator
    await stage.worker("rollout", rollout)
    with pytest.raises(BadJob, match=re.escape(f"evaluation.simulator: asked for is 'toy-2', here is {here!r}")):
        await acme.submit(spec("never", simulator="toy-2"))
    await acme.submit(spec("other", simulator=here))
    state = await ended(acme, "other", eventually)
    assert state.phase == "failed"
    assert f"evaluation.simulator: asked for is {here!r}, here is 'toy-1'" in state.reason
    stage.version = here
    await acme.submit(spec("same", simulator=here))
    assert (await ended(acme, "same", eventually)).phase == "completed"


async def test_an_episode_that_was_played_again_after_a_fault_says_so(
    stage: Stage, acme: Client, eventually: Eventually
) -> None:
    stage.crashes = {"reach"}
    await stage.worker("rollout", rollout, concurrency=2)
    await acme.submit(spec("score"))
    await ended(acme, "score", eventually)
    episodes = await acme.episodes("score")
    assert sorted(one.attempts for one in episodes) == [1] * 9 + [2]
    assert next(one.task for one in episodes if one.attempts == 2) == "reach"
    assert {one.service for one in episodes} == {__version__}
    made = await acme.report("score")
    assert made.evaluations[0].repeated == 1
    assert any("of 10 episodes 1 had to be handed out again" in note for note in made.notes)


async def test_a_version_under_evaluation_keeps_its_weights(stage: Stage, acme: Client, eventually: Eventually) -> None:
    stage.held = 1
    await stage.worker("rollout", rollout, concurrency=2)
    await acme.submit(spec("score"))
    await eventually(lambda: sum(stage.ended.values()) == 1)
    from nexus_bus.retention import in_use

    state = await acme.job("score")
    assert state is not None
    assert in_use([state]) == {"kept@0"}
    await acme.pause("score")
    paused = await acme.job("score")
    assert paused is not None
    assert in_use([paused]) == {"kept@0"}, "a paused one, too"


async def test_an_episode_that_comes_twice_in_the_log_is_given_once(acme: Client, bus: Bus, gateway: Gateway) -> None:
    one = EvaluationEpisode(
        job="score", purpose="after", index=0, task="touch", trial=0, seed=1, policy="kept@0", success=True, end="success",
        episode_return=1.0, length=3, simulate_s=0.0, forward_s=0.0, wait_s=0.0, simulator="toy-1", time="now",
    )  # fmt: skip
    for number, success in enumerate((True, False)):  # as after the log has forgotten the id
        await bus.publish("eval.episode", replace(one, success=success), msg_id=str(number), tenant="acme", job="score")
    assert [(found.trial, found.success) for found in await acme.episodes("score")] == [(0, True)]
