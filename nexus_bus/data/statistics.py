"""Statistics of a dataset's columns, exact over all frames. Written by data/writer.py, what normalisation stands on.

A small column is held and its quantiles are read off; of a large one they are found by counting, digit by digit, in as many
passes as it takes. Pictures are counted into one histogram per channel, which has the same exact quantiles in 6 KB, whatever
the number of frames. LeRobot wants picture statistics in [0, 1] and shape (3, 1, 1).
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
HELD_BYTES = 128 << 20  # of a column; beyond, it is gone through again and again
DIGIT = 16  # bits of a value that one pass tells
DIMENSIONS = 8  # that one pass counts: 5 MB each

Statistic = dict[str, np.ndarray]
Batches = Callable[[], Iterable[np.ndarray]]  # the same `[n, ...]` numbers, anew at each call


def number_statistics(values: np.ndarray) -> Statistic:
    """Per dimension, for `[N, ...]` numbers; standard deviation of the population (ddof 0), linear quantiles."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    found: Statistic = {
        "min": flat.min(0),
        "max": flat.max(0),
        "mean": flat.mean(0),
        "std": flat.std(0),
        "count": np.array([len(flat)]),
    }
    for name, quantile in zip(QUANTILES, np.quantile(flat, list(QUANTILES.values()), axis=0), strict=True):
        found[name] = quantile
    return found


def over(batches: Batches) -> Statistic:
    """`number_statistics` of a column that comes in batches and need not fit in memory. Raises ValueError without rows."""
    held: list[np.ndarray] = []
    size = count = 0
    mean, square, low, high = np.zeros(1), np.zeros(1), np.full(1, np.inf), np.full(1, -np.inf)
    dtype = np.dtype(np.float32)
    for batch in batches():
        if not len(batch):
            continue
        dtype, size = batch.dtype, size + batch.nbytes
        if size <= HELD_BYTES:
            held.append(batch)
        else:
            held.clear()
        flat = batch.reshape(len(batch), -1).astype(np.float64)
        total, middle = count + len(flat), flat.mean(0)
        # Chan et al., Algorithms for Computing the Sample Variance (1983): two parts into one.
        square = square + ((flat - middle) ** 2).sum(0) + (middle - mean) ** 2 * (count * len(flat) / total)
        mean = mean + (middle - mean) * (len(flat) / total)
        low, high, count = np.minimum(low, flat.min(0)), np.maximum(high, flat.max(0)), total
    if not count:
        raise ValueError("a column without rows has no statistics")
    if held:
        return number_statistics(np.concatenate(held))
    found: Statistic = {"min": low, "max": high, "mean": mean, "std": np.sqrt(square / count), "count": np.array([count])}
    places = np.array(list(QUANTILES.values())) * (count - 1)
    below = places.astype(np.int64)
    ranks = np.unique(np.concatenate([below, np.minimum(below + 1, count - 1)]))
    parts = [slice(d, min(d + DIMENSIONS, len(mean))) for d in range(0, len(mean), DIMENSIONS)]
    values = np.concatenate([_ranked(batches, ranks, part, dtype) for part in parts], axis=1)
    for name, place, first in zip(QUANTILES, places, below, strict=True):
        lower, upper = values[np.searchsorted(ranks, [first, min(first + 1, count - 1)])]
        found[name] = lower + (upper - lower) * (place - first)
    return found


def histogram(pictures: np.ndarray) -> np.ndarray:
    """How often each value occurs per channel: `[..., 3]` uint8 to `[3, 256]`."""
    return np.stack([np.bincount(pictures[..., channel].ravel(), minlength=256) for channel in range(3)])


def picture_statistics(counts: np.ndarray, frames: int) -> Statistic:
    """The same statistics from a histogram `[3, 256]`, in [0, 1]; `count` is the number of frames."""
    levels = np.arange(256) / 255.0
    total = counts.sum(1)
    mean = counts @ levels / total
    variance = np.maximum(counts @ levels**2 / total - mean**2, 0.0)
    present = counts > 0
    found: Statistic = {
        "min": levels[present.argmax(1)],
        "max": levels[255 - present[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt(variance),
    }
    below = counts.cumsum(1)
    for name, quantile in QUANTILES.items():
        found[name] = np.array([_at(row, quantile * (row[-1] - 1)) for row in below]) / 255.0
    return {name: value.reshape(3, 1, 1) for name, value in found.items()} | {"count": np.array([frames])}


def plain(statistic: Statistic) -> dict[str, Any]:
    """As nested lists, for JSON and parquet."""
    return {name: value.tolist() for name, value in statistic.items()}


def _at(below: np.ndarray, position: float) -> float:
    """The value at a fractional position of the sorted sample, interpolated linearly as numpy.quantile does."""
    whole = int(position)
    low, high = np.searchsorted(below, [whole, min(whole + 1, below[-1] - 1)], side="right")
    return float(low + (high - low) * (position - whole))


def _ranked(batches: Batches, ranks: np.ndarray, dimensions: slice, dtype: np.dtype[Any]) -> np.ndarray:
    """The values at these places of each sorted dimension, `[ranks, dimensions]`, exactly.

    Each pass counts one digit of the values that begin with the digits found so far, as a radix sort would.
    """
    width = dimensions.stop - dimensions.start
    bits = _bits(dtype)
    prefixes = np.zeros((len(ranks), width), np.uint64)
    left = np.repeat(ranks[:, None], width, axis=1)
    for shift in range(bits - DIGIT, -1, -DIGIT):
        known = [np.unique(prefixes[:, d]) for d in range(width)]
        counts = [np.zeros((len(slots), 1 << DIGIT), np.int64) for slots in known]
        for batch in batches():
            if not len(batch):
                continue
            digits = _keys(batch.reshape(len(batch), -1)[:, dimensions], bits) >> np.uint64(shift)
            for d in range(width):
                before = digits[:, d] >> np.uint64(DIGIT)
                slot = np.minimum(np.searchsorted(known[d], before), len(known[d]) - 1)
                ours = known[d][slot] == before
                places = (slot[ours] << DIGIT) + (digits[ours, d] & np.uint64((1 << DIGIT) - 1)).astype(np.int64)
                counts[d] += np.bincount(places, minlength=counts[d].size).reshape(counts[d].shape)
        for d in range(width):
            below = counts[d].cumsum(1)
            for r in range(len(ranks)):
                row = below[np.searchsorted(known[d], prefixes[r, d])]
                digit = int(np.searchsorted(row, left[r, d], side="right"))
                left[r, d] -= row[digit - 1] if digit else 0
                prefixes[r, d] = (prefixes[r, d] << np.uint64(DIGIT)) | np.uint64(digit)
    return _values(prefixes, bits)


def _bits(dtype: np.dtype[Any]) -> int:
    """Of the float that holds every value of a type that occurs."""
    return 64 if dtype.itemsize > 4 or dtype in (np.int32, np.uint32) else 32


def _keys(values: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers that are ordered as the values are: a float's own bits, its sign turned round."""
    number, word = (np.float64, np.uint64) if bits == 64 else (np.float32, np.uint32)
    raw = (np.ascontiguousarray(values, number) + number(0)).view(word)  # + 0: there is one zero
    top = word(1 << (bits - 1))
    return np.where(raw & top, ~raw, raw | top).astype(np.uint64)


def _values(keys: np.ndarray, bits: int) -> np.ndarray:
    """Back from `_keys`, as float64."""
    number, word = (np.float64, np.uint64) if bits == 64 else (np.float32, np.uint32)
    raw, top = keys.astype(word), word(1 << (bits - 1))
    return np.where(raw & top, raw & ~top, ~raw).view(number).astype(np.float64)
