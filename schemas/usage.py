"""Who used what. Inference, trainer, environment, master → USAGE; and who did what: master → AUDIT."""

from typing import Literal

from schemas.base import Count, JobOrNone, Message, Name, Seconds

UsageKind = Literal["inference", "training", "environment", "storage"]


class Usage(Message, frozen=True, kw_only=True):
    """Resources one job used on one worker since its last record. The message id makes a repeated record harmless.

    What nobody's job asked for is the tenant `provider`'s, by what it was: `idle`, `loading`, `canary`, `repeated`.
    """

    tenant: Name
    job: JobOrNone  # "_": sessions that the tenant opened itself
    worker: Name
    kind: UsageKind
    device_s: float = 0.0  # of the compute thread of an inference worker or a trainer
    requests: Count = 0
    group_sum: Count = 0  # group sizes summed; mean group size = group_sum / (requests + records)
    records: Count = 0
    steps: Count = 0  # environment or gradient steps
    session_s: Seconds = 0.0  # environment sessions held
    simulator_s: Seconds = 0.0  # … and of them, seconds that the simulator computed
    stored_bytes: Count = 0  # storage: what the job keeps from `time` on, until its next such record
    time: str


class Audit(Message, frozen=True, kw_only=True):
    """One decision on behalf of a tenant."""

    tenant: Name
    action: str  # submit, cancel, pause, resume, budget, policy.imported, policy.pinned, policy.retired, completed …
    job: str = ""  # "_" where the message named none
    outcome: str = ""  # asked, accepted, ok, queued or refused
    detail: str = ""  # why, in one sentence
    key: str = ""  # public key of who asked; empty for the service's own decisions and for the provider
    submission: str = ""  # message id of the order that it is about
    time: str
