"""Normalisation: formulas of the field, exact inverses, and no pass-through when statistics are missing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nexus_bus.errors import ContractError
from nexus_bus.models.normalize import Normalize, statistics_hash
from schemas.policy import Normalizer, NormMode, Statistics

STATS = Statistics(
    min=[-2.0, 0.0, 1.0],
    max=[4.0, 0.5, 1.0],
    mean=[1.0, 0.2, 1.0],
    std=[1.5, 0.1, 0.0],
    q01=[-1.0, 0.1, 1.0],
    q99=[3.0, 0.4, 1.0],
    count=100,
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("identity", [0.7, 0.3, 5.0]),
        ("mean_std", [(0.7 - 1.0) / 1.5, (0.3 - 0.2) / 0.1, 4.0]),
        ("min_max", [2 * (0.7 + 2) / 6 - 1, 2 * 0.3 / 0.5 - 1, 4.0]),
        ("quantile", [2 * (0.7 + 1) / 4 - 1, 2 * (0.3 - 0.1) / 0.3 - 1, 4.0]),
    ],
)
def test_each_mode_is_its_formula_and_a_constant_dimension_does_not_explode(mode: NormMode, expected: list[float]):
    norm = Normalize(Normalizer(mode=mode, statistics=STATS), 3, "contract.action_norm")
    raw = np.array([[0.7, 0.3, 5.0]], np.float32)
    np.testing.assert_allclose(norm.forward(raw)[0], expected, rtol=1e-5)
    np.testing.assert_allclose(norm.inverse(norm.forward(raw)), raw, rtol=1e-5)
    assert torch.equal(norm.forward(torch.from_numpy(raw)), torch.from_numpy(norm.forward(raw)))


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), st.sampled_from(["mean_std", "min_max", "quantile"]))
def test_the_inverse_undoes_it(values: list[float], mode: NormMode):
    norm = Normalize(Normalizer(mode=mode, statistics=STATS), 3, "x")
    raw = np.array(values, np.float32)
    np.testing.assert_allclose(norm.inverse(norm.forward(raw)), raw, atol=2e-3, rtol=1e-5)


def test_the_mask_leaves_a_gripper_as_it_is():
    norm = Normalize(Normalizer(mode="min_max", statistics=STATS, mask=[True, False, True]), 3, "x")
    assert norm.forward(np.array([0.0, 0.3, 1.0], np.float32))[1] == np.float32(0.3)
    assert norm.inverse(np.array([0.0, 0.3, 1.0], np.float32))[1] == np.float32(0.3)


@pytest.mark.parametrize(
    ("normalizer", "says"),
    [
        (Normalizer(mode="mean_std"), "contract.state_norm.statistics: missing"),
        (Normalizer(mode="mean_std", statistics=STATS), "contract.state_norm.statistics.mean: 3 numbers for 4 dimensions"),
        (Normalizer(mask=[True]), "contract.state_norm.mask: 1 entries for 4 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_field(normalizer: Normalizer, says: str):
    with pytest.raises(ContractError, match=says):
        Normalize(normalizer, 4, "contract.state_norm")


def test_the_hash_sees_a_swap():
    a, b = Normalizer(mode="mean_std", statistics=STATS), Normalizer(mode="min_max", statistics=STATS)
    assert statistics_hash(a, b) == statistics_hash(a, b)
    assert len({statistics_hash(a, b), statistics_hash(b, a), statistics_hash(a, a)}) == 3
