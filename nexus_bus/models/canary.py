"""How far a grouped answer is from the same request answered alone: promise 2 checked in production, one in a hundred."""

import numpy as np

from nexus_bus.models.slots import Acted

TOLERANCE = {"exact": 0.0, "fast": 0.05}  # of `gap`; an action space spans 2


def gap(grouped: Acted, alone: Acted, profile: str) -> float:
    """Largest difference in the head's normalised space; in the exact profile of everything that the answer says.

    Answers of other shapes, or with a density on one side only, are infinitely far apart.
    """
    pairs = [(grouped.sample, alone.sample)]
    if profile == "exact":
        pairs += [(grouped.actions, alone.actions), (_numbers(grouped), _numbers(alone))]
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    return max(float(np.abs(one - other).max(initial=0.0)) for one, other in pairs)


def _numbers(acted: Acted) -> np.ndarray:
    return np.array([*(acted.log_prob or []), *([] if acted.value is None else [acted.value])])
