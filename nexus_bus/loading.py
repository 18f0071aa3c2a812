"""Policy versions for whoever acts: ready at once, or loaded on a thread of their own from memory, disk or the bus.

Beside the line, in an inference worker. Nobody else's answer waits for a load. Newer versions of the jobs that are served
here are loaded as they are published; retired ones are forgotten. A name gives its version or an error, nothing in its place.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from nexus_bus import registry
from nexus_bus.bus import Bus
from nexus_bus.errors import NexusError, NotFound
from schemas.policy import PolicyVersion

if TYPE_CHECKING:
    from nexus_bus.models.paging import PolicySlots
    from nexus_bus.models.slots import PolicySlot

T = TypeVar("T")

SIDE_BY_SIDE = 2  # loads in flight: one is fetched while another is built
AHEAD = 16  # jobs whose newest version waits to be loaded ahead


class Loader:
    """Fills the slots of an inference worker."""

    def __init__(self, bus: Bus, slots: "PolicySlots") -> None:
        """Over the slots of this process."""
        self.slots = slots
        self._bus = bus
        self._kv = bus.kv("registry")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        self._room = asyncio.Semaphore(SIDE_BY_SIDE)
        self._loading: dict[tuple[str, str], asyncio.Task[PolicySlot]] = {}
        self._retired: set[tuple[str, str]] = set()  # while they were being loaded
        self._ahead: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._ahead_task: asyncio.Task[None] | None = None

    def get(self, tenant: str, policy: str) -> "PolicySlot | None":
        """The version if it is ready."""
        return self.slots.get(tenant, policy)

    async def load(self, tenant: str, policy: str) -> "PolicySlot":
        """The version, loaded once for all who wait for it.

        Raises:
            NotFound: this tenant has no such version, it was retired, or its weights are damaged. Never the base model instead.
            ContractError, BadMessage: it does not fit this backbone, or its weights do not fit the contract; names the field.
            Unavailable: the bus is away.
        """
        if (ready := self.get(tenant, policy)) is not None:
            return ready
        key = (tenant, policy)
        if (task := self._loading.get(key)) is None:
            task = self._loading[key] = asyncio.create_task(self._load(tenant, policy))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(task)

    async def follow(self) -> None:
        """Load what is published for the jobs served here, forget what is retired, as it happens."""
        async for key, entry in self._kv.watch(registry.policies_prefix(), PolicyVersion):
            tenant, job, n = registry.policy_of(key)
            if entry is None or entry.value.retired:
                self._forget(tenant, f"{job}@{n}")
            elif self._newer(tenant, job, n):
                self._ahead[tenant, job] = entry.value.id
                while len(self._ahead) > AHEAD:
                    self._ahead.popitem(last=False)
                if self._ahead_task is None or self._ahead_task.done():
                    self._ahead_task = asyncio.create_task(self._load_ahead())

    async def _load(self, tenant: str, policy: str) -> "PolicySlot":
        """`_fetch`, with errors that say whose."""
        try:
            return await self._fetch(tenant, policy)
        except NexusError as error:
            raise type(error)(f"policy {policy}: {error}") from error
        except Exception as error:
            self._bus.log.exception("a version cannot be loaded", tenant=tenant, policy=policy)
            raise NexusError(f"policy {policy}: cannot be loaded; the provider's log has the reason") from error
        finally:
            self._retired.discard((tenant, policy))

    async def _fetch(self, tenant: str, policy: str) -> "PolicySlot":
        async with self._room:
            version = await self._record(tenant, policy)
            slot = await self._off(self.slots.page_in, version)
            if slot is None:
                weights = await self._bus.blobs.get(version.weights)
                adapter = await self._bus.blobs.get(version.adapter) if version.adapter is not None else None
                slot = await self._off(self.slots.load, version, weights, adapter)
                self._thread.submit(self.slots.store, version, weights, adapter)
        if (tenant, policy) in self._retired:
            self.slots.drop(tenant, policy)
            raise NotFound("it was retired this moment")
        return slot

    async def _record(self, tenant: str, policy: str) -> PolicyVersion:
        if (known := self.slots.known(tenant, policy)) is not None:
            return known
        job, _, n = policy.partition("@")
        entry = await self._kv.get(registry.policy_key(tenant, job, int(n)), PolicyVersion)
        if entry is None:
            raise NotFound(f"there is no such version; `nexus policies {job}` lists what there is")
        if entry.value.retired:
            raise NotFound(f"it was retired on {entry.value.retired[:19]}; `nexus policies {job}` lists what is left")
        return entry.value

    async def _off(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def _newer(self, tenant: str, job: str, n: int) -> bool:
        """Whether the job is served here, by older versions only."""
        served = [version.rpartition("@") for who, version in self.slots.versions() if who == tenant]
        numbers = [int(number) for name, _, number in served if name == job]
        return bool(numbers) and n > max(numbers)

    async def _load_ahead(self) -> None:
        while self._ahead:
            (tenant, _), policy = self._ahead.popitem(last=False)
            try:
                await self.load(tenant, policy)
            except NexusError as error:  # whoever asks for it is told
                self._bus.log.warning("a version cannot be loaded ahead", tenant=tenant, policy=policy, error=str(error))

    def _forget(self, tenant: str, policy: str) -> None:
        if (tenant, policy) in self._loading:
            self._retired.add((tenant, policy))
        self.slots.drop(tenant, policy)
