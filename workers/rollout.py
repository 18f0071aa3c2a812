"""Rollout: plays episodes, a session of the Environment Service on one side and the Inference Queue on the other.

Reads   ROLLOUT (rollout.run: a durable consumer per tenant, served by shares of time; rollout.own: the same in environments
        of tenants' own, while they offer any), registry (tenants and their limits), answers of inference workers on its inbox.
Writes  INFERENCE (infer.request), TRAINING (rollout records), EVALS and FILMS (of evaluations), JOBS (episode reports).
Killed  the order was not acknowledged and is played again, by anybody, to the same record under the same id: seeds and the
        policy version are in the order.
"""

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nexus_bus import __version__, registry, telemetry, worker
from nexus_bus.bus import Bus, Delivery, Done, Outcome, Retry, rollout_durable
from nexus_bus.clock import now
from nexus_bus.envs.offered import is_own
from nexus_bus.errors import ContractError, EnvironmentFault, NexusError, Unavailable, from_code
from nexus_bus.evaluation.recorder import Recorder
from nexus_bus.offers import OwnServing
from nexus_bus.serving import AHEAD, Serving
from nexus_bus.tensors import from_tensor, to_tensor
from nexus_bus.worker import Context
from schemas.base import Tensor
from schemas.control import JobReport, Role
from schemas.environment import Observation, SessionCall, SessionOpen, SessionOpened, SessionReply
from schemas.evaluation import EvaluationEpisode, Purpose
from schemas.inference import InferenceReply, InferenceRequest
from schemas.plan import TERMINAL, JobState
from schemas.rollout import EpisodeResult, RolloutOrder, RolloutRecord, RolloutStep
from schemas.subjects import subject

ROLE: Role = "rollout"

# What is queued for a job that has ended, the master takes away, so nothing comes again; but for one that goes on this very
# moment, while the server's copy of its state is behind.
ENDED = Retry(0.5, "its job has ended")


class _Over(Exception):
    """The job of an episode has ended."""


@dataclass
class Episode:
    """What has happened so far in the episode of one order."""

    order: RolloutOrder
    steps: list[RolloutStep] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    last: SessionReply = field(default_factory=SessionReply)
    final_value: float = 0.0
    simulate_s: float = 0.0
    forward_s: float = 0.0
    clipped: float = 0.0  # of its actions: the sum of each one's share of components outside the bounds

    @property
    def success(self) -> bool:
        """Whether the episode counts as solved, by the order's rule."""
        if not self.successes:
            return False
        return any(self.successes) if self.order.success == "any_step" else self.successes[-1]


class Rollout:
    """Plays orders, many at a time."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.waiting: dict[str, asyncio.Future[InferenceReply]] = {}
        self.inbox = ""
        self.recorder = Recorder(context.bus, context.log)

    async def open(self) -> None:
        """Make the inbox that answers come to."""
        self.inbox = (await self.bus.inbox("infer.reply", self._answered)).subject
        self.bus.returned.add(self._in_vain)

    async def handle(self, delivery: Delivery) -> Outcome:
        """Play one order to its end, and hand on what it gave. What it raises, the loop turns into another try (consume.py)."""
        order: RolloutOrder = delivery.message
        if await self._over(order):  # it may have waited here for a session
            return ENDED
        name = f"{order.job}/{order.purpose}/{order.batch}/{order.index}"
        self.context.pulse.busy += 1
        started = time.monotonic()
        asked = telemetry.link_from(delivery.headers.get("traceparent", ""))
        try:
            # Each record has a trace of its own; the job's trace is a link, or one trace would hold thousands of episodes.
            with telemetry.span(
                "rollout.episode", root=True, links=[asked] if asked else [], tenant=order.tenant, job=order.job, record=name
            ):
                episode, simulator = await self._play(order)
                if order.purpose == "train":
                    await self._hand_on(episode, name, simulator)
                else:
                    await self._record(episode, order.purpose, simulator, time.monotonic() - started, delivery.num_delivered)
                await self._report(episode, delivery.msg_id, simulator, time.monotonic() - started)
        except _Over:
            return ENDED
        except EnvironmentFault as fault:
            await self._retried(order, name, delivery.num_delivered, fault)
            raise
        finally:
            self.context.pulse.busy -= 1
        return Done()

    async def _play(self, order: RolloutOrder) -> tuple[Episode, str]:
        opened = await self._open_session(order)
        episode = Episode(order)
        try:
            if order.simulator not in ("", opened.version):
                raise ContractError(f"evaluation.simulator: asked for is {order.simulator!r}, here is {opened.version!r}")
            reply = await self._call(order, opened, SessionCall(op="reset", seed=order.seed, trial=_trial(order)))
            episode.simulate_s += reply.device_s
            while not (reply.terminated or reply.truncated):
                if is_own(order.environment.id) and await self._over(order):  # a robot stops when its job does
                    raise _Over
                seen = _observation(reply)
                answer = await self._infer(order, seen, len(episode.steps))
                actions = np.ascontiguousarray(from_tensor(_tensor(answer.actions))[: order.execute])
                reply = await self._call(order, opened, SessionCall(op="step", actions=to_tensor(actions)))
                self._note(episode, seen, answer, reply)
            if reply.truncated and not reply.terminated and order.purpose == "train":
                final = await self._infer(order, _observation(reply), len(episode.steps))
                episode.final_value = final.value or 0.0
            return episode, opened.version
        finally:
            try:
                await self._call(order, opened, SessionCall(op="close"))
            except NexusError as error:
                # The session's lease ends it; an error here must not hide the one that brought us here.
                self.context.log.info("session not closed", session=opened.session, error=str(error))

    async def _over(self, order: RolloutOrder) -> bool:
        """Whether the job has ended: what is played for it is for nobody."""
        entry = await self.kv.get(registry.job_key(order.tenant, order.job), JobState)
        return entry is not None and entry.value.phase in TERMINAL

    def _note(self, episode: Episode, seen: Observation, answer: InferenceReply, reply: SessionReply) -> None:
        executed = len(reply.rewards)
        if executed == 0:
            raise EnvironmentFault("the environment executed no action of the chunk and did not end the episode")
        episode.steps.append(
            RolloutStep(
                observation=seen,
                actions=answer.sample or _tensor(answer.actions),
                log_prob=sum((answer.log_prob or [])[:executed]),
                value=answer.value or 0.0,
                executed=executed,
                rewards=reply.rewards,
                version=answer.policy,
                feature_id=answer.feature_id,
            )
        )
        episode.rewards += reply.rewards
        episode.successes += reply.successes
        episode.last = reply
        episode.simulate_s += reply.device_s
        episode.forward_s += answer.device_s
        episode.clipped += executed * max(answer.clipped, reply.clipped)  # whoever answers with actions may cut them already
        self.context.pulse.progress += 1

    async def _open_session(self, order: RolloutOrder) -> SessionOpened:
        request = SessionOpen(
            tenant=order.tenant,
            job=order.job,
            environment=order.environment,
            action=order.action,
            observation=order.observation,
            lease_s=self.context.config.session_lease_s,
            session=uuid.uuid4().hex[:16],
        )
        serves = "env.own" if is_own(order.environment.id) else "env.open"
        watch = subject("env.session", tenant=order.tenant, session=request.session or "")
        timeout = self.context.config.open_timeout_s
        return await self.bus.request(serves, request, timeout=timeout, tenant=order.tenant, watch=watch)

    async def _call(self, order: RolloutOrder, opened: SessionOpened, call: SessionCall) -> SessionReply:
        with telemetry.span(f"environment.{call.op}"):
            return await self.bus.request(
                "env.session", call, timeout=self.context.config.call_timeout_s, watch=opened.subject, tenant=order.tenant,
                session=opened.session,
            )  # fmt: skip

    async def _infer(self, order: RolloutOrder, observation: Observation, step: int) -> InferenceReply:
        request = InferenceRequest(
            id=uuid.uuid4().hex,
            job=order.job,
            policy=order.policy,
            observation=observation,
            greedy=order.greedy,
            seed=(order.noise_seed + step * 7919) % 2**48,
            latency_ms=order.latency_ms,
            deadline=time.time() + self.context.config.infer_timeout_s,
        )
        future: asyncio.Future[InferenceReply] = asyncio.get_running_loop().create_future()
        self.waiting[request.id] = future
        try:
            with telemetry.span("inference.request", policy=order.policy):
                await self.bus.publish(
                    "infer.request", request, msg_id=request.id, headers={"Nexus-Reply-To": self.inbox}, tenant=order.tenant
                )
                reply = await asyncio.wait_for(future, self.context.config.infer_timeout_s)
        except TimeoutError as error:
            raise Unavailable(f"no answer from inference within {self.context.config.infer_timeout_s:g} s") from error
        finally:
            del self.waiting[request.id]
        if reply.error:
            raise from_code(reply.error_code, reply.error)
        return reply

    async def _answered(self, reply: InferenceReply, _headers: dict[str, str]) -> None:
        future = self.waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def _in_vain(self) -> None:
        """The server was away. The Inference Queue lies in its memory and answers in none: nobody may be about to answer."""
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(Unavailable("the bus was away while inference was asked"))

    async def _hand_on(self, episode: Episode, name: str, simulator: str) -> None:
        order, last = episode.order, episode.last
        record = RolloutRecord(
            id=name,
            tenant=order.tenant,
            job=order.job,
            batch=order.batch,
            index=order.index,
            policy=order.policy,
            task=order.environment.task,
            seed=order.seed,
            trial=_trial(order),
            steps=episode.steps,
            terminated=last.terminated,
            truncated=last.truncated,
            end=last.end,
            success=episode.success,
            final_observation=last.observation if last.truncated else None,
            final_value=episode.final_value,
            episode_return=sum(episode.rewards),
            length=len(episode.rewards),
            environment=simulator,
        )
        with telemetry.span("record.publish"):
            await self.bus.publish("train.record", record, msg_id=f"{order.tenant}/{name}", tenant=order.tenant, job=order.job)

    async def _record(self, episode: Episode, purpose: Purpose, simulator: str, seconds: float, attempts: int) -> None:
        order = episode.order
        spent = episode.simulate_s + episode.forward_s
        recorded = EvaluationEpisode(
            job=order.job,
            purpose=purpose,
            index=order.index,
            task=order.environment.task,
            trial=_trial(order),
            seed=order.seed,
            policy=order.policy,
            success=episode.success,
            end=episode.last.end,
            episode_return=sum(episode.rewards),
            length=len(episode.rewards),
            simulate_s=episode.simulate_s,
            forward_s=episode.forward_s,
            wait_s=max(0.0, seconds - spent),
            simulator=simulator,
            time=now(),
            attempts=attempts,
            service=__version__,
            clipped=episode.clipped / max(1, len(episode.rewards)),
        )
        seen = [step.observation for step in episode.steps]
        if episode.last.observation is not None:
            seen.append(episode.last.observation)
        await self.recorder.record(order.tenant, recorded, seen, order.films)

    async def _report(self, episode: Episode, ordered: str, simulator: str, seconds: float) -> None:
        """Under an id that the order's gives: one that was taken back and handed out anew is reported anew."""
        order = episode.order
        result = EpisodeResult(
            job=order.job,
            purpose=order.purpose,
            batch=order.batch,
            index=order.index,
            policy=order.policy,
            seed=order.seed,
            success=episode.success,
            episode_return=sum(episode.rewards),
            length=len(episode.rewards),
            end=episode.last.end,
            environment=simulator,
            seconds=seconds,
        )
        report = JobReport(job=order.job, kind="episode", episode=result)
        await self.bus.publish("job.report", report, msg_id=f"{ordered}/report", tenant=order.tenant, job=order.job)

    async def _retried(self, order: RolloutOrder, name: str, attempt: int, fault: EnvironmentFault) -> None:
        """A fault of the simulator costs its own job a retry, and the job is told."""
        await self.context.event(
            "episode.retried", order.tenant, job=order.job, key=f"retried/{name}/{attempt}",
            message=f"episode {order.purpose}/{order.batch}/{order.index} is played again: {fault}",
            data={"cause": "simulator", "batch": order.batch, "index": order.index, "attempt": attempt},
        )  # fmt: skip

    async def given_up(self, delivery: Delivery, reason: str) -> None:
        """An order that cannot be played fails its job by name; a missing episode would leave it waiting for ever."""
        if delivery.row.name not in ("rollout.run", "rollout.own"):
            return
        job = delivery.tokens["job"]
        report = JobReport(job=job, kind="failed", reason=f"an episode could not be played: {reason}")
        await self.bus.publish("job.report", report, msg_id=f"{delivery.msg_id}/failed", tenant=delivery.tenant, job=job)


def _trial(order: RolloutOrder) -> int:
    return order.index if order.trial is None else order.trial


def _observation(reply: SessionReply) -> Observation:
    if reply.observation is None:
        raise EnvironmentFault("the environment answered without an observation")
    return reply.observation


def _tensor(value: Tensor | None) -> Tensor:
    if value is None:
        raise Unavailable("inference answered without actions")
    return value


async def main(context: Context) -> None:
    """Serve until told to stop."""
    rollout = Rollout(context)
    await rollout.open()
    concurrency = context.config.concurrency
    serving = Serving(
        context.bus,
        lambda tenant, limits: rollout_durable(tenant, limits.sessions),
        batch=concurrency + AHEAD,
        on_dead=rollout.given_up,
    )
    own = OwnServing(context.bus, on_dead=rollout.given_up)
    context.pulse.state = "running"
    await asyncio.gather(
        serving.consume(rollout.handle, concurrency=concurrency, stop=context.stop),
        own.consume(rollout.handle, concurrency=context.config.own_concurrency, stop=context.stop),
    )


def run(**options: Any) -> int:
    """Entry point of `nexus worker rollout`."""
    return worker.run(ROLE, main, **options)
