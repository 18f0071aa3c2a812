"""Intervals and tests of success rates, alone and in pairs, each with its source. Pure, without NumPy but for the bootstrap.

Pairs are written as counts of a table: `both` solved the trial, only A, only B, neither.
"""

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
RESAMPLES = 10_000


def wilson(successes: int, episodes: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a binomial proportion, by default at 95 %.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if episodes == 0:
        return 0.0, 1.0
    p, z2 = successes / episodes, z * z
    centre = (p + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = z * math.sqrt(p * (1 - p) / episodes + z2 / (4 * episodes**2)) / (1 + z2 / episodes)
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(both: int, only_a: int, only_b: int, neither: int, z: float = Z95) -> tuple[float, float]:
    """Interval of the difference (success of B less that of A) of paired proportions, by default at 95 %.

    R. G. Newcombe, Improved confidence intervals for the difference between binomial proportions based on paired data,
    Statistics in Medicine 17 (1998), method 10: square-and-add of Wilson's intervals with a corrected correlation.
    """
    pairs = both + only_a + only_b + neither
    if pairs == 0:
        return -1.0, 1.0
    a, b = (both + only_a) / pairs, (both + only_b) / pairs
    (low_a, high_a), (low_b, high_b) = wilson(both + only_a, pairs, z), wilson(both + only_b, pairs, z)
    phi = _correlation(both, only_a, only_b, neither)
    below = _add(b - low_b, high_a - a, phi)
    above = _add(high_b - b, a - low_a, phi)
    return max(-1.0, b - a - below), min(1.0, b - a + above)


def _add(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))


def _correlation(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Phi of the table, with a continuity correction where it is positive."""
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if margins == 0:
        return 0.0
    product = float(both * neither - only_a * only_b)
    if product > 0:
        product = max(0.0, product - (both + only_a + only_b + neither) / 2)
    return product / math.sqrt(margins)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided mid-p value of McNemar's test: whether the trials on which A and B differ go both ways alike.

    M. W. Fagerland, S. Lydersen, P. Laake, The McNemar test for binary matched-pairs data: mid-p and asymptotic are better than
    exact conditional, BMC Medical Research Methodology 13 (2013).
    """
    differing, fewer = only_a + only_b, min(only_a, only_b)
    if differing == 0:
        return 1.0
    here = math.comb(differing, fewer) / 2**differing
    if only_a == only_b:
        return 1 - here / 2  # both tails meet in this one outcome
    return 2 * sum(math.comb(differing, k) for k in range(fewer + 1)) / 2**differing - here


def bootstrap(differences: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean of paired differences, by drawing pairs anew. The same input gives the same answer.

    B. Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 7 (1979).
    """
    import numpy as np  # only here: the command line's help stays instant

    if not differences:
        return 0.0, 0.0
    values = np.asarray(differences, np.float64)
    rng = np.random.Generator(np.random.PCG64(seed))
    means = [float(values[rng.integers(0, len(values), len(values))].mean()) for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
