"""Scores, each with the protocol that made it; the record of every episode behind one; reports and comparisons.

Rollout → EVALS and FILMS, for tenants; master → tenant, inside events.
"""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, Document, Message, Name, PolicyId, PolicyRef, Positive, Seconds, Seed, Sha256
from schemas.environment import EndReason
from schemas.job import MAX_HORIZON, EnvironmentSpec, EvaluationSpec, Scalar

FILM_BYTES = 240 << 10  # of one film: it travels in one message, to tenants too

Purpose = Literal["before", "after"]


class Protocol(Document, frozen=True, kw_only=True):
    """What decides a score besides the policy, as a file: `nexus eval --protocol FILE --policy JOB@N`.

    What is unset is as the environment has it; `nexus report` writes the whole of it.
    """

    environment: str  # a name of the catalogue, e.g. a suite
    tasks: Annotated[tuple[str, ...], Meta(max_length=256)] = ()  # unset: all of the environment
    trials: Positive = 50  # of each task
    seed: Seed = 10_000  # trial i runs with seed + i
    max_steps: Positive | None = None
    wait_steps: Annotated[int, Meta(ge=0, le=1000)] | None = None  # before the first picture
    success: Literal["any_step", "last_step"] = "any_step"  # last_step: it goes on after a success, and has to end in one
    image_size: Positive | None = None  # pixels
    orientation: Literal["upright", "flipped", "mirrored"] | None = None  # of the pictures
    image_encoding: Literal["png", "jpeg", "raw"] = "png"  # on their way to the policy; jpeg changes them
    execute: Annotated[int, Meta(ge=1, le=MAX_HORIZON)] | None = None  # actions of a chunk that are executed
    options: dict[str, Scalar] = {}  # others of the environment
    simulator: Annotated[str, Meta(max_length=400)] = ""  # name and versions; another one is refused
    films: Annotated[int, Meta(ge=0, le=16)] = 4  # of failures to keep, and of successes; changes no score
    policy: PolicyRef | None = None  # `--policy` says it otherwise


class TaskScore(Message, frozen=True, kw_only=True):
    """Success on one task of several."""

    task: str
    episodes: Count
    successes: Count
    low: float  # Wilson 95 % interval
    high: float


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
    tasks: list[TaskScore] = []  # of a protocol with several


class EvaluationEpisode(Message, frozen=True, kw_only=True):
    """One episode of an evaluation. It is named by (purpose, task, trial); should it be there twice, the first one counts."""

    job: Name
    purpose: Purpose  # of an eval job: after
    index: Count  # in the order of the protocol
    task: str
    trial: Count
    seed: Seed
    policy: PolicyId  # that answered
    success: bool
    end: EndReason
    episode_return: float
    length: Count  # environment steps
    simulate_s: Seconds  # simulator at work
    forward_s: Seconds  # this episode's share of forwards
    wait_s: Seconds  # all else: the way there and back, queues, groups that fill, the others' share
    simulator: str  # name and versions, as the worker has them
    time: str  # RFC 3339, of its end
    film: str = ""  # name of its film; empty: none was kept
    attempts: Positive = 1  # times it was handed out: more where a simulator failed, or the worker that played it
    service: str = ""  # version of the service that played it
    clipped: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of its actions' components outside the bounds: they were cut


class EvaluationFilm(Message, frozen=True, kw_only=True):
    """What the policy saw in one episode, a picture per decision."""

    job: Name
    purpose: Purpose
    task: str
    trial: Count
    success: bool
    instruction: Annotated[str, Meta(max_length=1000)] = ""  # what it was told at first
    media_type: Literal["video/mp4", "image/gif"]
    data: Annotated[bytes, Meta(max_length=FILM_BYTES)]


class Summary(Message, frozen=True, kw_only=True):
    """Some episodes in numbers."""

    episodes: Count
    successes: Count
    success: float
    low: float  # Wilson 95 % interval
    high: float
    mean_return: float
    mean_length: float
    simulate_s: Seconds  # sums
    forward_s: Seconds
    wait_s: Seconds
    ends: dict[str, Count]  # by reason


class EvaluatedPolicy(Message, frozen=True, kw_only=True):
    """What a policy version is made of, by its hashes: whether two of one name are the same can be seen from outside."""

    weights: Sha256  # of the action module
    adapter: Sha256 | None  # of the adapter; None: it has none
    backbone: str
    backbone_fingerprint: str  # hash of its configuration and weights: what a revision stands for
    contract: Sha256  # of the whole contract
    statistics: str  # hash of what normalises states and actions
    step: Count
    created: str  # RFC 3339


class Evaluated(Message, frozen=True, kw_only=True):
    """One policy version under the protocol, as far as it was played."""

    purpose: Purpose
    policy: PolicyId
    version: EvaluatedPolicy | None = None  # None: it was not looked up
    planned: Count  # episodes
    overall: Summary
    tasks: dict[str, Summary]
    simulators: list[str]  # that played: one, unless it was replaced meanwhile
    services: list[str] = []  # versions of the service that played
    repeated: Count = 0  # episodes that were handed out more than once; each counts once


class Comparison(Message, frozen=True, kw_only=True):
    """Two policies under one protocol, paired by (task, trial): B against A. Sources: nexus_bus/evaluation/statistics.py."""

    a: str
    b: str
    pairs: Count
    both: Count  # solved it
    only_a: Count
    only_b: Count
    neither: Count
    success_a: float
    success_b: float
    difference: float  # success of B less that of A
    low: float  # its 95 % interval: Newcombe's, for pairs
    high: float
    p_value: float  # McNemar, mid-p, two-sided
    return_difference: float
    return_low: float  # its 95 % interval: bootstrap over pairs
    return_high: float
    identical: Count  # pairs with the same end, return and length
    unpaired: Count = 0  # episodes that only one of them has
    tasks: dict[str, tuple[float, float, float]] = {}  # difference, low, high of each


class Manifest(Message, frozen=True, kw_only=True):
    """All of a report that is numbers."""

    tenant: Name
    job: Name
    phase: str  # of the job
    created: str  # RFC 3339
    protocol: Protocol
    evaluations: list[Evaluated]
    change: Comparison | None = None  # of a job that was evaluated before and after
    notes: list[str] = []  # what a reader has to know: what may vary, what is missing
