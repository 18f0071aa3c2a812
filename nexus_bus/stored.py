"""What is kept in store: weights of versions, training states, recorded and pushed datasets. The master's.

`Stored` says what each job keeps, as a gauge in its usage. A gauge counts until the job's next one, so it is published when it
changes, and daily, and twice is harmless. `Keeping` knows at any time what a tenant keeps that has a limit.
"""

import asyncio
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING

from nexus_bus import worker
from nexus_bus.bus import Bus
from nexus_bus.clock import now
from nexus_bus.errors import NexusError
from schemas.dataset import DatasetRecord
from schemas.plan import JobState
from schemas.policy import PolicyVersion, TrainingState
from schemas.usage import Usage

if TYPE_CHECKING:
    from nexus_bus.worker import Context

LOOK_S = 300.0
AGAIN_S = 86_400.0
Value = PolicyVersion | TrainingState | DatasetRecord
KINDS: dict[str, type[Value]] = {"policy.": PolicyVersion, "state.": TrainingState, "dataset.": DatasetRecord}  # by prefix
NO_JOB = "_"  # of datasets that were pushed


class Stored:
    """Looks at the registry now and then."""

    def __init__(self, context: "Context") -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.said: dict[tuple[str, str], tuple[int, float]] = {}  # (tenant, job) → bytes, monotonic time
        self.looked = float("-inf")

    async def sweep(self) -> None:
        """Publish what changed, if it is time to look."""
        if (clock := time.monotonic()) < self.looked + LOOK_S:
            return
        self.looked = clock
        held = await self._held()
        for tenant, job in held.keys() | self.said.keys():
            size = held[tenant, job]
            before, at = self.said.get((tenant, job), (0, clock))
            if size == before and clock < at + AGAIN_S:
                continue
            entry = Usage(
                tenant=tenant, job=job, worker=self.context.name, kind="storage", stored_bytes=size, time=now()
            )  # fmt: skip
            await self.bus.publish("usage", entry, msg_id=f"stored/{uuid.uuid4().hex}", tenant=tenant, job=job)
            self.said[tenant, job] = (size, clock)

    async def _held(self) -> Counter[tuple[str, str]]:
        blobs: dict[tuple[str, str], dict[str, int]] = {}  # the same content of a job lies there once
        for prefix, kind in KINDS.items():
            for entry in (await self.kv.entries(prefix, kind)).values():
                blobs.setdefault((entry.value.tenant, _job(entry.value)), {}).update(_blobs(entry.value))
        held = Counter({owner: sum(own.values()) for owner, own in blobs.items()})
        for entry in (await self.kv.entries("job.", JobState)).values():
            held[entry.value.plan.tenant, entry.value.plan.spec.name] += entry.value.dataset_bytes
        return held


class Kept:
    """Weights, training states and pushed datasets of a tenant."""

    def __init__(self) -> None:
        """Of nothing."""
        self.known = False  # whether all that lay there at the beginning is in it
        self._blobs: dict[str, dict[tuple[str, str], int]] = {}  # registry key → (job, content) → bytes
        self._size: int | None = 0

    def size(self) -> int:
        """Bytes; the same content of a job lies there once."""
        if self._size is None:
            self._size = sum({blob: size for own in self._blobs.values() for blob, size in own.items()}.values())
        return self._size

    def note(self, key: str, value: Value | None) -> None:
        """What is there now under a key of the registry."""
        self._blobs[key] = (
            {(_job(value), content): size for content, size in _blobs(value).items()} if value is not None else {}
        )
        self._size = None


class Keeping:
    """What tenants keep, followed for those that were asked about: to list it at every look would be to list all of it."""

    def __init__(self, bus: Bus) -> None:
        """Follows nobody yet."""
        self._log = bus.log
        self._kv = bus.kv("registry")
        self._followed: dict[str, tuple[Kept, asyncio.Task[None]]] = {}

    def of(self, tenant: str) -> Kept:
        """What is known by now; from the first call on it is followed."""
        found = self._followed.get(tenant)
        if found is None or found[1].done():
            kept = Kept()
            found = self._followed[tenant] = kept, asyncio.create_task(self._follow(kept, tenant))
        return found[0]

    def forget(self, tenant: str) -> None:
        """Follow it no more."""
        if (found := self._followed.pop(tenant, None)) is not None:
            found[1].cancel()

    async def _follow(self, kept: Kept, tenant: str) -> None:
        own = {f"{prefix}{tenant}.": kind for prefix, kind in KINDS.items()}
        try:
            for prefix, kind in own.items():
                for key, entry in (await self._kv.entries(prefix, kind)).items():
                    kept.note(key, entry.value)
            kept.known = True
            await worker.side_by_side(*(self._watch(kept, prefix, kind) for prefix, kind in own.items()))
        except NexusError as error:  # begun anew when asked again
            kept.known = False
            self._log.warning("what a tenant keeps cannot be followed", tenant=tenant, error=str(error))

    async def _watch(self, kept: Kept, prefix: str, kind: type[Value]) -> None:
        async for key, entry in self._kv.watch(prefix, kind):
            kept.note(key, entry.value if entry is not None else None)


def _job(value: Value) -> str:
    return NO_JOB if isinstance(value, DatasetRecord) else value.job


def _blobs(value: Value) -> dict[str, int]:
    """Content → bytes."""
    if isinstance(value, DatasetRecord):
        return {value.dataset: value.bytes}
    if isinstance(value, TrainingState):
        return {value.state.sha256: value.state.size}
    refs = () if value.purged else (value.weights, value.adapter)
    return {ref.sha256: ref.size for ref in refs if ref is not None}
