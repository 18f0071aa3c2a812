"""Which frames make batch number n. A pure function, so that any worker can make any batch again after a crash.

A job's cursor is the number of its next batch, which lies in its training state beside weights and optimizer; with the seed it
says all about the order, so a job that goes on draws what it would have drawn. Its shards are feed orders, batches [first,
last) each: whichever worker takes one makes the same batches, and how many workers there are changes nothing.

All frames are shuffled, also of a set larger than memory: within a batch they are decoded in the order in which they lie. To
shuffle a few episodes at a time would decode a set of many films 2 to 3 times as fast, but a batch would hold those alone.
"""

import functools

import numpy as np

from nexus_bus.clock import derive_seed


def batch_indices(n_frames: int, seed: int, batch: int, batch_size: int) -> np.ndarray:
    """Frame indices of one batch, int64 `[batch_size]`: every frame once per epoch, each epoch in an order of its own.

    Batches follow each other without a gap, so one may end an epoch and begin the next. Raises ValueError without frames.
    """
    if n_frames < 1:
        raise ValueError("a dataset without frames has no batches")
    positions = np.arange(batch * batch_size, (batch + 1) * batch_size)
    epochs, places = np.divmod(positions, n_frames)
    return np.array([_order(n_frames, seed, int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])


@functools.lru_cache(maxsize=8)
def _order(n_frames: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.Generator(np.random.PCG64(derive_seed(seed, "epoch", epoch))).permutation(n_frames)
    order.setflags(write=False)
    return order
