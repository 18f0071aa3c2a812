"""The Inference Queue. Rollout (or a tenant) → inference → the asker's inbox."""

from typing import Annotated

from msgspec import Meta

from schemas.base import Message, Name, PolicyId, Seed, Tensor
from schemas.environment import Observation


class InferenceRequest(Message, frozen=True, kw_only=True):
    """Ask one policy version for an action chunk. The asker's inbox travels in the `Nexus-Reply-To` header."""

    id: Annotated[str, Meta(max_length=200)]  # the same request asked again may be answered twice; the answers are equal
    job: Name  # whose usage it is; of a tenant's own request the policy's, whatever stands here
    policy: PolicyId
    observation: Observation
    greedy: bool = True  # the head's mean or its deterministic path; False samples with `seed`
    seed: Seed = 0
    latency_ms: Annotated[float, Meta(ge=0)] = 0.0  # longest wait for its group to fill; 0: the worker's own bound
    deadline: float = 0.0  # unix seconds, by the clock of `ce-time`, after which nobody waits for the answer; 0: none


class InferenceReply(Message, frozen=True, kw_only=True):
    """The answer, naming the version that made it. Either `actions` or `error` is set."""

    id: str
    policy: str = ""
    actions: Tensor | None = None  # float32 [T, D], raw action units, ready for the environment
    sample: Tensor | None = None  # float32 [T, D] in the head's normalised space, kept for the log-prob
    log_prob: list[float] | None = None  # per action of the chunk, summed over dimensions; heads without one leave it out
    value: float | None = None
    feature_id: str = ""
    group: int = 0  # samples in the grouped forward
    tenants: int = 0  # tenants in it
    queue_s: float = 0.0
    device_s: float = 0.0  # this request's share
    clipped: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of the chunk's components that lay outside the bounds
    error: str = ""
    error_code: str = ""
