"""Environment sessions and the dataset side of the Environment Service. Rollout ⇄ environment; master → environment."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import END, Count, Image, JobOrNone, Message, Name, Positive, Seed, Tensor
from schemas.job import EnvironmentSpec, ExpertSpec
from schemas.policy import ActionSpec, ObservationSpec

EndReason = Literal["running", "success", "failure", "time_limit"]


class SessionOpen(Message, frozen=True, kw_only=True):
    """Ask for a session: a simulator held for one episode at a time."""

    tenant: Name
    job: JobOrNone  # whom it is charged to
    environment: EnvironmentSpec
    action: ActionSpec  # what the policy gives; refused on mismatch
    observation: ObservationSpec  # what the policy takes; refused on mismatch
    lease_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0  # the session ends itself after this long without a call
    session: Name | None = None  # what it is to be called, so that the asker sees on its subject whether it is still being made


class SessionOpened(Message, frozen=True, kw_only=True):
    """Where the session lives: every further call goes to this subject."""

    session: str
    subject: str
    worker: str
    version: str  # simulator and version, kept with every score


class SessionCall(Message, frozen=True, kw_only=True):
    """One call on a session."""

    op: Literal["reset", "step", "render", "save", "restore", "close"]
    seed: Seed = 0  # reset
    trial: Count = 0  # reset
    actions: Tensor | None = None  # step: float32 [n, D], all executed unless the episode ends
    state: bytes = b""  # restore: what a save of the same environment and task gave


class Observation(Message, frozen=True, kw_only=True):
    """What the policy sees at a chunk boundary."""

    images: dict[str, Image]
    state: Tensor  # float32 [S]
    instruction: str


class SessionReply(Message, frozen=True, kw_only=True):
    """Answer to a call; the arrays cover the executed actions of a step."""

    observation: Observation | None = None  # after reset and step; the final one is kept for the truncation bootstrap
    rewards: list[float] = []
    successes: list[bool] = []
    terminated: bool = False
    truncated: bool = False
    end: EndReason = "running"
    image: Image | None = None  # render
    state: bytes = b""  # save: the whole episode, to go on with here or in another session
    steps: Count = 0  # environment steps since reset
    device_s: float = 0.0  # simulator seconds this call took
    clipped: Annotated[float, Meta(ge=0, le=1)] = 0.0  # step: share of the executed components outside the bounds


# What a tenant asks for itself, and what it serves with a simulator or robot of its own.

OwnId = Annotated[
    str, Meta(pattern=r"^own(-[a-z0-9][a-z0-9_-]{0,40})?" + END, description="An environment of the tenant's own.")
]
TaskName = Annotated[str, Meta(min_length=1, max_length=100)]
Text = Annotated[str, Meta(max_length=400)]

MAX_TASKS = 256  # of one offer


class EnvironmentQuery(Message, frozen=True, kw_only=True):
    """What must a policy fit there?"""

    environment: EnvironmentSpec


class EnvironmentFound(Message, frozen=True, kw_only=True):
    """What a policy must fit."""

    action: ActionSpec
    observation: ObservationSpec
    max_steps: Positive
    instructions: list[str]
    simulator: str  # name and versions
    success: str  # the rule
    varies: str = ""  # why the same seed may give another episode; empty: it gives the same


class SessionAsk(Message, frozen=True, kw_only=True):
    """Ask for a session of one's own, to step it from any program."""

    environment: EnvironmentSpec
    action: ActionSpec | None = None  # what will be sent; if given, refused on mismatch
    observation: ObservationSpec | None = None  # what is expected to be seen; if given, refused on mismatch
    lease_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0  # the session ends itself after this long without a call


class SessionLease(Message, frozen=True, kw_only=True):
    """A session of one's own."""

    session: str
    worker: str
    environment: EnvironmentFound


class SessionStep(Message, frozen=True, kw_only=True):
    """One call on a session of one's own."""

    session: Name
    call: SessionCall


class OwnTask(Message, frozen=True, kw_only=True):
    """A task of a tenant's own environment, as it was measured."""

    action: ActionSpec
    observation: ObservationSpec
    max_steps: Annotated[int, Meta(ge=1, le=100_000)]
    instruction: Text


class OwnOffer(Message, frozen=True, kw_only=True):
    """A worker of a tenant serves an environment of its own, for as long as it says so every few seconds."""

    environment: OwnId
    worker: Name
    sessions: Annotated[int, Meta(ge=0, le=64)]  # it holds so many at once; 0: it leaves
    tasks: Annotated[dict[TaskName, OwnTask], Meta(min_length=1, max_length=MAX_TASKS)]
    simulator: Text  # name and versions, kept with every score
    success: Text = ""  # the rule


class OwnQuery(Message, frozen=True, kw_only=True):
    """A page of a tenant's own environments, by id; `after` is the `next` of the page before."""

    after: Annotated[str, Meta(max_length=100)] = ""
    limit: Annotated[int, Meta(ge=1, le=4)] = 4  # each may have many tasks


class OwnFound(Message, frozen=True, kw_only=True):
    """An environment of the tenant's own that is served right now."""

    environment: str
    workers: list[str]  # that serve it
    sessions: Count  # that they hold at once
    tasks: dict[str, str]  # with the instruction of each
    max_steps: Positive  # of its longest task
    simulator: str  # name and versions


class OwnPage(Message, frozen=True, kw_only=True):
    """Environments of the tenant's own, by id."""

    environments: list[OwnFound]
    next: str = ""  # empty: that was all


class OwnAsk(Message, frozen=True, kw_only=True):
    """What a tenant's worker is asked: to open a session, or a call on one. It answers with an OwnAnswer."""

    id: str
    gateway: str  # comes back in the answer
    open: SessionOpen | None = None
    session: str = ""  # of `call`
    call: SessionCall | None = None


class OwnAnswer(Message, frozen=True, kw_only=True):
    """What a tenant's worker answers: one of the three."""

    id: Annotated[str, Meta(max_length=64)]
    gateway: Name
    opened: SessionOpened | None = None
    reply: SessionReply | None = None
    error: Text = ""
    error_code: Annotated[str, Meta(max_length=60)] = ""


class OwnAnswered(Message, frozen=True, kw_only=True):
    """An answer that came to another gateway than asked."""

    tenant: Name
    answer: OwnAnswer


class PrepareOrder(Message, frozen=True, kw_only=True):
    """Make a job's dataset ready: record it from the scripted expert, or open it; then report frames and statistics."""

    tenant: Name
    job: Name
    dataset: str  # directory below the tenant's data root, or public/<directory>
    environment: EnvironmentSpec | None = None  # with `expert`
    expert: ExpertSpec | None = None  # unset: the dataset must exist
    resumed: Count = 0  # how often its job was; a pause takes the orders before it back


class FeedOrder(Message, frozen=True, kw_only=True):
    """Put SFT batches [first, last) of a job on the Training Queue, each drawn deterministically from the seed."""

    tenant: Name
    job: Name
    dataset: str
    first: Count
    last: Count
    batch_size: Positive
    horizon: Positive
    seed: Seed
    image_encoding: Literal["png", "jpeg", "raw"] = "png"
