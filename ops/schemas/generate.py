"""Write `schemas/generated/`: a JSON Schema per message family, and an AsyncAPI 3.0 document of the table of subjects.

Beside the line: run by `make schemas`; `make check` runs it with `--check` and fails when the files lag behind the Structs. A
field's trailing comment becomes its description, so that a reader in another language is told the same.

Sources: JSON Schema 2020-12 (json-schema.org/draft/2020-12), AsyncAPI 3.0.0 (asyncapi.com/docs/reference/specification/v3.0.0).
"""

import argparse
import ast
import functools
import importlib
import inspect
import io
import pkgutil
import sys
import tokenize
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import yaml

import schemas
from schemas import SCHEMA_VERSION
from schemas.base import END, NAME_PATTERN
from schemas.subjects import TABLE, SubjectEntry

OUT = Path(schemas.__file__).parent / "generated"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFRESH = "make schemas"

Document = dict[str, Any]

HEADERS: dict[str, tuple[str, str]] = {
    "Content-Type": ("^application/(json|msgpack)$", "How the payload is encoded; both are accepted for every message."),
    "Nexus-Schema": (f"^{SCHEMA_VERSION}$", "Version of these schemas."),
    "Nats-Msg-Id": ("", "Identity of the message: the same one published again is stored once."),
    "traceparent": ("^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$", "W3C trace context of the sender's span."),
    "ce-specversion": ("^1\\.0$", "CloudEvents 1.0."),
    "ce-type": ("^nexus\\.[a-z.]+$", "`nexus.` and the channel's name."),
    "ce-source": ("^/nexus/", "`/nexus/` and the sender's name."),
    "ce-id": ("", "The message's identity, as Nats-Msg-Id where there is one."),
    "ce-time": ("", "RFC 3339, when it was sent."),
    "Nexus-Reply-To": ("", "Where the answer to a stream's message goes: its reply subject is the acknowledgement."),
    "Nexus-Blob": ("", "Set when the payload is a BlobRef: the message itself lies in the object store."),
}
REQUIRED_HEADERS = ["Content-Type"]  # what a sender in another language must set; the rest it should


@functools.cache
def families() -> dict[str, ModuleType]:
    """The modules of `schemas` that define messages, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(schemas.__path__) if not module.ispkg)
    modules = {name: importlib.import_module(f"schemas.{name}") for name in names if name != "subjects"}
    return {name: module for name, module in modules.items() if structs(module)}


def structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    """The Structs a module defines itself, in its order."""
    found = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, msgspec.Struct)]
    return [kind for kind in found if kind.__module__ == module.__name__ and kind.__struct_fields__]


def family_schema(name: str, module: ModuleType) -> Document:
    """A self-contained JSON Schema: `#/$defs/<Struct>` for every Struct of the family, and for what those refer to."""
    return {
        "$schema": DIALECT,
        "$id": f"urn:nexus-bus:schema:{SCHEMA_VERSION}:{name}",
        "title": name,
        "description": _first_line(module),
        "$defs": _components(structs(module), "#/$defs/{name}"),
    }


def asyncapi() -> Document:
    """The table of subjects as AsyncAPI: a channel per row, who sends on it, who receives, and what is answered."""
    channels: Document = {}
    operations: Document = {}
    messages: Document = {}
    for row in TABLE:
        channels[row.name] = _channel(row)
        messages[row.name] = _message(row, row.message, row.type)
        if row.reply is not None:
            channels[f"{row.name}.reply"] = {
                "address": None,  # the asker's inbox
                "description": f"Answers to {row.name}, to the reply subject of the request.",
                "messages": {f"{row.name}.reply": {"$ref": f"#/components/messages/{row.name}.reply"}},
            }
            messages[f"{row.name}.reply"] = _message(row, row.reply, f"{row.type}.reply")
        for action, who in (("send", row.producer), ("receive", row.consumer)):
            operations[f"{row.name}.{action}"] = _operation(row, action, who)
    kinds = [kind for row in TABLE for kind in (row.message, row.reply) if kind is not None]
    return {
        "asyncapi": "3.0.0",
        "id": "urn:nexus-bus",
        "info": {
            "title": "Nexus Bus",
            "version": SCHEMA_VERSION,
            "description": "Every message that crosses the bus. Made from schemas/*.py; do not edit.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": messages,
            "schemas": {"Headers": _headers()} | _components(kinds, "#/components/schemas/{name}"),
        },
    }


def files() -> dict[str, str]:
    """Everything generated, by file name."""
    made = {
        f"{name}.json": msgspec.json.format(msgspec.json.encode(family_schema(name, module)), indent=2).decode() + "\n"
        for name, module in families().items()
    }
    made["asyncapi.yaml"] = yaml.safe_dump(asyncapi(), sort_keys=False, allow_unicode=True, width=120)
    return made


def drift(out: Path = OUT) -> list[str]:
    """Names of files that are missing, differ, or should not be there."""
    made = files()
    there = {path.name: path.read_text(encoding="utf-8") for path in out.glob("*") if path.is_file()} if out.is_dir() else {}
    return sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))


def _channel(row: SubjectEntry) -> Document:
    channel: Document = {
        "address": row.pattern,
        "description": row.summary,
        "messages": {row.name: {"$ref": f"#/components/messages/{row.name}"}},
        "x-nexus-delivery": row.delivery,
    }
    if row.tokens:
        channel["parameters"] = {token: {"description": f"A name: {_published(NAME_PATTERN)}, or `_`."} for token in row.tokens}
    if row.stream:
        channel["x-nexus-stream"] = row.stream
    return channel


def _message(row: SubjectEntry, kind: type, name: str) -> Document:
    return {
        "name": name,
        "title": kind.__name__,
        "summary": _sentence(kind),
        "contentType": f"application/{row.codec}",
        "headers": {"$ref": "#/components/schemas/Headers"},
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


def _operation(row: SubjectEntry, action: str, who: str) -> Document:
    operation: Document = {
        "action": action,
        "channel": {"$ref": f"#/channels/{row.name}"},
        "summary": row.summary,
        "messages": [{"$ref": f"#/channels/{row.name}/messages/{row.name}"}],
        "x-nexus-role": who,
    }
    if row.reply is not None:
        operation["reply"] = {"channel": {"$ref": f"#/channels/{row.name}.reply"}}
    elif row.name == "infer.request":
        operation["reply"] = {
            "address": {"location": "$message.header#/Nexus-Reply-To"},
            "channel": {"$ref": "#/channels/infer.reply"},
        }
    return operation


def _headers() -> Document:
    properties = {
        name: {"type": "string", "description": text} | ({"pattern": pattern} if pattern else {})
        for name, (pattern, text) in HEADERS.items()
    }
    return {"title": "Headers", "type": "object", "properties": properties, "required": REQUIRED_HEADERS}


def _components(kinds: list[type[msgspec.Struct]] | list[type], template: str) -> Document:
    """Schemas of the kinds and of everything below them, by name, each field with its comment as description."""
    _, found = msgspec.json.schema_components(kinds, ref_template=template)
    found = _published(found)
    comments = {kind.__name__: _comments(module)[kind.__name__] for module in families().values() for kind in structs(module)}
    for name, schema in found.items():
        for key, value in schema.get("properties", {}).items():
            text = comments.get(name, {}).get(key)
            if text and "description" not in value:
                value["description"] = text
    return dict(sorted(found.items()))


def _published(node: Any) -> Any:
    """A schema with patterns as other languages know them."""
    if isinstance(node, str):
        return node.replace(END, "$")
    if isinstance(node, dict):
        return {key: _published(value) for key, value in node.items()}
    return [_published(value) for value in node] if isinstance(node, list) else node


@functools.cache
def _comments(module: ModuleType) -> dict[str, dict[str, str]]:
    """Trailing comments of the fields, by class and field."""
    source = inspect.getsource(module)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    at = {token.start[0]: token.string.removeprefix("#").strip() for token in tokens if token.type == tokenize.COMMENT}
    return {
        node.name: {
            part.target.id: at[part.end_lineno or part.lineno]
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.end_lineno in at
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def _sentence(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def main() -> int:
    """Write the files, or with --check say which lag behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if something would")
    arguments = parser.parse_args()
    stale = drift()
    if arguments.check:
        if stale:
            print(
                f"schemas/generated is not what schemas/ says ({', '.join(stale)}): run `{REFRESH}` and commit", file=sys.stderr
            )
        return 1 if stale else 0
    OUT.mkdir(exist_ok=True)
    made = files()
    for name in stale:
        if name in made:
            (OUT / name).write_text(made[name], encoding="utf-8")
        else:
            (OUT / name).unlink()
    print(f"{len(made)} files, {len(stale)} changed: {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
