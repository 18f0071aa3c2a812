"""Statistics of a dataset's columns, exact over all frames. Written by data/writer.py, what normalisation stands on.

Numbers are kept and their quantiles taken exactly; pictures are counted into one histogram per channel, which has the same
exact quantiles in 6 KB, whatever the number of frames. LeRobot wants picture statistics in [0, 1] and shape (3, 1, 1).
"""

from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

Statistic = dict[str, np.ndarray]


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


def histogram(pictures: np.ndarray) -> np.ndarray:
    """How often each value occurs per channel: `[N, H, W, 3]` uint8 to `[3, 256]`."""
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
