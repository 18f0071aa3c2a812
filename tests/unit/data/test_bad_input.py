"""A dataset comes from anybody: what is cut off, lies, or wants more than it shows is refused with the place and the reason."""

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nexus_bus.data import rows
from nexus_bus.data.reader import Dataset
from nexus_bus.data.writer import DatasetWriter
from nexus_bus.errors import BadMessage

WriteV2 = Callable[..., Path]
SIDE = 16
FRONT = "observation.images.front"
CELL = pa.struct({"bytes": pa.binary(), "path": pa.string()})
DATA = "data/chunk-000/file-000.parquet"


def write(root: Path, pictures: str = "image", lengths: tuple[int, ...] = (5, 4)) -> Path:
    picture = {"dtype": pictures, "shape": [SIDE, SIDE, 3], "names": None}
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        FRONT: picture,
    }
    rng = np.random.default_rng(0)
    with DatasetWriter(root, 10, features, "test") as writer:
        for length in lengths:
            frames = {
                "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
                "action": rng.normal(size=(length, 2)).astype(np.float32),
                FRONT: np.full((length, SIDE, SIDE, 3), 90, np.uint8),
            }
            writer.add_episode(frames, "touch it")
        writer.finalize()
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "set")


def edit(root: Path, **changes: Any) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def feature(root: Path, key: str, **changes: Any) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features[key] = features.get(key, {"names": None}) | changes
    edit(root, features=features)


def rewrite(root: Path, **columns: Any) -> None:
    """Replace columns of the data file."""
    table = pq.read_table(root / DATA)
    for name, column in columns.items():
        name = name.replace("__", ".")  # noqa: PLW2901
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, root / DATA)


def test_a_truncated_film_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "film", "video")
    path = next(root.rglob("*.mp4"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadMessage, match=r"file-000\.mp4: .*front of episode 0, frame 2: no whole film"):
        Dataset(root).images(2)
    path.unlink()
    with pytest.raises(BadMessage, match=r"file-000\.mp4: .*no whole film: .*No such file"):
        Dataset(root).images(2)


def test_a_film_with_too_few_frames_is_refused_at_the_frame(tmp_path: Path) -> None:
    long, short = write(tmp_path / "long", "video"), write(tmp_path / "short", "video", (5, 2))
    next(long.rglob("*.mp4")).write_bytes(next(short.rglob("*.mp4")).read_bytes())
    dataset = Dataset(long)
    assert dataset.images(6)["front"].shape == (SIDE, SIDE, 3)
    with pytest.raises(BadMessage, match=r"episode 1, frame 2: no picture at 0\.700 s; the film is cut off or another one"):
        dataset.images(7)
    assert dataset.images(6)["front"].shape == (SIDE, SIDE, 3), "and the others can still be had"


def test_a_film_of_another_size_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    root = write(tmp_path / "film", "video")
    feature(root, FRONT, shape=[8, 8, 3])
    with pytest.raises(BadMessage, match=r"film of \[16, 16, 3\], info\.json says \[8, 8, 3\]"):
        Dataset(root).images(0)


@pytest.mark.parametrize("missing", ["meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet", DATA])
def test_missing_files_are_named(root: Path, missing: str) -> None:
    (root / missing).unlink()
    with pytest.raises(BadMessage, match=missing.replace(".", r"\.")):
        Dataset(root)


def test_meta_that_is_no_json_is_refused(root: Path) -> None:
    (root / "meta/info.json").write_text("{")
    with pytest.raises(BadMessage, match=r"meta/info\.json: not readable JSON"):
        Dataset(root)
    (root / "meta/info.json").write_text("[" * 100_000)
    with pytest.raises(BadMessage, match=r"meta/info\.json: not readable JSON"):
        Dataset(root)
    (root / "meta/info.json").write_text("[]")
    with pytest.raises(BadMessage, match="holds a list, expected an object"):
        Dataset(root)


@pytest.mark.parametrize(
    ("key", "changes", "text"),
    [
        ("action", {"shape": [3]}, r"action has 2 numbers a row, meta/info\.json says shape \[3\]"),
        ("action", {"shape": []}, r"action has 2 numbers a row"),
        ("action", {"shape": ["2"]}, r"features\.action\.shape is \['2'\]"),
        ("action", {"shape": [2, 1 << 40]}, "holds more than"),
        ("action", {"dtype": None}, "action has no dtype"),
        (FRONT, {"shape": [16, 16]}, r"front\.shape \[16, 16\], expected \[height, width, 3\]"),
        (FRONT, {"dtype": "float32"}, "has dtype 'float32', not image or video"),
        (FRONT, {"shape": [32, 32, 3]}, r"picture \[16, 16, 3\], info\.json says \[32, 32, 3\]"),
        (FRONT, {"dtype": "video"}, f"no column videos/{FRONT}/chunk_index"),
        ("observation.force", {"dtype": "float32", "shape": [6]}, "no column observation.force, which .* names as a feature"),
    ],
)
def test_features_that_disagree_with_the_files_are_refused(root: Path, key: str, changes: dict[str, Any], text: str) -> None:
    feature(root, key, **changes)
    with pytest.raises(BadMessage, match=text):
        Dataset(root).frame(0)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"index": pa.array([0, 1, 2, 3, 4, 5, 7, 6, 8])}, "row 6 has index 7, expected 6"),
        ({"action": pa.array([[1.0, 2.0]] * 8 + [None], pa.list_(pa.float32()))}, "action has empty cells"),
        ({"action": pa.array([[1.0, 2.0]] * 7 + [[1.0], [1.0, 2.0, 3.0]])}, "2 numbers in row 0 and 1 in row 7"),
        ({"action": pa.array(["left"] * 9)}, "action holds string, which is no number"),
        ({"action": pa.array([[1.0, 2.0]] * 8 + [[np.nan, 0.0]])}, "action of frame 8 is not finite"),
        ({"task_index": pa.array([0] * 8 + [7])}, r"frame 8 has task_index 7, which meta/tasks does not have"),
        ({"observation__images__front": pa.array([{"bytes": b"GIF89a", "path": None}] * 9)}, "frame 3: unreadable picture"),
        ({"observation__images__front": pa.array([{"bytes": None, "path": None}] * 9, CELL)}, "neither bytes nor a path"),
    ],
)  # fmt: skip
def test_cells_that_are_not_what_they_should_be_are_refused(root: Path, columns: dict[str, Any], text: str) -> None:
    rewrite(root, **columns)
    with pytest.raises(BadMessage, match=text):
        Dataset(root).frame(8)


def test_a_file_with_fewer_rows_than_its_episodes_is_refused(root: Path) -> None:
    pq.write_table(pq.read_table(root / DATA).slice(0, 7), root / DATA)
    with pytest.raises(BadMessage, match="7 rows, the episodes in it have 9; one was cut short"):
        Dataset(root)


def test_an_empty_dataset_is_refused(root: Path) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(BadMessage, match="holds no episodes; record or import some"):
        Dataset(root)


def test_an_episode_of_one_frame_is_read(tmp_path: Path) -> None:
    """Its only action fills the chunk, marked as padding; `nexus data check` names it."""
    dataset = Dataset(write(tmp_path / "short", "video", (3, 1, 2)))
    chunk = dataset.chunk(3, 4)
    assert chunk.is_pad.tolist() == [False, True, True, True]
    assert (chunk.actions == chunk.actions[0]).all()
    assert dataset.images(3)["front"].shape == (SIDE, SIDE, 3)


def test_names_that_lead_out_are_refused(root: Path) -> None:
    outside = root.parent / "secret.parquet"
    outside.write_bytes((root / DATA).read_bytes())
    for name in ("../secret.parquet", str(outside), "data/../../secret.parquet", "data/chunk-000/../../../secret.parquet"):
        edit(root, data_path=name)
        with pytest.raises(BadMessage, match="leads out of it"):
            Dataset(root)
    edit(root, data_path="data/\0.parquet")
    with pytest.raises(BadMessage, match="is no path"):
        Dataset(root)


def test_links_that_lead_out_are_refused(root: Path) -> None:
    (root / DATA).rename(root.parent / "secret.parquet")
    (root / DATA).symlink_to(root.parent / "secret.parquet")
    with pytest.raises(BadMessage, match="leads out of it; copy the file in, links are not followed"):
        Dataset(root)
    (root / DATA).unlink()
    (root / "data/chunk-000").rmdir()
    (root.parent / "elsewhere").mkdir()
    (root.parent / "secret.parquet").rename(root.parent / "elsewhere/file-000.parquet")
    (root / "data/chunk-000").symlink_to(root.parent / "elsewhere")
    with pytest.raises(BadMessage, match="leads out of it"):
        Dataset(root)


def test_a_link_of_the_metadata_is_refused(root: Path) -> None:
    (root / "meta/info.json").rename(root.parent / "info.json")
    (root / "meta/info.json").symlink_to(root.parent / "info.json")
    with pytest.raises(BadMessage, match="leads out of it"):
        Dataset(root)


def test_a_picture_that_names_a_file_outside_is_refused(write_v2: WriteV2) -> None:
    root = write_v2("v2.0", pictures="image")
    path = root / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    cells = table[FRONT].to_pylist()
    cells[0] = {"bytes": None, "path": "../../../../etc/passwd"}
    cells[2] = {"bytes": None, "path": "images/nothing.png"}
    pq.write_table(table.set_column(table.column_names.index(FRONT), FRONT, pa.array(cells)), path)
    dataset = Dataset(root)
    with pytest.raises(BadMessage, match="leads out of it"):
        dataset.images(0)
    with pytest.raises(BadMessage, match=r"'images/nothing\.png' is not readable: No such file"):
        dataset.images(2)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims a picture of any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (4097, 4096), (4096, 16)])
def test_a_picture_that_claims_gigabytes_is_refused_by_its_header(root: Path, width: int, height: int) -> None:
    cells = [{"bytes": bomb(width, height), "path": None}] * 9
    rewrite(root, observation__images__front=pa.array(cells, CELL))
    with pytest.raises(BadMessage, match=r"far more pixels than the limit of|is the limit|info\.json says"):
        Dataset(root).images(0)


def test_a_feature_that_claims_gigabytes_is_refused(root: Path) -> None:
    feature(root, FRONT, shape=[60_000, 60_000, 3])
    with pytest.raises(BadMessage, match="holds more than"):
        Dataset(root)


def test_a_table_that_unpacks_to_gigabytes_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_GROUP", 100)
    with pytest.raises(BadMessage, match=r"row group 0 unpacks to .* 100 is the limit"):
        Dataset(root).chunk(0, 1)


def test_one_picture_named_in_every_row_is_not_unpacked_into_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_GROUP", 500_000)
    rewrite(root, observation__images__front=pa.array([{"bytes": b"x" * 100_000, "path": None}] * 9, CELL))
    assert (root / DATA).stat().st_size < 150_000
    with pytest.raises(BadMessage, match=r"front of row group 0 unpacks to more than 500000 bytes"):
        Dataset(root).images(0)


def test_cells_of_more_numbers_than_declared_are_not_unpacked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = pa.array([np.zeros(20_000, np.float32)] * 9, pa.list_(pa.float32()))
    rewrite(root, action=long)
    dataset, read = Dataset(root), pq.ParquetFile.iter_batches

    def of_others(file: Any, *args: Any, columns: list[str], **options: Any) -> Any:
        assert "action" not in columns, "it is refused before it is unpacked"
        return read(file, *args, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", of_others)
    for asked in (lambda: dataset.rows.numbers("action", 0, 1), lambda: dataset.stats("action")):
        with pytest.raises(BadMessage, match=r"action has 20000 numbers a row, meta/info\.json says shape \[2\]"):
            asked()


def test_a_film_that_is_a_list_of_other_files_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "film", "video")
    path = next(root.rglob("*.mp4"))
    other = path.rename(path.with_name("elsewhere"))
    path.write_text(f"ffconcat version 1.0\nfile {other.name}\n")
    with pytest.raises(BadMessage, match=r"no whole film: .*Invalid data"):
        Dataset(root).images(0)


def test_metadata_of_gigabytes_are_refused(root: Path) -> None:
    os.truncate(root / "meta/info.json", 1 << 30)  # sparse
    with pytest.raises(BadMessage, match="metadata has at most"):
        Dataset(root)


def test_pictures_that_are_files_of_another_kind_are_refused(root: Path) -> None:
    """Pillow would open many kinds; a dataset has two."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(buffer, "TIFF")
    cells = [{"bytes": buffer.getvalue(), "path": None}] * 9
    rewrite(root, observation__images__front=pa.array(cells, CELL))
    with pytest.raises(BadMessage, match="unreadable picture"):
        Dataset(root).images(0)
