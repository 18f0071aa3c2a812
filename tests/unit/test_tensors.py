"""Arrays and pictures survive the trip exactly, and what lies about its size is refused."""

import io

import numpy as np
import pytest
from PIL import Image as Pillow

from nexus_bus.errors import BadMessage
from nexus_bus.tensors import decode_image, encode_image, from_tensor, to_tensor
from schemas.base import Image, Tensor

PICTURE = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8", "int32", "int64", "bool"])
def test_arrays_come_back_equal(dtype: str) -> None:
    array = (np.arange(24).reshape(2, 3, 4) % 5).astype(dtype)
    back = from_tensor(to_tensor(array))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    back[0] = 0  # a fresh array, not a view of the message


def test_scalars_empties_views_and_big_endian() -> None:
    for array in (np.float32(3.5), np.zeros((0, 7), np.float32), np.arange(10)[::-2], np.arange(4, dtype=">f4")):
        np.testing.assert_array_equal(from_tensor(to_tensor(np.asarray(array))), array)


def test_bfloat16_widens_to_float32() -> None:
    values = np.array([1.0, -2.5, 0.15625], np.float32)
    halves = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    np.testing.assert_array_equal(from_tensor(Tensor(dtype="bfloat16", shape=(3,), data=halves)), values)


def test_a_tensor_that_lies_about_its_size_is_refused() -> None:
    with pytest.raises(BadMessage, match=r"tensor\.data: 8 bytes"):
        from_tensor(Tensor(dtype="float32", shape=(1 << 24, 1 << 24), data=b"\0" * 8))


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(BadMessage, match="complex"):
        to_tensor(np.zeros(2, np.complex64))


@pytest.mark.parametrize("encoding", ["png", "raw"])
def test_exact_encodings_are_exact(encoding: str) -> None:
    np.testing.assert_array_equal(decode_image(encode_image(PICTURE, encoding)), PICTURE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "picture",
    [
        np.full((1, 1, 3), 255, np.uint8),
        np.zeros((3, 1, 3), np.uint8),
        PICTURE[::-1, ::2],  # a view
        np.broadcast_to(np.arange(224, dtype=np.uint8)[:, None, None], (224, 301, 3)),
    ],
)
def test_a_png_of_any_shape_is_exact_for_whoever_reads_it(picture: np.ndarray) -> None:
    with Pillow.open(io.BytesIO(encode_image(picture, "png").data)) as opened:
        opened.load()
        assert (opened.format, opened.mode) == ("PNG", "RGB")
        np.testing.assert_array_equal(np.array(opened), picture)


def test_a_plain_picture_is_small() -> None:
    assert len(encode_image(np.zeros((224, 224, 3), np.uint8), "png").data) < 1000


def test_jpeg_is_close() -> None:
    smooth = np.broadcast_to(np.linspace(0, 255, 32, dtype=np.uint8)[:, None, None], (32, 32, 3)).copy()
    assert np.abs(decode_image(encode_image(smooth, "jpeg")).astype(int) - smooth).mean() < 2


@pytest.mark.parametrize(
    "image",
    [
        Image(encoding="png", shape=(12, 20, 3), data=b"not a png"),
        Image(encoding="raw", shape=(12, 20, 3), data=b"short"),
        Image(encoding="png", shape=(1 << 20, 1 << 20, 3), data=encode_image(PICTURE).data),
        Image(encoding="png", shape=(20, 12, 3), data=encode_image(PICTURE).data),
        Image(encoding="jpeg", shape=(12, 20, 3), data=encode_image(PICTURE).data),
        Image(encoding="png", shape=(12, 20, 3), data=encode_image(PICTURE).data[:60]),
    ],
)
def test_bad_pictures_are_refused(image: Image) -> None:
    with pytest.raises(BadMessage, match="image"):
        decode_image(image)


def test_only_hwc_uint8_goes_in() -> None:
    with pytest.raises(BadMessage, match="HWC uint8"):
        encode_image(PICTURE.astype(np.float32))


def test_a_jpeg_that_goes_over_its_picture_again_and_again_is_refused() -> None:
    """40 KB of scans of nothing cost 5 s at 2048 x 2048, in a forward that others share."""
    buffer = io.BytesIO()
    Pillow.fromarray(np.zeros((16, 16, 3), np.uint8)).save(buffer, "JPEG", progressive=True)
    plain = buffer.getvalue()
    assert decode_image(Image(encoding="jpeg", shape=(16, 16, 3), data=plain)).shape == (16, 16, 3)
    scan = plain[plain.rindex(b"\xff\xda") : -2]
    with pytest.raises(BadMessage, match=r"image.data: a jpeg of \d+ scans; at most 64"):
        decode_image(Image(encoding="jpeg", shape=(16, 16, 3), data=plain[:-2] + 1000 * scan + plain[-2:]))
