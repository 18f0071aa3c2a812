"""Weighted fair queueing over device time: whose turn it is, by virtual counters. Pure; both queues ask it.

Before a group is formed. Each tenant has a counter: device-seconds it was given, over its weight. Of those who wait, the one
with the smallest counter is served next, so that backlogged tenants get device time by their weights, however many requests
they queue and whatever one of them costs. What a turn will cost is charged when it is given, as expected of that tenant's
last ones, and corrected when it is measured. Who had nothing waiting comes back at the smallest counter of those who had:
a quiet night is no credit.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

FIRST_S = 0.01  # expected of a turn while nobody's was measured: plain weighted rounds, whatever the number
HANDLING_S = 0.001  # charged for a turn that came to nothing (refused, expired): else asking for nonsense would be free
LEAST_S = 1e-6  # expected of any turn: a counter that stands still would be served for ever
FILL = 1.25  # a group is filled up with more than a tenant's share while it takes no longer than this times its fair part
RECENT = 0.2  # weight of the newest measured turn


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn that was given, until it is settled."""

    key: str
    expected: float  # device-seconds charged for it
    at: float  # counter before it


@dataclass(slots=True)
class _Account:
    weight: float
    counter: float  # device-seconds over weight
    served: int = 0  # when it had its last turn; equal counters go by who waits longest
    cost: float = 0.0  # device-seconds of a turn, lately; 0: not measured yet


class Shares:
    """The counters of all tenants of one queue."""

    def __init__(self) -> None:
        """Start with nobody; a key that nobody added has weight 1."""
        self._accounts: dict[str, _Account] = {}
        self._waiting: frozenset[str] = frozenset()  # at the last look
        self._clock = 0.0  # counter at the newest turn: where somebody enters whom nobody is waiting beside
        self._turns = 0
        self._cost = 0.0  # of anybody's turn

    def add(self, key: str, weight: float = 1.0) -> None:
        """Let a tenant take part, or give one another weight. Raises ValueError for a weight that is not positive."""
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight of {key}: {weight!r} is not a positive number")
        if (account := self._accounts.get(key)) is not None:
            account.weight = weight
        else:
            self._accounts[key] = _Account(weight, self._clock)

    def remove(self, key: str) -> None:
        """Forget a tenant; turns of it that are settled later change nothing."""
        self._accounts.pop(key, None)
        self._waiting -= {key}

    def counter(self, key: str) -> float:
        """Device-seconds over weight that a tenant has been charged, those before it came included."""
        return self._accounts[key].counter

    def turns(self, waiting: Mapping[str, int]) -> Iterator[Turn]:
        """Deal turns to those who wait, each with how many requests, until all are served or the caller stops asking.

        Every turn taken from the iterator is charged, and is to be settled. Take them in one go: it looks at who waits once.
        """
        for key in waiting.keys() - self._accounts.keys():
            self.add(key)
        stayed = self._waiting & waiting.keys()
        least = min((self._accounts[key].counter for key in stayed), default=self._clock)
        for key in waiting.keys() - stayed:
            self._accounts[key].counter = max(self._accounts[key].counter, least)
        self._waiting = frozenset(waiting)
        return self._deal({key: count for key, count in waiting.items() if count > 0})

    def _deal(self, left: dict[str, int]) -> Iterator[Turn]:
        line = [(self._accounts[key].counter, self._accounts[key].served, key) for key in left]
        heapq.heapify(line)
        while line:
            key = line[0][2]
            account = self._accounts[key]
            at = account.counter
            self._clock = max(self._clock, at)
            expected = max(account.cost or self._cost or FIRST_S, LEAST_S)
            account.counter += expected / account.weight
            self._turns += 1
            account.served = self._turns
            left[key] -= 1
            if left[key]:
                heapq.heapreplace(line, (account.counter, account.served, key))
            else:
                heapq.heappop(line)
            yield Turn(key, expected, at)

    def cancel(self, turn: Turn) -> None:
        """It is not used."""
        if (account := self._accounts.get(turn.key)) is not None:
            account.counter -= turn.expected / account.weight

    def settle(self, turn: Turn, device_s: float | None) -> None:
        """Charge what a turn did cost in place of what was expected; None or 0: it came to nothing."""
        account = self._accounts.get(turn.key)
        if account is None:
            return
        account.counter += ((device_s or HANDLING_S) - turn.expected) / account.weight
        if device_s:
            account.cost += (RECENT if account.cost else 1.0) * (device_s - account.cost)
            self._cost += (RECENT if self._cost else 1.0) * (device_s - self._cost)


def fill(shares: Shares, ready: Mapping[str, Sequence[int]], batch: int, cost: Callable[[int], float]) -> list[Turn]:
    """Deal a group of `batch` samples among what is ready; only the last may carry it past that.

    A tenant whose units follow each other, of which one is ready at a time, would get one in a group that others fill up, and
    its share never. So the group closes where its share is passed, except as far as filling it up takes hardly longer.

    Args:
        ready: by tenant, the samples of each unit in the order they will go.
        cost: seconds of a group of so many samples.
    """
    left = {key: deque(sizes) for key, sizes in ready.items()}
    given: list[Turn] = []
    samples = fair = 0
    for turn in shares.turns({key: len(sizes) for key, sizes in ready.items()}):
        size = left[turn.key][0]
        passed = any(shares.counter(key) < turn.at for key, sizes in left.items() if not sizes)
        if passed and cost(samples + size) > FILL * cost(fair):
            shares.cancel(turn)
            break
        left[turn.key].popleft()
        given.append(turn)
        samples += size
        fair = fair if passed else samples
        if samples >= batch:
            break
    return given


def in_turns(waiting: Iterable[tuple[str, str]], held: Mapping[str, int]) -> list[str]:
    """Order things that are held for long, such as seats: the next goes to whoever holds fewest, those before it counted.

    Args:
        waiting: (tenant, what it wants), in each tenant's own order, which is kept.
        held: how many each tenant has already.
    """
    counts = Counter(held)
    turns: list[tuple[int, str]] = []
    for tenant, wanted in waiting:
        turns.append((counts[tenant], wanted))
        counts[tenant] += 1
    return [wanted for _, wanted in sorted(turns, key=lambda turn: turn[0])]


def gives_way(held: Mapping[str, tuple[str, str]], tenant: str) -> str:
    """What is given up for a tenant when all are held: the newest of whoever holds most, if that leaves it no fewer. Else "".

    Args:
        held: by what is held, (who holds it, since when).
    """
    counts = Counter(who for who, _ in held.values())
    most, count = counts.most_common(1)[0]
    if count - counts[tenant] < 2:
        return ""
    return max((what for what, (who, _) in held.items() if who == most), key=lambda what: held[what][1])
