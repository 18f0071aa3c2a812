"""A tenant's policy versions: listed, taken home, brought along, kept."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from nexus_bus import exported
from nexus_bus.client import files
from nexus_bus.client.calls import ANSWER_S, Calls, token
from nexus_bus.errors import BadJob, NotFound, Unavailable
from schemas.api import (
    JobQuery,
    PageQuery,
    PolicyFound,
    PolicyPage,
    PolicyQuery,
    UploadedImport,
)
from schemas.events import EventType
from schemas.policy import MAX_ANCESTORS, PolicyImport, PolicyPin, PolicyVersion, TrainingState

STATE_TRIES = 5  # to read a training state that is being replaced


@dataclass(frozen=True)
class Imported:
    """A policy that came from elsewhere."""

    policy: PolicyVersion
    message: str  # what the master said; a warning, where its backbone is not known


class PolicyCalls(Calls):
    """Everything a tenant does with policy versions."""

    async def policies(self, job: str | None = None) -> list[PolicyVersion]:
        """Policy versions, of one job or of all, in order."""
        found: list[PolicyVersion] = []
        query = PageQuery(job=token("job", job) if job else "")
        while True:
            page: PolicyPage = await self.call("policy.list", query)
            found += page.policies
            if not page.next:
                return found
            query = PageQuery(job=query.job, after=page.next)

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
        found = await self._version(f"{token('policy', job)}@{int(n)}")
        if found is None:
            raise NotFound(f"policy: {self.tenant} has no {ref!r}; `nexus policies` lists what there is")
        return found

    async def _version(self, policy: str) -> PolicyVersion | None:
        answer: PolicyFound = await self.call("policy.get", PolicyQuery(policy=policy))
        return answer.policy

    async def lineage(self, ref: str) -> list[PolicyVersion]:
        """A version and its ancestors to the root, over all jobs it came through. Raises NotFound."""
        found = [await self.policy(ref)]
        while (parent := found[-1].parent) is not None:
            version = await self._version(parent)
            if version is None:
                break  # never so while entries are kept for ever
            found.append(version)
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
        weights = await files.fetch(self, version.id, version.weights)
        adapter = await files.fetch(self, version.id, version.adapter) if version.adapter is not None else None
        training = await self._training_state(version) if training_state else None
        ancestors = [*(one.id for one in lineage[1:]), *filter(None, [root.origin]), *root.ancestors]
        content = exported.files_of(version, weights, adapter, ancestors, training)
        return await asyncio.to_thread(exported.write, directory, content, force=force)

    async def _training_state(self, version: PolicyVersion) -> tuple[TrainingState, bytes]:
        for _ in range(STATE_TRIES):
            state = (await self.call("policy.state", JobQuery(job=version.job))).state
            if state is None or state.version != version.n:
                newest = f"{version.job}@{state.version} has one" if state is not None else "it was not trained here"
                raise BadJob(f"training state: {version.id} has none; {newest}")
            try:
                return state, await files.fetch(self, version.id, state.state)
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
        card = taken.card
        job = token("name", name or card.id.partition("@")[0])
        order = PolicyImport(
            name=job,
            contract=taken.contract,
            weights=card.weights,
            adapter=card.adapter,
            origin=f"{card.tenant}/{card.id}",
            ancestors=card.ancestors[:MAX_ANCESTORS],
            step=card.step,
            records=card.records,
            seed=card.seed,
            metrics=card.metrics,
            trace=card.trace,
        )
        message = UploadedImport(
            order=order,
            weights=await files.send(self, taken.weights),
            adapter=await files.send(self, taken.adapter) if taken.adapter is not None else None,
        )
        answers: tuple[EventType, ...] = ("policy.imported", "policy.refused")
        answer, _ = await self._ask("policy.import", message, None, f"the import of {job}@0", answers, timeout)
        return Imported(await self.policy(f"{job}@0"), answer.message)

    async def pin(self, ref: str, pinned: bool = True, *, timeout: float = ANSWER_S) -> PolicyVersion:
        """Keep a version for good, whatever the retention of its job says; or, with False, no longer.

        Raises:
            NotFound: there is no such version.
            BadJob: the master says no: it was retired.
            Unavailable: no answer in time.
        """
        version = await self.policy(ref)
        answers: tuple[EventType, ...] = ("policy.pinned", "policy.unpinned", "policy.refused")
        order = PolicyPin(policy=version.id, pinned=pinned)
        await self._ask("policy.pin", order, None, f"the pin of {version.id}", answers, timeout)
        return await self.policy(version.id)
