"""One decode path, which refuses with the field's name."""

import json

import msgspec
import pytest
from bus_examples import example

from nexus_bus.bus.codec import decode, encode
from nexus_bus.errors import BadMessage
from schemas.base import Tensor
from schemas.environment import SessionCall
from schemas.job import JobCancel
from schemas.subjects import BY_NAME, TABLE, SubjectEntry

NAMES = [row.name for row in TABLE]


@pytest.mark.parametrize("row", TABLE, ids=NAMES)
@pytest.mark.parametrize("full", [True, False], ids=["full", "minimal"])
def test_every_row_round_trips(row: SubjectEntry, *, full: bool) -> None:
    message = example(row.message, full=full)
    assert decode(row, encode(row, message)) == message
    if row.reply is not None:
        reply = example(row.reply, full=full)
        assert decode(row, encode(row, reply, reply=True), reply=True) == reply


@pytest.mark.parametrize("row", TABLE, ids=NAMES)
def test_every_row_reads_both_content_types(row: SubjectEntry) -> None:
    message = example(row.message, full=True)
    assert decode(row, msgspec.json.encode(message), "application/json; charset=utf-8") == message
    assert decode(row, msgspec.msgpack.encode(message), "application/msgpack") == message


@pytest.mark.parametrize(
    ("name", "document", "said"),
    [
        ("event", {"type": "job.exploded", "tenant": "acme", "time": "now"}, r"job\.exploded.*\$\.type"),
        ("job.cancel", {"job": 7}, r"\$\.job"),
        ("job.cancel", {"job": "Not A Name"}, r"\$\.job"),
        ("job.cancel", {}, "missing required field `job`"),
        ("job.submit", {"name": "pick", "kind": "sft", "stepps": 3}, "stepps"),
        ("env.open", {"tenant": "acme", "job": "pick", "environment": {"id": "x", "task": 3}}, r"\$\.environment\.task"),
    ],
)
def test_what_is_wrong_is_refused_by_name(name: str, document: dict[str, object], said: str) -> None:
    with pytest.raises(BadMessage, match=f"^{name}: .*{said}"):
        decode(BY_NAME[name], json.dumps(document).encode())


def test_an_unknown_field_of_a_message_is_ignored() -> None:
    newer = {"job": "pick", "urgency": "high"}
    assert decode(BY_NAME["job.cancel"], json.dumps(newer).encode()) == JobCancel(job="pick")


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_not_readable_is_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage, match=r"job\.cancel"):
        decode(BY_NAME["job.cancel"], payload)


def test_an_unknown_content_type_is_refused() -> None:
    with pytest.raises(BadMessage, match="use application/json or application/msgpack"):
        decode(BY_NAME["job.cancel"], b"{}", "application/x-pickle")


def test_a_tensor_with_an_unknown_dtype_is_refused_by_name() -> None:
    call = {"op": "step", "actions": {"dtype": "complex64", "shape": [1], "data": b"12345678"}}
    with pytest.raises(BadMessage, match=r"\$\.actions\.dtype"):
        decode(BY_NAME["env.session"], msgspec.msgpack.encode(call))


def test_encoding_another_type_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match=r"job\.cancel carries JobCancel, not SessionCall"):
        encode(BY_NAME["job.cancel"], SessionCall(op="reset"))
    with pytest.raises(TypeError, match="carries nothing"):
        encode(BY_NAME["job.cancel"], Tensor(dtype="bool", shape=(), data=b"1"), reply=True)


def test_an_infinity_is_refused_where_it_would_be_kept_as_json() -> None:
    algorithm = {"name": "ppo", "value_clip": float("inf")}
    document = {"kind": "rl", "name": "pick", "environment": {"id": "tabletop", "task": "touch"}, "algorithm": algorithm}
    with pytest.raises(BadMessage, match=r"\$\.algorithm\.value_clip"):
        decode(BY_NAME["job.submit"], msgspec.msgpack.encode(document), "application/msgpack")


def test_an_error_that_quotes_a_long_value_stays_short_and_names_the_field() -> None:
    with pytest.raises(BadMessage, match=r"\$\.kind") as caught:
        decode(BY_NAME["job.submit"], json.dumps({"kind": "x" * 1_000_000, "name": "pick"}).encode())
    assert len(str(caught.value)) < 500
