"""Jobs as the registry has them, followed: a look at them costs what is not over, however many there ever were.

Finished jobs stay in the registry for good, since people look up what they had, and a name is given once. Of those that are
closed only what is still asked about is kept here, added up. The roster says where it is worth looking; what is decided is
written by compare-and-set over an entry that was read for it.
"""

import asyncio
from collections import defaultdict

from nexus_bus import registry
from nexus_bus.admission import Jobs, Left, Past, left
from nexus_bus.bus import Bus
from nexus_bus.errors import NexusError
from schemas.plan import JobState

ALL = "job."  # what the keys of all jobs begin with


class Roster:
    """Jobs by tenant: what is noted counts at once, what others write as soon as the registry tells."""

    def __init__(self, bus: Bus, tenant: str = "") -> None:
        """Of one tenant, or of all. Knows nobody: whoever asks first waits until all that is there is known."""
        self._prefix = registry.job_key(tenant, "") if tenant else ALL
        self._log = bus.log
        self._kv = bus.kv("registry")
        self._tenants: defaultdict[str, _Own] = defaultdict(_Own)
        self._reading = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._over = False

    def note(self, state: JobState, revision: int) -> None:
        """Take a state that was read or written; of one job, older ones are passed over."""
        self._tenants[state.plan.tenant].note(state, revision)

    async def tenants(self) -> list[str]:
        """Whose jobs are not all closed."""
        await self._complete()
        return [tenant for tenant, own in self._tenants.items() if own.open]

    async def of(self, tenant: str) -> Jobs:
        """A tenant's jobs that are not closed, by name, kept up to date. What cannot be read is left out."""
        await self._complete()
        return self._tenants[tenant].open

    async def past(self, tenant: str) -> Past:
        """What is known of those that are."""
        await self._complete()
        return self._tenants[tenant].past

    async def dataset_bytes(self, tenant: str) -> int:
        """Of all data that was recorded for its jobs."""
        own = await self.of(tenant)
        return (await self.past(tenant)).dataset_bytes + sum(state.dataset_bytes for state in own.values())

    def close(self) -> None:
        """Follow no longer; who still asks is answered from a list."""
        self._over = True
        if self._following is not None:
            self._following.cancel()

    async def _complete(self) -> None:
        """Nothing is decided by half a list. Raises Unavailable while the registry cannot be read."""
        async with self._reading:
            if self._following is not None and not self._following.done():
                return
            self._tenants.clear()
            for entry in (await self._kv.entries(self._prefix, JobState)).values():
                self.note(entry.value, entry.revision)
            if not self._over:
                self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for key, entry in self._kv.watch(self._prefix, JobState):
                if entry is not None:
                    self.note(entry.value, entry.revision)
                else:
                    self._tenants[registry.tenant_of(key)].forget(key.split(".")[2])
        except NexusError as error:  # begun anew when asked again
            self._log.warning("jobs cannot be followed", error=str(error))


class _Own:
    """One tenant's."""

    def __init__(self) -> None:
        """None yet."""
        self.open: dict[str, JobState] = {}
        self.past = Past()
        self._closed: dict[str, Left] = {}
        self._revisions: dict[str, int] = {}

    def note(self, state: JobState, revision: int) -> None:
        job = state.plan.spec.name
        if revision <= self._revisions.get(job, 0):
            return
        if not state.closed:
            self.open[job] = state
            self._leave(job)  # an evaluation that had ended goes on
        else:
            self.forget(job)
            self._closed[job] = left(state)
            self.past.add(self._closed[job])
        self._revisions[job] = revision

    def forget(self, job: str) -> None:
        """It is there no more."""
        self.open.pop(job, None)
        self._revisions.pop(job, None)
        self._leave(job)

    def _leave(self, job: str) -> None:
        if (gone := self._closed.pop(job, None)) is not None:
            self.past.add(gone, -1)
