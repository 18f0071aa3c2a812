"""Batches are a pure function of seed and number: that is the cursor, and orders of batches are the shards."""

import numpy as np
import pytest

from nexus_bus.data.sampler import batch_indices


def test_every_frame_comes_once_per_epoch_and_batches_leave_no_gap() -> None:
    drawn = np.concatenate([batch_indices(10, 3, batch, 4) for batch in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()


def test_a_batch_does_not_depend_on_what_was_drawn_before() -> None:
    late = batch_indices(100, 1, 57, 8)
    for batch in range(57):
        batch_indices(100, 1, batch, 8)
    np.testing.assert_array_equal(batch_indices(100, 1, 57, 8), late)
    assert batch_indices(100, 2, 57, 8).tolist() != late.tolist()


def test_batches_larger_than_the_dataset() -> None:
    assert sorted(batch_indices(3, 0, 0, 6)) == [0, 0, 1, 1, 2, 2]


def test_an_empty_dataset_has_no_batches() -> None:
    with pytest.raises(ValueError, match="without frames"):
        batch_indices(0, 0, 0, 1)
