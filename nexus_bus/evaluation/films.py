"""Short films of what a policy saw: H.264 where PyAV is installed, else GIF. Small enough for one message."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from PIL import Image as Pillow

from nexus_bus.errors import BadMessage
from nexus_bus.tensors import decode_image
from schemas.environment import Observation
from schemas.evaluation import FILM_BYTES

FPS = 4  # decisions per second of film: slow enough to follow
MOST = 160  # pictures; of more, every second one, and so on
SIDE = 384  # pixels, of the longer side
LAST = 4  # how often the last picture is repeated, so that the end can be seen

MediaType = Literal["video/mp4", "image/gif"]


def film(observations: Sequence[Observation]) -> tuple[MediaType, bytes] | None:
    """A film of these observations, cameras side by side; None where there are no pictures, or they do not fit.

    Raises BadMessage for a picture that cannot be read, or encoded.
    """
    seen = [one for one in observations if one.images]
    if not seen:
        return None
    step, side = -(-len(seen) // MOST), SIDE
    while side >= 64:
        frames = [_frame(one, side) for one in seen[::step]]
        if seen[-1] is not seen[::step][-1]:
            frames.append(_frame(seen[-1], side))
        kind, data = _encoded(frames + frames[-1:] * LAST)
        if len(data) <= FILM_BYTES:
            return kind, data
        step, side = step * 2, side * 3 // 4
    return None


def _frame(observation: Observation, side: int) -> np.ndarray:
    """One picture, HWC uint8, even height and width."""
    pictures = [decode_image(image) for _, image in sorted(observation.images.items())]
    height = max(picture.shape[0] for picture in pictures)
    width = sum(picture.shape[1] for picture in pictures)
    canvas = np.zeros((height, width, 3), np.uint8)
    left = 0
    for picture in pictures:
        canvas[: picture.shape[0], left : left + picture.shape[1]] = picture
        left += picture.shape[1]
    scale = min(1.0, side / max(height, width))
    size = (max(2, int(width * scale) // 2 * 2), max(2, int(height * scale) // 2 * 2))
    return np.asarray(Pillow.fromarray(canvas).resize(size)) if size != (width, height) else canvas


def _encoded(frames: list[np.ndarray]) -> tuple[MediaType, bytes]:
    try:
        import av  # an extra: only here
        from av.error import FFmpegError
    except ImportError:
        return "image/gif", _gif(frames)
    try:
        return "video/mp4", _mp4(av, frames)
    except FFmpegError as error:  # an episode must not be lost for its film
        raise BadMessage(f"film: {error}") from error


def _mp4(av: Any, frames: list[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=FPS, options={"crf": "23", "threads": "1"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"  # what browsers play
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def _gif(frames: list[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    first, *others = (Pillow.fromarray(frame) for frame in frames)
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=1000 // FPS, loop=0)
    return buffer.getvalue()
