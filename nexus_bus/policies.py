"""The master's hand on policy versions: imports, pins, retention. Entries change by compare-and-set, so masters may be several.

A version is retired in two moves. First its entry says so, and from then on nobody starts from it; a while later its weights
are deleted, unless a living version has the same. What a killed master left half done, the first sweep of the next one ends.
"""

import asyncio
from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from nexus_bus import registry
from nexus_bus.audit import audit
from nexus_bus.bus import Bus
from nexus_bus.clock import now
from nexus_bus.errors import BadJob, BadMessage, Conflict, NotFound, Refused
from nexus_bus.exported import LARGEST, check_weights
from nexus_bus.models.bases import SHIPPED, describe_backbone
from nexus_bus.models.contract import check_contract
from nexus_bus.retention import in_use, retire
from schemas.base import BlobRef
from schemas.job import RetentionSpec
from schemas.plan import JobState
from schemas.policy import PolicyContract, PolicyImport, PolicyVersion

if TYPE_CHECKING:
    from nexus_bus.worker import Context

GRACE_S = 60.0  # from retirement to deletion: what was asked for before is still answered


class Policies:
    """Everything the master does with policy versions."""

    def __init__(self, context: "Context", grace_s: float = GRACE_S) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.grace_s = grace_s
        self.storing = asyncio.Lock()  # weights are not deleted while an import takes them up
        self.looked: dict[tuple[str, str], tuple[int, frozenset[int]]] = {}  # job → what its last retirement went by
        self.dying: set[str] | None = None  # keys of versions whose weights are still to be deleted; None: not known yet

    async def living(self, tenant: str, policy: str) -> PolicyVersion:
        """A version `<job>@<n>` whose weights are there. Raises NotFound."""
        job, _, n = policy.partition("@")
        entry = await self.kv.get(registry.policy_key(tenant, job, int(n)), PolicyVersion)
        if entry is None:
            raise NotFound(f"init: no policy {policy!r}; `nexus policies` lists what there is")
        if entry.value.retired:
            raise NotFound(
                f"init: {policy} was retired on {entry.value.retired[:19]}; `nexus policies {job}` lists what is left"
            )
        return entry.value

    async def imported(self, tenant: str, name: str) -> bool:
        """Whether a version was imported under this name (asked where no job has it)."""
        return await self.kv.get(registry.policy_key(tenant, name, 0), PolicyVersion) is not None

    async def take_in(self, tenant: str, order: PolicyImport) -> str:
        """Register what a tenant brings as `<name>@0`; a sentence about it. The same content again is the same version.

        Raises:
            Refused: the name is taken, or the content is not what the order says; names the field.
        """
        if await self.kv.get(registry.job_key(tenant, order.name), JobState) is not None:
            raise BadJob(f"name: a job {order.name!r} exists; choose another name with --name")
        async with self.storing:
            weights = await self._content("weights", order.weights)
            adapter = await self._content("adapter", order.adapter) if order.adapter is not None else None
            note = await asyncio.to_thread(_checked, order.contract, weights, adapter)
            version = PolicyVersion(
                id=f"{order.name}@0",
                tenant=tenant,
                job=order.name,
                n=0,
                parent=None,
                contract=order.contract,
                weights=order.weights,
                adapter=order.adapter,
                created=now(),
                step=order.step,
                records=order.records,
                seed=order.seed,
                metrics=order.metrics,
                trace=order.trace,
                origin=order.origin,
                ancestors=order.ancestors,
            )
            key = registry.policy_key(tenant, order.name, 0)
            try:
                await self.kv.create(key, version)
            except Conflict:
                known = await self.kv.get(key, PolicyVersion)
                if known is None or _content_of(known.value) != _content_of(version):
                    raise BadJob(f"name: {version.id} exists with other content; choose another name with --name") from None
        return f"{version.id} is {order.origin or 'of unknown origin'}{note}"

    async def _content(self, field: str, ref: BlobRef) -> bytes:
        if ref.size > LARGEST:
            raise BadMessage(f"{field}.size: {ref.size} bytes; at most {LARGEST} are taken")
        data = await self.bus.blobs.get(ref)
        if len(data) != ref.size:
            raise BadMessage(f"{field}.size: {ref.size}, but {field}.sha256 names {len(data)} bytes")
        return data

    async def discard(self, order: PolicyImport) -> None:
        """Delete what was sent for an import that was refused, unless somebody has the same."""
        refs = [order.weights, *([order.adapter] if order.adapter is not None else [])]
        async with self.storing:
            entries = (await self.kv.entries(registry.policies_prefix(), PolicyVersion, strict=True)).values()
            living = {ref.sha256 for entry in entries if not entry.value.retired for ref in _blobs(entry.value)}
            for ref in refs:
                if ref.sha256 not in living:
                    await self.bus.blobs.discard(ref)

    async def pin(self, tenant: str, policy: str, pinned: bool) -> None:
        """Keep a version for good, or no longer.

        Raises:
            NotFound: there is no such version, or its weights are gone.
            Conflict: somebody changed it this moment; try again.
        """
        job, _, n = policy.partition("@")
        key = registry.policy_key(tenant, job, int(n))
        entry = await self.kv.get(key, PolicyVersion)
        if entry is None:
            raise NotFound(f"policy: no version {policy!r}; `nexus policies` lists what there is")
        if entry.value.retired:
            raise NotFound(f"policy: {policy} was retired on {entry.value.retired[:19]}; it cannot be kept any more")
        if entry.value.pinned != pinned:
            await self.kv.update(key, msgspec.structs.replace(entry.value, pinned=pinned), entry.revision)
        self.looked.pop((tenant, job), None)

    def look_again(self, _tenant: str) -> None:
        """Somebody else may have retired versions: whoever removes a tenant does."""
        self.dying = None

    async def sweep(self) -> None:
        """Retire what the retention of each job gives up, and delete the weights of what was retired a while ago."""
        try:
            await self._sweep()
        except Refused as error:  # an entry that cannot be read may need any weights: nothing is deleted
            self.context.log.warning("policy versions are all kept while an entry cannot be read", error=str(error))

    async def _sweep(self) -> None:
        jobs: dict[str, list[JobState]] = defaultdict(list)
        for state in (await self.kv.entries("job.", JobState, strict=True)).values():
            jobs[state.value.plan.tenant].append(state.value)
        for tenant, own in jobs.items():
            needed: dict[str, set[int]] = defaultdict(set)
            for policy in in_use(own):
                name, _, n = policy.partition("@")
                needed[name].add(int(n))
            for state in own:
                spec = state.plan.spec.retention or RetentionSpec()
                if state.version >= spec.keep:  # there may be more than are kept
                    await self._retire(tenant, state, spec, frozenset(needed[state.plan.spec.name]))
        await self._purge()

    async def _retire(self, tenant: str, state: JobState, spec: RetentionSpec, needed: frozenset[int]) -> None:
        job = state.plan.spec.name
        if self.looked.get((tenant, job)) == (state.version, needed):
            return
        entries = await self.kv.entries(registry.policies_prefix(tenant, job), PolicyVersion, strict=True)
        with_weights = {entry.value.n: key for key, entry in entries.items() if not entry.value.retired}
        pins = {entry.value.n for entry in entries.values() if entry.value.pinned}
        for n in retire(with_weights, pins, spec, needed):
            entry = entries[with_weights[n]]
            gone = msgspec.structs.replace(entry.value, retired=now())
            try:
                await self.kv.update(with_weights[n], gone, entry.revision)
            except Conflict:  # pinned this very moment, or retired by another master: the next sweep sees which
                return
            if self.dying is not None:
                self.dying.add(with_weights[n])
            await audit(self.bus, tenant, "policy.retired", job, "ok", gone.id, key=str(n))
            await self.context.event(
                "policy.retired", tenant, job=job, key=f"retired/{n}", data={"version": n},
                message=f"{gone.id}: the job keeps its newest {spec.keep} versions; `nexus policies pin` keeps one for good",
            )  # fmt: skip
        self.looked[tenant, job] = (state.version, needed)

    async def _purge(self) -> None:
        """Delete the weights of retired versions, once nobody can be reading them any more."""
        if self.dying == set():
            return
        async with self.storing:
            entries = await self.kv.entries(registry.policies_prefix(), PolicyVersion, strict=True)
            retired = {key: entry for key, entry in entries.items() if entry.value.retired and not entry.value.purged}
            living = {ref.sha256 for entry in entries.values() if not entry.value.retired for ref in _blobs(entry.value)}
            self.dying = set(retired)
            for key, entry in retired.items():
                if _age_s(entry.value.retired) < self.grace_s:
                    continue
                for ref in _blobs(entry.value):
                    if ref.sha256 not in living:
                        await self.bus.blobs.delete(ref)
                await self.kv.put(key, msgspec.structs.replace(entry.value, purged=True))
                self.dying.discard(key)


def _checked(contract: PolicyContract, weights: bytes, adapter: bytes | None) -> str:
    """Check what comes from elsewhere, as far as that goes without building the head; a warning, or nothing.

    Raises:
        Refused: names the file and what is wrong with it.
    """
    known = next((base for base in map(describe_backbone, SHIPPED) if base.fingerprint == contract.backbone_fingerprint), None)
    check_contract(contract, backbone=known)
    check_weights(contract, weights, adapter)
    if known is not None:
        return ""
    return (
        f"; warning: its backbone {contract.backbone!r} ({contract.backbone_fingerprint[:12]}) is none that ships with this "
        "service: it serves only where that one is resident"
    )


def _content_of(version: PolicyVersion) -> tuple[str, str, PolicyContract]:
    """What makes two versions the same policy."""
    return version.weights.sha256, version.adapter.sha256 if version.adapter else "", version.contract


def _blobs(version: PolicyVersion) -> list[BlobRef]:
    return [version.weights, *([version.adapter] if version.adapter else [])]


def _age_s(time: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
