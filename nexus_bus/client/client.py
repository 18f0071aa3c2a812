"""The tenant's end of the line: a job document in; events, states and policy versions out."""

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from nexus_bus import config
from nexus_bus.bus import Bus
from nexus_bus.documents import job_spec
from nexus_bus.errors import BadJob, NotFound, Unavailable
from nexus_bus.registry import job_key, policy_key
from schemas.base import NAME_PATTERN, Name
from schemas.events import Event
from schemas.job import EnvironmentSpec, EvaluationSpec, JobCancel, JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import PolicyVersion

ANSWER_S = 15.0  # how long the master may take to accept or refuse
CLOCKS = timedelta(minutes=10)  # by which those of client and server may differ
ENDINGS = frozenset({"job.completed", "job.failed", "job.cancelled"})

Document = JobSpec | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Submission:
    """An accepted job."""

    job: str
    id: str  # message id of the submission
    message: str  # what the master said


class Client:
    """Everything a tenant does, on one connection."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        """Use `connect`, or `for_tenant` of another client."""
        self.bus = bus
        self.tenant = _tenant(tenant)
        self._registry = bus.kv("registry")

    @classmethod
    async def connect(cls, url: str | None = None, tenant: str | None = None, *, timeout: float = 15.0) -> Self:
        """Connect as a tenant.

        Args:
            url: default NEXUS_URL, else the server that `nexus up` started in NEXUS_HOME.
            tenant: default NEXUS_TENANT, else "default".

        Raises:
            BadJob: the tenant is not a name.
            Unavailable: no server answers within `timeout` seconds.
        """
        name = _tenant(tenant or os.environ.get("NEXUS_TENANT") or "default")
        bus = await Bus.connect(
            url or os.environ.get("NEXUS_URL") or config.default_url(), name=f"client-{name}", timeout=timeout
        )
        return cls(bus, name)

    def for_tenant(self, tenant: str) -> "Client":
        """The same connection on behalf of another tenant."""
        return Client(self.bus, tenant)

    async def close(self) -> None:
        """Flush and disconnect."""
        await self.bus.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Jobs

    async def submit(
        self, document: Document, *, wait: bool = False, submission: str | None = None, timeout: float = ANSWER_S
    ) -> Submission:
        """Send a job: a JobSpec, a mapping, or the path of a TOML, YAML or JSON file.

        Args:
            wait: return only when the job has ended.
            submission: an id of your own; repeated with the same id it is the same submission, not a second one.
            timeout: seconds the master may take to answer.

        Raises:
            BadJob: the document or the master says no; the text begins with the field.
            Unavailable: no answer in time; the job is queued all the same and begins once a master is there.
        """
        spec = (
            document if isinstance(document, JobSpec) else job_spec(Path(document) if isinstance(document, str) else document)
        )
        name = submission or f"{self.tenant}/{spec.name}/{uuid.uuid4().hex}"
        since = datetime.now(UTC) - CLOCKS
        await self.bus.publish("job.submit", spec, msg_id=name, tenant=self.tenant)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._answer(name, since)
        except TimeoutError:
            raise Unavailable(
                f"no answer from a master within {timeout:g} s; {spec.name!r} is queued and begins once one runs (`nexus up`)"
            ) from None
        if answer.type == "job.refused":
            raise BadJob(answer.message)
        if wait:
            await self.wait(spec.name)
        return Submission(spec.name, name, answer.message)

    async def _answer(self, submission: str, since: datetime) -> Event:
        async for item in self.bus.tail("event", since=since, follow=True, tenant=self.tenant, job="*"):
            event: Event = item.message
            if event.submission == submission and event.type in ("job.accepted", "job.refused"):
                return event
        raise Unavailable("the event stream ended")  # a followed stream does not end

    async def evaluate(
        self,
        policy: str,
        environment: EnvironmentSpec,
        *,
        evaluation: EvaluationSpec | None = None,
        name: str | None = None,
        **submit: Any,
    ) -> Submission:
        """Submit an evaluation of one policy version (`<job>@<n>` or `<job>@latest`). Raises as `submit`."""
        protocol = evaluation or EvaluationSpec()
        if name is None:
            digest = hashlib.sha256(msgspec.json.encode([policy, environment, protocol], order="deterministic")).hexdigest()[:8]
            name = f"eval-{policy.replace('@', '-')[:45]}-{digest}"
        document = {"kind": "eval", "name": name, "init": policy, "environment": environment, "evaluation": protocol}
        return await self.submit(msgspec.to_builtins(document), **submit)

    async def cancel(self, job: str, reason: str = "") -> None:
        """Stop a job; its last committed policy version stays. Raises NotFound, or BadJob if it has ended."""
        state = await self._known(job)
        if state.phase in TERMINAL:
            raise BadJob(f"job: {job!r} is {state.phase} already")
        cancel = JobCancel(job=job, reason=reason)
        await self.bus.publish(
            "job.cancel", cancel, msg_id=f"cancel/{self.tenant}/{job}/{state.submission}", tenant=self.tenant
        )

    async def jobs(self) -> list[JobState]:
        """This tenant's jobs, oldest first."""
        keys = await self._registry.keys(job_key(self.tenant, ""))
        entries = await asyncio.gather(*(self._registry.get(key, JobState) for key in keys))
        return sorted((entry.value for entry in entries if entry is not None), key=lambda state: state.submitted)

    async def job(self, name: str) -> JobState | None:
        """One job's state, or None."""
        entry = await self._registry.get(job_key(self.tenant, _token("job", name)), JobState)
        return entry.value if entry is not None else None

    async def watch(self, job: str) -> AsyncIterator[Event]:
        """A job's events from its beginning, until it has ended. Raises NotFound if there is no such job."""
        state = await self._known(job)
        async for item in self.bus.tail("event", since="all", follow=not state.closed, tenant=self.tenant, job=job):
            yield item.message
            if item.message.type in ENDINGS:
                return

    async def wait(self, job: str) -> JobState:
        """Wait until a job has ended; its last state. Raises NotFound if there is no such job."""
        async for _ in self.watch(job):
            pass
        return await self._known(job)

    async def _known(self, job: str) -> JobState:
        state = await self.job(job)
        if state is None:
            raise NotFound(f"job: {self.tenant} has no job {job!r}; `nexus jobs` lists them")
        return state

    # Policies

    async def policies(self, job: str | None = None) -> list[PolicyVersion]:
        """Policy versions, of one job or of all, in order."""
        prefix = f"policy.{self.tenant}." + (f"{_token('job', job)}." if job else "")
        entries = await asyncio.gather(*(self._registry.get(key, PolicyVersion) for key in await self._registry.keys(prefix)))
        return sorted((entry.value for entry in entries if entry is not None), key=lambda version: (version.job, version.n))

    async def policy(self, ref: str) -> PolicyVersion:
        """One version: `<job>@<n>` or `<job>@latest`. Raises NotFound."""
        job, _, n = ref.partition("@")
        if n == "latest":
            versions = await self.policies(job)
            if not versions:
                raise NotFound(f"policy: job {job!r} has published no version")
            return versions[-1]
        if not n.isdecimal():
            raise NotFound(f"policy: {ref!r} is not of the form <job>@<n> or <job>@latest")
        entry = await self._registry.get(policy_key(self.tenant, _token("policy", job), int(n)), PolicyVersion)
        if entry is None:
            raise NotFound(f"policy: {self.tenant} has no {ref!r}; `nexus policies` lists what there is")
        return entry.value

    async def download(self, ref: str, directory: Path) -> list[Path]:
        """Leave with a policy: `model.safetensors` (the action module), `contract.json` and `policy.json`. Raises NotFound."""
        version = await self.policy(ref)
        weights = await self.bus.blobs.get(version.weights)
        files = {
            "model.safetensors": weights,
            "contract.json": _pretty(version.contract),
            "policy.json": _pretty(version),
        }
        return await asyncio.to_thread(_write, directory, files)


def _write(directory: Path, files: Mapping[str, bytes]) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in files]


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"


def _token(field: str, name: str) -> str:
    """A name that cannot break out of its place in a subject."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise BadJob(f"{field}: {name!r} is not a name (lower-case letters, digits, - and _; pattern {NAME_PATTERN})") from None


def _tenant(name: str) -> str:
    return _token("tenant", name)
