"""Pictures of a dataset: stored ones, and frames of films whose decoders stay open, so many of them. Below data/reader.py.

What a header says is compared with the feature before a pixel is unfolded: a picture of a few bytes may claim gigabytes.
"""

import io
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from nexus_bus.data.layout import Root
from nexus_bus.errors import BadMessage
from nexus_bus.tensors import MAX_PIXELS

warnings.filterwarnings("ignore", category=Pillow.DecompressionBombWarning)  # it is refused below, in our own words

OPEN_FILMS = 8
AHEAD = 8  # frames that are decoded on the way rather than looked for anew


def still(data: bytes, shape: Sequence[int], where: str) -> np.ndarray:
    """Decode a PNG or JPEG to HWC uint8. Raises BadMessage, also for a picture of another size than `shape`."""
    height, width, channels = shape
    try:
        with Pillow.open(io.BytesIO(data), formats=["PNG", "JPEG"]) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise BadMessage(f"{where}: picture of {opened.width}x{opened.height} pixels; {MAX_PIXELS} in all is the limit")
            if [opened.height, opened.width, channels] != [height, width, 3]:
                raise BadMessage(f"{where}: picture {[opened.height, opened.width, 3]}, info.json says {list(shape)}")
            return np.array(opened.convert("RGB"))
    except Pillow.DecompressionBombError as error:
        raise BadMessage(f"{where}: picture that claims far more pixels than the limit of {MAX_PIXELS} in all") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise BadMessage(f"{where}: unreadable picture: {' '.join(str(error).split())}") from error


class Films:
    """Open films of one dataset, by path. Opening one costs more than a frame of it, so `OPEN_FILMS` stay open."""

    def __init__(self, root: Root, fps: float) -> None:
        self._root = root
        self._fps = fps
        self._open: OrderedDict[str, _Decoder] = OrderedDict()
        self.opened = 0  # how often, for whoever wants to know

    def at(self, name: str, time: float, shape: Sequence[int], where: str) -> np.ndarray:
        """The frame of a film at `time` seconds, HWC uint8. Raises BadMessage if there is none within half a frame."""
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = _Decoder(self._root.current(name), self._fps, shape, where)
            self.opened += 1
            if len(self._open) > OPEN_FILMS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return found.at(time, where)

    def count(self, name: str) -> int:
        """Frames of an open film, as its header says; 0 where it does not."""
        return self._open[name].frames

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __len__(self) -> int:
        """Films that are open."""
        return len(self._open)

    def close(self) -> None:
        """Let go of the files."""
        while self._open:
            self._open.popitem()[1].close()


class _Decoder:
    """An open film: forward frame by frame while times rise, by seeking otherwise."""

    def __init__(self, path: Path, fps: float, shape: Sequence[int], where: str) -> None:
        import av  # here: only films need it
        from av.error import FFmpegError

        self._failures = (FFmpegError, OSError, ValueError, EOFError)
        self._fps = fps
        try:
            # Left to guess, it takes a playlist for one, which names other files and addresses.
            self._container = av.open(str(path), format="mp4", container_options={"protocol_whitelist": "file"})
        except self._failures as error:
            raise BadMessage(f"{where}: no whole film: {error}") from error
        streams = self._container.streams.video
        size = [streams[0].height, streams[0].width, 3] if streams else []
        if size != list(shape) or math.prod(size) > 3 * MAX_PIXELS:
            self._container.close()
            raise BadMessage(f"{where}: film of {size or 'no pictures'}, info.json says {list(shape)}")
        self._shape = tuple(shape)
        self._stream = streams[0]
        self.frames = int(self._stream.frames)
        self._stream.thread_type = "SLICE"  # threads per frame hold back a dozen of them, and a sample needs one
        self._frames: Iterator[Any] = iter(())
        self._frame: Any = None  # the last one decoded

    def at(self, time: float, where: str) -> np.ndarray:
        """The picture shown at `time` seconds."""
        half = 0.5 / self._fps
        try:
            if not math.isfinite(time) or time < -half:
                raise BadMessage(f"{where}: {time} is no time of a film")
            seen = -math.inf if self._frame is None else float(self._frame.time)
            if abs(seen - time) > half:
                if not seen < time < seen + AHEAD / self._fps:
                    base = float(self._stream.time_base or 1)
                    self._container.seek(max(0, int((time - half) / base)), stream=self._stream)
                    self._frames = self._container.decode(self._stream)
                self._frame = next((frame for frame in self._frames if float(frame.time) >= time - half), None)
            if self._frame is None or float(self._frame.time) > time + half:
                last = "" if self._frame is None else f"; the next is at {float(self._frame.time):.3f} s"
                raise BadMessage(f"{where}: no picture at {time:.3f} s{last}; the film is cut off or another one")
            picture = self._frame.to_ndarray(format="rgb24")
        except self._failures as error:
            self._frame, self._frames = None, iter(())
            raise BadMessage(f"{where}: not readable at {time:.3f} s: {error}") from error
        if picture.shape != self._shape:
            raise BadMessage(f"{where}: picture {list(picture.shape)} at {time:.3f} s, info.json says {list(self._shape)}")
        return picture

    def close(self) -> None:
        """Let go of the file."""
        self._container.close()
