"""An example of any message, made from its type: so that a row added to the table is tested without another line."""

import re
from typing import Any

import msgspec
from msgspec import inspect

TEXTS = ("acme", "pick@3", "a" * 64, "text", "2026-01-01T00:00:00Z", "U" + "A" * 55, "own-arm")


def example(kind: type, *, full: bool) -> Any:
    """A valid message: with every field set, or with the required ones only."""
    return msgspec.convert(_value(inspect.type_info(kind), full=full), kind)


def _value(kind: inspect.Type, *, full: bool) -> Any:  # noqa: C901, PLR0911, PLR0912 - one case per kind of type
    match kind:
        case inspect.Metadata():
            return _value(kind.type, full=full)
        case inspect.StructType() | inspect.DataclassType():
            fields = {f.encode_name: _value(f.type, full=full) for f in kind.fields if full or f.required}
            tag = getattr(kind, "tag", None)
            return {kind.tag_field: tag, **fields} if isinstance(kind, inspect.StructType) and tag is not None else fields
        case inspect.UnionType():
            return _value(next(t for t in kind.types if not isinstance(t, inspect.NoneType)), full=full)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StrType():
            return next(t for t in TEXTS if kind.pattern is None or re.search(kind.pattern, t))
        case inspect.BytesType():
            return b"bytes"
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return max(1, kind.ge or 0)
        case inspect.FloatType():
            low = kind.ge if kind.ge is not None else kind.gt if kind.gt is not None else 0.0
            high = kind.le if kind.le is not None else low + 1.0
            return (low + high) / 2
        case inspect.ListType() | inspect.VarTupleType():
            return [_value(kind.item_type, full=full)]
        case inspect.TupleType():
            return [_value(item, full=full) for item in kind.item_types]
        case inspect.DictType():
            return {_value(kind.key_type, full=full): _value(kind.value_type, full=full)}
        case inspect.AnyType() | inspect.RawType():
            return 1
        case _:
            raise NotImplementedError(f"no example of {kind}")
