"""How benches take time: medians of alternating runs, so that whatever else the machine does meets all sides alike."""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

ROUNDS, LEAST = 9, 3
BUDGET_S = 4.0  # of one comparison; slow ones get fewer rounds


def alternate(works: Mapping[str, Callable[[], object]], device: torch.device, *, quick: bool = False) -> dict[str, float]:
    """Median seconds of each, run in turns after a warm-up: A B A B. `quick`: each once.

    CPU time on a CPU, since other programs of the machine do not count; on a GPU the wall clock until it is done.
    """
    for work in () if quick else works.values():
        work()
    spent: dict[str, list[float]] = {name: [] for name in works}
    ends = time.monotonic() + BUDGET_S
    for done in range(1 if quick else ROUNDS):
        if done >= LEAST and time.monotonic() > ends:
            break
        for name, work in works.items():
            started = _clock(device)
            work()
            spent[name].append(_clock(device) - started)
    return {name: float(np.median(seconds)) for name, seconds in spent.items()}


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
