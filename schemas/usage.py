"""Who used what. Inference, trainer, environment, master → USAGE; and who did what: master → AUDIT."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, JobOrNone, Message, Name, Seconds

UsageKind = Literal["inference", "training", "environment", "storage", "sum"]


class UsagePart(Message, frozen=True, kw_only=True):
    """Resources that one worker spent on one job up to a time, since the record before."""

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
    stored_gb_day: Seconds = 0.0  # storage, in a sum alone: GB kept, times days, in the hour or day of `time`
    commit: Count = 0  # training: the last of the job's commits that it is for
    time: str


class Usage(UsagePart, frozen=True, kw_only=True):
    """What one job used. The message id makes a repeated record harmless.

    What nobody's job asked for is the tenant `provider`'s, by what it was: `idle`, `loading`, `canary`, `repeated`.

    A log of years would not fit into the stream. So now and then one record of kind `sum` takes the place of all that the log
    held of a job: it has no numbers of its own but `earlier` ones, added up by the hour, and by the day where they are older
    than two. Whoever adds up records begins anew with it.
    """

    tenant: Name
    job: JobOrNone  # "_": sessions that the tenant opened itself
    earlier: Annotated[tuple[UsagePart, ...], Meta(max_length=20_000)] = ()


class Audit(Message, frozen=True, kw_only=True):
    """One decision on behalf of a tenant, or something that it asked for.

    The log keeps them for 400 days, and of one tenant the newest 30,000. What is asked over and over (policy.read,
    policy.upload, env.open, env.offer) stands there once for each thing and key in an hour. Requests to act and calls on
    sessions do not: usage has what they took.
    """

    tenant: Name
    action: str  # submit, cancel, pause, resume, budget, policy.imported, policy.pinned, policy.retired, completed …
    job: str = ""  # "_" where the message named none
    outcome: str = ""  # asked, accepted, ok, queued or refused
    detail: str = ""  # why, in one sentence
    key: str = ""  # public key of who asked; empty for the service's own decisions
    submission: str = ""  # message id of the order that it is about
    time: str
