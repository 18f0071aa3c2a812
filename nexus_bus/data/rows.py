"""The tables of a dataset, read piece by piece: a row group when a frame of it is asked for, so many megabytes of them kept.

Nothing of the data is read when a dataset opens, and no more than `HELD_BYTES` stays, whatever its size. What is read is
compared with what metadata say of it: columns, sizes of cells, and the running number of every row.
"""

import bisect
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nexus_bus.data.layout import INFO, PICTURES, Feature, Layout
from nexus_bus.errors import BadMessage

HELD_BYTES = 256 << 20
OPEN_TABLES = 16
MAX_GROUP = 1 << 30  # unpacked bytes of one column of a row group
AT_ONCE = 4  # pictures unpacked before that is looked at: a file may hold one once and name it in every row
BATCH = 65_536  # rows of a batch of numbers …
BATCH_BYTES = 64 << 20  # … which are fewer if a row holds many of them
_ENDS = b"PAR1"


@dataclass(frozen=True, slots=True)
class Table:
    """A data file: rows [begin, end) of the dataset."""

    name: str
    begin: int
    end: int


class Rows:
    """Cells of a dataset by row number.

    Raises:
        BadMessage: a file that is not there, is cut off, or is not what the metadata say; the text names it.
    """

    def __init__(self, layout: Layout) -> None:
        self._root = layout.root
        self._features = layout.features
        self.tables = _tables(layout)
        self._begins = [table.begin for table in self.tables]
        self._open: OrderedDict[int, tuple[pq.ParquetFile, list[int]]] = OrderedDict()
        self._held: OrderedDict[tuple[int, int, str], Any] = OrderedDict()
        self._counted: set[tuple[int, int]] = set()  # row groups whose running numbers were looked at
        self.held_bytes = 0
        self.groups_read = 0

    def check_ends(self) -> None:
        """Look at the first and last bytes of every file, which a writer that was killed did not write."""
        for table in self.tables:
            path = self._root.inside(table.name)
            try:
                with path.open("rb", buffering=0) as file:
                    first = file.read(4)
                    file.seek(-4, 2)
                    last = file.read(4)
            except FileNotFoundError as error:
                raise BadMessage(f"dataset {self._root.name}: there is no {table.name}") from error
            except OSError as error:
                raise BadMessage(f"{table.name}: {error.strerror or error}; it is empty or cannot be read") from error
            if first != _ENDS or last != _ENDS:
                raise BadMessage(
                    f"{table.name}: no whole parquet file: its footer is missing. Whoever wrote it did not finish; copy or "
                    "record it again"
                )

    def numbers(self, key: str, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) of a column, `[n, *shape]` in the column's own type."""
        parts: list[np.ndarray] = []
        while begin < end:
            number, group, offset, size = self._find(begin)
            taken = min(size - offset, end - begin)
            parts.append(self._column(number, group, key)[offset : offset + taken])
            begin += taken
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def cell(self, key: str, row: int) -> dict[str, Any]:
        """A stored picture, {"bytes", "path"}."""
        number, group, offset, _ = self._find(row)
        found = self._column(number, group, key)[offset].as_py()
        if not isinstance(found, dict) or (found.get("bytes") is None and not isinstance(found.get("path"), str)):
            raise BadMessage(f"{self.tables[number].name}: {key}[{row}] holds neither bytes nor a path of a picture")
        return found

    def stream(self, keys: Sequence[str], only: int | None = None) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """All rows in order, or those of one file, as (first row, columns), at most BATCH at a time; nothing of it is kept."""
        for table in self.tables if only is None else [self.tables[only]]:
            file, _ = self._opened(table)  # one of its own, for whoever asks for single rows meanwhile
            begin = table.begin
            present = [key for key in keys if key in file.schema_arrow.names]
            try:
                for group in range(file.num_row_groups if present else 0):
                    for key in present:
                        self._check_size(file, group, key, table.name)
                for batch in file.iter_batches(_batch([self._features[key] for key in present]), columns=present):
                    yield begin, {key: matrix(batch[key], self._features[key], table.name, key) for key in present}
                    begin += batch.num_rows
            except (OSError, ValueError, pa.ArrowException) as error:
                raise BadMessage(f"{table.name}: not readable after row {begin}: {error}") from error
            finally:
                file.close()

    def columns(self, number: int) -> pa.Schema:
        """The columns of a data file."""
        return self._file(number)[0].schema_arrow

    def close(self) -> None:
        """Let go of the files."""
        while self._open:
            self._open.popitem()[1][0].close()
        self._held.clear()
        self.held_bytes = 0

    def _find(self, row: int) -> tuple[int, int, int, int]:
        """File, row group, row in it, and rows of it."""
        number = bisect.bisect_right(self._begins, row) - 1
        _, begins = self._file(number)
        offset = row - self.tables[number].begin
        group = bisect.bisect_right(begins, offset) - 1
        return number, group, offset - begins[group], begins[group + 1] - begins[group]

    def _file(self, number: int) -> tuple[pq.ParquetFile, list[int]]:
        found = self._open.get(number)
        if found is None:
            found = self._open[number] = self._opened(self.tables[number])
            if len(self._open) > OPEN_TABLES:
                self._open.popitem(last=False)[1][0].close()
        self._open.move_to_end(number)
        return found

    def _opened(self, table: Table) -> tuple[pq.ParquetFile, list[int]]:
        path = self._root.current(table.name)
        try:
            file = pq.ParquetFile(path)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadMessage(f"{table.name}: no whole parquet file: {error}") from error
        meta = file.metadata
        if meta.num_rows != table.end - table.begin:
            file.close()
            raise BadMessage(
                f"{table.name}: {meta.num_rows} rows, the episodes in it have {table.end - table.begin}; one was cut short, "
                "or its metadata belong to another file"
            )
        begins = [0]
        for group in range(meta.num_row_groups):
            begins.append(begins[-1] + meta.row_group(group).num_rows)
        return file, begins

    def _column(self, number: int, group: int, key: str) -> Any:
        where = (number, group, key)
        found = self._held.get(where)
        if found is None:
            if (number, group) not in self._counted:
                self._count(number, group)
            found = self._held[where] = self._read(number, group, key)
            self.held_bytes += found.nbytes
            while self.held_bytes > HELD_BYTES and len(self._held) > 1:
                self.held_bytes -= self._held.popitem(last=False)[1].nbytes
        self._held.move_to_end(where)
        return found

    def _read(self, number: int, group: int, key: str) -> Any:
        file, begins = self._file(number)
        name = self.tables[number].name
        if key not in file.schema_arrow.names:
            raise BadMessage(f"{name}: no column {key}, which {INFO} names as a feature")
        feature, rows = self._features[key], begins[group + 1] - begins[group]
        pictures = feature["dtype"] in PICTURES
        self._check_size(file, group, key, name)
        pieces: list[Any] = []
        held = found = 0
        try:
            for batch in file.iter_batches(AT_ONCE if pictures else _batch([feature]), row_groups=[group], columns=[key]):
                pieces.append(batch[key] if pictures else matrix(batch[key], feature, name, key))
                held, found = held + pieces[-1].nbytes, found + len(pieces[-1])
                if held > MAX_GROUP:
                    raise BadMessage(_too_large(name, key, group, f"more than {MAX_GROUP}"))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadMessage(f"{name}: {key} is not readable: {error}") from error
        self.groups_read += 1
        if found != rows or not pieces:
            raise BadMessage(f"{name}: {key} has {found} rows, its footer says {rows}")
        if pictures:
            return pa.chunked_array(pieces)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _check_size(self, file: pq.ParquetFile, group: int, key: str, name: str) -> None:
        """What the footer says of a column. Of packed data that says little, but cells of any number of numbers show there."""
        meta, feature = file.metadata.row_group(group), self._features[key]
        wanted = meta.num_rows * (1 if feature["dtype"] in PICTURES else max(1, math.prod(feature["shape"])))
        for column in (meta.column(number) for number in range(meta.num_columns)):
            if column.path_in_schema == key or column.path_in_schema.startswith(f"{key}."):
                if column.total_uncompressed_size > MAX_GROUP:
                    raise BadMessage(_too_large(name, key, group, str(column.total_uncompressed_size)))
                if column.num_values > wanted:
                    each = column.num_values / max(meta.num_rows, 1)
                    raise BadMessage(f"{name}: {key} has {each:g} numbers a row, {INFO} says shape {feature['shape']}")

    def _count(self, number: int, group: int) -> None:
        _, begins = self._file(number)
        first = self.tables[number].begin + begins[group]
        found = self._read(number, group, "index")
        wrong = np.flatnonzero(found.ravel() != np.arange(first, first + len(found)))
        if len(wrong):
            row = int(wrong[0])
            raise BadMessage(
                f"{self.tables[number].name}: row {begins[group] + row} has index {found.ravel()[row]}, expected {first + row}"
            )
        self._counted.add((number, group))


def _batch(features: Sequence[Feature]) -> int:
    """Rows of a batch of such numbers."""
    size = sum(8 * math.prod(feature["shape"]) for feature in features)
    return max(1, min(BATCH, BATCH_BYTES // max(1, size)))


def _too_large(name: str, key: str, group: int, size: str) -> str:
    return f"{name}: {key} of row group {group} unpacks to {size} bytes; {MAX_GROUP} is the limit; write smaller row groups"


def matrix(column: pa.Array | pa.ChunkedArray, feature: Feature, name: str, key: str) -> np.ndarray:
    """A column as `[n, *shape]`. Raises BadMessage where a cell is missing or has another size."""
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    shape = feature["shape"]
    rows, size = len(values), math.prod(shape)
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type):
        if values.null_count:
            raise BadMessage(f"{name}: {key} has empty cells")
        if not pa.types.is_fixed_size_list(values.type):
            lengths = np.diff(values.offsets.to_numpy())
            if len(lengths) and (lengths != lengths[0]).any():
                row = int(np.flatnonzero(lengths != lengths[0])[0])
                raise BadMessage(f"{name}: {key} has {lengths[0]} numbers in row 0 and {lengths[row]} in row {row}")
        values = values.flatten()
    if values.null_count:
        raise BadMessage(f"{name}: {key} has empty cells")
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        raise BadMessage(f"{name}: {key} holds {values.type}, which is no number")
    if len(values) != rows * size:
        raise BadMessage(f"{name}: {key} has {len(values) / max(rows, 1):g} numbers a row, {INFO} says shape {shape}")
    return values.to_numpy(zero_copy_only=False).reshape(rows, *shape)


def _tables(layout: Layout) -> list[Table]:
    """The data files in order; episodes that follow each other in one file make one entry."""
    tables: list[Table] = []
    for episode in layout.episodes:
        if tables and tables[-1].name == episode.data:
            tables[-1] = Table(episode.data, tables[-1].begin, episode.end)
        else:
            tables.append(Table(episode.data, episode.begin, episode.end))
    return tables
