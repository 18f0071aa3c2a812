"""A dataset larger than memory is read: what is held and what is open is bounded, whatever is asked for."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nexus_bus.data import film_writer, pictures, rows, statistics
from nexus_bus.data import writer as writer_module
from nexus_bus.data.reader import Dataset
from nexus_bus.data.sampler import batch_indices
from nexus_bus.data.writer import DatasetWriter

SIDE = 32
EPISODES, LENGTH = 40, 25
FRONT, WRIST = "observation.images.front", "observation.images.wrist"


def write(root: Path, kind: str) -> Path:
    picture = {"dtype": kind, "shape": [SIDE, SIDE, 3], "names": None}
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        FRONT: picture,
        WRIST: picture,
    }
    rng = np.random.default_rng(0)
    with DatasetWriter(root, 10, features, "test") as writer:
        for number in range(EPISODES):
            shown = rng.integers(0, 255, (LENGTH, SIDE, SIDE, 3), np.uint8) if kind == "image" else None
            if shown is None:
                shown = np.full((LENGTH, SIDE, SIDE, 3), 40 + 5 * number, np.uint8)
            frames = {
                "observation.state": np.full((LENGTH, 3), number, np.float32),
                "action": np.arange(LENGTH * 2, dtype=np.float32).reshape(LENGTH, 2) + 1000 * number,
                FRONT: shown,
                WRIST: 255 - shown,
            }
            writer.add_episode(frames, f"task {number % 3}")
        writer.finalize()
    return root


def test_tables_of_any_size_are_read_through_a_small_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "DATA_MB", 0)  # a file per episode
    monkeypatch.setattr(rows, "HELD_BYTES", 400_000)
    monkeypatch.setattr(rows, "OPEN_TABLES", 3)
    root = write(tmp_path / "set", "image")
    stored = sum(path.stat().st_size for path in root.rglob("*.parquet"))
    assert stored > 10 * rows.HELD_BYTES
    dataset = Dataset(root)
    assert dataset.rows.groups_read == 0, "nothing is read to open it"
    most = 0
    for indices in (batch_indices(len(dataset), 1, 0, 300), range(len(dataset))):
        for index in indices:
            frame = dataset.frame(int(index))
            assert frame.state[0] == index // LENGTH
            assert frame.action[0] == 1000 * (index // LENGTH) + 2 * (index % LENGTH)
            most = max(most, dataset.rows.held_bytes)
            assert len(dataset.rows._open) <= 3
    assert 0 < most <= rows.HELD_BYTES + 200_000, "one piece more than the bound, at most"
    dataset.close()
    assert dataset.rows.held_bytes == 0


def test_statistics_of_a_dataset_hold_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "set", "image")
    expected = Dataset(root).stats("action")
    monkeypatch.setattr(statistics, "HELD_BYTES", 0)
    dataset = Dataset(root)
    found = dataset.stats("action")
    np.testing.assert_allclose(found.q01, expected.q01, rtol=1e-12)
    np.testing.assert_allclose(found.q99, expected.q99, rtol=1e-12)
    assert dataset.rows.held_bytes == 0
    assert dataset.stats("action") is found, "and are computed once"


def test_few_films_are_open_at_a_time_and_one_of_them_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_writer, "VIDEO_MB", 0)  # a film per episode and camera
    monkeypatch.setattr(pictures, "OPEN_FILMS", 6)
    dataset = Dataset(write(tmp_path / "set", "video"))
    for index in batch_indices(len(dataset), 1, 0, 150):
        images = dataset.images(int(index))
        assert abs(images["front"].mean() - 40 - 5 * (index // LENGTH)) < 6
        assert abs(images["wrist"].mean() - 215 + 5 * (index // LENGTH)) < 6
        assert len(dataset.films) <= 6
    dataset.close()
    assert len(dataset.films) == 0
    before = dataset.films.opened
    indices = batch_indices(len(dataset), 1, 1, 75)
    dataset.frames(indices)
    assert dataset.films.opened - before == 2 * len(np.unique(indices // LENGTH)), "in the order in which they lie: each once"
    dataset.close()


def test_an_odd_number_of_rows_and_groups_that_end_inside_an_episode(tmp_path: Path) -> None:
    """Other writers cut their tables where they like."""
    root = write(tmp_path / "set", "image")
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=7)
    dataset = Dataset(root)
    for index in (0, 6, 7, 24, 25, 999, 500, 13):
        chunk = dataset.chunk(index, 12)
        end = (index // LENGTH + 1) * LENGTH
        wanted = [1000 * (index // LENGTH) + 2 * (min(i, end - 1) % LENGTH) for i in range(index, index + 12)]
        assert chunk.actions[:, 0].tolist() == wanted
        assert chunk.is_pad.tolist() == [i >= end for i in range(index, index + 12)]


def test_several_pictures_come_in_the_order_asked_for(tmp_path: Path) -> None:
    dataset = Dataset(write(tmp_path / "set", "video"))
    asked = [900, 3, 3, 512, 0, 999, 4]
    assert [frame.episode for frame in dataset.frames(asked)] == [index // LENGTH for index in asked]
    assert [float(frame.action[0]) for frame in dataset.frames(np.array(asked))] == [
        1000 * (index // LENGTH) + 2 * (index % LENGTH) for index in asked
    ]
    dataset.close()


@pytest.mark.parametrize("kind", ["image", "video"])
def test_threads_share_a_dataset(tmp_path: Path, kind: str) -> None:
    """An environment worker feeds several jobs from one."""
    dataset = Dataset(write(tmp_path / "set", kind))
    expected = {index: dataset.frame(index) for index in range(0, 1000, 37)}
    begin = threading.Barrier(4)

    def read(seed: int) -> bool:
        begin.wait(timeout=30)
        order = np.random.default_rng(seed).permutation(list(expected))
        for index in order.tolist():
            seen = dataset.frame(index)
            np.testing.assert_array_equal(seen.action, expected[index].action)
            for camera, picture in seen.images.items():
                np.testing.assert_array_equal(picture, expected[index].images[camera])
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [True] * 4
    dataset.close()
