"""Inputs for benches."""

import numpy as np

from nexus_bus.models.prompt import Prompt


def noise_prompts(count: int) -> list[Prompt]:
    """Different pictures of noise under one sentence."""
    rng = np.random.default_rng(0)
    return [Prompt([rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)], "touch the red block") for _ in range(count)]
