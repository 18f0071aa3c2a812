"""A tenant as the provider keeps it: who may speak in its name, and how much it may take. `nexus tenant` → registry."""

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import END, Count, Message, Name, Positive, Seconds

Weight = Annotated[float, Meta(ge=0.001, le=1000)]
Budget = Annotated[float, Meta(gt=0, le=1e15)]
Bytes = Annotated[int, Meta(ge=1, le=2**53)]

TenantPhase = Literal["active", "suspended", "removed"]
PublicKey = Annotated[str, Meta(pattern=r"^[AU][A-Z2-7]{55}" + END, description="Public key of an account or of a user.")]


class TenantLimits(Message, frozen=True, kw_only=True):
    """What one tenant may take. None: as the service's settings say, or without a limit where they say nothing."""

    weight: Weight = 1.0  # of its share of device time among those who wait
    jobs: Positive | None = None  # running at once; those beyond wait in line
    queued: Positive | None = None  # waiting; those beyond are refused
    slots: Positive | None = None  # training jobs (a private slot each) at once; those beyond wait in line
    sessions: Positive | None = None  # environment sessions at once, over all workers
    stored_bytes: Bytes | None = None  # weights and recorded data kept; beyond it nothing new begins
    device_s: Budget | None = None  # device-seconds on record, over all time; at its end every job pauses
    money: Budget | None = None  # in the currency of [prices], over all time; at its end every job pauses
    payload_bytes: Annotated[int, Meta(ge=1024, le=8 << 20)] = 1 << 20  # of one message
    connections: Annotated[int, Meta(ge=1, le=65536)] = 32
    subscriptions: Annotated[int, Meta(ge=1, le=65536)] = 256


class ServiceTerms(Message, frozen=True, kw_only=True):
    """What holds where a tenant has no limit of its own, as a master says when it starts. Master → registry."""

    jobs: Positive
    queued: Positive
    currency: str = ""  # of [prices]; empty: there are none, and a limit of money counts for nothing


class TenantKey(Message, frozen=True, kw_only=True):
    """One key that may speak for a tenant. Its secret half was shown once and is not kept."""

    key: PublicKey
    label: str = ""
    issued: Seconds  # unix time
    expires: Seconds | None = None  # unix time


class TenantRecord(Message, frozen=True, kw_only=True):
    """A tenant's account."""

    name: Name
    account: PublicKey
    phase: TenantPhase = "active"
    limits: TenantLimits = TenantLimits()
    keys: list[TenantKey] = []
    revoked: dict[str, Count] = {}  # public key of a user → unix time up to which what was issued to it is void
    issued: Count = 0  # unix time of the newest account token, which never goes back
    created: str
    reason: str = ""  # why it is suspended, or was removed
