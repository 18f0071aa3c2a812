"""The client: submit, watch, cancel, and take policies home. Everything it does is events and registry reads."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import msgspec

from nexus_bus import registry
from nexus_bus.bus import Bus
from nexus_bus.documents import job_spec
from nexus_bus.errors import BadJob, NotFound, Unavailable
from schemas.events import Event
from schemas.job import JobCancel, JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import PolicyVersion

ANSWER_S = 10.0


@dataclass(frozen=True)
class Submission:
    """An accepted job."""

    id: str
    job: str
    message: str


class Client:
    """One tenant's view of a bus."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        """Use `Client.connect`."""
        self.bus = bus
        self.tenant = tenant
        self._kv = bus.kv("registry")

    @classmethod
    async def connect(cls, url: str, tenant: str = "default", *, timeout: float = 5.0) -> Self:
        """Join a bus. Raises Unavailable if no server answers."""
        return cls(await Bus.connect(url, name=f"client-{tenant}", timeout=timeout), tenant)

    def for_tenant(self, tenant: str) -> "Client":
        """The same connection for another tenant; accounts of their own come later."""
        return Client(self.bus, tenant)

    async def close(self) -> None:
        """Leave."""
        await self.bus.close()

    async def submit(self, document: JobSpec | dict[str, Any] | Path, *, submission: str = "") -> Submission:
        """Send a job and wait for the answer. The same `submission` id again is the same job, not a second one.

        Raises:
            BadJob: refused, here or by the master; the text names the field.
            Unavailable: no master answered in time; the job is queued and will be answered by an event.
        """
        spec = document if isinstance(document, JobSpec) else job_spec(document)
        submission = submission or uuid.uuid4().hex
        since = datetime.now(UTC) - timedelta(seconds=2)  # server and client clocks of one machine; generous on two
        await self.bus.publish("job.submit", spec, msg_id=submission, tenant=self.tenant)
        try:
            async with asyncio.timeout(ANSWER_S):
                async for item in self.bus.tail("event", since=since, tenant=self.tenant, job="*"):
                    event: Event = item.message
                    if event.submission != submission:
                        continue
                    if event.type == "job.refused":
                        raise BadJob(event.message)
                    return Submission(submission, spec.name, event.message)
        except TimeoutError:
            pass
        raise Unavailable(f"no master answered within {ANSWER_S:g} s; {spec.name} stays queued: `nexus watch {spec.name}`")

    async def cancel(self, job: str, reason: str = "") -> None:
        """Ask for a job to be stopped; its newest version stays. Raises NotFound where there is no such job."""
        if await self.job(job) is None:
            raise NotFound(f"no job {job!r} of tenant {self.tenant!r}; `nexus jobs` lists them")
        message = JobCancel(job=job, reason=reason)
        await self.bus.publish("job.cancel", message, msg_id=uuid.uuid4().hex, tenant=self.tenant)

    async def job(self, name: str) -> JobState | None:
        """A job's state, or None."""
        entry = await self._kv.get(registry.job_key(self.tenant, name), JobState)
        return entry.value if entry is not None else None

    async def jobs(self) -> list[JobState]:
        """All jobs of the tenant, oldest first."""
        entries = [await self._kv.get(key, JobState) for key in await self._kv.keys(registry.job_key(self.tenant, ""))]
        return sorted((entry.value for entry in entries if entry is not None), key=lambda state: state.submitted)

    async def policies(self, job: str = "") -> list[PolicyVersion]:
        """Published versions, of one job or of all."""
        prefix = f"policy.{self.tenant}." + (f"{job}." if job else "")
        entries = [await self._kv.get(key, PolicyVersion) for key in await self._kv.keys(prefix)]
        return sorted((entry.value for entry in entries if entry is not None), key=lambda policy: (policy.job, policy.n))

    async def policy(self, ref: str) -> PolicyVersion:
        """One version: `<job>@<n>` or `<job>@latest`. Raises NotFound."""
        job, _, n = ref.partition("@")
        found = [policy for policy in await self.policies(job) if n in ("latest", str(policy.n))]
        if not found:
            raise NotFound(f"no policy version {ref!r} of tenant {self.tenant!r}; `nexus policies` lists them")
        return found[-1]

    async def download(self, ref: str, directory: Path) -> PolicyVersion:
        """Take a version home: `head.safetensors` and `policy.json` with its contract."""
        policy = await self.policy(ref)
        data = await self.bus.blobs.get(policy.weights)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "head.safetensors").write_bytes(data)
        (directory / "policy.json").write_bytes(msgspec.json.format(msgspec.json.encode(policy)))
        return policy

    async def watch(self, job: str = "*", *, since: Any = "all") -> AsyncIterator[Event]:
        """Events of a job until it ends; of all jobs, for ever."""
        async for item in self.bus.tail("event", since=since, tenant=self.tenant, job=job):
            yield item.message
            if job != "*" and item.message.type in ("job.completed", "job.failed", "job.cancelled"):
                return

    async def wait(self, job: str) -> JobState:
        """Wait until a job has ended."""
        while True:
            state = await self.job(job)
            if state is not None and state.phase in TERMINAL:
                return state
            await asyncio.sleep(0.2)
