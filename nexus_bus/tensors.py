"""Arrays and pictures in and out of messages. Used on both ends of every hop that carries observations, actions or records.

What comes off the wire is checked before it is believed: a size that does not match its shape, or a picture that would
unfold to more than `MAX_PIXELS`, is refused with `BadMessage`.
"""

import io
import math
import struct
import zlib
from typing import Any, Literal

import numpy as np
from PIL import Image as Pillow

from nexus_bus.errors import BadMessage
from schemas.base import Image, Tensor

Encoding = Literal["png", "jpeg", "raw"]

MAX_PIXELS = 4096 * 4096
MAX_SCANS = 64  # of a JPEG: each goes over all of the picture, and costs some 20 bytes
JPEG_QUALITY = 95

_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # numpy has none: the upper half of a float32
    "float64": np.dtype("<f8"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "bool": np.dtype("?"),
}
_NAMES: dict[np.dtype[Any], Any] = {dtype: name for name, dtype in _NUMPY.items() if name != "bfloat16"}


def to_tensor(array: np.ndarray) -> Tensor:
    """Pack an array. Raises BadMessage for a dtype that messages do not have."""
    contiguous = np.asarray(array, order="C")
    name = _NAMES.get(contiguous.dtype.newbyteorder("<"))
    if name is None:
        raise BadMessage(
            f"tensor: dtype {contiguous.dtype} cannot travel; use one of {', '.join(sorted(set(_NAMES.values())))}"
        )
    return Tensor(dtype=name, shape=contiguous.shape, data=contiguous.astype(_NUMPY[name], copy=False).tobytes())


def from_tensor(tensor: Tensor) -> np.ndarray:
    """Unpack into a fresh, writable array; bfloat16 widens to float32, which is exact. Raises BadMessage if the size lies."""
    dtype = _NUMPY[tensor.dtype]
    expected = math.prod(tensor.shape) * dtype.itemsize
    if len(tensor.data) != expected:
        raise BadMessage(f"tensor.data: {len(tensor.data)} bytes, but {tensor.dtype} {list(tensor.shape)} takes {expected}")
    array = np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
    if tensor.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.copy()


def encode_image(picture: np.ndarray, encoding: Encoding = "png") -> Image:
    """Pack an HWC uint8 RGB picture. PNG and raw are exact; JPEG (quality 95, no chroma subsampling) is not."""
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or picture.size == 0:
        raise BadMessage(f"image: expected HWC uint8 with 3 channels, got {picture.dtype} {list(picture.shape)}")
    height, width, channels = picture.shape
    shape = (height, width, channels)
    if encoding == "raw":
        return Image(encoding="raw", shape=shape, data=np.ascontiguousarray(picture).tobytes())
    if encoding == "png":
        return Image(encoding="png", shape=shape, data=_png(picture))
    buffer = io.BytesIO()
    Pillow.fromarray(picture).save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return Image(encoding="jpeg", shape=shape, data=buffer.getvalue())


def _png(picture: np.ndarray) -> bytes:
    """Two to five times as fast as Pillow, which tries five filters on every row, at about the size that it makes.

    Each row is told as its difference to the one above, and runs of equal bytes are all that is looked for.
    """
    height, width, _ = picture.shape
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    flat = picture.reshape(height, 3 * width)
    rows[:, 0] = 2  # the filter "up"
    rows[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])
    packer = zlib.compressobj(1, strategy=zlib.Z_RLE)
    packed = packer.compress(rows.data) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of each of three colours
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
        for kind, data in ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    )


def decode_image(image: Image) -> np.ndarray:
    """Unpack to HWC uint8. The declared shape must be the real one. Raises BadMessage."""
    height, width, channels = image.shape
    if channels != 3 or not 0 < height * width <= MAX_PIXELS:
        raise BadMessage(f"image.shape: {list(image.shape)} is not a colour picture of at most {MAX_PIXELS} pixels")
    if image.encoding == "raw":
        if len(image.data) != height * width * 3:
            raise BadMessage(f"image.data: {len(image.data)} bytes, but raw {list(image.shape)} takes {height * width * 3}")
        return np.frombuffer(image.data, np.uint8).reshape(image.shape).copy()
    if image.encoding == "jpeg" and (scans := image.data.count(b"\xff\xda")) > MAX_SCANS:
        raise BadMessage(f"image.data: a jpeg of {scans} scans; at most {MAX_SCANS}")
    try:
        # Only the declared codec may run, and the header is compared before a pixel is unfolded.
        with Pillow.open(io.BytesIO(image.data), formats=[image.encoding.upper()]) as opened:
            if opened.size != (width, height):
                raise BadMessage(
                    f"image.shape: declared {height}x{width}, the {image.encoding} holds {opened.height}x{opened.width}"
                )
            return np.array(opened.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise BadMessage(f"image.data: not a readable {image.encoding}: {error}") from error
