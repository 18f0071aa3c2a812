"""Settings: one frozen Struct per role, defaults that were tried, and where each value in force came from.

Before the line: `worker.run` loads them before anything heavy is imported. Precedence: flags, environment, TOML file, default.
In the environment NEXUS_<FIELD> is for every role that has the field, NEXUS_<ROLE>_<FIELD> for one. The file (`--config`, or
NEXUS_CONFIG) has a table `[all]` for every role that has the field, one per role, `[prices]` (see pricing.py) and `[up]` for
`nexus up` itself. `nexus config ROLE` prints the result.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from nexus_bus.errors import Refused
from nexus_bus.nearest import nearest
from nexus_bus.pricing import FIELDS as PRICES

MB = 1 << 20

HOME = "NEXUS_HOME"
FILE = "NEXUS_CONFIG"
CREDS = "NEXUS_CREDS"
AUTHORITY = "NEXUS_AUTHORITY"
CA = "NEXUS_CA"
UP = ("autoscale",)  # what the table `[up]` may say
FALLBACK = "nats://127.0.0.1:4222"  # where NATS is known to listen

Whole = Annotated[int, Meta(ge=1)]
Time = Annotated[float, Meta(gt=0)]
Bytes = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]


def home() -> Path:
    """Where server, logs, datasets and caches live: NEXUS_HOME, else `.nexus` below the working directory."""
    return Path(os.environ.get(HOME, ".nexus")).expanduser().resolve()


def started() -> bool:
    """Whether `nexus up` has a server in this home."""
    return (home() / "url").is_file()


def default_url() -> str:
    """The server that `nexus up` started in this home, else the port that NATS is known for."""
    return (home() / "url").read_text().strip() if started() else FALLBACK


def authority(of: Path | None = None) -> Path:
    """Directory of the operator's key: NEXUS_AUTHORITY, else where `nexus up` makes it in a home (default: this one)."""
    given = os.environ.get(AUTHORITY)
    return Path(given) if given else (of or home()) / "nats" / "authority"


def default_creds() -> str | None:
    """NEXUS_CREDS, else the provider's credentials that `nexus up` made in this home; None where there are neither."""
    if given := os.environ.get(CREDS):
        return given
    made = authority() / "provider.creds"
    return str(made) if made.is_file() else None


def default_ca() -> str | None:
    """NEXUS_CA, else the certificate that the embedded server of this home made for itself; None: what this machine trusts."""
    if given := os.environ.get(CA):
        return given
    made = authority() / "ca.pem"
    return str(made) if made.is_file() else None


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every role has."""

    url: str = field(default_factory=default_url)  # of the NATS server; several of a cluster by commas
    creds: str | None = field(default_factory=default_creds)  # a .creds file; "none": the server asks for nothing
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    trace_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # share of traces kept
    beat_s: Time = 1.0  # between heartbeats
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1  # servers of a cluster that hold each stream: 3 outlive the loss of one
    alive_file: str | None = None  # says the state, and is as old as the last progress: for probes


class MasterConfig(Common, frozen=True, kw_only=True):
    """Master."""

    base: str = "nexus-nano"  # what inference and trainer workers hold: a job that asks for another is refused

    max_jobs: Whole = 64  # of one tenant, running at once; those beyond wait in line
    max_queued: Whole = 2000  # of one tenant, waiting; those beyond are refused


class EnvironmentConfig(Common, frozen=True, kw_only=True):
    """Environment Service."""

    data_root: str = field(default_factory=lambda: str(home() / "datasets"))  # a directory per tenant, and public/
    sessions: Whole = 128  # held at once
    processes: Whole = field(default_factory=lambda: min(4, max(1, (os.cpu_count() or 2) // 2)))  # for simulators of one kind
    feeds: Whole = 8  # datasets read or recorded side by side
    call_timeout_s: Time = 20.0  # a simulator that takes longer is ended
    memory_gb: Time = 8.0  # one process of simulators that holds more is ended


class RolloutConfig(Common, frozen=True, kw_only=True):
    """Rollout."""

    concurrency: Whole = 24  # episodes side by side …
    own_concurrency: Whole = 64  # … and of those in environments of tenants' own, which wait on other machines
    infer_timeout_s: Time = 20.0
    open_timeout_s: Time = 30.0
    call_timeout_s: Time = 25.0  # above the environment's own, so that its answer arrives
    session_lease_s: Time = 60.0  # a session nobody calls for this long ends itself


class ModelConfig(Common, frozen=True, kw_only=True):
    """What both model roles share. A host's workers share one feature cache on disk."""

    base: str = "nexus-nano"  # the shipped backbone, a directory, or a hub id
    device: str = "auto"  # auto, cpu, cuda, cuda:1 …
    profile: Literal["exact", "fast"] = "exact"  # exact: one result whatever the neighbours
    threads: Whole = 1  # of the forward
    cache_dir: str | None = field(default_factory=lambda: str(home() / "features"))  # "none": memory only
    cache_memory_bytes: Bytes = 256 * MB
    cache_disk_bytes: Bytes = 2048 * MB


class InferenceConfig(ModelConfig, frozen=True, kw_only=True):
    """Inference."""

    batch: Whole = 32  # B: samples per group at most; the knee of the measured batch curve where that is less
    wait_ms: Annotated[float, Meta(ge=0)] = 20.0  # T: nobody waits longer for a group to fill; less where waiting does not pay
    tenant_inflight: Whole = 128  # requests of one tenant taken from the queue and not yet run; the queue keeps the others
    slots: Whole = 64  # policy versions ready to act …
    slot_bytes: Bytes = 1024 * MB  # … and their size, on the device; the others are paged out
    slot_host_bytes: Bytes = 1024 * MB  # with a GPU: weights kept in host memory
    slot_dir: str | None = field(default_factory=lambda: str(home() / "slots"))  # paged-out weights; "none": fetched again
    slot_disk_bytes: Bytes = 4096 * MB
    canary_every: Count = 100  # one answer in so many is made again alone and compared; 0: none


class TrainerConfig(ModelConfig, frozen=True, kw_only=True):
    """Trainer."""

    slots: Whole = 512  # jobs held at once
    slot_bytes: Bytes = 2048 * MB  # of slots at work, on the device; the others are parked
    slot_host_bytes: Bytes = 1024 * MB  # of parked ones in host memory; the rest on disk
    slot_dir: str | None = field(default_factory=lambda: str(home() / "parked"))  # "none": all parked ones in host memory
    commit_every: Whole = 50  # SFT steps between commits
    canary_every: Count = 100  # one sample in so many is encoded again alone and compared; 0: none
    batch: Whole = 64  # B: samples per forward at most; the knee of the measured batch curve where that is less
    group_wait_ms: Annotated[float, Meta(ge=0)] = 20.0  # T: nobody waits longer for neighbours; less where it does not pay
    lease_s: Annotated[float, Meta(ge=1)] = 6.0  # a slot is taken over this long after its holder fell silent


class GatewayConfig(Common, frozen=True, kw_only=True):
    """Gateway."""

    tenant_calls: Whole = 256  # of one tenant, under way at once; those beyond are refused
    tenant_work: Whole = 8  # … of which so many are worked on, while the others wait their turn
    tenant_orders: Whole = 1000  # submissions, cancellations, imports … of one tenant at once …
    tenant_orders_per_s: Time = 10.0  # … and all the time
    infer_timeout_s: Time = 30.0  # a tenant's own request to act waits no longer


class HealthConfig(Common, frozen=True, kw_only=True):
    """Health Manager."""

    missed: Whole = 4  # heartbeats, until a worker counts as lost
    starting_s: Time = 120.0  # allowed from start to the first work
    wedged_s: Time = 90.0  # busy without progress
    backoff_s: Annotated[float, Meta(ge=0)] = 0.5  # before the second restart, then doubling
    loop_window_s: Time = 60.0  # in which …
    loop_limit: Whole = 5  # … this many restarts are a crash loop


ROLES: dict[str, type[Common]] = {
    "master": MasterConfig,
    "environment": EnvironmentConfig,
    "rollout": RolloutConfig,
    "inference": InferenceConfig,
    "trainer": TrainerConfig,
    "gateway": GatewayConfig,
    "health": HealthConfig,
}


@dataclass(frozen=True)
class Loaded:
    """Settings in force (`value`, the role's Struct), and for each field who set it."""

    value: Any
    sources: dict[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """(field, value, source) of every field, in order, for people."""
        return [(name, repr(getattr(self.value, name)), source) for name, source in self.sources.items()]


def load(role: str, *, flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Loaded:
    """Settings of a role. Flags that are None were not given.

    Raises:
        Refused: an unknown role or key (with the nearest that exists), or a value that does not fit, with its source.
    """
    if role not in ROLES:
        raise Refused(f"role {role!r} does not exist{nearest(role, ROLES)}")
    kinds = {f.name: f.type for f in msgspec.structs.fields(ROLES[role])}
    values: dict[str, Any] = {}
    sources = dict.fromkeys(kinds, "default")
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    for source, key, value in (
        *_file(role, file or (Path(os.environ[FILE]) if os.environ.get(FILE) else None), kinds),
        *_environment(role, kinds),
        *(("flag", key, value) for key, value in given.items()),
    ):
        if key not in kinds:
            raise Refused(f"{source}: {role} has no setting {key!r}{nearest(key, kinds)}")
        values[key], sources[key] = _fit(source, key, value, kinds[key]), source
    return Loaded(ROLES[role](**values), sources)


def up_settings() -> dict[str, Any]:
    """What the table `[up]` of the settings file says: of `nexus up` itself."""
    path = Path(os.environ[FILE]) if os.environ.get(FILE) else None
    return {key: value for _, key, value in _file("up", path, dict.fromkeys(UP))}


def _fit(source: str, key: str, value: Any, kind: Any) -> Any:
    """Text of the environment or a command line becomes what the field takes; "none" is nothing, where that is allowed."""
    if value == "none" and kind == str | None:
        return None
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(f"{source}: {key} = {value!r}: {error}") from error


def _file(role: str, path: Path | None, kinds: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    if path is None:
        return
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"settings file {path}: {error}") from error
    tables = {
        "all": {f.name for kind in ROLES.values() for f in msgspec.structs.fields(kind)},
        "prices": set(PRICES),
        "up": set(UP),
        **{name: {f.name for f in msgspec.structs.fields(kind)} for name, kind in ROLES.items()},
    }
    for table, content in document.items():  # all of it, whoever reads: a typing error is found by the first worker that starts
        if table not in tables or not isinstance(content, dict):
            raise Refused(f"settings file {path}: no table [{table}]{nearest(table, tables)}")
        for key in content:
            if key not in tables[table]:
                raise Refused(f"settings file {path}: [{table}] has no setting {key!r}{nearest(key, tables[table])}")
    for table in ("all", role):
        yield from ((f"{path} [{table}]", key, value) for key, value in document.get(table, {}).items() if key in kinds)


def _environment(role: str, kinds: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key in kinds:
        if (variable := f"NEXUS_{key.upper()}") in os.environ:
            yield variable, key, os.environ[variable]
    prefix = f"NEXUS_{role.upper()}_"
    for variable in sorted(os.environ):
        if variable.startswith(prefix):
            yield variable, variable.removeprefix(prefix).lower(), os.environ[variable]
