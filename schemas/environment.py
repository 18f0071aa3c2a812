"""Environment sessions and the dataset side of the Environment Service. Rollout ⇄ environment; master → environment."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, Image, Message, Name, Positive, Seed, Tensor
from schemas.job import EnvironmentSpec, ExpertSpec
from schemas.policy import ActionSpec, ObservationSpec

EndReason = Literal["running", "success", "failure", "time_limit"]


class SessionOpen(Message, frozen=True, kw_only=True):
    """Ask for a session: a simulator held for one episode at a time."""

    tenant: Name
    job: Name
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


class PrepareOrder(Message, frozen=True, kw_only=True):
    """Make a job's dataset ready: record it from the scripted expert, or open it; then report frames and statistics."""

    tenant: Name
    job: Name
    dataset: str  # directory below the tenant's data root, or public/<directory>
    environment: EnvironmentSpec | None = None  # with `expert`
    expert: ExpertSpec | None = None  # unset: the dataset must exist


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
