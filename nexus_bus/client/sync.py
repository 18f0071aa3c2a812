"""The client for programs without an event loop: the same methods, each of which waits. One background thread per client."""

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nexus_bus.client.calls import ANSWER_S, CALL_S
from nexus_bus.client.catalog import Catalog
from nexus_bus.client.client import Client as AsyncClient
from nexus_bus.client.client import Document, Submission
from nexus_bus.client.datasets import Progress
from nexus_bus.client.policies import Imported
from nexus_bus.client.sessions import ACT_S, LEASE_S
from nexus_bus.client.sessions import Session as AsyncSession
from schemas.api import Account
from schemas.dataset import DatasetInfo, DatasetUnfinished
from schemas.environment import EnvironmentFound, Observation, OwnFound, SessionReply
from schemas.evaluation import Comparison, EvaluationEpisode, EvaluationFilm, Manifest
from schemas.events import Event
from schemas.inference import InferenceReply
from schemas.job import EnvironmentSpec, EvaluationSpec
from schemas.plan import JobState
from schemas.policy import ActionSpec, ObservationSpec, PolicyVersion
from schemas.usage import Audit, Usage

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class Session:
    """See `nexus_bus.client.Session`; errors are the same."""

    def __init__(self, session: AsyncSession, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """Use `Client.session`."""
        self._session = session
        self._wait = wait
        self.id, self.worker, self.found = session.id, session.worker, session.found

    def reset(self, seed: int, trial: int = 0) -> SessionReply:
        """Begin the episode that (seed, trial) names."""
        return self._wait(self._session.reset(seed, trial))

    def step(self, actions: "np.ndarray") -> SessionReply:
        """Execute a chunk, float32 `[n, D]`."""
        return self._wait(self._session.step(actions))

    def render(self) -> "np.ndarray":
        """The first camera's picture of this moment, HWC uint8."""
        return self._wait(self._session.render())

    def save(self) -> bytes:
        """The whole episode."""
        return self._wait(self._session.save())

    def restore(self, state: bytes) -> SessionReply:
        """Go on with a saved episode."""
        return self._wait(self._session.restore(state))

    def close(self) -> None:
        """Give the simulator back."""
        self._wait(self._session.close())


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
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return waiting.result()
        finally:
            waiting.cancel()  # Ctrl-C ends what was waited for as well

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> tuple[T, ...]:
            async for item in items:
                return (item,)
            return ()

        try:
            while found := self._wait(following()):
                yield found[0]
        finally:
            self._wait(_close(items))

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

    def for_tenant(self, tenant: str) -> Self:
        """The same connection on behalf of another tenant; closing one closes both."""
        other = copy.copy(self)
        other._client = self._client.for_tenant(tenant)  # noqa: SLF001 - a copy of this one
        other.tenant = other._client.tenant  # noqa: SLF001
        return other

    def call(self, name: str, message: Any, *, timeout: float = CALL_S, headers: dict[str, str] | None = None) -> Any:
        """Ask the gateway."""
        return self._wait(self._client.call(name, message, timeout=timeout, headers=headers))

    def account(self) -> Account:
        """Limits and keys, and how much is taken."""
        return self._wait(self._client.account())

    def events(self, job: str = "", *, after: int = 0, since: datetime | None = None, follow: bool = True) -> Iterator[Event]:
        """What happened, then what happens."""
        return self._each(self._client.events(job, after=after, since=since, follow=follow))

    def usage(self, job: str = "", *, since: datetime | None = None) -> Iterator[Usage]:
        """What was used, up to now."""
        return self._each(self._client.usage(job, since=since))

    def audit(self, *, since: datetime | None = None) -> Iterator[Audit]:
        """Who asked for what and what was decided, up to now."""
        return self._each(self._client.audit(since=since))

    def submit(
        self, document: Document, *, wait: bool = False, submission: str | None = None, timeout: float = ANSWER_S
    ) -> Submission:
        """Send a job."""
        return self._wait(self._client.submit(document, wait=wait, submission=submission, timeout=timeout))

    def evaluate(
        self,
        policy: str,
        environment: EnvironmentSpec,
        *,
        evaluation: EvaluationSpec | None = None,
        name: str | None = None,
        **submit: Any,
    ) -> Submission:
        """Evaluate a policy version."""
        return self._wait(self._client.evaluate(policy, environment, evaluation=evaluation, name=name, **submit))

    def episodes(self, job: str) -> list[EvaluationEpisode]:
        """Every episode of a job's evaluations."""
        return self._wait(self._client.episodes(job))

    def film(self, job: str, film: str) -> EvaluationFilm | None:
        """What the policy saw in one of them."""
        return self._wait(self._client.film(job, film))

    def report(self, job: str) -> Manifest:
        """A job's evaluations in numbers."""
        return self._wait(self._client.report(job))

    def reported(self, job: str) -> tuple[Manifest, list[EvaluationEpisode]]:
        """A report with the episodes behind it."""
        return self._wait(self._client.reported(job))

    def compare(self, a: str, b: str | None = None) -> Comparison:
        """Two evaluations of one protocol."""
        return self._wait(self._client.compare(a, b))

    def cancel(self, job: str, reason: str = "") -> None:
        """Stop a job."""
        self._wait(self._client.cancel(job, reason))

    def pause(self, job: str, reason: str = "", *, timeout: float = ANSWER_S) -> str:
        """Let a job rest; why it rests."""
        return self._wait(self._client.pause(job, reason, timeout=timeout))

    def resume(self, job: str, *, add_device_s: float = 0.0, timeout: float = ANSWER_S) -> str:
        """Go on with a paused job; what it goes on with."""
        return self._wait(self._client.resume(job, add_device_s=add_device_s, timeout=timeout))

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
        return self._each(self._client.watch(job))

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

    def import_policy(self, directory: Path, *, name: str | None = None, timeout: float = ANSWER_S) -> Imported:
        """Register an exported policy."""
        return self._wait(self._client.import_policy(directory, name=name, timeout=timeout))

    def pin(self, ref: str, pinned: bool = True, *, timeout: float = ANSWER_S) -> PolicyVersion:
        """Keep a version for good, or no longer."""
        return self._wait(self._client.pin(ref, pinned, timeout=timeout))

    def push_dataset(
        self, directory: Path | str, *, name: str | None = None, replace: bool = False, progress: Progress | None = None
    ) -> DatasetInfo:
        """Bring a dataset; `progress` is called in another thread."""
        return self._wait(self._client.push_dataset(directory, name=name, replace=replace, progress=progress))

    def datasets(self) -> list[DatasetInfo]:
        """Datasets that jobs can name."""
        return self._wait(self._client.datasets())

    def dataset(self, name: str) -> DatasetInfo | None:
        """One of them; None if it is not there."""
        return self._wait(self._client.dataset(name))

    def unfinished_datasets(self) -> list[DatasetUnfinished]:
        """Pushes that were begun and are not at their end."""
        return self._wait(self._client.unfinished_datasets())

    def drop_dataset(self, dataset: str) -> int:
        """Take a dataset away."""
        return self._wait(self._client.drop_dataset(dataset))

    def catalog(self) -> Catalog:
        """What a job may name."""
        return self._wait(self._client.catalog())

    def own_environments(self) -> list[OwnFound]:
        """Environments of the tenant's own that are served right now."""
        return self._wait(self._client.own_environments())

    def environment(self, spec: EnvironmentSpec) -> EnvironmentFound:
        """What a policy must fit there."""
        return self._wait(self._client.environment(spec))

    @contextmanager
    def session(
        self,
        spec: EnvironmentSpec,
        *,
        lease_s: float = LEASE_S,
        action: ActionSpec | None = None,
        observation: ObservationSpec | None = None,
    ) -> Iterator[Session]:
        """Hold a simulator, and give it back at the end."""
        opening = self._client.session(spec, lease_s=lease_s, action=action, observation=observation)
        session = self._wait(opening.__aenter__())
        try:
            yield Session(session, self._wait)
        finally:
            self._wait(opening.__aexit__(None, None, None))

    def act(
        self, policy: str, observation: Observation, *, greedy: bool = True, seed: int = 0, timeout: float = ACT_S
    ) -> InferenceReply:
        """Ask a policy version what to do."""
        return self._wait(self._client.act(policy, observation, greedy=greedy, seed=seed, timeout=timeout))


async def _close(events: Any) -> None:
    await events.aclose()
