"""Many consumers served by fair shares of device time, so that a tenant who floods the queue delays nobody else."""

import asyncio
from collections import Counter, defaultdict
from itertools import islice

from nexus_bus.bus.delivery import Delivery
from nexus_bus.bus.pull import Puller
from nexus_bus.fair import Shares, Turn


class Rounds:
    """Takes from each key's puller by its share, see nexus_bus/fair.py. Until something is charged, these are weighted rounds.

    What is taken counts as on its way until it is charged; a `counted` puller holds no more than its batch, that included.
    """

    def __init__(self) -> None:
        """Start with nobody."""
        self._pullers: dict[str, Puller] = {}
        self._shares = Shares()
        self._taken: dict[Delivery, tuple[Turn, Puller]] = {}
        self._done: Counter[Puller] = Counter()  # charged since the last take: so much room its puller has again
        self._arrived = asyncio.Event()

    def add(self, key: str, puller: Puller, weight: float = 1) -> None:
        """Serve a key, or one that is served already by another weight; an earlier puller is replaced and not stopped."""
        puller.arrived = self._arrived  # one event for all: whoever gets something wakes the round
        self._pullers[key] = puller
        self._shares.add(key, weight)
        self._arrived.set()

    def remove(self, key: str) -> Puller | None:
        """Serve a key no more; its puller is the caller's again, who stops it."""
        self._shares.remove(key)
        if (puller := self._pullers.pop(key, None)) is not None:
            del self._done[puller]
        return puller

    async def take(self, n: int, wait: float) -> list[Delivery]:
        """Up to `n` messages, by shares; waits up to `wait` seconds for the first. May be empty."""
        taken = await self._collect(n)
        if taken or wait <= 0:
            return taken
        self._arrived.clear()
        if not any(puller.waiting for puller in self._pullers.values()):
            try:
                await asyncio.wait_for(self._arrived.wait(), wait)
            except TimeoutError:
                return []
        return await self._collect(n)

    get = take  # as a Puller has it: the loop of consume.py is served by either

    async def done(self, delivery: Delivery, seconds: float) -> None:
        """Charge a message for how long it was in hand."""
        self.charge(delivery, seconds)

    def charge(self, delivery: Delivery, device_s: float | None = None) -> None:
        """What a message that was taken did cost; None: it came to nothing. The second time it says nothing new."""
        if (found := self._taken.pop(delivery, None)) is not None:
            turn, puller = found
            self._shares.settle(turn, device_s)
            if self._pullers.get(turn.key) is puller:  # else it was removed meanwhile
                self._done[puller] += 1
            self._arrived.set()  # a taker that waits gives the room back

    def wake(self) -> None:
        """End a wait that is going on in `take`: the taker has something else to do."""
        self._arrived.set()

    async def _collect(self, n: int) -> list[Delivery]:
        done, self._done = self._done, Counter()
        for puller, count in done.items():
            await puller.release(count)
        waiting = {key: puller.waiting for key, puller in self._pullers.items() if puller.waiting}
        dealt: defaultdict[str, list[Turn]] = defaultdict(list)
        for turn in islice(self._shares.turns(waiting), n):
            dealt[turn.key].append(turn)
        taken: list[Delivery] = []
        for puller, turns in [(self._pullers[key], turns) for key, turns in dealt.items()]:
            got = await puller.get(len(turns), wait=0)
            self._taken.update(zip(got, ((turn, puller) for turn in turns), strict=False))
            for turn in turns[len(got) :]:  # one that could not be opened is no request
                self._shares.settle(turn, None)
            taken += got
        return taken

    async def stop(self) -> None:
        """Stop every puller."""
        await asyncio.gather(*(puller.stop() for puller in self._pullers.values()))
