"""What each job used of a worker, added up and published every few seconds. Beside the line, in inference workers."""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Literal

from nexus_bus.bus import Bus
from nexus_bus.clock import now
from schemas.usage import Usage

EVERY_S = 2.0


@dataclass
class _Used:
    device_s: float = 0.0
    requests: int = 0
    group_sum: int = 0


class Tally:
    """Device time and requests by (tenant, job) since the last record."""

    def __init__(self, bus: Bus, worker: str, kind: Literal["inference", "training", "environment"]) -> None:
        """In the name of a worker."""
        self._bus, self._worker = bus, worker
        self._kind: Literal["inference", "training", "environment"] = kind
        self._used: dict[tuple[str, str], _Used] = {}

    def add(self, tenant: str, job: str, device_s: float, group: int = 0) -> None:
        """Note device time, and if `group` is given a request that was answered in a group of that size."""
        used = self._used.setdefault((tenant, job), _Used())
        used.device_s += device_s
        used.requests += 1 if group else 0
        used.group_sum += group

    async def publish(self) -> None:
        """Publish it every few seconds."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Publish it now."""
        taken, self._used = self._used, {}
        for (tenant, job), used in taken.items():
            entry = Usage(
                tenant=tenant,
                job=job,
                worker=self._worker,
                kind=self._kind,
                device_s=used.device_s,
                requests=used.requests,
                group_sum=used.group_sum,
                time=now(),
            )
            await self._bus.publish("usage", entry, msg_id=uuid.uuid4().hex, tenant=tenant, job=job)
