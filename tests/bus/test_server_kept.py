"""`nexus up` and its server on a machine that is out of memory or disk: it comes back as soon as there is room, at its port."""

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.bus import EmbeddedServer
from nexus_bus.cli import service
from nexus_bus.errors import Unavailable
from nexus_bus.host import _keep
from tests.conftest import Eventually, free_port


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(subprocess, "Popen", fork)


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Path, *_: Any, **__: Any) -> None:
        self.open("w").close()  # as the system does: it is empty, and then nothing more fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)


@pytest.mark.parametrize("lacks", [no_memory, no_room])
async def test_the_server_comes_back_when_there_is_room_again(
    tmp_path: Path, eventually: Eventually, lacks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    EmbeddedServer(tmp_path, port=free_port()).start().stop()
    server, said = EmbeddedServer(tmp_path).start(), list[str]()
    url, pid = server.url, server.pid
    keeping = asyncio.create_task(_keep(server, said.append))
    try:
        with pytest.MonkeyPatch.context() as patching:
            lacks(patching)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: keeping.done() or any("cannot be started" in line for line in said))
            assert not keeping.done(), "it gave up"
        await eventually(server.running)
        assert (server.url, server.ended) == (url, None)
        assert server.pid != pid
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        server.stop()


def test_a_start_without_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory(monkeypatch)
    with pytest.raises(Unavailable, match=r"nats-server in .* cannot be started: .*Cannot allocate memory"):
        EmbeddedServer(tmp_path, port=free_port()).start()


def test_the_port_that_clients_know_outlives_a_full_disk(tmp_path: Path) -> None:
    port, others = free_port(), free_port()
    EmbeddedServer(tmp_path, port=port).start().stop()
    with pytest.MonkeyPatch.context() as patching:
        no_room(patching)
        with pytest.raises(Unavailable, match="No space left"):
            EmbeddedServer(tmp_path, port=others).start()
    server = EmbeddedServer(tmp_path).start()
    server.stop()
    assert server.url.endswith(f":{port}")


def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def echo(text: str) -> None:
        said.append(text)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("click.echo", echo)
    service._say("nats-server ended")
    assert said[0].endswith(" nats-server ended")
