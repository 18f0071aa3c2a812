"""Who used what. Inference, trainer, environment → USAGE; and who did what: master → AUDIT."""

from typing import Literal

from schemas.base import Count, Message, Name


class Usage(Message, frozen=True, kw_only=True):
    """Resources one job used on one worker since its last record. The message id makes a repeated record harmless."""

    tenant: Name
    job: Name
    worker: Name
    kind: Literal["inference", "training", "environment"]
    device_s: float = 0.0
    requests: Count = 0
    group_sum: Count = 0  # group sizes summed; mean group size = group_sum / (requests + records)
    records: Count = 0
    steps: Count = 0  # environment or gradient steps
    time: str


class Audit(Message, frozen=True, kw_only=True):
    """One decision on behalf of a tenant."""

    tenant: Name
    action: str
    job: str = ""
    outcome: str = ""
    detail: str = ""
    time: str
