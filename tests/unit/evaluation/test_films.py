"""Films of what a policy saw: playable, small, and of everything it saw."""

import builtins
import io
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image as Pillow

from nexus_bus.errors import BadMessage
from nexus_bus.evaluation.films import LAST, film
from nexus_bus.tensors import encode_image, to_tensor
from schemas.base import Image
from schemas.environment import Observation
from schemas.evaluation import FILM_BYTES


def seen(*pictures: np.ndarray) -> Observation:
    images = {f"camera{i}": encode_image(picture, "png") for i, picture in enumerate(pictures)}
    return Observation(images=images, state=to_tensor(np.zeros(1, np.float32)), instruction="touch")


def plain(value: int, height: int = 48, width: int = 64) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def decoded(data: bytes) -> list[np.ndarray]:
    import av

    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_a_film_has_a_picture_per_decision_and_cameras_side_by_side():
    made = film([seen(plain(20 * i), plain(200)) for i in range(10)])
    assert made is not None
    kind, data = made
    assert kind == "video/mp4"
    frames = decoded(data)
    assert len(frames) == 10 + LAST
    assert frames[0].shape == (48, 128, 3)
    assert abs(int(frames[5][24, 30].mean()) - 100) < 12
    assert abs(int(frames[5][24, 100].mean()) - 200) < 12


def test_a_long_noisy_film_of_large_pictures_is_made_small():
    rng = np.random.Generator(np.random.PCG64(0))
    noise = [rng.integers(0, 255, (256, 256, 3), np.uint8) for _ in range(40)]
    made = film([seen(noise[i % 40]) for i in range(200)])
    assert made is not None
    assert len(made[1]) <= FILM_BYTES
    assert len(decoded(made[1])) > 10


def test_without_pyav_it_is_a_gif(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "av" or name.startswith("av."):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    made = film([seen(plain(20 * i)) for i in range(6)])
    assert made is not None
    assert made[0] == "image/gif"
    with Pillow.open(io.BytesIO(made[1])) as opened:
        assert getattr(opened, "n_frames", 0) >= 6


def test_no_pictures_are_no_film_and_a_broken_one_is_said():
    assert film([]) is None
    assert film([seen()]) is None
    broken = Image(encoding="png", shape=(48, 64, 3), data=b"no picture")
    with pytest.raises(BadMessage, match="not a readable png"):
        film([replace(seen(), images={"camera0": broken})])
