"""Intervals and tests against published values."""

import math

import pytest

from nexus_bus.evaluation.statistics import bootstrap, mcnemar, newcombe, wilson

# Both, only A, only B, neither; A is after, B before. Bentur et al. (2009), as in Fagerland et al. (2013, 2014).
AIRWAYS = (1, 7, 1, 12)


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_newcombes_table_of_1998(successes: int, episodes: int, low: float, high: float):
    assert wilson(successes, episodes) == pytest.approx((low, high), abs=5e-5)


def test_newcombes_interval_of_pairs_matches_published_values():
    assert newcombe(*AIRWAYS) == pytest.approx((-0.507, -0.026), abs=5e-4)
    assert newcombe(36, 2, 12, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_swapping_the_two_mirrors_the_interval():
    both, only_a, only_b, neither = 40, 3, 11, 6
    low, high = newcombe(both, only_a, only_b, neither)
    assert newcombe(both, only_b, only_a, neither) == pytest.approx((-high, -low))
    assert low < (only_b - only_a) / 60 < high


def test_intervals_of_little_are_wide_and_stay_within_bounds():
    assert wilson(0, 0) == (0.0, 1.0)
    assert newcombe(0, 0, 0, 0) == (-1.0, 1.0)
    for table in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 5, 0), (0, 0, 0, 9)):
        low, high = newcombe(*table)
        assert -1 <= low <= (table[2] - table[1]) / sum(table) <= high <= 1


def test_mcnemars_mid_p_matches_published_values():
    assert mcnemar(1, 7) == pytest.approx(0.0391, abs=5e-5)  # the exact conditional test has 0.0703
    assert mcnemar(7, 1) == mcnemar(1, 7)
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == pytest.approx(1 - math.comb(10, 5) / 2**11)


def test_the_bootstrap_gives_the_same_answer_again_and_is_near_the_normal_one():
    values = [float((7 * i) % 11) for i in range(200)]
    low, high = bootstrap(values)
    assert bootstrap(values) == (low, high)
    mean = sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) / len(values))
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), rel=0.02)
    assert bootstrap([]) == (0.0, 0.0)
    assert bootstrap([0.5] * 9) == (0.5, 0.5)
