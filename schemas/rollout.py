"""Rollouts: orders to play an episode, and the record it leaves. Master → rollout → trainer (and master)."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, Message, Name, PolicyId, Positive, Seed, Tensor
from schemas.environment import EndReason, Observation
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec


class RolloutOrder(Message, frozen=True, kw_only=True):
    """Play one episode. The version is pinned, so that the same order gives the same episode whenever it is repeated."""

    tenant: Name
    job: Name
    purpose: Literal["train", "before", "after"]  # only "train" leaves a rollout record
    batch: Count  # RL update this episode belongs to; 0 for evaluations
    index: Count  # position within the batch, or the trial of an evaluation
    policy: PolicyId
    environment: EnvironmentSpec
    action: ActionSpec
    observation: ObservationSpec
    seed: Seed  # of the environment
    noise_seed: Seed  # of the policy's sampling; unused when it acts greedily
    greedy: bool
    max_steps: Positive
    execute: Positive
    success: Literal["any_step", "last_step"] = "any_step"
    latency_ms: Annotated[float, Meta(ge=0)] = 20.0  # of the plan: longest wait of a request for its group to fill
    trial: Count | None = None  # of an evaluation with several tasks; unset: the index
    films: Count = 0  # of each outcome that the whole evaluation keeps
    simulator: str = ""  # name and versions that it has to be; empty: whichever is there


class RolloutStep(Message, frozen=True, kw_only=True):
    """One decision: what the policy saw, what it answered, and what came of the executed part of the chunk."""

    observation: Observation
    actions: Tensor  # float32 [T, D] in the head's (normalised) space, as sampled
    log_prob: float  # of the executed part, chunk level
    value: float  # V(observation)
    executed: Positive  # actions of the chunk that were executed
    rewards: list[float]  # per executed action
    version: PolicyId  # that answered
    feature_id: str  # of the feature the answer was computed from


class RolloutRecord(Message, frozen=True, kw_only=True):
    """One training episode, the unit of the Training Queue for RL."""

    id: str  # <job>/<batch>/<index>: the same episode has the same id whoever plays it
    tenant: Name
    job: Name
    batch: Count
    index: Count
    policy: PolicyId
    task: str
    seed: Seed
    trial: Count
    steps: list[RolloutStep]
    terminated: bool  # by the task
    truncated: bool  # by the time limit: bootstrap with the value of the final observation
    end: EndReason
    success: bool
    final_observation: Observation | None = None
    final_value: float = 0.0
    episode_return: float = 0.0
    length: Count = 0  # environment steps
    environment: str = ""  # simulator and version


class EpisodeResult(Message, frozen=True, kw_only=True):
    """What the master needs of an episode, for scores and pacing. Rollout → master."""

    job: Name
    purpose: Literal["train", "before", "after"]
    batch: Count
    index: Count
    policy: PolicyId
    seed: Seed
    success: bool
    episode_return: float
    length: Count
    end: EndReason
    environment: str = ""
    seconds: float = 0.0
