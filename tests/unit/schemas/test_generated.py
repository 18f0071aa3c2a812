"""What other languages read: valid JSON Schemas, an AsyncAPI document that holds together, and no drift."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from nexus_bus.bus import headers
from ops.schemas import generate
from schemas.subjects import BY_NAME, TABLE

FAMILIES = sorted(path for path in generate.OUT.glob("*.json"))


@pytest.fixture(scope="module")
def asyncapi() -> dict[str, Any]:
    return yaml.safe_load((generate.OUT / "asyncapi.yaml").read_text(encoding="utf-8"))


def test_nothing_generated_lags_behind() -> None:
    assert generate.drift() == [], "run `make schemas`"


def test_drift_is_seen(tmp_path: Path) -> None:
    made = generate.files()
    for name, text in made.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert generate.drift(tmp_path) == []
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "usage.json").unlink()
    assert generate.drift(tmp_path) == ["job.json", "old.json", "usage.json"]


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_each_family_is_a_valid_schema_whose_references_resolve(path: Path) -> None:
    schema = json.loads(path.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert [ref for ref in references(schema) if resolve(schema, ref) is None] == []


def test_comments_of_fields_are_their_descriptions() -> None:
    schema = json.loads((generate.OUT / "control.json").read_text(encoding="utf-8"))
    assert schema["$defs"]["Lease"]["properties"]["expires"]["description"] == "unix seconds; 0: it was given up"


def test_the_asyncapi_document_has_its_parts(asyncapi: dict[str, Any]) -> None:
    assert asyncapi["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= asyncapi["info"].keys()
    assert asyncapi["defaultContentType"] == "application/json"
    for name, schema in asyncapi["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema | {"$id": f"urn:test:{name}"})


def test_its_references_resolve(asyncapi: dict[str, Any]) -> None:
    found = list(references(asyncapi))
    assert len(found) > 3 * len(TABLE)
    assert [ref for ref in found if resolve(asyncapi, ref) is None] == []


def test_every_row_is_a_channel_with_both_ends(asyncapi: dict[str, Any]) -> None:
    for name, row in BY_NAME.items():
        channel = asyncapi["channels"][name]
        assert channel["address"] == row.pattern
        assert set(channel.get("parameters", {})) == set(row.tokens)
        assert asyncapi["operations"][f"{name}.send"]["x-nexus-role"] == row.producer
        assert asyncapi["operations"][f"{name}.receive"]["x-nexus-role"] == row.consumer
        message = asyncapi["components"]["messages"][name]
        assert message["contentType"] == f"application/{row.codec}"
        assert message["payload"]["$ref"].endswith(f"/{row.message.__name__}")
        assert ("reply" in asyncapi["operations"][f"{name}.send"]) == (row.reply is not None or name == "infer.request")


def test_operations_use_the_messages_of_their_channel(asyncapi: dict[str, Any]) -> None:
    for operation in asyncapi["operations"].values():
        assert operation["action"] in {"send", "receive"}
        assert all(message["$ref"].startswith(operation["channel"]["$ref"] + "/messages/") for message in operation["messages"])


def test_the_headers_we_send_are_the_documented_ones(asyncapi: dict[str, Any]) -> None:
    sent = headers.build(BY_NAME["job.submit"], "acme", "id-1", {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    schema = asyncapi["components"]["schemas"]["Headers"]
    assert set(sent) <= set(schema["properties"])
    Draft202012Validator(schema).validate(sent)


def references(node: Any) -> Iterator[str]:
    """Every `$ref` in a document."""
    if isinstance(node, dict):
        if isinstance(ref := node.get("$ref"), str):
            yield ref
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(document: Any, ref: str) -> Any:
    """What a local reference names, or None."""
    assert ref.startswith("#/"), f"{ref} is not local"
    for part in ref[2:].split("/"):
        document = document.get(part) if isinstance(document, dict) else None
    return document
