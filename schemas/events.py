"""Everything that happened, for tenants and dashboards. Any worker → EVENTS."""

from typing import Literal

from schemas.base import Message, Name
from schemas.evaluation import Score

EventType = Literal[
    "job.accepted",
    "job.refused",
    "job.queued",
    "job.phase",
    "job.paused",
    "job.resumed",
    "job.progress",
    "job.completed",
    "job.failed",
    "job.cancelled",
    "policy.published",
    "eval.completed",
    "policy.imported",
    "policy.refused",
    "policy.pinned",
    "policy.unpinned",
    "policy.retired",
    "canary.gap",
    "record.dead",
    "request.refused",
    "worker.lost",
    "worker.restarted",
    "worker.drained",
    "worker.scaled",
    "episode.retried",
    "environment.left",
    "environment.joined",
]


class Event(Message, frozen=True, kw_only=True):
    """One thing that happened. `data` holds numbers and short strings for people and dashboards."""

    type: EventType
    tenant: Name
    job: str = "_"  # "_" where no job is known
    time: str  # RFC 3339
    message: str = ""  # one sentence for a person
    submission: str = ""  # message id of the submission it answers
    data: dict[str, str | int | float | bool | None] = {}
    score: Score | None = None
