"""What a tenant may ask the gateway, and what it answers. Tenant → gateway, as requests; see the `api.*` rows of subjects.py.

Orders (`job.submit` and the like) carry the messages of their own families; here is what is only asked and answered.
"""

from typing import Annotated

from msgspec import Meta

from schemas.base import END, Count, Message, Name, PolicyId, Positive, Seconds, Sha256
from schemas.evaluation import EvaluationEpisode, EvaluationFilm
from schemas.events import Event
from schemas.plan import JobState
from schemas.policy import PolicyImport, PolicyVersion, TrainingState
from schemas.tenant import ServiceTerms, TenantKey, TenantLimits, TenantPhase
from schemas.usage import Audit, Usage

PAGE = 200  # entries of one answer
CHUNK_BYTES = 256 << 10  # of content in one message: below every tenant's payload limit
WAIT_S = 20.0  # that a reader may wait for something new

Limit = Annotated[int, Meta(ge=1, le=PAGE)]
JobName = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_-]{0,62})?" + END, description="A job, or empty for all.")]
Upload = Annotated[str, Meta(pattern=r"^[0-9a-f]{8,64}" + END, description="A name of the sender's own for what it sends.")]


class Taken(Message, frozen=True, kw_only=True):
    """An order is on the master's queue. Its answer is the event whose `submission` this is."""

    submission: str
    after: Count = 0  # of the event log: the answer comes later than this
    duplicate: bool = False  # it was there already, under the same Nats-Msg-Id


class JobQuery(Message, frozen=True, kw_only=True):
    """One job."""

    job: Name


class JobFound(Message, frozen=True, kw_only=True):
    """A job, or nothing."""

    job: JobState | None = None


class PageQuery(Message, frozen=True, kw_only=True):
    """A page of a list; `after` is the `next` of the page before."""

    job: JobName = ""
    after: Annotated[str, Meta(max_length=200)] = ""
    limit: Limit = PAGE


class JobPage(Message, frozen=True, kw_only=True):
    """Jobs by name."""

    jobs: list[JobState]
    next: str = ""  # empty: that was all


class PolicyPage(Message, frozen=True, kw_only=True):
    """Policy versions by job and number."""

    policies: list[PolicyVersion]
    next: str = ""


class PolicyQuery(Message, frozen=True, kw_only=True):
    """One policy version."""

    policy: PolicyId


class PolicyFound(Message, frozen=True, kw_only=True):
    """A policy version, or nothing."""

    policy: PolicyVersion | None = None


class StateFound(Message, frozen=True, kw_only=True):
    """Where training of a job stands, or nothing."""

    state: TrainingState | None = None


class ContentQuery(Message, frozen=True, kw_only=True):
    """A piece of what a policy version of one's own, or the training state of its job, refers to."""

    policy: PolicyId
    sha256: Sha256  # as the version or the state says
    offset: Count = 0
    size: Annotated[int, Meta(ge=1, le=CHUNK_BYTES)] = CHUNK_BYTES


class Content(Message, frozen=True, kw_only=True):
    """It may be shorter than asked for, at the end."""

    data: bytes


class UploadChunk(Message, frozen=True, kw_only=True):
    """A piece of what is sent, one after another. What is not used within an hour is forgotten."""

    upload: Upload
    offset: Count
    data: Annotated[bytes, Meta(max_length=CHUNK_BYTES)]


class UploadedImport(Message, frozen=True, kw_only=True):
    """Register a policy whose files were sent before."""

    order: PolicyImport
    weights: Upload
    adapter: Upload | None = None


class LogQuery(Message, frozen=True, kw_only=True):
    """Entries of a log after one of them, or since a time. With `wait_s` an empty answer waits for something new."""

    job: JobName = ""
    after: Count = 0
    since: str = ""  # RFC 3339
    limit: Limit = PAGE
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_S)] = 0.0


class EventPage(Message, frozen=True, kw_only=True):
    """What happened, in order."""

    events: list[Event]
    next: Count  # ask again with this as `after`
    end: bool = False  # nothing more was there


class UsagePage(Message, frozen=True, kw_only=True):
    """What was used, in order."""

    usage: list[Usage]
    next: Count
    end: bool = False


class AuditPage(Message, frozen=True, kw_only=True):
    """Who did what, in order."""

    audit: list[Audit]
    next: Count
    end: bool = False


class EpisodePage(Message, frozen=True, kw_only=True):
    """Episodes of evaluations, in the order in which they ended."""

    episodes: list[EvaluationEpisode]
    next: Count
    end: bool = False


class FilmQuery(Message, frozen=True, kw_only=True):
    """A film of a job of one's own, as an episode's record names it."""

    job: Name
    film: Name


class FilmFound(Message, frozen=True, kw_only=True):
    """A film, or nothing: films are kept for a month at most."""

    film: EvaluationFilm | None = None


class AccountQuery(Message, frozen=True, kw_only=True):
    """Who am I."""


class Account(Message, frozen=True, kw_only=True):
    """What the provider has agreed with a tenant, and how much of it is taken."""

    tenant: Name
    phase: TenantPhase = "active"
    limits: TenantLimits = TenantLimits()
    service: ServiceTerms | None = None  # what holds where a limit is not set; None: no master has said it yet
    keys: list[TenantKey] = []
    used: dict[str, float] = {}  # jobs, queued, slots, stored_bytes, device_s, money; what is known
    chunk_bytes: Positive = CHUNK_BYTES
    time: Seconds = 0.0  # the service's clock, unix time
