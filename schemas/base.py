"""What all messages are made of: the Struct they derive from, names, tensors, images and references to blobs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message on the bus. Unknown fields are ignored, so that an older reader survives a newer writer."""

    def __repr__(self) -> str:
        """As it travels, without what holds the default; bytes are counted: a picture's would fill the screen."""
        shown: list[str] = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if value != default:
                text = f"<{len(value):,} bytes>" if isinstance(value, bytes) else repr(value)
                shown.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Part of a document a person writes. Unknown fields are refused, because there they are typing errors."""


END = r"$(?!\n)"  # in Python `$` alone lets a final newline through, which would end a subject; published as plain `$`
PUBLIC = "public"  # no tenant's name: below it lies what every tenant may read
PROVIDER = "provider"  # nor is this: whose are events of nobody's job, and device time that none asked for
NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}" + END

Name = Annotated[str, Meta(pattern=NAME_PATTERN, description="A tenant, job or worker: one token of a subject.")]
JobOrNone = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_-]{0,62}|_)" + END, description="A job, or `_` for none.")]
PolicyRef = Annotated[
    str,
    Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}@(0|[1-9][0-9]{0,8}|latest)" + END, description="`<job>@<n>` or `<job>@latest`."),
]
PolicyId = Annotated[
    str,
    Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}@(0|[1-9][0-9]{0,8})" + END, description="One immutable version: `<job>@<n>`."),
]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**53)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}" + END)]
Dimension = Annotated[int, Meta(ge=0, le=1 << 24)]

DType = Literal["float32", "float16", "bfloat16", "float64", "uint8", "int32", "int64", "bool"]


class Tensor(Message, frozen=True, kw_only=True):
    """A dense array, little-endian, in C order."""

    dtype: DType
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=8)]
    data: bytes


class Image(Message, frozen=True, kw_only=True):
    """One picture, HWC uint8 when decoded. PNG is exact, JPEG small, raw free of codec time: the plan chooses."""

    encoding: Literal["png", "jpeg", "raw"]
    shape: tuple[Dimension, Dimension, Dimension]
    data: bytes


class BlobRef(Message, frozen=True, kw_only=True):
    """Content that travels by the object store: anything above 512 KB, and all weights."""

    sha256: Sha256
    size: Count
    media_type: str = "application/octet-stream"
