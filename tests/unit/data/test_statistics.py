"""The statistics are the true ones, over all frames."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nexus_bus.data import statistics
from nexus_bus.data.statistics import histogram, number_statistics, over, picture_statistics


def test_numbers_have_exact_quantiles() -> None:
    values = np.random.default_rng(0).normal(size=(101, 3)).astype(np.float32)
    found = number_statistics(values)
    np.testing.assert_allclose(found["q01"], np.quantile(values.astype(np.float64), 0.01, axis=0))
    np.testing.assert_allclose(found["std"], values.astype(np.float64).std(0))
    assert found["count"].tolist() == [101]


def test_pictures_counted_by_histogram_have_the_same_quantiles_as_their_pixels() -> None:
    rng = np.random.default_rng(1)
    for high in (3, 256):
        pictures = rng.integers(0, high, (5, 6, 7, 3), dtype=np.uint8)
        found = picture_statistics(histogram(pictures[:2]) + histogram(pictures[2:]), 5)
        pixels = pictures.reshape(-1, 3) / 255.0
        for name, quantile in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
            np.testing.assert_allclose(found[name].ravel(), np.quantile(pixels, quantile, axis=0), atol=1e-12)
        for name in ("min", "max", "mean", "std"):
            np.testing.assert_allclose(found[name].ravel(), getattr(pixels, name)(0), atol=1e-12)
        assert found["mean"].shape == (3, 1, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_a_column_that_is_not_held_has_the_same_exact_statistics(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    values = (rng.normal(size=(5000, 11)) * 10.0 ** rng.integers(-6, 6, 11)).astype(np.float64)
    values[:, 3] = 7.5  # constant
    values[:, 4] = rng.integers(-2, 2, 5000)  # few values, zero among them
    values[:, 5] = np.where(rng.random(5000) < 0.002, 1.0, 0.0)  # sparse
    values[0, 6], values[1, 7] = (2e9, -2e9) if dtype is np.int64 else (3e38, -3e38)
    column = np.abs(values % 200).astype(dtype) if dtype in (np.uint8, np.bool_) else values.astype(dtype)
    expected = number_statistics(column)
    monkeypatch.setattr(statistics, "HELD_BYTES", 0)
    passes = 0

    def batches() -> Iterator[np.ndarray]:
        nonlocal passes
        passes += 1
        yield from np.array_split(column, 7)
        yield column[:0]

    found = over(batches)
    for name in ("min", "max", "count", "q01", "q10", "q50", "q90", "q99"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=0, err_msg=name)
    for name in ("mean", "std"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    assert passes > 2, "it was gone through again rather than kept"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_have_quantiles_too(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "HELD_BYTES", 0)
    values = np.array([[-0.0, 1.5], [0.0, -3.0], [2.0, 8.0]], np.float32)[:rows]
    found, expected = over(lambda: iter([values])), number_statistics(values)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name)


def test_a_column_without_rows_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="without rows"):
        over(lambda: [])
