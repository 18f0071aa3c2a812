"""Job documents and protocols: TOML, YAML or JSON, with errors that name field and line, and what was probably meant."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import LiteralType, StructType, Type, UnionType, type_info

from nexus_bus.errors import BadJob, NexusError
from schemas.evaluation import Protocol
from schemas.job import JobSpec

T = TypeVar("T")

MAX_BYTES = 1 << 20
_UNKNOWN = re.compile(r"unknown field `(\w+)`(?: - at `\$\.?([^`]*)`)?")
_MISSING = re.compile(r"missing required field `(\w+)`(?: - at `\$\.?([^`]*)`)?")
_PLACE = re.compile(r"^(.*) - at `\$\.?([^`]*)`$", re.DOTALL)

_NAME_SHAPE = "a name is lower-case letters, digits, - and _, and begins with a letter or digit"
_SHAPES = {"init": "a policy is named <job>@<number> or <job>@latest"}


def read_document(path: Path) -> dict[str, Any]:
    """A document as plain data, by its file ending.

    Raises:
        BadJob: unreadable, too large, or not well formed; says where.
    """
    return _parse(path, _text(path))


def job_spec(document: Mapping[str, Any] | Path) -> JobSpec:
    """The JobSpec of a document, given as data or as a file.

    Raises:
        BadJob: an unknown or missing field, a wrong type or value; names the field, its line, and the nearest known one.
    """
    return _document(document, JobSpec)


def protocol(document: Path) -> Protocol:
    """The protocol in a file. Raises as `job_spec`."""
    return _document(document, Protocol)


def _document(document: Mapping[str, Any] | Path, kind: type[T]) -> T:
    text = _text(document) if isinstance(document, Path) else ""
    data = _parse(document, text) if isinstance(document, Path) else document
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        field, what = _explain(str(error), kind)
        where = f"{document}{_line(text, field)}: " if isinstance(document, Path) else ""
        raise BadJob(f"{where}{field}: {what}" if field else f"{where}{what}") from error


def located(path: Path, error: NexusError) -> NexusError:
    """A refusal of what a file asks for, with the line that asks; its text begins with the field."""
    field = str(error).partition(": ")[0]
    return type(error)(f"{path}{_line(_text(path), field)}: {error}") if field.replace(".", "").isidentifier() else error


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadJob(f"{path}: larger than {MAX_BYTES} bytes; a job document is a page of text")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadJob(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise BadJob(f"{path}: {error.strerror or error}") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml", ".json"):
        raise BadJob(f"{path}: a job document ends in .toml, .yaml or .json")
    try:
        document = tomllib.loads(text) if kind == ".toml" else json.loads(text) if kind == ".json" else _yaml(text)
    except (ValueError, RecursionError) as error:
        raise BadJob(f"{path}: not well formed: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise BadJob(f"{path}: a job document is a table of fields, not a {type(document).__name__}")
    return document


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _explain(text: str, root: type) -> tuple[str, str]:
    """(field, what is wrong with it) of a validation error."""
    if found := _UNKNOWN.search(text):
        name, place = found.group(1), found.group(2) or ""
        variants = [{f.name for f in kind.fields} for kind in _structs(_at(place, root))]
        known = sorted({field for fields in variants if name not in fields for field in fields})
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
        return _join(place, name), f"no such field{hint}"
    if found := _MISSING.search(text):
        return _join(found.group(2) or "", found.group(1)), "missing"
    if found := _PLACE.match(text):
        what, field = found.groups()
        return field, f"{what}{_choices(what, field, root)}" if "regex" not in what else _SHAPES.get(field, _NAME_SHAPE)
    return "", text


def _choices(what: str, field: str, root: type) -> str:
    """What an invalid value could have been."""
    if not what.startswith("Invalid"):
        return ""
    parent, _, name = field.rpartition(".")
    tags = [str(kind.tag) for kind in _structs(_at(parent, root)) if kind.tag_field == name and kind.tag is not None]
    values = [str(value) for kind in _at(field, root) if isinstance(kind, LiteralType) for value in kind.values]
    return f"; there are {', '.join(tags or values)}"


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _line(text: str, field: str) -> str:
    """`:<number>` of the line that sets the field, where exactly one line sets one of that name."""
    name = field.rpartition(".")[2]
    if not name.isidentifier():
        return ""
    # A key at the start of a line, of a table header, or inside an inline table.
    pattern = re.compile(rf"""(?:^\s*|[\[{{,.]\s*)["']?{name}["']?\s*[=:\]]""")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    return f":{lines[0]}" if len(lines) == 1 else ""


def _at(place: str, root: type) -> list[Type]:
    """The types that may stand at a path of the document."""
    kinds: list[Type] = [type_info(root)]
    for part in filter(None, place.split(".")):
        kinds = [f.type for kind in _structs(kinds) for f in kind.fields if f.name == part]
    return _flat(kinds)


def _structs(kinds: list[Type]) -> list[StructType]:
    return [kind for kind in _flat(kinds) if isinstance(kind, StructType)]


def _flat(kinds: Iterable[Type]) -> list[Type]:
    return [one for kind in kinds for one in (kind.types if isinstance(kind, UnionType) else (kind,))]
