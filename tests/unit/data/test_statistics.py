"""The statistics are the true ones, over all frames."""

import numpy as np

from nexus_bus.data.statistics import histogram, number_statistics, picture_statistics


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
