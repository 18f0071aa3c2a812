"""Which frames make batch number n. Pure functions, so that any worker can make any batch again after a crash.

A training job's cursor is the number of its next batch. `Sampler` adds what a training loop of one's own needs besides:
ranks that share a batch, a cursor for the checkpoint that refuses another dataset, and an order that reads a set larger
than memory nearly front to back.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from nexus_bus.clock import derive_seed
from nexus_bus.errors import ContractError

WINDOWS = 2  # whose order is kept: the one at hand and the one that a batch reaches into


def batch_indices(n_frames: int, seed: int, batch: int, batch_size: int) -> np.ndarray:
    """Frame indices of one batch, int64 `[batch_size]`: every frame once per epoch, each epoch in an order of its own.

    Batches follow each other without a gap, so one may end an epoch and begin the next. Raises ValueError without frames.
    """
    if n_frames < 1:
        raise ValueError("a dataset without frames has no batches")
    positions = np.arange(batch * batch_size, (batch + 1) * batch_size)
    epochs, places = np.divmod(positions, n_frames)
    return np.array([_order(n_frames, seed, int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sampler stands: part of a checkpoint. Ranks are not in it, a run may go on with more or fewer."""

    dataset: str  # fingerprint of the episodes' lengths
    seed: int
    batch_size: int
    window: int
    batch: int  # the next one


class Sampler:
    """Batches for ever, of which each of `world` ranks gets its share. Raises ValueError for numbers that do not fit.

    Args:
        lengths: frames of each episode.
        batch_size: of all ranks together; batch n is the same frames for any number of ranks.
        window: 0 shuffles all frames. Else so many episodes, drawn anew each epoch, are shuffled at a time: their films and
            tables stay open while they are read, and no order of the whole set is held.
    """

    def __init__(
        self, lengths: Sequence[int], *, batch_size: int, seed: int = 0, rank: int = 0, world: int = 1, window: int = 0
    ) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        if not len(self._lengths) or self._lengths.min() < 1:
            raise ValueError("a dataset without frames has no batches")
        if not 0 <= rank < world <= batch_size:
            raise ValueError(f"rank {rank} of {world} with batches of {batch_size}: every rank needs a share of each")
        if window < 0:
            raise ValueError(f"window: {window}, expected a number of episodes, or 0 for all frames")
        self.frames = int(self._lengths.sum())
        self.rank = rank
        self.world = world
        self._fingerprint = hashlib.blake2b(self._lengths.tobytes(), digest_size=8).hexdigest()
        self._begins = self._lengths.cumsum() - self._lengths
        self._seed, self._batch_size, self._window = seed, batch_size, window
        self._batch = 0
        self._windows = functools.lru_cache(WINDOWS)(self._shuffled)
        self._orders = functools.lru_cache(WINDOWS)(self._drawn)

    @property
    def epoch(self) -> float:
        """Passes over the dataset that are done."""
        return self._batch * self._batch_size / self.frames

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """This rank's frames of the next batch."""
        found = self.batch(self._batch)
        self._batch += 1
        return found

    def batch(self, number: int) -> np.ndarray:
        """This rank's frames of batch `number`, int64; it moves nothing."""
        if not self._window:
            return batch_indices(self.frames, self._seed, number, self._batch_size)[self.rank :: self.world]
        positions = np.arange(number * self._batch_size, (number + 1) * self._batch_size)[self.rank :: self.world]
        return np.array([self._at(*divmod(int(position), self.frames)) for position in positions])

    def cursor(self) -> Cursor:
        """To be kept with the weights that the batches before it made."""
        return Cursor(
            dataset=self._fingerprint, seed=self._seed, batch_size=self._batch_size, window=self._window, batch=self._batch
        )

    def resume(self, cursor: Cursor) -> None:
        """Go on where a checkpoint stands. Raises ContractError if that was another dataset, seed, batch size or window."""
        now = self.cursor()
        for name in ("dataset", "seed", "batch_size", "window"):
            before, here = getattr(cursor, name), getattr(now, name)
            if before != here:
                raise ContractError(
                    f"cursor.{name}: the checkpoint has {before}, here it is {here}; batches would not follow on"
                )
        self._batch = cursor.batch

    def _at(self, epoch: int, place: int) -> int:
        _, ends = self._orders(epoch)
        window = int(np.searchsorted(ends, place, side="right"))
        return int(self._windows(epoch, window)[place - (ends[window - 1] if window else 0)])

    def _drawn(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's order of episodes, and the frames that each window of them and all before it hold."""
        order = _generator(self._seed, "episodes", epoch).permutation(len(self._lengths))
        return order, np.add.reduceat(self._lengths[order], np.arange(0, len(order), self._window)).cumsum()

    def _shuffled(self, epoch: int, window: int) -> np.ndarray:
        order, _ = self._orders(epoch)
        drawn = order[window * self._window : (window + 1) * self._window]
        frames = np.concatenate([self._begins[n] + np.arange(int(self._lengths[n])) for n in drawn])
        return _generator(self._seed, "window", epoch, window).permutation(frames)


@functools.lru_cache(maxsize=8)
def _order(n_frames: int, seed: int, epoch: int) -> np.ndarray:
    order = _generator(seed, "epoch", epoch).permutation(n_frames)
    order.setflags(write=False)
    return order


def _generator(seed: int, *path: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *path)))
