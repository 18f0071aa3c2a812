"""The job document a tenant writes (TOML, YAML or JSON) and publishes on `job.submit`. Tenant → master."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Document, Message, Name, PolicyRef, Positive, Seconds, Seed

Scalar = str | int | float | bool
Rate = Annotated[float, Meta(gt=0, le=10)]
Fraction = Annotated[float, Meta(ge=0, le=1)]

MAX_HORIZON = 64


class HeadSpec(Document, frozen=True, kw_only=True):
    """The tenant's private action module on the shared backbone."""

    type: str = "oft"  # a name of the head catalogue; checked by the master so that the refusal lists what exists
    horizon: Annotated[int, Meta(ge=1, le=MAX_HORIZON)] = 8  # T: actions per chunk
    options: dict[str, Scalar] = {}  # e.g. hidden, layers, heads: see `nexus catalog`


class LoraSpec(Document, frozen=True, kw_only=True):
    """The tenant's private low-rank adapter on the shared language model (tier `lora`)."""

    rank: Annotated[int, Meta(ge=1, le=256)] = 8
    alpha: Annotated[float, Meta(gt=0, le=1024)] = 16.0  # the deltas are scaled by alpha / rank
    targets: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] = ("q_proj", "v_proj")  # linear layers, by last name
    last_layers: Annotated[int, Meta(ge=0, le=1024)] = 0  # adapt the last so many layers of the language model; 0: all
    learning_rate: Rate = 1e-4  # peak of the adapter; the head has the algorithm's


class EnvironmentSpec(Document, frozen=True, kw_only=True):
    """Which simulator, and how it is shown to the policy."""

    id: str  # a name of the environment catalogue
    task: str  # a task of that environment, e.g. "touch"
    options: dict[str, Scalar] = {}  # adapter options, e.g. blocks=1
    execute: Annotated[int, Meta(ge=1, le=MAX_HORIZON)] | None = None  # actions of a chunk that are executed; all if unset
    image_encoding: Literal["png", "jpeg", "raw"] = "png"


class ExpertSpec(Document, frozen=True, kw_only=True):
    """Record demonstrations from the environment's scripted expert before training."""

    episodes: Positive = 50
    seed: Seed = 0
    noise: Fraction = 0.0  # std of Gaussian noise on executed actions; the recorded labels stay the expert's


class DataSpec(Document, frozen=True, kw_only=True):
    """Where SFT reads from: a LeRobot dataset of this tenant, or one recorded from an expert first."""

    dataset: str | None = None  # a directory below the tenant's data root, or public/<directory>, which all may read
    expert: ExpertSpec | None = None


class Sft(Document, frozen=True, kw_only=True, tag="sft", tag_field="name"):
    """Supervised fine-tuning: one gradient step per batch."""

    learning_rate: Rate = 1e-3
    weight_decay: Fraction = 0.01
    batch_size: Annotated[int, Meta(ge=1, le=1024)] = 32
    steps: Positive = 400
    warmup_steps: Annotated[int, Meta(ge=0)] = 20
    min_learning_rate: Annotated[float, Meta(ge=0, le=10)] = 1e-6
    grad_clip: Rate = 1.0
    publish_every: Positive = 100  # steps between policy versions


class Ppo(Document, frozen=True, kw_only=True, tag="ppo", tag_field="name"):
    """Proximal policy optimisation, Gaussian around the `oft` head. Its defaults keep close to the policy it begins from:
    `nexus_bus/learning/algorithms/ppo.py` says why.
    """

    learning_rate: Rate = 5e-5  # of the head; an adapter has the one of `[lora]`
    value_learning_rate: Rate = 1e-3
    weight_decay: Fraction = 0.0
    updates: Positive = 20  # policy versions to publish
    episodes_per_update: Annotated[int, Meta(ge=1, le=4096)] = 32
    epochs: Annotated[int, Meta(ge=1, le=64)] = 4  # at most so many passes over the episodes of an update: see target_kl
    minibatch: Positive = 64  # chunks per gradient step
    gamma: Fraction = 0.99  # per chunk
    lam: Fraction = 0.95
    clip: Fraction = 0.2  # of the ratio of densities, of whole chunks
    value_clip: Annotated[float, Meta(gt=0)] = 0.2
    dual_clip: Annotated[float, Meta(gt=1)] = 3.0
    entropy: Annotated[float, Meta(ge=0, le=1)] = 0.0
    init_log_std: Annotated[float, Meta(ge=-10, le=2)] = -0.7  # how far actions are varied to learn from, of a range of 2
    target_kl: Annotated[float, Meta(gt=0)] | None = 0.1  # per chunk: an update that has gone further stops; null: none does
    grad_clip: Rate = 1.0
    value_warmup_updates: Annotated[int, Meta(ge=0)] = 0  # updates that train the value head alone
    staleness: Annotated[int, Meta(ge=0, le=8)] = 1  # policy versions that producers may lag behind


class Budget(Document, frozen=True, kw_only=True):
    """Where a job stops, whatever its algorithm still wants."""

    wall_s: Seconds | None = None  # then it fails
    device_s: Seconds | None = None  # of training and inference together; then it pauses, and `nexus resume` goes on


class RetentionSpec(Document, frozen=True, kw_only=True):
    """Which policy versions of the job keep their weights. Pinned ones and those in use are kept besides."""

    keep: Positive = 100  # the newest so many
    every: Annotated[int, Meta(ge=0)] = 0  # besides, every such number for good: 10 keeps @0, @10, @20 …; 0: none


class EvaluationSpec(Document, frozen=True, kw_only=True):
    """The protocol of a score; it is stored with every score it produced. See `Protocol` for one as a file."""

    episodes: Positive = 60  # trials of each task
    seed: Seed = 10_000  # trial i runs with seed + i, before and after alike
    before: bool = True
    after: bool = True
    success: Literal["any_step", "last_step"] = "any_step"
    tasks: Annotated[tuple[str, ...], Meta(max_length=256)] = ()  # several of the environment; unset: the one that it names
    simulator: Annotated[str, Meta(max_length=400)] = ""  # name and versions that it has to be; unset: whichever is there
    films: Annotated[int, Meta(ge=0, le=16)] = 4  # of failures to keep, and of successes: the first ones

    @property
    def total(self) -> int:
        """Episodes of all tasks."""
        return self.episodes * max(1, len(self.tasks))

    def part(self, index: int) -> tuple[str, int]:
        """Task (empty: the environment's) and trial of an episode. Tasks take turns, so that half a result covers them all."""
        if not self.tasks:
            return "", index
        trial, number = divmod(index, len(self.tasks))
        return self.tasks[number], trial


class JobSpec(Document, frozen=True, kw_only=True):
    """One job. The tenant is not in it: the bus knows who sent it."""

    kind: Literal["sft", "rl", "eval"]
    name: Name  # unique within the tenant; versions are called <name>@<n>
    base: str = ""  # a shipped backbone, a directory, or a hub id; unset: the one that the service holds
    head: HeadSpec | None = None  # unset with `init`: the head of that policy
    tier: Literal["frozen", "lora"] = "frozen"
    lora: LoraSpec | None = None  # of tier `lora`; unset: its defaults, or with `init` the adapter of that policy
    init: PolicyRef | None = None  # start from (or evaluate) this policy of the same tenant
    environment: EnvironmentSpec | None = None
    data: DataSpec | None = None
    algorithm: Sft | Ppo | None = None  # defaults by kind
    budget: Budget = Budget()
    evaluation: EvaluationSpec | None = None
    latency_ms: Annotated[float, Meta(gt=0, le=10_000)] = 20.0  # no request of this job waits longer for its group to fill
    retention: RetentionSpec | None = None  # unset: its defaults
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0  # among the tenant's own jobs: of those that wait, the highest is next
    seed: Seed = 0


class JobCancel(Message, frozen=True, kw_only=True):
    """Stop a job; its last committed policy version stays."""

    job: Name
    reason: str = ""


class JobPause(Message, frozen=True, kw_only=True):
    """Let a job rest: its slot is released after the batch at work, and it goes on where it stopped. Tenant → master."""

    job: Name
    reason: Annotated[str, Meta(max_length=1000)] = ""


class JobResume(Message, frozen=True, kw_only=True):
    """Go on with a paused job. Tenant → master."""

    job: Name
    add_device_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # more device-seconds than its budget had
