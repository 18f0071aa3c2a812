"""Messages to bytes and back: the one decode path. It refuses with the name of the field that is wrong."""

from typing import Any

import msgspec

from nexus_bus.errors import BadMessage
from schemas.subjects import Codec, SubjectEntry

CONTENT_TYPES: dict[Codec, str] = {"json": "application/json", "msgpack": "application/msgpack"}
MAX_PAYLOAD = 8 * 1024 * 1024  # of one message; the server's limit
QUOTED = 400  # characters of what was found, in an error
SAID = 2000  # of whatever else is told: logs and events are kept for long
MAX_BLOB_MESSAGE = 64 * 1024 * 1024  # of a message that travelled by the object store

_JSON = msgspec.json.Encoder()
_MSGPACK = msgspec.msgpack.Encoder()
_DECODERS: dict[tuple[type, str], Any] = {}


def encode(row: SubjectEntry, message: Any, *, reply: bool = False, asked: str | None = None) -> bytes:
    """Encode a message of a row (or its reply) by the row's codec.

    Args:
        asked: of a reply, the content type of the request: who asked in JSON can read JSON, bytes as base64.

    Raises:
        TypeError: the row carries another type; a programming error.
    """
    wanted = row.reply if reply else row.message
    if wanted is None or not isinstance(message, wanted):
        raise TypeError(f"{row.name} carries {getattr(wanted, '__name__', 'nothing')}, not {type(message).__name__}")
    return _MSGPACK.encode(message) if content_type(row, asked) == CONTENT_TYPES["msgpack"] else _JSON.encode(message)


def content_type(row: SubjectEntry, asked: str | None = None) -> str:
    """How a message of a row travels, or the reply to one that came as `asked`."""
    return CONTENT_TYPES["json"] if asked and _plain(asked) == CONTENT_TYPES["json"] else CONTENT_TYPES[row.codec]


def _plain(kind: str) -> str:
    return kind.partition(";")[0].strip().lower()


def decode(row: SubjectEntry, payload: bytes, kind: str | None = None, *, reply: bool = False) -> Any:
    """Decode a payload into the row's type, checking every constraint.

    Args:
        kind: content type from the message's header; without one the row's own codec is taken, for messages written by hand.

    Raises:
        BadMessage: not of that type; the text ends with the path of the field.
    """
    kind = _plain(kind or CONTENT_TYPES[row.codec])
    wanted = row.reply if reply else row.message
    if wanted is None:
        raise BadMessage(f"{row.name} has no reply")
    if len(payload) > MAX_BLOB_MESSAGE:
        raise BadMessage(f"{row.name}: {len(payload)} bytes; at most {MAX_BLOB_MESSAGE} are read")
    try:
        decoder = _decoder(wanted, kind)
    except KeyError:
        raise BadMessage(f"{row.name}: Content-Type {kind!r}; use application/json or application/msgpack") from None
    try:
        message = decoder.decode(payload)
        if kind != CONTENT_TYPES["json"] and row.codec == "json":
            # What it says is kept and sent on as JSON, which has no infinity: an unreadable copy would stop whoever reads it.
            message = _decoder(wanted, CONTENT_TYPES["json"]).decode(_JSON.encode(message))
    except msgspec.ValidationError as error:
        raise BadMessage(f"{row.name}: {brief(str(error), QUOTED)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{row.name}: not readable as {kind}: {error}") from None
    return message


def brief(text: str, most: int = SAID) -> str:
    """An error may quote a value of any length: its beginning, and its end, which names the field."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-(most // 2) :]}"


def _decoder(wanted: type, kind: str) -> Any:
    found = _DECODERS.get((wanted, kind))
    if found is None:
        made = {"application/json": msgspec.json.Decoder, "application/msgpack": msgspec.msgpack.Decoder}[kind]
        found = _DECODERS[wanted, kind] = made(wanted)
    return found
