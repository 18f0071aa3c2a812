"""Job documents: TOML, YAML or JSON to JobSpec, with errors that name the field and what was probably meant."""

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec

from nexus_bus.errors import BadJob
from schemas.job import JobSpec

MAX_BYTES = 1 << 20
_UNKNOWN = re.compile(r"unknown field `(\w+)`(?: - at `\$\.?([^`]*)`)?")


def read_document(path: Path) -> dict[str, Any]:
    """A document as plain data, by its file ending.

    Raises:
        BadJob: unreadable, too large, or not well formed; says where.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadJob(f"{path}: larger than {MAX_BYTES} bytes; a job document is a page of text")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadJob(f"{path}: {error}") from error
    kind = path.suffix.lower()
    try:
        if kind == ".json":
            document = json.loads(text)
        elif kind in (".yaml", ".yml"):
            import yaml

            document = yaml.safe_load(text)
        elif kind == ".toml":
            document = tomllib.loads(text)
        else:
            raise BadJob(f"{path}: a job document ends in .toml, .yaml or .json")
    except (ValueError, RecursionError) as error:
        raise BadJob(f"{path}: not well formed: {error}") from error
    except Exception as error:  # yaml has its own tree of errors, and yaml is imported only when needed
        if type(error).__module__.startswith("yaml"):
            raise BadJob(f"{path}: not well formed: {' '.join(str(error).split())}") from error
        raise
    if not isinstance(document, dict):
        raise BadJob(f"{path}: a job document is a table of fields, not a {type(document).__name__}")
    return document


def job_spec(document: dict[str, Any] | Path) -> JobSpec:
    """The JobSpec of a document.

    Raises:
        BadJob: an unknown or missing field, a wrong type or value; names the field and the nearest known one.
    """
    data = read_document(document) if isinstance(document, Path) else document
    try:
        return msgspec.convert(data, JobSpec)
    except msgspec.ValidationError as error:
        raise BadJob(_explain(str(error))) from error


def _explain(text: str) -> str:
    found = _UNKNOWN.search(text)
    if found is None:
        return text
    name, place = found.group(1), found.group(2) or ""
    known = _fields(place)
    near = difflib.get_close_matches(name, known, n=1)
    where = f"{place}.{name}" if place else name
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}" if known else ""
    return f"{where}: no such field{hint}"


def _fields(place: str) -> list[str]:
    """Field names at a path of the document; of every variant where there are several."""
    kinds: list[Any] = [JobSpec]
    for part in filter(None, place.split(".")):
        kinds = [
            option
            for kind in kinds
            for f in msgspec.structs.fields(kind)
            if f.name == part
            for option in (get_args(f.type) or (f.type,))
            if isinstance(option, type) and issubclass(option, msgspec.Struct)
        ]
    return sorted({f.encode_name for kind in kinds for f in msgspec.structs.fields(kind)})
