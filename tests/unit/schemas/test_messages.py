"""Every message survives both codecs, keeps the schema we publish, and refuses what it should by the field's name."""

import functools
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from msgspec import inspect

from ops.schemas.generate import families, family_schema, structs
from schemas.base import Document, Image, Message, Tensor
from schemas.environment import Observation, SessionCall, SessionReply
from schemas.events import Event
from schemas.inference import InferenceRequest
from schemas.job import JobSpec, Sft
from schemas.policy import PolicyVersion

ALL = [(name, kind) for name, module in families().items() for kind in structs(module)]
IDS = [kind.__name__ for _, kind in ALL]

# Text that satisfies a pattern, by a piece of it.
TEXT = {
    "@(0|[1-9]": "job@3",
    "[0-9a-f]{64}": "0" * 64,
    "[0-9a-f]{8,64}": "0" * 8,
    "[AU]": "U" + "A" * 55,
    "^own": "own-name",
    "[a-z0-9][a-z0-9_-]": "a-name",
}


def example(kind: inspect.Type, *, full: bool) -> Any:
    """A value of the type in builtins: with `full` every optional part is there, else only what is required."""
    match kind:
        case inspect.Metadata():
            made = example(kind.type, full=full)
        case inspect.StructType():
            made = {f.encode_name: example(f.type, full=full) for f in kind.fields if full or f.required}
            made |= {str(kind.tag_field): kind.tag} if kind.tag_field else {}
        case inspect.UnionType():
            made = example(next(t for t in kind.types if not isinstance(t, inspect.NoneType)), full=full)
        case inspect.ListType() | inspect.VarTupleType():
            made = [example(kind.item_type, full=full)] * 2
        case inspect.TupleType():
            made = [example(item, full=full) for item in kind.item_types]
        case inspect.DictType():
            key = kind.key_type.values[-1] if isinstance(kind.key_type, inspect.LiteralType) else "key"
            made = {key: example(kind.value_type, full=full)}
        case inspect.LiteralType():
            made = kind.values[-1]
        case _:
            made = scalar(kind)
    return made


def scalar(kind: Any) -> Any:
    """A value at the edge of what is allowed, where there is one."""
    if isinstance(kind, inspect.StrType):
        return next(text for piece, text in TEXT.items() if piece in kind.pattern) if kind.pattern else "text"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        edges = [edge for edge in (kind.le, kind.ge, None if kind.gt is None else kind.gt + 1) if edge is not None]
        return edges[0] if edges else 3
    return {inspect.BoolType: True, inspect.BytesType: b"\x00\x01\xff"}[type(kind)]


@functools.cache
def published(family: str) -> dict[str, Any]:
    """The family's schema as other languages read it."""
    return family_schema(family, families()[family])


@pytest.mark.parametrize("full", [True, False], ids=["full", "least"])
@pytest.mark.parametrize(("family", "kind"), ALL, ids=IDS)
def test_an_example_round_trips_and_fits_the_published_schema(family: str, kind: type, full: bool) -> None:
    message = msgspec.convert(example(inspect.type_info(kind), full=full), kind)
    text = msgspec.json.encode(message)
    assert msgspec.json.decode(text, type=kind) == message
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
    Draft202012Validator(published(family) | {"$ref": f"#/$defs/{kind.__name__}"}).validate(msgspec.json.decode(text))


@pytest.mark.parametrize(("family", "kind"), ALL, ids=IDS)
def test_structs_are_frozen_keyword_only_and_evolve(family: str, kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen, family
    assert issubclass(kind, Message | Document)
    assert config.forbid_unknown_fields == issubclass(kind, Document)
    assert kind.__doc__


def test_a_newer_writer_is_understood_but_a_typing_error_in_a_document_is_not() -> None:
    assert msgspec.json.decode(b'{"op":"close","new_field":1}', type=SessionCall).op == "close"
    with pytest.raises(msgspec.ValidationError, match="unknown field `bass`"):
        msgspec.json.decode(b'{"kind":"sft","name":"a","bass":"x"}', type=JobSpec)


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ('{"op":"jump"}', SessionCall, r"\$\.op"),
        ('{"op":"reset","seed":-1}', SessionCall, r"\$\.seed"),
        ('{"op":"step","actions":{"dtype":"float32","shape":[-1],"data":""}}', SessionCall, r"\$\.actions\.shape"),
        ('{"kind":"sft","name":"Not A Name"}', JobSpec, r"\$\.name"),
        (r'{"kind":"sft","name":"a\n"}', JobSpec, r"\$\.name"),
        ('{"kind":"sft","name":"a","init":"b@01"}', JobSpec, r"\$\.init"),
        ('{"kind":"sft","name":"a","algorithm":{"name":"sft","steps":"many"}}', JobSpec, r"\$\.algorithm\.steps"),
        ('{"type":"job.exploded","tenant":"a","time":""}', Event, r"\$\.type"),
        ('{"id":"a@latest"}', PolicyVersion, r"\$\.id"),
        ('{"learning_rate":0,"name":"sft"}', Sft, r"\$\.learning_rate"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(text: str, kind: type, names: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=names):
        msgspec.json.decode(text.encode(), type=kind)


def test_a_request_is_told_by_a_short_id():
    """It becomes part of headers, which have room for 64 KB together."""
    with pytest.raises(msgspec.ValidationError, match=r"length <= 200 - at `\$\.id`"):
        msgspec.convert({"id": "i" * 100_000}, InferenceRequest)


def test_a_reply_with_pictures_can_be_looked_at() -> None:
    picture = Image(encoding="png", shape=(96, 96, 3), data=bytes(34_567))
    state = Tensor(dtype="float32", shape=(1,), data=bytes(4))
    seen = Observation(images={"front": picture}, state=state, instruction="reach")
    assert repr(SessionReply(observation=seen, steps=3, clipped=0.5)) == (
        "SessionReply(observation=Observation(images={'front': Image(encoding='png', shape=(96, 96, 3), data=<34,567 bytes>)}, "
        "state=Tensor(dtype='float32', shape=(1,), data=<4 bytes>), instruction='reach'), steps=3, clipped=0.5)"
    )
    assert repr(SessionReply(state=bytes(10))) == "SessionReply(state=<10 bytes>)"
