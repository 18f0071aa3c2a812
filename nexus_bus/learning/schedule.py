"""Learning rate as a pure function of the step: nothing to save, nothing to get wrong on resume."""

import math


def cosine(step: int, *, peak: float, floor: float, warmup: int, total: int) -> float:
    """Linear from 0 to `peak` over `warmup` steps, then half a cosine down to `floor` at `total`. Steps count from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = min(floor, peak)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
