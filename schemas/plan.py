"""A compiled job: what runs where, with which sizes. Printed by `nexus plan` and kept by the master."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, Message, Name, Positive, Seconds
from schemas.job import JobSpec
from schemas.policy import ActionSpec, ObservationSpec, Statistics

Phase = Literal[
    "waiting",
    "data",
    "preparing",
    "evaluating_before",
    "training",
    "evaluating_after",
    "paused",
    "completed",
    "failed",
    "cancelled",
]
TERMINAL: frozenset[str] = frozenset({"completed", "failed", "cancelled"})
Limit = Literal["", "jobs", "slots", "stored_bytes", "device_s", "money", "suspended"]  # of a tenant


class Plan(Message, frozen=True, kw_only=True):
    """What the master decided before anything runs."""

    tenant: Name
    spec: JobSpec  # with every default filled in
    phases: list[Phase]
    roles: list[str]
    subjects: dict[str, str]  # purpose → subject
    action: ActionSpec
    observation: ObservationSpec
    max_steps: Positive  # of one episode
    execute: Positive  # actions executed per chunk
    instructions: list[str]  # examples of what the policy will be told
    batches: Count  # SFT batches or RL updates
    latency_ms: Annotated[float, Meta(ge=0)] = 20.0  # longest wait of an inference request for its group to fill
    varies: str = ""  # why the same seed may give another episode; empty: it gives the same
    estimates: dict[str, float] = {}  # environment_steps, inference_requests, records, device_s …
    notes: list[str] = []


class JobState(Message, frozen=True, kw_only=True):
    """A job as the registry holds it; only the master writes it."""

    plan: Plan
    phase: Phase
    submission: str  # message id of the submission, so that a repeated one is recognised
    submitted: str
    started: str = ""
    ended: str = ""
    reason: str = ""
    dataset: str = ""  # directory the data comes from, once recorded or checked
    frames: Count = 0
    dataset_bytes: Count = 0  # of one recorded for this job
    state_statistics: Statistics | None = None  # of the dataset
    action_statistics: Statistics | None = None
    issued: Count = 0  # work units handed out in this phase: batches, updates or episodes
    done: Count = 0  # work units known to be finished in this phase
    version: int = -1  # newest published policy version; -1 before the first
    init: str = ""  # resolved version that training starts from
    scores: dict[str, float] = {}  # success_before, success_after …
    finished_episodes: list[int] = []  # evaluation trials already counted in this phase
    successes: Count = 0
    solved: dict[str, Count] = {}  # successes of each task, of an evaluation with several
    summed_return: float = 0.0
    summed_length: Count = 0
    metrics: dict[str, float] = {}
    deadline: Seconds | None = None  # unix time at which the wall budget ends
    paused: Phase | None = None  # where a paused job goes on
    paused_at: Seconds = 0.0  # unix time; the wall budget stands still meanwhile
    paused_by: str = ""  # message id of the last order to rest, so that a repeated one is recognised
    resumed: Count = 0  # times: orders handed out anew need ids of their own
    resumed_by: str = ""  # message id of the last order to go on, so that a repeated one is recognised
    device_s: Seconds = 0.0  # used of the device budget when it was paused
    added_device_s: Seconds = 0.0  # to the budget, by those who resumed it
    queued: Count = 0  # place among the tenant's jobs that wait for room, when it came; 0: it does not wait for that
    estimate_s: Seconds = 0.0  # how long it may wait there
    limit: Limit = ""  # the tenant's limit that it waits for; or that lets it rest, and then it goes on by itself
    closed: bool = False  # consumers and queued work are gone, and the ending was announced
