"""The films of a dataset that is being written, one at a time per camera. Below data/writer.py.

Pictures are encoded as H.264. A film that exists already is taken over packet by packet, so that a conversion loses nothing.
"""

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from nexus_bus.data.layout_v30 import VIDEO_PATH, place
from nexus_bus.errors import BadMessage

VIDEO_MB = 200
CODEC = "h264"


class FilmWriter:
    """The films of one camera; their numbers are its own, not those of the data files.

    Args:
        folder: of the dataset. key: the feature. fps: whole frames per second.
        shape: [height, width, 3] of every picture; both even, as the pixel format wants it.
    """

    def __init__(self, folder: Path, key: str, fps: int, shape: list[int]) -> None:
        if shape[0] % 2 or shape[1] % 2:
            raise BadMessage(f"features.{key}.shape: {shape}; a film needs an even height and width, dtype image takes any")
        self.info: dict[str, Any] = {}  # of the codec, for info.json
        self._folder = folder
        self._key = key
        self._fps = fps
        self._shape = shape
        self._file = -1
        self._frames = 0  # in this file
        self._bytes = 0
        self._container: Any = None
        self._stream: Any = None
        self._kind: object = None  # what a film must have in common with this file to go into it
        self._copied = True

    def write(self, pictures: Iterable[np.ndarray]) -> dict[str, Any]:
        """Append an episode's pictures, HWC uint8; where they lie, as the episodes' table has it."""
        import av  # here: only films need it

        if self._copied or self._full():
            self._begin(None)
        begin = self._frames
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts, frame.time_base = self._frames, Fraction(1, self._fps)
            self._mux(self._stream.encode(frame))
            self._frames += 1
        return self._where(begin)

    def copy(self, source: Path, frames: int) -> dict[str, Any]:
        """Append a whole film of `frames` frames as it is. Raises BadMessage if it is not of this size and that length."""
        import av
        from av.error import FFmpegError

        try:
            with av.open(str(source), format="mp4", container_options={"protocol_whitelist": "file"}) as film:
                stream = film.streams.video[0]
                if [stream.height, stream.width] != self._shape[:2]:
                    raise BadMessage(f"{source.name}: film of {stream.height}x{stream.width}, expected {self._shape[:2]}")
                context = stream.codec_context
                kind = (context.name, context.pix_fmt, bytes(context.extradata or b""), stream.time_base)
                if kind != self._kind or self._full():
                    self._begin(stream)
                    self._kind = kind
                begin, offset = self._frames, round(self._frames / self._fps / float(stream.time_base or 1))
                for packet in film.demux(stream):
                    if packet.pts is not None and packet.dts is not None:  # the last one only says that there are no more
                        packet.pts, packet.dts = packet.pts + offset, packet.dts + offset
                        packet.stream = self._stream
                        self._mux([packet])
                        self._frames += 1
        except (FFmpegError, OSError, ValueError, IndexError) as error:
            raise BadMessage(f"{source.name}: film that cannot be taken over: {error}") from error
        if self._frames - begin != frames:
            raise BadMessage(f"{source.name}: {self._frames - begin} frames, the episode has {frames}")
        return self._where(begin)

    def close(self) -> None:
        """Finish the open file."""
        if self._container is not None:
            if not self._copied:
                self._mux(self._stream.encode(None))
            self._container.close()
            self._container = None

    def _begin(self, like: Any) -> None:
        import av

        self.close()
        self._file, self._frames, self._bytes, self._copied = self._file + 1, 0, 0, like is not None
        path = self._folder / VIDEO_PATH.format(video_key=self._key, **place(self._file))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        if like is not None:
            self._stream = self._container.add_stream_from_template(like)
            context = like.codec_context
            codec, pixels = str(context.codec.canonical_name), str(context.pix_fmt)
        else:
            self._kind = None
            self._stream = self._container.add_stream(CODEC, rate=self._fps, options={"crf": "18", "g": "2"})
            self._stream.height, self._stream.width = self._shape[:2]
            self._stream.pix_fmt = "yuv420p"
            self._stream.time_base = Fraction(1, self._fps)
            codec, pixels = CODEC, "yuv420p"
        self.info = {
            "video.height": self._shape[0], "video.width": self._shape[1], "video.codec": codec, "video.pix_fmt": pixels,
            "video.is_depth_map": False, "video.fps": self._fps, "video.channels": 3, "has_audio": False,
        }  # fmt: skip

    def _mux(self, packets: list[Any]) -> None:
        for packet in packets:
            self._bytes += packet.size
            self._container.mux(packet)

    def _full(self) -> bool:
        return self._container is None or self._bytes > VIDEO_MB << 20

    def _where(self, begin: int) -> dict[str, Any]:
        times = {"from_timestamp": begin / self._fps, "to_timestamp": self._frames / self._fps}
        return {f"videos/{self._key}/{name}": value for name, value in (place(self._file) | times).items()}
