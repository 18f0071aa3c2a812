"""Policies: the contract a policy was trained under, and its immutable versions. Trainer → registry → inference."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import BlobRef, Count, Message, Name, PolicyId, Positive, Seed, Sha256
from schemas.job import HeadSpec, LoraSpec
from schemas.usage import Usage

MAX_ANCESTORS = 1000  # that an import brings along: a registry entry stays small

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
    control: Annotated[str, Meta(max_length=60)] = ""  # what an action moves, e.g. osc_pose_delta; empty: there is one way only


class ObservationSpec(Message, frozen=True, kw_only=True):
    """What the environment gives: named HWC uint8 cameras and a float32 state."""

    cameras: dict[str, tuple[Positive, Positive, Literal[3]]]
    state_size: Annotated[int, Meta(ge=0, le=4096)]
    orientation: Literal["upright", "flipped", "mirrored"] = "upright"  # flipped: upside down; mirrored: left is right


class PolicyContract(Message, frozen=True, kw_only=True):
    """Everything that must fit before a policy may act. Stored with every version, compared before the first forward."""

    backbone: str
    backbone_fingerprint: str  # hash of configuration and weights
    head: HeadSpec
    horizon: Positive
    lora: LoraSpec | None = None  # the adapter that the head was trained with; None: on frozen features
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
    adapter: BlobRef | None = None  # safetensors of the adapter, under peft's names
    created: str  # RFC 3339
    step: Count = 0  # gradient steps since the job began
    records: Count = 0  # records learned so far
    seed: Seed = 0
    metrics: dict[str, float] = {}
    trace: str = ""  # traceparent of the step that made it
    origin: str = ""  # of an imported version: <tenant>/<job>@<n> where it was exported
    ancestors: list[str] = []  # of an imported version: the ancestors that its export named, youngest first
    pinned: bool = False  # kept whatever the retention says
    retired: str = ""  # RFC 3339; from then on its weights may be gone, the entry stays
    purged: bool = False  # its weights were given up


class PolicyImport(Message, frozen=True, kw_only=True):
    """Register a policy that comes from elsewhere as `<name>@0`; its weights are in the object store. Tenant → master."""

    name: Name
    contract: PolicyContract
    weights: BlobRef
    adapter: BlobRef | None = None
    origin: Annotated[str, Meta(max_length=200)] = ""
    ancestors: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=MAX_ANCESTORS)] = []
    step: Count = 0
    records: Count = 0
    seed: Seed = 0
    metrics: dict[str, float] = {}
    trace: Annotated[str, Meta(max_length=200)] = ""


class PolicyPin(Message, frozen=True, kw_only=True):
    """Keep a version for good, or no longer. Tenant → master."""

    policy: PolicyId
    pinned: bool = True


class ExportedPolicy(Message, frozen=True, kw_only=True):
    """`policy_version.json` of an exported directory: what it is, where it came from, and hashes of the files beside it."""

    format: Literal["nexus-policy-1"]
    tenant: Name
    id: PolicyId
    created: str  # RFC 3339
    ancestors: list[str]  # from its parent to the root, over all jobs
    step: Count
    records: Count
    seed: Seed
    metrics: dict[str, float]
    trace: str
    weights: BlobRef  # action_head.safetensors
    adapter: BlobRef | None  # adapter_model.safetensors
    contract_sha256: Sha256  # of policy_contract.json as it decodes
    statistics_hash: str


class DeadRecord(Message, frozen=True, kw_only=True):
    """A record that its batch is learned without: it is a dead letter."""

    batch: Count
    index: Count  # within the batch
    msg_id: str
    seq: Count  # in the TRAINING stream
    reason: str  # one sentence for the tenant


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
    used: Usage | None = None  # what this commit owes: published after it, and by whoever resumes if that was cut off
    dead: list[DeadRecord] = []  # written down here before they become dead letters, so that nobody waits for them
