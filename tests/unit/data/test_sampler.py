"""Batches are a pure function of seed and number; ranks share them, and a checkpoint's cursor goes on where it stood."""

import itertools

import msgspec
import numpy as np
import pytest

from nexus_bus.data.sampler import Cursor, Sampler, batch_indices
from nexus_bus.errors import ContractError

LENGTHS = (5, 1, 8, 3, 6, 2)
FRAMES = sum(LENGTHS)


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
    with pytest.raises(ValueError, match="without frames"):
        Sampler([], batch_size=1)
    with pytest.raises(ValueError, match="without frames"):
        Sampler([3, 0], batch_size=1)


@pytest.mark.parametrize("window", [0, 1, 2, 4, 100])
def test_a_sampler_goes_through_every_frame_once_per_epoch(window: int) -> None:
    sampler = Sampler(LENGTHS, batch_size=5, seed=7, window=window)
    drawn = np.concatenate(list(itertools.islice(sampler, 2 * FRAMES // 5 + 1)))
    first, second = drawn[:FRAMES], drawn[FRAMES : 2 * FRAMES]
    assert sorted(first) == sorted(second) == list(range(FRAMES))
    assert first.tolist() != second.tolist()
    assert sampler.epoch == pytest.approx(2.2)


def test_without_a_window_its_batches_are_those_of_a_job() -> None:
    drawn = next(Sampler(LENGTHS, batch_size=8, seed=3))
    np.testing.assert_array_equal(drawn, batch_indices(FRAMES, 3, 0, 8))


def test_a_window_keeps_to_a_few_episodes_at_a_time() -> None:
    """Their films stay open while they are read."""
    lengths = [10] * 50
    sampler = Sampler(lengths, batch_size=10, seed=1, window=4)
    for _ in range(12):  # 40 frames a window: four batches
        drawn = [np.unique(next(sampler) // 10) for _ in range(4)]
        assert len(np.unique(np.concatenate(drawn))) == 4
        sampler.batch(0)  # looking elsewhere moves nothing


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_a_batch_that_does_not_depend_on_how_many_they_are(window: int, world: int) -> None:
    alone = Sampler(LENGTHS, batch_size=5, seed=2, window=window)
    ranks = [Sampler(LENGTHS, batch_size=5, seed=2, rank=rank, world=world, window=window) for rank in range(world)]
    for _ in range(20):
        whole, parts = next(alone), [next(rank) for rank in ranks]
        assert sorted(np.concatenate(parts)) == sorted(whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        np.testing.assert_array_equal(parts[0], whole[::world])


@pytest.mark.parametrize("window", [0, 3])
def test_a_checkpoint_goes_on_where_it_stood_with_any_number_of_ranks(window: int) -> None:
    through = Sampler(LENGTHS, batch_size=6, seed=4, window=window)
    before = [next(through).tolist() for _ in range(9)]
    kept = msgspec.json.encode(through.cursor())
    after = [next(through).tolist() for _ in range(9)]
    assert before != after
    for world in (1, 2):
        ranks = [Sampler(LENGTHS, batch_size=6, seed=4, rank=rank, world=world, window=window) for rank in range(world)]
        for rank in ranks:
            rank.resume(msgspec.json.decode(kept, type=Cursor))
        again = [np.stack([next(rank) for rank in ranks], axis=1).ravel().tolist() for _ in range(9)]
        assert again == after


def test_a_cursor_of_other_data_is_refused() -> None:
    cursor = Sampler(LENGTHS, batch_size=4, seed=1).cursor()
    with pytest.raises(ContractError, match=r"cursor\.dataset: the checkpoint has"):
        Sampler((*LENGTHS, 3), batch_size=4, seed=1).resume(cursor)
    with pytest.raises(ContractError, match=r"cursor\.seed: the checkpoint has 1, here it is 2"):
        Sampler(LENGTHS, batch_size=4, seed=2).resume(cursor)
    with pytest.raises(ContractError, match=r"cursor\.batch_size"):
        Sampler(LENGTHS, batch_size=8, seed=1).resume(cursor)
    with pytest.raises(ContractError, match=r"cursor\.window"):
        Sampler(LENGTHS, batch_size=4, seed=1, window=2).resume(cursor)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (0, 9)])
def test_ranks_that_do_not_fit_are_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="every rank needs a share"):
        Sampler(LENGTHS, batch_size=8, rank=rank, world=world)
