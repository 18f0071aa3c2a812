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

from nexus_bus import config, exported
from nexus_bus.bus import Bus
from nexus_bus.documents import job_spec
from nexus_bus.errors import BadJob, NotFound, Unavailable
from nexus_bus.registry import job_key, policies_prefix, policy_key, state_key
from schemas.base import NAME_PATTERN, PUBLIC, Name
from schemas.events import Event, EventType
from schemas.job import EnvironmentSpec, EvaluationSpec, JobCancel, JobPause, JobResume, JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import MAX_ANCESTORS, PolicyImport, PolicyPin, PolicyVersion, TrainingState

ANSWER_S = 15.0  # how long the master may take to accept or refuse
CLOCKS = timedelta(minutes=10)  # by which those of client and server may differ
STATE_TRIES = 5  # to read a training state that is being replaced
ENDINGS = frozenset({"job.completed", "job.failed", "job.cancelled"})

Document = JobSpec | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Submission:
    """An accepted job."""

    job: str
    id: str  # message id of the submission
    message: str  # what the master said


@dataclass(frozen=True)
class Imported:
    """A policy that came from elsewhere."""

    policy: PolicyVersion
    message: str  # what the master said; a warning, where its backbone is not known


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
        answer = await self._ask("job.submit", spec, name, f"{spec.name!r}", ("job.accepted", "job.refused"), timeout)
        if wait:
            await self.wait(spec.name)
        return Submission(spec.name, name, answer.message)

    async def _ask(
        self, name: str, message: Any, submission: str, what: str, answers: tuple[EventType, ...], timeout: float
    ) -> Event:
        """Put something on the master's queue, and wait for the event that answers it. Raises BadJob if that is a refusal."""
        since = datetime.now(UTC) - CLOCKS
        await self.bus.publish(name, message, msg_id=submission, tenant=self.tenant)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._answer(submission, since, answers)
        except TimeoutError:
            raise Unavailable(
                f"no answer from a master within {timeout:g} s; {what} is queued and begins once one runs (`nexus up`)"
            ) from None
        if answer.type.endswith(".refused"):
            raise BadJob(answer.message)
        return answer

    async def _answer(self, submission: str, since: datetime, answers: tuple[EventType, ...]) -> Event:
        async for item in self.bus.tail("event", since=since, follow=True, tenant=self.tenant, job="*"):
            event: Event = item.message
            if event.submission == submission and event.type in answers:
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

    async def pause(self, job: str, reason: str = "", *, timeout: float = ANSWER_S) -> str:
        """Let a job rest; why it rests. Raises NotFound, BadJob if it has ended, Unavailable if nobody answers in time."""
        await self._known(job)
        return await self._rest("job.pause", JobPause(job=job, reason=reason), timeout)

    async def resume(self, job: str, *, add_device_s: float = 0.0, timeout: float = ANSWER_S) -> str:
        """Go on with a paused job, if asked to with a larger device budget; what it goes on with. Raises as `pause`."""
        await self._known(job)
        return await self._rest("job.resume", JobResume(job=job, add_device_s=add_device_s), timeout)

    async def _rest(self, name: str, order: JobPause | JobResume, timeout: float) -> str:
        submission = f"{self.tenant}/{name}/{order.job}/{uuid.uuid4().hex}"
        answers: tuple[EventType, ...] = ("job.paused", "job.resumed", "job.refused")
        return (await self._ask(name, order, submission, f"{name} of {order.job!r}", answers, timeout)).message

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
        prefix = policies_prefix(self.tenant, _token("job", job) if job else "")
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
        if not (n.isascii() and n.isdecimal()):
            raise NotFound(f"policy: {ref!r} is not of the form <job>@<n> or <job>@latest")
        entry = await self._registry.get(policy_key(self.tenant, _token("policy", job), int(n)), PolicyVersion)
        if entry is None:
            raise NotFound(f"policy: {self.tenant} has no {ref!r}; `nexus policies` lists what there is")
        return entry.value

    async def lineage(self, ref: str) -> list[PolicyVersion]:
        """A version and its ancestors to the root, over all jobs it came through. Raises NotFound."""
        found = [await self.policy(ref)]
        while (parent := found[-1].parent) is not None:
            job, _, n = parent.partition("@")
            entry = await self._registry.get(policy_key(self.tenant, job, int(n)), PolicyVersion)
            if entry is None:
                break  # never so while entries are kept for ever
            found.append(entry.value)
        return found

    async def export(self, ref: str, directory: Path, *, training_state: bool = False, force: bool = False) -> list[Path]:
        """Leave with a policy: see nexus_bus/exported.py for the files.

        Args:
            ref: `<job>@<n>` or `<job>@latest`.
            directory: made if it is not there.
            training_state: also what training would go on from; only the newest version of a job has it.
            force: the directory may hold something; an export there is replaced.

        Raises:
            NotFound: there is no such version, or it was retired.
            BadJob: something is in the way, or the version has no training state.
            Unavailable: the disk is full or refuses.
        """
        lineage = await self.lineage(ref)
        version, root = lineage[0], lineage[-1]
        if version.retired:
            raise NotFound(f"policy: {version.id} was retired on {version.retired[:19]}; its weights are gone")
        weights = await self.bus.blobs.get(version.weights)
        adapter = await self.bus.blobs.get(version.adapter) if version.adapter is not None else None
        training = await self._training_state(version) if training_state else None
        ancestors = [*(one.id for one in lineage[1:]), *filter(None, [root.origin]), *root.ancestors]
        files = exported.files_of(version, weights, adapter, ancestors, training)
        return await asyncio.to_thread(exported.write, directory, files, force=force)

    async def _training_state(self, version: PolicyVersion) -> tuple[TrainingState, bytes]:
        for _ in range(STATE_TRIES):
            entry = await self._registry.get(state_key(self.tenant, version.job), TrainingState)
            if entry is None or entry.value.version != version.n:
                newest = f"{version.job}@{entry.value.version} has one" if entry is not None else "it was not trained here"
                raise BadJob(f"training state: {version.id} has none; {newest}")
            try:
                return entry.value, await self.bus.blobs.get(entry.value.state)
            except NotFound:  # a trainer committed this moment, and dropped the state before
                continue
        raise Unavailable(f"training state: {version.job!r} commits faster than its state can be read; try again later")

    async def import_policy(self, directory: Path, *, name: str | None = None, timeout: float = ANSWER_S) -> Imported:
        """Register an exported policy as `<name>@0`; a job may then start from it. The same content again is the same version.

        Args:
            name: default the name of the job it was exported from.

        Raises:
            BadMessage, ContractError: the directory is no whole, unchanged export; names the file.
            BadJob: the name is taken, or the master says no.
            Unavailable: no answer in time.
        """
        taken = await asyncio.to_thread(exported.read, directory)
        card, put = taken.card, self.bus.blobs.put
        job = _token("name", name or card.id.partition("@")[0])
        order = PolicyImport(
            name=job,
            contract=taken.contract,
            weights=await put(taken.weights, media_type=card.weights.media_type),
            adapter=await put(taken.adapter, media_type=card.weights.media_type) if taken.adapter is not None else None,
            origin=f"{card.tenant}/{card.id}",
            ancestors=card.ancestors[:MAX_ANCESTORS],
            step=card.step,
            records=card.records,
            seed=card.seed,
            metrics=card.metrics,
            trace=card.trace,
        )
        submission = f"{self.tenant}/import/{job}/{uuid.uuid4().hex}"
        answers: tuple[EventType, ...] = ("policy.imported", "policy.refused")
        answer = await self._ask("policy.import", order, submission, f"the import of {job}@0", answers, timeout)
        return Imported(await self.policy(f"{job}@0"), answer.message)

    async def pin(self, ref: str, pinned: bool = True, *, timeout: float = ANSWER_S) -> PolicyVersion:
        """Keep a version for good, whatever the retention of its job says; or, with False, no longer.

        Raises:
            NotFound: there is no such version.
            BadJob: the master says no: it was retired.
            Unavailable: no answer in time.
        """
        version = await self.policy(ref)
        submission = f"{self.tenant}/pin/{version.id}/{uuid.uuid4().hex}"
        answers: tuple[EventType, ...] = ("policy.pinned", "policy.unpinned", "policy.refused")
        order = PolicyPin(policy=version.id, pinned=pinned)
        await self._ask("policy.pin", order, submission, f"the pin of {version.id}", answers, timeout)
        return await self.policy(version.id)


def _token(field: str, name: str) -> str:
    """A name that cannot break out of its place in a subject."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise BadJob(f"{field}: {name!r} is not a name (lower-case letters, digits, - and _; pattern {NAME_PATTERN})") from None


def _tenant(name: str) -> str:
    if name == PUBLIC:
        raise BadJob(f"tenant: {name!r} is reserved for what every tenant may read; choose another name")
    return _token("tenant", name)
