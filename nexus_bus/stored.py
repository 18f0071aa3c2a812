"""What each job keeps in store, as a gauge in its usage: weights of its versions, its training state, its recorded dataset.

The master's. A gauge counts until the job's next one, so it is published when it changes, and daily, and twice is harmless.
"""

import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING

from nexus_bus.bus import Bus
from nexus_bus.clock import now
from schemas.base import BlobRef
from schemas.plan import JobState
from schemas.policy import PolicyVersion, TrainingState
from schemas.usage import Usage

if TYPE_CHECKING:
    from nexus_bus.worker import Context

LOOK_S = 300.0
AGAIN_S = 86_400.0


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
        blobs: dict[tuple[str, str], dict[str, BlobRef]] = {}  # the same content of a job lies there once
        for entry in (await self.kv.entries("policy.", PolicyVersion)).values():
            version = entry.value
            if not version.purged:
                own = blobs.setdefault((version.tenant, version.job), {})
                own |= {ref.sha256: ref for ref in (version.weights, version.adapter) if ref is not None}
        for entry in (await self.kv.entries("state.", TrainingState)).values():
            ref = entry.value.state
            blobs.setdefault((entry.value.tenant, entry.value.job), {})[ref.sha256] = ref
        held = Counter({owner: sum(ref.size for ref in own.values()) for owner, own in blobs.items()})
        for entry in (await self.kv.entries("job.", JobState)).values():
            held[entry.value.plan.tenant, entry.value.plan.spec.name] += entry.value.dataset_bytes
        return held
