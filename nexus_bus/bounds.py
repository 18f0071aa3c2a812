"""How much of what a policy gave lay outside an action's bounds: much of it is the usual sign of un-normalised actions."""

import numpy as np

MARGIN = 0.1  # of the range, by which a component may overshoot: a policy that learned ±1 gives 1.1 as often as 0.9


def outside(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """Share of the components of `[n, D]` that lie beyond the bounds `[D]` by more than MARGIN of their range, 0 to 1."""
    slack = MARGIN * (high - low)
    return float(((actions < low - slack) | (actions > high + slack)).mean())
