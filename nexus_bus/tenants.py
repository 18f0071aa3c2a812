"""Tenants of a running service: added, limited, given new keys, suspended, removed. What `nexus tenant` does.

The record in the registry is the truth and changes by compare-and-set; the account's token is made from it and pushed to the
server afterwards. Whoever is interrupted in between is made good by the next command on that tenant, which pushes it again.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nexus_bus import registry
from nexus_bus.audit import audit
from nexus_bus.bus import Bus, ensure_topology, remove_tenant
from nexus_bus.bus.accounts import clock, forget, known, push
from nexus_bus.bus.authority import FOR_EVER, SYSTEM_FILE, Authority
from nexus_bus.bus.jwt import Key
from nexus_bus.clock import now
from nexus_bus.errors import BadJob, Conflict, NotFound
from nexus_bus.nearest import nearest
from schemas.base import NAME_PATTERN, PUBLIC, Name
from schemas.job import JobCancel
from schemas.plan import JobState
from schemas.policy import PolicyVersion, TrainingState
from schemas.tenant import ServiceTerms, TenantKey, TenantLimits, TenantRecord

RESERVED = frozenset({PUBLIC, "provider", "system"})
MANY_KEYS = 32  # of one tenant at once
LABEL = 64  # characters of a key's label
REMOVING = "is being removed"
DRAIN_S = 60.0  # for jobs of a tenant that is removed by force


@dataclass(frozen=True)
class Issued:
    """A tenant, and credentials that are shown once."""

    record: TenantRecord
    creds: str


class Tenants:
    """All of them. Use `tenants_of`."""

    def __init__(self, bus: Bus, system: Bus, authority: Authority) -> None:
        self.bus, self.system, self.authority = bus, system, authority
        self.kv = bus.kv("registry")

    async def add(
        self, name: str, limits: TenantLimits | None = None, *, label: str = "", expires_s: float | None = None
    ) -> Issued:
        """A new tenant, who may begin at once.

        Raises:
            BadJob: the name is none, is reserved, or was given before; the label or the expiry is none.
        """
        check_name(name)
        key, issued = Key.new("user"), await clock(self.system)
        record = TenantRecord(
            name=name,
            account=self.authority.tenant(name).public,
            limits=limits or TenantLimits(),
            keys=[_key(key, label, issued, expires_s)],
            issued=issued,
            created=now(),
        )
        try:
            revision = await self.kv.create(registry.account_key(name), record)
        except Conflict:
            known = await self.find(name)
            if known.phase == "removed":
                why = f"was removed {known.reason}, and a name is given once; choose another"
            else:
                why = f"exists since {known.created[:19]}; choose another, or `nexus tenant rotate {name}` for new credentials"
            raise BadJob(f"tenant: {name!r} {why}") from None
        await self._push(record, revision)
        await audit(self.bus, name, "tenant.add", "", "ok", label, key=record.created, caller=self.bus.key)
        return Issued(record, self._creds(record, key))

    async def all(self) -> list[TenantRecord]:
        """By name; those that were removed are among them."""
        entries = await self.kv.entries(registry.account_key(""), TenantRecord)
        return [entries[key].value for key in sorted(entries)]

    async def find(self, name: str) -> TenantRecord:
        """One tenant. Raises NotFound."""
        check_name(name)
        entry = await self.kv.get(registry.account_key(name), TenantRecord)
        if entry is None:
            raise NotFound(f"tenant: no {name!r}; `nexus tenant list` shows who there is")
        return entry.value

    async def terms(self) -> ServiceTerms | None:
        """What holds where a tenant has no limit of its own; None: no master has said it yet."""
        entry = await self.kv.get(registry.SERVICE, ServiceTerms)
        return entry.value if entry is not None else None

    async def time(self) -> float:
        """By the server's clock, which decides what has expired."""
        return await clock(self.system)

    async def limit(self, name: str, changes: dict[str, Any]) -> TenantRecord:
        """Other limits, from this moment on; None takes one away.

        Raises:
            NotFound: no such tenant.
            BadJob: a limit does not exist, or its value does not fit; names it.
        """

        def change(record: TenantRecord) -> TenantRecord:
            return msgspec.structs.replace(record, limits=limits_of(changes, record.limits))

        return await self._change(name, change, "tenant.limit", _words(changes))

    async def rotate(self, name: str, *, label: str = "", expires_s: float | None = None, keep: bool = False) -> Issued:
        """New credentials; those issued before are void at once, unless they are kept.

        Raises:
            NotFound: no such tenant.
            BadJob: it holds as many keys as it may; the label or the expiry is none.
        """
        check_name(name)
        key, issued = Key.new("user"), await clock(self.system)
        own = _key(key, label, issued, expires_s)

        def change(record: TenantRecord) -> TenantRecord:
            kept = record.keys if keep else []
            if len(kept) >= MANY_KEYS:
                raise BadJob(f"tenant: {name} has {len(kept)} keys; rotate without --keep makes all of them void")
            revoked = record.revoked if keep else _void(record)
            return msgspec.structs.replace(record, keys=[*kept, own], revoked=revoked)

        record = await self._change(name, change, "tenant.rotate", label)
        return Issued(record, self._creds(record, key))

    async def revoke(self, name: str, key: str) -> TenantRecord:
        """Make one key void, or all of one label; `key` is its public half or the label. Raises NotFound."""

        def change(record: TenantRecord) -> TenantRecord:
            gone = [one for one in record.keys if key and key in (one.key, one.label)]
            if not gone:
                raise NotFound(f"key: {name} has no {key!r}; `nexus tenant show {name}` lists its keys")
            kept = [one for one in record.keys if one not in gone]
            revoked = record.revoked | {one.key: FOR_EVER for one in gone}
            return msgspec.structs.replace(record, keys=kept, revoked=revoked)

        return await self._change(name, change, "tenant.revoke", key)

    async def suspend(self, name: str, reason: str = "") -> TenantRecord:
        """Cut a tenant off; its jobs pause, and go on when it is active again. Raises NotFound."""
        return await self._change(
            name, lambda record: msgspec.structs.replace(record, phase="suspended", reason=reason), "tenant.suspend", reason
        )

    async def activate(self, name: str) -> TenantRecord:
        """Let a suspended tenant go on, with the keys it had. Raises NotFound."""
        return await self._change(
            name, lambda record: msgspec.structs.replace(record, phase="active", reason=""), "tenant.activate", ""
        )

    async def remove(self, name: str, *, force: bool = False, drain_s: float = DRAIN_S) -> TenantRecord:
        """End a tenant: its keys are void, its weights and states are deleted, its name is never given again.

        What it used and did stays on record. Datasets on the disks of environment workers are left to whoever owns the disks.

        Args:
            force: cancel its jobs first, and wait until they have ended.

        Raises:
            NotFound: no such tenant.
            BadJob: it has jobs that have not ended, and names them; with `force`, if they do not end in time.
        """
        before = await self.find(name)
        if (busy := await self.jobs(name)) and not force:
            raise BadJob(_busy(name, busy))
        await self.suspend(name, REMOVING)
        try:
            await self._drain(name, force, time.monotonic() + drain_s)
        except BadJob:
            if not force and before.phase == "active":
                await self.activate(name)
            raise
        await self._erase(name)  # first: whoever is interrupted here removes it again
        record = await self._change(
            name,
            lambda one: msgspec.structs.replace(one, phase="removed", reason=f"on {now()[:10]}", keys=[], revoked=_void(one)),
            "tenant.remove",
            "",
        )
        await forget(self.system, self.authority.deletion(record.account))
        return record

    async def jobs(self, name: str) -> list[str]:
        """Names of a tenant's jobs that have not ended."""
        entries = await self.kv.entries(registry.job_key(name, ""), JobState)
        return sorted(entry.value.plan.spec.name for entry in entries.values() if not entry.value.closed)

    async def _drain(self, name: str, force: bool, ends: float) -> None:
        """Wait until a suspended tenant has no job, and no order that could still become one; with force, end its jobs."""
        ordered: set[str] = set()
        while (busy := await self.jobs(name)) or await self.bus.queued("JOBS", f"*.*.{name}"):
            if busy and not force:  # one came in just before
                raise BadJob(_busy(name, busy))
            for job in set(busy) - ordered:
                order = JobCancel(job=job, reason="the tenant is removed")
                await self.bus.publish("job.cancel", order, msg_id=f"remove/{name}/{job}", tenant=name)
                ordered.add(job)
            if time.monotonic() > ends:
                what = _some(busy) if busy else "orders in the queue"
                raise BadJob(f"tenant: {what} of {name} did not end in time; is a master running? Try again once one is")
            await asyncio.sleep(0.1)

    async def _erase(self, name: str) -> None:
        states = await self.kv.entries(registry.state_key(name, ""), TrainingState)
        for key, entry in states.items():
            await self.bus.blobs.delete(entry.value.state)
            await self.kv.delete(key)
        for key, entry in (await self.kv.entries(registry.policies_prefix(name), PolicyVersion)).items():
            # The master's next sweep deletes the weights, if nobody else has the same.
            await self.kv.put(key, msgspec.structs.replace(entry.value, retired=entry.value.retired or now(), pinned=False))
        for prefix in (registry.job_key(name, ""), registry.dataset_key(name, "")):
            for key in await self.kv.keys(prefix):
                await self.kv.delete(key)
        await self.kv.delete(registry.tenant_key(name))  # workers stop serving it
        await remove_tenant(self.bus, name)
        for stream, on in (
            ("EVENTS", f"event.{name}.*"), ("EVALS", f"eval.{name}.*"), ("FILMS", f"film.{name}.*.*"),
            ("UPLOADS", f"upload.{name}.*"),
        ):  # fmt: skip
            await self.bus.drop(stream, on)

    async def refresh(self) -> list[str]:
        """Tell the server of every account that it does not know as it should be: after an update of ours that has new calls,
        or with a server whose accounts were lost. Those that were told anew.
        """
        told: list[str] = []
        for record in await self.all():
            if record.phase != "removed" and not await known(self.system, self.authority.tenant_token(record)):
                await self._change(record.name, lambda one: one, "tenant.refresh", "")
                told.append(record.name)
        return told

    async def _change(
        self, name: str, change: Callable[[TenantRecord], TenantRecord], action: str, detail: str
    ) -> TenantRecord:
        check_name(name)
        while True:
            entry = await self.kv.get(registry.account_key(name), TenantRecord)
            if entry is None:
                raise NotFound(f"tenant: no {name!r}; `nexus tenant list` shows who there is")
            if entry.value.phase == "removed":
                raise NotFound(f"tenant: {name!r} was removed {entry.value.reason}")
            # Of two tokens servers may keep the later one, and clocks go back.
            issued = max(await clock(self.system), entry.value.issued + 1)
            record = msgspec.structs.replace(change(entry.value), issued=issued)
            try:
                revision = await self.kv.update(registry.account_key(name), record, entry.revision)
            except Conflict:
                continue
            await self._push(record, revision)
            await audit(self.bus, name, action, "", "ok", detail, key=str(revision), caller=self.bus.key)
            return record

    async def _push(self, record: TenantRecord, revision: int) -> None:
        """Tell the server what a record says; then what it says by now, if somebody changed it meanwhile.

        A copy of the registry may be behind what was just written to it: what is older than what was pushed is not news.
        """
        while True:
            await push(self.system, self.authority.tenant_token(record))
            entry = await self.kv.get(registry.account_key(record.name), TenantRecord)
            if entry is None or entry.revision <= revision:
                return
            record, revision = entry.value, entry.revision

    def _creds(self, record: TenantRecord, key: Key) -> str:
        (own,) = (one for one in record.keys if one.key == key.public)
        expires = math.ceil(own.expires) if own.expires is not None else None
        return self.authority.tenant_creds(record, key, issued=int(own.issued), expires=expires)


@contextlib.asynccontextmanager
async def tenants_of(url: str, authority: Path, *, timeout: float = 15.0) -> AsyncIterator[Tenants]:
    """Connect as the operator whose key lies in a directory.

    Raises:
        Denied: the directory holds no operator's key, or the server does not trust it.
        Unavailable: nothing answers at `url`.
    """
    operator = Authority.kept(authority)
    system = await Bus.connect(url, name="operator", timeout=timeout, creds=authority / SYSTEM_FILE, streams=False)
    try:
        bus = await Bus.connect(url, name="operator", timeout=timeout, creds=authority / "provider.creds")
        try:
            await ensure_topology(bus)
            yield Tenants(bus, system, operator)
        finally:
            await bus.close()
    finally:
        await system.close()


def check_name(name: str) -> None:
    """Raises BadJob for what is no name of a tenant."""
    if name in RESERVED:
        raise BadJob(f"tenant: {name!r} is reserved; choose another name")
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        shown = name if len(name) <= 80 else f"{name[:80]}…"
        raise BadJob(
            f"tenant: {shown!r} is not a name (lower-case letters, digits, - and _, at most 63; pattern {NAME_PATTERN})"
        ) from None


def limits_of(given: dict[str, Any], base: TenantLimits | None = None) -> TenantLimits:
    """Limits with some of them set anew; None takes one away, and text is read as the number it is.

    Raises:
        BadJob: names the limit, what was given, and what would fit.
    """
    known = {field.name: field for field in msgspec.structs.fields(TenantLimits)}
    values = msgspec.structs.asdict(base or TenantLimits())
    for name, value in given.items():
        if name not in known:
            raise BadJob(f"limit: {name!r} does not exist{nearest(name, known)}")
        try:
            one = {} if value is None else {name: value}
            values[name] = getattr(msgspec.convert(one, TenantLimits, strict=not isinstance(value, str)), name)
        except msgspec.ValidationError as error:
            wanted = str(error).partition(" - at")[0].replace("Expected", "expected").replace("`", "")
            shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}…"
            raise BadJob(f"limit: {name} = {shown}: {wanted}; `none` takes the limit away") from None
    return TenantLimits(**values)


def _key(key: Key, label: str, issued: int, expires_s: float | None) -> TenantKey:
    if expires_s is not None and not 1 <= expires_s < 1e10:
        raise BadJob(f"expires: {expires_s!r} seconds; give at least one second")
    if len(label) > LABEL or not label.isprintable():
        raise BadJob(f"label: {label[:LABEL]!r}; give at most {LABEL} printable characters")
    return TenantKey(key=key.public, label=label, issued=issued, expires=issued + expires_s if expires_s is not None else None)


def _void(record: TenantRecord) -> dict[str, int]:
    """Its revoked keys, if all that it has now are among them."""
    return record.revoked | {one.key: FOR_EVER for one in record.keys}


def _words(changes: dict[str, Any]) -> str:
    return " ".join(f"{name}={'none' if value is None else value}" for name, value in changes.items())


def _busy(name: str, jobs: list[str]) -> str:
    return f"tenant: {name} has jobs that have not ended: {_some(jobs)}; cancel them, or remove it with --force"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
