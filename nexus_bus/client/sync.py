"""The client for programs without an event loop: the same methods, each of which waits. One background thread per client."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from nexus_bus.client.client import Client as AsyncClient
from nexus_bus.client.client import Document, Submission
from nexus_bus.client.policies import Imported
from schemas.evaluation import Comparison, EvaluationEpisode, EvaluationFilm, Manifest
from schemas.events import Event
from schemas.job import EnvironmentSpec, EvaluationSpec
from schemas.plan import JobState
from schemas.policy import PolicyVersion

T = TypeVar("T")


class Client:
    """See `nexus_bus.client.Client`; errors are the same."""

    def __init__(
        self, url: str | None = None, tenant: str | None = None, *, timeout: float = 15.0, creds: str | Path | None = None
    ) -> None:
        """Connect. Raises as `Client.connect`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nexus-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(AsyncClient.connect(url, tenant, timeout=timeout, creds=creds))
        except BaseException:
            self._end()
            raise
        self.tenant = self._client.tenant

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def close(self) -> None:
        """Disconnect."""
        self._wait(self._client.close())
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self, document: Document, *, wait: bool = False, submission: str | None = None) -> Submission:
        """Send a job."""
        return self._wait(self._client.submit(document, wait=wait, submission=submission))

    def evaluate(
        self,
        policy: str,
        environment: EnvironmentSpec,
        *,
        evaluation: EvaluationSpec | None = None,
        name: str | None = None,
        wait: bool = False,
    ) -> Submission:
        """Evaluate a policy version."""
        return self._wait(self._client.evaluate(policy, environment, evaluation=evaluation, name=name, wait=wait))

    def episodes(self, job: str) -> list[EvaluationEpisode]:
        """Every episode of a job's evaluations."""
        return self._wait(self._client.episodes(job))

    def film(self, job: str, film: str) -> EvaluationFilm | None:
        """What the policy saw in one of them."""
        return self._wait(self._client.film(job, film))

    def report(self, job: str) -> Manifest:
        """A job's evaluations in numbers."""
        return self._wait(self._client.report(job))

    def compare(self, a: str, b: str | None = None) -> Comparison:
        """Two evaluations of one protocol."""
        return self._wait(self._client.compare(a, b))

    def cancel(self, job: str, reason: str = "") -> None:
        """Stop a job."""
        self._wait(self._client.cancel(job, reason))

    def pause(self, job: str, reason: str = "") -> str:
        """Let a job rest; why it rests."""
        return self._wait(self._client.pause(job, reason))

    def resume(self, job: str, *, add_device_s: float = 0.0) -> str:
        """Go on with a paused job; what it goes on with."""
        return self._wait(self._client.resume(job, add_device_s=add_device_s))

    def jobs(self) -> list[JobState]:
        """All jobs."""
        return self._wait(self._client.jobs())

    def job(self, name: str) -> JobState | None:
        """One job."""
        return self._wait(self._client.job(name))

    def wait(self, job: str) -> JobState:
        """Wait until a job has ended."""
        return self._wait(self._client.wait(job))

    def watch(self, job: str) -> Iterator[Event]:
        """A job's events until it has ended."""
        events = self._client.watch(job)

        async def following() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self._wait(following())) is not None:
                yield event
        finally:
            self._wait(_close(events))

    def policies(self, job: str | None = None) -> list[PolicyVersion]:
        """Policy versions."""
        return self._wait(self._client.policies(job))

    def policy(self, ref: str) -> PolicyVersion:
        """One version."""
        return self._wait(self._client.policy(ref))

    def lineage(self, ref: str) -> list[PolicyVersion]:
        """A version and its ancestors."""
        return self._wait(self._client.lineage(ref))

    def export(self, ref: str, directory: Path, *, training_state: bool = False, force: bool = False) -> list[Path]:
        """Leave with a policy."""
        return self._wait(self._client.export(ref, directory, training_state=training_state, force=force))

    def import_policy(self, directory: Path, *, name: str | None = None) -> Imported:
        """Register an exported policy."""
        return self._wait(self._client.import_policy(directory, name=name))

    def pin(self, ref: str, pinned: bool = True) -> PolicyVersion:
        """Keep a version for good, or no longer."""
        return self._wait(self._client.pin(ref, pinned))


async def _close(events: Any) -> None:
    await events.aclose()
