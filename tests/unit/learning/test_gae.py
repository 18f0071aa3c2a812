"""Advantages against a reference that sums the definition, and the two ways an episode can end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus_bus.learning.gae import gae
from nexus_bus.learning.schedule import cosine

numbers = st.floats(-10, 10)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), st.booleans(), numbers, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_surprises(
    steps: list[tuple[float, float]], terminated: bool, final: float, gamma: float, lam: float
):
    rewards, values = (np.array(column) for column in zip(*steps, strict=True))
    after = [*values[1:], 0.0 if terminated else final]
    surprises = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    expected = [sum((gamma * lam) ** k * d for k, d in enumerate(surprises[t:])) for t in range(len(steps))]
    advantages, returns = gae(rewards, values, terminated=terminated, final_value=final, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, expected, atol=1e-9)
    np.testing.assert_allclose(returns, advantages + values)


def test_a_time_limit_goes_on_with_the_final_value_and_the_tasks_end_does_not():
    rewards, values = np.array([0.0, 1.0]), np.zeros(2)
    _, ended = gae(rewards, values, terminated=True, final_value=10.0, gamma=0.9, lam=1.0)
    _, cut = gae(rewards, values, terminated=False, final_value=10.0, gamma=0.9, lam=1.0)
    np.testing.assert_allclose(ended, [0.9, 1.0])
    np.testing.assert_allclose(cut, [0.9 * (1 + 0.9 * 10), 1 + 0.9 * 10])


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    rates = [cosine(step, peak=1.0, floor=0.1, warmup=10, total=110) for step in range(130)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == rates[129] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert cosine(5, peak=1e-9, floor=1e-6, warmup=0, total=10) == 1e-9, "the floor never lifts the peak"
