"""The tenant's end of the line: a job document in; events, states and policy versions out."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nexus_bus.client.calls import ANSWER_S, token
from nexus_bus.client.catalog import CatalogCalls
from nexus_bus.client.sessions import SessionCalls
from nexus_bus.documents import job_spec
from nexus_bus.errors import BadJob, NotFound
from nexus_bus.evaluation.protocol import differences
from nexus_bus.evaluation.selection import choose
from nexus_bus.evaluation.summary import compare, manifest, of, once
from schemas.api import (
    FilmFound,
    FilmQuery,
    JobFound,
    JobPage,
    JobQuery,
    PageQuery,
)
from schemas.evaluation import Comparison, EvaluationEpisode, EvaluationFilm, Manifest
from schemas.events import Event, EventType
from schemas.job import EnvironmentSpec, EvaluationSpec, JobCancel, JobPause, JobResume, JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import PolicyVersion

ENDINGS = frozenset({"job.completed", "job.failed", "job.cancelled"})

Document = JobSpec | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Submission:
    """An accepted job."""

    job: str
    id: str  # message id of the submission
    message: str  # what the master said


class Client(SessionCalls, CatalogCalls):
    """Everything a tenant does, on one connection: requests to the gateway, and nothing else."""

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
        answer, taken = await self._ask(
            "job.submit", spec, submission, f"{spec.name!r}", ("job.accepted", "job.refused"), timeout
        )
        if wait:
            await self.wait(spec.name)
        return Submission(spec.name, taken, answer.message)

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
        name = name or evaluation_name(policy, environment, protocol)
        document = {"kind": "eval", "name": name, "init": policy, "environment": environment, "evaluation": protocol}
        return await self.submit(msgspec.to_builtins(document), **submit)

    async def episodes(self, job: str) -> list[EvaluationEpisode]:
        """Every episode of a job's evaluations that has ended, once each, in the order of the protocol."""
        pages = self._log("eval.read", token("job", job), 0, None, follow=False)
        return once([one async for page in pages for one in page.episodes])

    async def film(self, job: str, film: str) -> EvaluationFilm | None:
        """What the policy saw in one of them, by the name in its record; None once it is past its age."""
        found: FilmFound = await self.call("eval.film", FilmQuery(job=token("job", job), film=token("film", film)))
        return found.film

    async def report(self, job: str) -> Manifest:
        """A job's evaluations in numbers. Raises NotFound, or BadJob where there are none."""
        return (await self.reported(job))[0]

    async def reported(self, job: str) -> tuple[Manifest, list[EvaluationEpisode]]:
        """A report with the episodes behind it. Raises as `report`."""
        state, episodes = await self._known(job), await self.episodes(job)
        versions: dict[str, PolicyVersion] = {}
        for policy in {one.policy for one in episodes}:
            with contextlib.suppress(NotFound):  # the numbers are there all the same
                versions[policy] = await self.policy(policy)
        return manifest(state, episodes, versions), episodes

    async def compare(self, a: str, b: str | None = None) -> Comparison:
        """Two evaluations of one protocol, trial by trial: `b` against `a`.

        Args:
            a, b: `JOB`, `JOB:before`, `JOB:after`, or a policy `JOB@N` that was evaluated. No `b`: before and after of `a`.

        Raises:
            NotFound: there is no such evaluation.
            BadJob: their protocols or simulators differ, and the text says in what; or they share no trial.
        """
        one, other = choose(await self.jobs(), a, b)
        played = [of(await self.episodes(chosen.job), chosen.purpose) for chosen in (one, other)]
        protocols = [
            chosen.protocol(episode.simulator for episode in episodes)
            for chosen, episodes in zip((one, other), played, strict=True)
        ]
        if all(played) and (differing := differences(*protocols)):
            raise BadJob(f"compare: the protocols of {one.label} and {other.label} differ in {'; '.join(differing)}")
        return compare(one.label, played[0], other.label, played[1])

    async def cancel(self, job: str, reason: str = "") -> None:
        """Stop a job; its last committed policy version stays. Raises NotFound, or BadJob if it has ended."""
        await self.call("job.cancel", JobCancel(job=token("job", job), reason=reason))

    async def pause(self, job: str, reason: str = "", *, timeout: float = ANSWER_S) -> str:
        """Let a job rest; why it rests. Raises NotFound, BadJob if it has ended, Unavailable if nobody answers in time."""
        return await self._rest("job.pause", JobPause(job=token("job", job), reason=reason), timeout)

    async def resume(self, job: str, *, add_device_s: float = 0.0, timeout: float = ANSWER_S) -> str:
        """Go on with a paused job, if asked to with a larger device budget; what it goes on with. Raises as `pause`."""
        return await self._rest("job.resume", JobResume(job=token("job", job), add_device_s=add_device_s), timeout)

    async def _rest(self, name: str, order: JobPause | JobResume, timeout: float) -> str:
        answers: tuple[EventType, ...] = ("job.paused", "job.resumed", "job.refused")
        answer, _ = await self._ask(name, order, None, f"{name} of {order.job!r}", answers, timeout)
        return answer.message

    async def jobs(self) -> list[JobState]:
        """This tenant's jobs, oldest first."""
        found: list[JobState] = []
        query = PageQuery()
        while True:
            page: JobPage = await self.call("job.list", query)
            found += page.jobs
            if not page.next:
                return sorted(found, key=lambda state: state.submitted)
            query = PageQuery(after=page.next)

    async def job(self, name: str) -> JobState | None:
        """One job's state, or None."""
        found: JobFound = await self.call("job.get", JobQuery(job=token("job", name)))
        return found.job

    async def watch(self, job: str) -> AsyncIterator[Event]:
        """A job's events from its beginning, until it has ended. Raises NotFound if there is no such job."""
        state = await self._known(job)
        async for event in self.events(job, follow=not state.closed):
            yield event
            if event.type in ENDINGS and (await self._known(job)).phase in TERMINAL:  # an evaluation may have gone on
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


def evaluation_name(policy: str, environment: EnvironmentSpec, protocol: EvaluationSpec) -> str:
    """Of an eval job that was given none: the same policy under the same protocol is the same job."""
    digest = hashlib.sha256(msgspec.json.encode([policy, environment, protocol], order="deterministic")).hexdigest()[:8]
    return f"eval-{policy.replace('@', '-')[:45]}-{digest}"
