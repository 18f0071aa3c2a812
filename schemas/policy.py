"""Policies: the contract a policy was trained under, and its immutable versions. Trainer → registry → inference."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import BlobRef, Count, Message, Name, PolicyId, Positive, Seed
from schemas.job import HeadSpec

NormMode = Literal["identity", "mean_std", "min_max", "quantile"]


class Statistics(Message, frozen=True, kw_only=True):
    """Per-dimension statistics of one key, computed over all frames."""

    min: list[float]
    max: list[float]
    mean: list[float]
    std: list[float]
    q01: list[float]
    q99: list[float]
    count: Count


class Normalizer(Message, frozen=True, kw_only=True):
    """How raw numbers become the head's numbers and back. `statistics` is required unless the mode is identity."""

    mode: NormMode = "identity"
    statistics: Statistics | None = None
    mask: list[bool] | None = None  # False leaves a dimension (a gripper) as it is


class ActionSpec(Message, frozen=True, kw_only=True):
    """What the environment takes: `[T, size]` float32."""

    size: Positive
    low: list[float]
    high: list[float]
    gripper: Literal["none", "minus_open", "plus_open", "zero_one"] = "none"
    rotation: Literal["none", "axis_angle", "euler_xyz", "quaternion"] = "none"


class ObservationSpec(Message, frozen=True, kw_only=True):
    """What the environment gives: named HWC uint8 cameras and a float32 state."""

    cameras: dict[str, tuple[Positive, Positive, Literal[3]]]
    state_size: Annotated[int, Meta(ge=0, le=4096)]


class PolicyContract(Message, frozen=True, kw_only=True):
    """Everything that must fit before a policy may act. Stored with every version, compared before the first forward."""

    backbone: str
    backbone_fingerprint: str  # hash of configuration and weights
    head: HeadSpec
    horizon: Positive
    query_tokens: Positive
    action: ActionSpec
    observation: ObservationSpec
    prompt: str  # template with {instruction}
    image_size: Positive
    image_filter: Literal["none", "bicubic"] = "none"
    action_norm: Normalizer = Normalizer()
    state_norm: Normalizer = Normalizer()
    statistics_hash: str = ""  # sha256 of both normalizers, so that a swap is seen


class PolicyVersion(Message, frozen=True, kw_only=True):
    """One immutable version of a policy, as the registry holds it."""

    id: PolicyId
    tenant: Name
    job: Name
    n: Count
    parent: str | None  # the version it was trained from
    contract: PolicyContract
    weights: BlobRef  # safetensors of the action module
    created: str  # RFC 3339
    step: Count = 0  # gradient steps since the job began
    records: Count = 0  # records learned so far
    seed: Seed = 0
    metrics: dict[str, float] = {}
    trace: str = ""  # traceparent of the step that made it


class TrainingState(Message, frozen=True, kw_only=True):
    """Where a trainer resumes: committed by compare-and-set together with what it has learned so far."""

    tenant: Name
    job: Name
    step: Count
    batches: Count  # batches (SFT) or updates (RL) learned, in order
    records: Count
    version: Count  # newest published policy version
    state: BlobRef  # weights, optimizer, scheduler, generator
    epoch: Count  # fencing epoch of the lease that committed it
    device_s: float = 0.0
    lag_sum: float = 0.0  # summed staleness in versions over records; mean lag = lag_sum / records
    group_sum: float = 0.0  # tenants in the group, summed over the grouped steps this job took part in
    groups: Count = 0
    metrics: dict[str, float] = {}  # of the last step
