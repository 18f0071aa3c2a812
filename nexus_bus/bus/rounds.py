"""Many consumers served in weighted rounds, so that a tenant who floods the queue delays nobody else."""

import asyncio

from nexus_bus.bus.delivery import Delivery
from nexus_bus.bus.pull import Puller


class Rounds:
    """Takes from each key's puller in turn, `weight` messages a turn."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._pullers: dict[str, tuple[Puller, int]] = {}
        self._order: list[str] = []
        self._next = 0
        self._arrived = asyncio.Event()

    def add(self, key: str, puller: Puller, weight: int = 1) -> None:
        """Serve a key; an earlier puller of the same key is replaced and not stopped."""
        puller.arrived = self._arrived  # one event for all: whoever gets something wakes the round
        if key not in self._pullers:
            self._order.append(key)
        self._pullers[key] = (puller, weight)
        self._arrived.set()

    def remove(self, key: str) -> Puller | None:
        """Serve a key no more; its puller is the caller's again, who stops it."""
        found = self._pullers.pop(key, None)
        if found is None:
            return None
        self._order.remove(key)
        return found[0]

    async def take(self, n: int, wait: float) -> list[Delivery]:
        """Up to `n` messages, in rounds; waits up to `wait` seconds for the first. May be empty."""
        taken = await self._collect(n)
        if taken or wait <= 0:
            return taken
        self._arrived.clear()
        if not any(puller.waiting for puller, _ in self._pullers.values()):
            try:
                await asyncio.wait_for(self._arrived.wait(), wait)
            except TimeoutError:
                return []
        return await self._collect(n)

    def wake(self) -> None:
        """End a wait that is going on in `take`: the taker has something else to do."""
        self._arrived.set()

    async def _collect(self, n: int) -> list[Delivery]:
        taken: list[Delivery] = []
        idle = 0
        while self._order and len(taken) < n and idle < len(self._order):
            self._next %= len(self._order)
            puller, weight = self._pullers[self._order[self._next]]
            self._next += 1
            got = await puller.get(min(weight, n - len(taken)), wait=0)
            taken += got
            idle = 0 if got else idle + 1
        return taken

    async def stop(self) -> None:
        """Stop every puller."""
        await asyncio.gather(*(puller.stop() for puller, _ in self._pullers.values()))
