"""Parquet as LeRobot and `datasets` want it: columns and their description, the tasks' table. Below data/writer.py."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from nexus_bus.data.layout import Feature

NUMBERS: dict[str, pa.DataType] = {
    "float32": pa.float32(),
    "float64": pa.float64(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "uint8": pa.uint8(),
    "bool": pa.bool_(),
}
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Columns and the metadata by which `datasets` knows vectors, matrices and pictures."""
    columns: list[tuple[str, pa.DataType]] = []
    described: dict[str, Any] = {}
    for key, feature in features.items():
        if feature["dtype"] == "video":
            continue
        if feature["dtype"] == "image":
            columns.append((key, PICTURE))
            described[key] = {"_type": "Image"}
            continue
        dtype, meaning = NUMBERS[feature["dtype"]], {"dtype": feature["dtype"], "_type": "Value"}
        if math.prod(feature["shape"]) > 1 or len(feature["shape"]) > 1:
            for size in reversed(feature["shape"]):
                dtype, meaning = pa.list_(dtype, size), {"feature": meaning, "length": size, "_type": "List"}
        columns.append((key, dtype))
        described[key] = meaning
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def column(values: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """`[n, *shape]` numbers as a column of that type."""
    sizes: list[int] = []
    while pa.types.is_fixed_size_list(dtype):
        sizes.append(dtype.list_size)
        dtype = dtype.value_type
    found = pa.array(values.reshape(-1)).cast(dtype)
    for size in reversed(sizes):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found


def tasks(numbers: Mapping[str, int]) -> pa.Table:
    """`task` is the pandas index of this table, which the format's readers rely on."""

    def described(name: str, kind: str, dtype: str) -> dict[str, Any]:
        return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}

    index = {
        "name": None,
        "field_name": None,
        "pandas_type": "unicode",
        "numpy_type": "object",
        "metadata": {"encoding": "UTF-8"},
    }
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [index],
        "columns": [described("task_index", "int64", "int64"), described("task", "unicode", "object")],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    table = pa.table({"task_index": pa.array(list(numbers.values()), pa.int64()), "task": pa.array(list(numbers))})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
