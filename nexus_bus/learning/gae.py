"""Generalised advantage estimation over one episode of action chunks. Between rollout records and PPO."""

import numpy as np
from numpy.typing import NDArray


def gae(
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    *,
    terminated: bool,
    final_value: float,
    gamma: float,
    lam: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages and returns [n] of an episode's n chunks (Schulman et al. 2016, eq. 16).

    A chunk is one decision: `rewards` are sums over its executed actions, and gamma is applied once per chunk, however many
    actions were executed. An episode that the task ended is worth nothing after its end; one that the time limit cut goes
    on with `final_value`, the value of the final observation.
    """
    advantages = np.zeros_like(rewards)
    following = 0.0 if terminated else final_value
    running = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        running = delta + gamma * lam * running
        advantages[t] = running
        following = values[t]
    return advantages, advantages + values
