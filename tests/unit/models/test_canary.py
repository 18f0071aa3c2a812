"""The canary's measure: zero only where two answers say the same."""

from dataclasses import replace

import numpy as np

from nexus_bus.models.canary import gap
from nexus_bus.models.slots import Acted

ACTED = Acted(np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32), [0.5, 0.25], 1.0)


def test_equal_answers_are_no_distance_apart():
    other = Acted(ACTED.actions.copy(), ACTED.sample.copy(), [0.5, 0.25], 1.0)
    assert gap(ACTED, other, "exact") == gap(ACTED, other, "fast") == 0.0


def test_the_exact_profile_compares_all_that_is_said():
    step = np.nextafter(np.float32(0), np.float32(1))
    for changed in (
        replace(ACTED, sample=ACTED.sample + step),
        replace(ACTED, actions=ACTED.actions * np.float32(1.0000001)),
        replace(ACTED, log_prob=[0.5, 0.25 + 1e-12]),
        replace(ACTED, value=1.0 + 1e-12),
    ):
        assert gap(ACTED, changed, "exact") > 0
    assert gap(ACTED, replace(ACTED, value=2.0), "fast") == 0.0, "a density is steep: the fast profile looks at the actions"
    assert abs(gap(ACTED, replace(ACTED, sample=ACTED.sample - 0.25), "fast") - 0.25) < 1e-6


def test_answers_that_cannot_be_compared_are_far_apart():
    assert gap(ACTED, replace(ACTED, sample=np.zeros((3, 3), np.float32)), "fast") == float("inf")
    assert gap(ACTED, replace(ACTED, value=None), "exact") == float("inf")
