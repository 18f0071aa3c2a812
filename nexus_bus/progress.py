"""How a job moves from phase to phase: pure functions of its state, used by the master alone.

A state and something that happened give the next state and the orders to hand out. Orders are deterministic: the same state
and the same happening give the same orders with the same ids, so that a master that died between handing out and writing
down may simply do it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nexus_bus.clock import derive_seed
from nexus_bus.envs.offered import is_own
from nexus_bus.evaluation.statistics import wilson
from schemas.control import JobReport
from schemas.environment import FeedOrder, PrepareOrder
from schemas.evaluation import Score, TaskScore
from schemas.job import EnvironmentSpec, EvaluationSpec, Ppo, Sft
from schemas.plan import TERMINAL, JobState, Phase, Plan
from schemas.rollout import EpisodeResult, RolloutOrder

FEED_CHUNK = 20  # SFT batches per feed order
FEED_AHEAD = 60  # SFT batches on the Training Queue beyond what is learned


@dataclass
class Happening:
    """What follows from one happening: orders as (subject name, message id, message), and scores to announce."""

    state: JobState
    orders: list[tuple[str, str, Any]] = field(default_factory=list)
    score: Score | None = None


def enter(state: JobState, phase: Phase) -> Happening:
    """Begin a phase: reset its counters and hand out its first orders."""
    state = msgspec.structs.replace(
        state, phase=phase, issued=0, done=0, finished_episodes=[], successes=0, solved={}, summed_return=0.0, summed_length=0
    )
    happening = Happening(state)
    if phase == "data":
        happening.orders.append(_prepare(state))
    elif phase in ("evaluating_before", "evaluating_after"):
        happening.orders.extend(_evaluation_orders(state, phase))
    elif phase == "training":
        _pace(happening)
    return happening


def leave(state: JobState) -> Happening:
    """End the current phase and begin the one after it."""
    phases = state.plan.phases
    return enter(state, phases[phases.index(state.phase) + 1])


def advance(state: JobState, report: JobReport) -> Happening:
    """Take one report into account. A repeated or late report changes nothing."""
    if state.phase in TERMINAL:
        return Happening(state)
    if state.paused is not None:
        return _meanwhile(state, state.paused, report)
    if report.kind == "episode" and report.episode is not None:
        return _episode(state, report.episode)
    if report.kind == "prepared" and state.phase == "data":
        return leave(
            msgspec.structs.replace(
                state,
                frames=report.frames,
                dataset_bytes=report.stored_bytes,
                state_statistics=report.state_statistics,
                action_statistics=report.action_statistics,
            )
        )
    if report.kind in ("learned", "trained"):
        return _learned(state, report)
    return Happening(state)


def pause(state: JobState, reason: str, at: float, device_s: float) -> JobState:
    """Let a job rest; `at` is now, in unix seconds, and `device_s` what it has used of its budget."""
    return msgspec.structs.replace(
        state, phase="paused", paused=state.phase, paused_at=at, reason=reason, device_s=device_s, queued=0, estimate_s=0.0
    )


def resume(state: JobState, at: float, added_device_s: float) -> Happening:
    """Go on with a paused job: what its pause took back is handed out anew, and what should have followed meanwhile."""
    phase = state.paused or state.phase
    deadline = state.deadline + at - state.paused_at if state.deadline is not None else None
    added = state.added_device_s + added_device_s
    state = msgspec.structs.replace(
        state, phase=phase, paused=None, reason="", resumed=state.resumed + 1, deadline=deadline, added_device_s=added
    )
    happening = Happening(state)
    if phase == "data":
        happening.orders.append(_prepare(state))
    elif phase in ("evaluating_before", "evaluating_after"):
        happening.orders.extend(_evaluation_orders(state, phase))
    elif phase == "training":
        if isinstance(algorithm := state.plan.spec.algorithm, Ppo):
            for batch in range(state.done, state.issued):
                happening.orders.extend(_episodes(state, algorithm, batch))
        _pace(happening)
    return happening


def _meanwhile(state: JobState, phase: Phase, report: JobReport) -> Happening:
    """What was under way when a job was paused still counts; what follows from it is handed out on resuming."""
    happening = advance(msgspec.structs.replace(state, phase=phase, paused=None), report)
    after = happening.state
    if after.phase in TERMINAL:
        return Happening(msgspec.structs.replace(after, reason=""), score=happening.score)
    issued = state.issued if after.phase == phase else 0
    return Happening(msgspec.structs.replace(after, phase="paused", paused=after.phase, issued=issued), score=happening.score)


def _prepare(state: JobState) -> tuple[str, str, PrepareOrder]:
    plan, data = state.plan, state.plan.spec.data
    order = PrepareOrder(
        tenant=plan.tenant,
        job=plan.spec.name,
        dataset=state.dataset,
        environment=plan.spec.environment,
        expert=data.expert if data else None,
        resumed=state.resumed,
    )
    return "env.prepare", f"{plan.tenant}/{plan.spec.name}/prepare{_again(state)}", order


def _rollout(state: JobState, purpose: str, batch: int, index: int, version: str, protocol: EvaluationSpec | None) -> Any:
    plan, spec, environment = state.plan, state.plan.spec, _environment(state.plan)
    greedy = protocol is not None
    # Of the starts that an environment numbers, training takes one after another, not the same few in each update.
    each = spec.algorithm.episodes_per_update if isinstance(spec.algorithm, Ppo) else 0
    task, trial = protocol.part(index) if protocol else ("", batch * each + index)
    seed = protocol.seed + trial if protocol else derive_seed(spec.seed, "episode", batch, index)
    order = RolloutOrder(
        tenant=plan.tenant,
        job=spec.name,
        purpose=purpose,  # type: ignore[arg-type]  # one of three literals, by the callers below
        batch=batch,
        index=index,
        policy=version,
        environment=msgspec.structs.replace(environment, task=task or environment.task),
        action=plan.action,
        observation=plan.observation,
        seed=seed,
        noise_seed=derive_seed(spec.seed, "noise", purpose, batch, index),
        greedy=greedy,
        max_steps=plan.max_steps,
        execute=plan.execute,
        success=protocol.success if protocol else "any_step",
        latency_ms=plan.latency_ms,
        trial=trial,
        films=protocol.films if protocol else 0,
        simulator=protocol.simulator if protocol else "",
    )
    kind = "rollout.own" if is_own(environment.id) else "rollout.run"
    return kind, f"{plan.tenant}/{spec.name}/{purpose}/{batch}/{index}{_again(state)}", order


def _again(state: JobState) -> str:
    """The end of an order's id: the queue remembers the ids of what was taken back."""
    return f"/{state.resumed}" if state.resumed else ""


def _environment(plan: Plan) -> EnvironmentSpec:
    if plan.spec.environment is None:  # the compiler refuses such a plan
        raise ValueError(f"{plan.spec.name}: a phase needs an environment and the plan has none")
    return plan.spec.environment


def _evaluation_orders(state: JobState, phase: Phase) -> Iterator[Any]:
    protocol = state.plan.spec.evaluation or EvaluationSpec()
    purpose = "before" if phase == "evaluating_before" else "after"
    for index in sorted(set(range(protocol.total)) - set(state.finished_episodes)):
        yield _rollout(state, purpose, 0, index, evaluated_version(state), protocol)


def evaluated_version(state: JobState) -> str:
    """The version an evaluation phase is pinned to: the given one of an `eval` job, else this job's newest."""
    return state.init if state.plan.spec.kind == "eval" else f"{state.plan.spec.name}@{max(state.version, 0)}"


def _episodes(state: JobState, algorithm: Ppo, batch: int) -> Iterator[Any]:
    version = f"{state.plan.spec.name}@{max(0, batch - algorithm.staleness)}"
    for index in range(algorithm.episodes_per_update):
        yield _rollout(state, "train", batch, index, version, None)


def _pace(happening: Happening) -> None:
    """Hand out as much training work as staleness (RL) or the queue's window (SFT) allows, and never more."""
    state = happening.state
    plan, algorithm = state.plan, state.plan.spec.algorithm
    issued = state.issued
    if isinstance(algorithm, Ppo):
        # Batch k is played by version max(0, k - staleness): it may start once that version is out.
        while issued < plan.batches and issued <= state.done + algorithm.staleness:
            happening.orders.extend(_episodes(state, algorithm, issued))
            issued += 1
    elif isinstance(algorithm, Sft):
        while issued < min(plan.batches, state.done + FEED_AHEAD):
            last = min(issued + FEED_CHUNK, plan.batches)
            order = FeedOrder(
                tenant=plan.tenant,
                job=plan.spec.name,
                dataset=state.dataset,
                first=issued,
                last=last,
                batch_size=algorithm.batch_size,
                horizon=plan.spec.head.horizon if plan.spec.head else plan.execute,
                seed=derive_seed(plan.spec.seed, "batches"),
            )
            happening.orders.append(("env.feed", f"{plan.tenant}/{plan.spec.name}/feed/{issued}", order))
            issued = last
    happening.state = msgspec.structs.replace(state, issued=issued)


def _learned(state: JobState, report: JobReport) -> Happening:
    state = msgspec.structs.replace(
        state, version=max(state.version, report.version), metrics={**state.metrics, **report.metrics}
    )
    if state.phase == "preparing" and state.version >= 0:
        return leave(state)
    if state.phase != "training":
        return Happening(state)
    if report.kind == "trained":
        return leave(msgspec.structs.replace(state, done=state.plan.batches))
    happening = Happening(msgspec.structs.replace(state, done=max(state.done, report.batches)))
    _pace(happening)
    return happening


def _episode(state: JobState, episode: EpisodeResult) -> Happening:
    if episode.purpose == "train":
        return Happening(state)
    phase = f"evaluating_{episode.purpose}"
    if state.phase != phase or episode.index in state.finished_episodes:
        return Happening(state)
    protocol = state.plan.spec.evaluation or EvaluationSpec()
    task, _ = protocol.part(episode.index)
    state = msgspec.structs.replace(
        state,
        finished_episodes=[*state.finished_episodes, episode.index],
        done=len(state.finished_episodes) + 1,
        successes=state.successes + int(episode.success),
        solved=state.solved | ({task: state.solved.get(task, 0) + 1} if task and episode.success else {}),
        summed_return=state.summed_return + episode.episode_return,
        summed_length=state.summed_length + episode.length,
    )
    if state.done < protocol.total:
        return Happening(state)
    score = _score(state, protocol, episode.environment)
    suffix = episode.purpose
    scores = {
        **state.scores,
        f"success_{suffix}": score.success,
        f"low_{suffix}": score.low,
        f"high_{suffix}": score.high,
        f"episodes_{suffix}": float(score.episodes),
    }
    happening = leave(msgspec.structs.replace(state, scores=scores))
    happening.score = score
    return happening


def _score(state: JobState, protocol: EvaluationSpec, simulator: str) -> Score:
    low, high = wilson(state.successes, state.done)
    return Score(
        policy=evaluated_version(state),
        protocol=protocol,
        environment=_environment(state.plan),
        simulator=simulator,
        max_steps=state.plan.max_steps,
        episodes=state.done,
        successes=state.successes,
        success=state.successes / state.done,
        low=low,
        high=high,
        mean_return=state.summed_return / state.done,
        mean_length=state.summed_length / state.done,
        tasks=[_task_score(task, state.solved.get(task, 0), protocol.episodes) for task in protocol.tasks],
    )


def _task_score(task: str, successes: int, episodes: int) -> TaskScore:
    low, high = wilson(successes, episodes)
    return TaskScore(task=task, episodes=episodes, successes=successes, low=low, high=high)
