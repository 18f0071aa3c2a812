"""Scores, each with the protocol that made it. Master → tenant, inside events."""

from schemas.base import Count, Message, PolicyId
from schemas.job import EnvironmentSpec, EvaluationSpec


class Score(Message, frozen=True, kw_only=True):
    """Success of one pinned policy version under one protocol."""

    policy: PolicyId
    protocol: EvaluationSpec
    environment: EnvironmentSpec
    simulator: str  # name and version
    max_steps: Count
    episodes: Count
    successes: Count
    success: float  # successes / episodes
    low: float  # Wilson 95 % interval
    high: float
    mean_return: float
    mean_length: float
