"""LeRobot v2.1: as v2.0, with statistics per episode in `meta/episodes_stats.jsonl`. Below data/reader.py.

Those have no quantiles, and there is no way to the quantiles of all frames from them: data/reader.py computes its own.
"""

from typing import Any

import msgspec
import numpy as np

from nexus_bus.data import layout_v20
from nexus_bus.data.layout import Layout, Root
from nexus_bus.errors import BadMessage

VERSION = "v2.1"
NAME = "meta/episodes_stats.jsonl"


class _Line(msgspec.Struct):
    episode_index: int
    stats: dict[str, dict[str, Any]]


def read(root: Root, info: dict[str, Any]) -> Layout:
    """The layout of a v2.1 dataset. Raises BadMessage naming the file and field."""
    return layout_v20.layout(root, info, VERSION, lambda: _declared(root))


def _declared(root: Root) -> dict[str, dict[str, Any]]:
    """Minimum, maximum, mean and deviation over all episodes, out of those of each."""
    lines = list(root.lines(NAME, _Line))
    keys = {key for line in lines for key in line.stats}
    try:
        return {key: _joined([line.stats[key] for line in lines if key in line.stats]) for key in sorted(keys)}
    except (ValueError, TypeError, KeyError) as error:
        raise BadMessage(f"{NAME}: statistics that do not fit each other: {type(error).__name__}: {error}") from error


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    counts = np.array([float(np.ravel(part["count"])[0]) for part in parts])
    low, high, mean, deviation = (
        np.stack([np.asarray(part[name], np.float64) for part in parts]) for name in ("min", "max", "mean", "std")
    )
    share = (counts / counts.sum()).reshape(-1, *[1] * (mean.ndim - 1))
    middle = (share * mean).sum(0)
    spread = (share * (deviation**2 + (mean - middle) ** 2)).sum(0)
    return {
        "min": low.min(0).tolist(),
        "max": high.max(0).tolist(),
        "mean": middle.tolist(),
        "std": np.sqrt(spread).tolist(),
        "count": [int(counts.sum())],
    }
