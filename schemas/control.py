"""Between workers: reports to the master, heartbeats, leases, and orders to the host that supervises processes."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, Message, Name
from schemas.policy import Statistics
from schemas.rollout import EpisodeResult

Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # since 1970; more than a Count holds

Role = Literal["master", "environment", "rollout", "inference", "trainer", "health", "gateway"]

# Why a worker was lost. killed: by a signal from outside; wedged: busy without progress; silent: no heartbeat; code: all else
Cause = Literal["simulator", "memory", "numerics", "broker", "code", "killed", "wedged", "silent"]


class JobReport(Message, frozen=True, kw_only=True):
    """Progress of a job, from whoever did the work. It travels on the master's work queue: it is not lost."""

    job: Name
    kind: Literal["episode", "prepared", "learned", "trained", "failed"]
    episode: EpisodeResult | None = None
    frames: Count = 0  # prepared
    stored_bytes: Count = 0  # prepared: of the dataset, if it was recorded for this job
    state_statistics: Statistics | None = None  # prepared
    action_statistics: Statistics | None = None  # prepared
    batches: Count = 0  # learned, trained: batches or updates learned and committed so far
    version: int = -1  # learned, trained: newest published version
    reason: str = ""  # failed: one sentence for the tenant
    metrics: dict[str, float] = {}


class Heartbeat(Message, frozen=True, kw_only=True):
    """A worker lives and moves. `progress` counts what it has done: a live worker that stops moving is wedged."""

    role: Role
    worker: Name
    host: Name
    pid: Count
    state: Literal["starting", "running", "draining"]
    busy: bool  # holds work it should be progressing on
    progress: Count
    time: float  # unix seconds
    gauges: dict[str, float] = {}  # e.g. queue, group_size, sessions
    last: bool = False  # it leaves in good order: no more will come, and nobody is to miss it


class ProcessExit(Message, frozen=True, kw_only=True):
    """The host's supervisor saw a child end."""

    role: Role
    worker: Name
    host: Name
    pid: Count
    returncode: int
    ordered: bool = False  # its end was wanted: it is not to come back
    cause: Cause | None = None  # what it looks like, from its code and its log
    words: str = ""  # the last that its log says about it


class ProcessOrder(Message, frozen=True, kw_only=True):
    """Ask a host's supervisor to restart or stop one of its processes. Health manager → supervisor."""

    worker: Name
    action: Literal["restart", "stop"]
    reason: str
    pid: Count = 0  # act only while the process still has this pid; 0 means whichever


class ScaleOrder(Message, frozen=True, kw_only=True):
    """Run so many workers of these roles on a host: more are started, those too many drain. Operator → supervisor."""

    counts: dict[Role, Count]
    reason: str = ""


class Scaled(Message, frozen=True, kw_only=True):
    """How many workers of each role a host is to run from now on; it starts and drains them while this is read."""

    counts: dict[Role, Count]


class WorkersQuery(Message, frozen=True, kw_only=True):
    """Ask the Health Manager whom it knows."""


class Known(Message, frozen=True, kw_only=True):
    """A worker as the Health Manager sees it."""

    role: Role
    worker: Name
    host: Name
    pid: Count
    state: str  # of its last heartbeat; or lost, restarting, given up
    busy: bool
    progress: Count
    silent_s: float  # since its last heartbeat
    restarts: Count = 0  # since the Health Manager came up
    cause: Cause | None = None  # of the last loss


class WorkersKnown(Message, frozen=True, kw_only=True):
    """Whom the Health Manager knows."""

    workers: list[Known]


class Attempt(Message, frozen=True, kw_only=True):
    """A batch that is being learned, or was when its trainer ended: found in the lease by whoever takes the slot next."""

    batch: Count
    tries: Count  # attempts that were begun and did not end well, this one included
    record: Annotated[int, Meta(ge=-1)] = -1  # index of the record that is tried alone; -1: all of them


class Lease(Message, frozen=True, kw_only=True):
    """Who serves a slot. Taken by compare-and-set; `epoch` grows with each taking, so a stale holder cannot commit."""

    tenant: Name
    job: Name
    holder: Name
    epoch: Count
    expires: float  # unix seconds; 0: it was given up
    attempts: list[Attempt] = []


class Ack(Message, frozen=True, kw_only=True):
    """A plain yes, or an error that names what was wrong and what to do."""

    ok: bool = True
    error: str = ""
    error_code: str = ""


class DeadLetter(Message, frozen=True, kw_only=True):
    """Why a message was given up, with the original."""

    stream: str
    subject: str
    msg_id: str
    reason: str
    deliveries: Count
    time: str
    headers: dict[str, str]
    payload: bytes


class Span(Message, frozen=True, kw_only=True):
    """One finished span, as the TRACES stream holds it."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str  # role
    worker: str
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    status: Literal["ok", "error", "unset"] = "unset"
    attributes: dict[str, str | int | float | bool] = {}
    links: list[tuple[str, str]] = []  # (trace_id, span_id)


class Spans(Message, frozen=True, kw_only=True):
    """A batch of finished spans."""

    spans: list[Span]
