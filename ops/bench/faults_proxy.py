"""A wire between workers and server that can be cut: connections stay open, and nothing comes through."""

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit

CHUNK = 1 << 16


class Proxy:
    """On the loopback interface. What is sent while the wire is cut arrives once it is joined, as TCP would have it."""

    def __init__(self, url: str) -> None:
        """To the server at `url`."""
        there = urlsplit(url)
        self._there = (there.hostname, there.port)
        self._joined = asyncio.Event()
        self._joined.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Where clients connect."""
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    def cut(self) -> None:
        """From now on nothing comes through, in neither direction."""
        self._joined.clear()

    def join(self) -> None:
        """What was held up comes through, and what follows."""
        self._joined.set()

    async def stop(self) -> None:
        """End every connection."""
        assert self._server is not None
        self._server.close()
        self.join()
        for writer in self._writers:
            writer.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = {writer}
        self._writers |= ends
        try:
            await self._joined.wait()
            if writer.is_closing() or reader.at_eof():
                return
            back, forth = await asyncio.open_connection(*self._there)
            ends.add(forth)
            self._writers |= ends
            ways = {asyncio.create_task(self._pipe(reader, forth)), asyncio.create_task(self._pipe(back, writer))}
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        except OSError:  # the server is away: so is what it serves
            return
        finally:
            self._tasks.discard(task)
            self._writers -= ends
            for end in ends:
                end.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._joined.wait()
                writer.write(data)
                await writer.drain()
