"""Records that cannot be learned: which of a batch they are, found by trials. Pure; a seat asks it before and after each turn.

An attempt that fails by its numbers or its size would fail again, and its batch is searched at once. One that fails otherwise,
or takes the process with it, is tried again, without neighbours: three times in all. Trials are rolled back, so that a
search changes no number of the records that go on.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import TypeAlias

from nexus_bus.errors import NexusError, Refused
from schemas.control import Attempt
from schemas.policy import DeadRecord

MOST = 3  # attempts that may fail before the records are given up
DIED = f"the trainer died {MOST} times while it learned from it"

Search: TypeAlias = Generator[
    list[int], Exception | None, dict[int, Exception]
]  # records to try → their error → the guilty ones


def bisect(records: Sequence[int]) -> Search:
    """Halve what fails, always beside what is known to be good: so that what is left works as a whole, also where records
    fail only together, or the whole is too much for the device. For one guilty record of n, about 2·log2(n) trials."""
    good: list[int] = []
    guilty: dict[int, Exception] = {}
    left = [list(records)]
    while left:
        part = left.pop()
        error = yield sorted(good + part)
        if error is None:
            good += part
        elif len(part) == 1:
            guilty[part[0]] = error
        else:
            middle = len(part) // 2
            left += [part[middle:], part[:middle]]
    return guilty


def one_by_one(records: Sequence[int]) -> Search:
    """Each alone: for attempts that end the process, of which only what was tried last is known afterwards."""
    guilty: dict[int, Exception] = {}
    for record in records:
        if (error := (yield [record])) is not None:
            guilty[record] = error
    return guilty


class Doubts:
    """What is known of a job's records that could not be learned. One turn after the other: `begin`, then `ended`."""

    def __init__(self, attempts: Iterable[Attempt] = (), dead: Iterable[DeadRecord] = ()) -> None:
        """`attempts` that the last holder of the job's lease did not live to end; records that are `dead` already."""
        self.dead = {(record.batch, record.index): record for record in dead}
        self.running = False
        self._tries = {attempt.batch: attempt.tries for attempt in attempts}
        self._died_of = {attempt.batch: attempt.record for attempt in attempts if attempt.tries >= MOST}
        self._search: Search | None = None
        self._trial: list[int] = []  # of a search: what is tried now
        self._error: Exception | None = None  # that a search by halves is about
        self._batch = 0  # of the turn at hand, and its records
        self._records: list[int] = []

    def gone(self, batch: int) -> int:
        """How many records of a batch are dead."""
        return sum(number == batch for number, _ in self.dead)

    def suspects(self, batch: int) -> bool:
        """Whether a batch is to be tried without neighbours."""
        return batch in self._tries

    def condemned(self, batch: int, records: Sequence[int]) -> dict[int, str]:
        """Records of a batch to give up before anything is tried: the process died of them too often. Each with the reason."""
        if batch not in self._died_of:
            return {}
        return {index: DIED for index in records if self._died_of[batch] in (index, -1)}

    def fresh(self, batch: int) -> None:
        """Its guilty records are given up: what is left of it begins anew."""
        self._died_of.pop(batch, None)
        self._tries.pop(batch, None)
        self._search, self._trial = None, []

    def begin(self, batch: int, records: Sequence[int]) -> tuple[list[int], bool]:
        """The next turn of a batch whose records are these: which of them to take, and whether only as a trial."""
        self._batch, self.running = batch, True
        tries = self._tries.get(batch, 0)
        if self._search is None:
            self._records = list(records)
            self._tries[batch] = min(tries + 1, MOST)
            if tries == MOST - 1 and len(records) > 1:
                self._search, self._error = one_by_one(records), None
                self._trial = next(self._search)
        return (self._records, False) if self._search is None else (self._trial, True)

    def ended(self, error: Exception | None) -> dict[int, str]:
        """How the turn ended; records that are found guilty by now, each with the reason."""
        self.running = False
        if self._search is not None:
            return self._heard(self._search, error)
        if error is None:
            del self._tries[self._batch]
        elif hopeless(error) or self._tries[self._batch] >= MOST:
            self._search, self._error = bisect(self._records), error
            self._trial = next(self._search)
        return {}

    def _heard(self, search: Search, error: Exception | None) -> dict[int, str]:
        try:
            self._trial = search.send(error)
        except StopIteration as done:
            self._search, self._trial = None, []
            guilty: dict[int, str] = {index: reason(fault) for index, fault in done.value.items()}
            if not guilty and self._error is not None and self._tries[self._batch] >= MOST:  # it fails in earnest alone
                guilty = dict.fromkeys(self._records, f"failed {MOST} times: {reason(self._error)}")
            return guilty
        return {}

    def attempts(self, *, orderly: bool = False) -> list[Attempt]:
        """For the lease: what is being tried, and what failed before.

        `orderly`: the seat is given up, or the process told to stop, and a turn that this cuts off is nobody's fault.
        """
        found: list[Attempt] = []
        for batch, tries in self._tries.items():
            at_work = batch == self._batch and (self.running or self._search is not None)
            record = self._trial[0] if at_work and len(self._trial) == 1 else self._died_of.get(batch, -1)
            counted = min(tries - (at_work and self.running), MOST - 1) if orderly else tries
            if counted:
                found.append(Attempt(batch=batch, tries=counted, record=record))
        return found


def hopeless(error: Exception) -> bool:
    """Whether the same attempt would only fail again: what does not fit, numbers that are not finite, too little memory."""
    return isinstance(error, Refused) or out_of_memory(error)


def out_of_memory(error: Exception) -> bool:
    """Whether host or device ran out of memory."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def reason(error: Exception) -> str:
    """An error as a sentence for the tenant; what is not its own stays in the provider's log."""
    if out_of_memory(error):
        return "the device ran out of memory"
    return str(error) if isinstance(error, NexusError) else "learning from it fails; the provider's log has the reason"
