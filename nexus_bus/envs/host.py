"""Simulators in a child process, many sessions in one: what workers/environment.py holds instead of simulators.

A simulator can crash, hang or leak; then the child is killed and its sessions are lost with an `EnvironmentFault`, while the
worker and its event loop go on. One child serves one thread of calls in order, so a GL context never changes threads.
Both ends talk length-prefixed msgpack over a socket pair; pictures are already encoded in the child, off the event loop.
"""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
import numpy as np

from nexus_bus import errors
from nexus_bus.envs.simulator import Observed
from nexus_bus.errors import BadMessage, EnvironmentFault, NexusError, NotFound
from nexus_bus.tensors import encode_image, from_tensor, to_tensor
from schemas.base import Tensor
from schemas.environment import Observation, SessionCall, SessionReply
from schemas.job import EnvironmentSpec

Op = Literal["ping", "open", "call", "expert", "save", "restore", "close"]
Encoding = Literal["png", "jpeg", "raw"]

_LENGTH = struct.Struct("<I")


class Request(msgspec.Struct, omit_defaults=True):
    """Parent to child: one call on one session."""

    session: int
    op: Op
    spec: EnvironmentSpec | None = None  # open
    call: SessionCall | None = None  # call
    encoding: Encoding = "png"  # call, restore
    state: bytes = b""  # restore


class Answer(msgspec.Struct, omit_defaults=True):
    """Child to parent, in the order of the requests: the reply, or the code and text of a NexusError."""

    reply: SessionReply | None = None
    state: bytes = b""  # save
    action: Tensor | None = None  # expert
    version: str = ""  # open: simulator and versions
    code: str = ""
    message: str = ""


@dataclass
class _Waiting:
    what: str
    limit: float
    answer: asyncio.Future[Answer]


class SimulatorHost:
    """One child process and its sessions. Use from one event loop; calls may overlap and are served in order.

    Any call raises EnvironmentFault when the child died, or when a call made no progress within its time limit: then the
    child is killed, all its sessions are gone, `alive` is False, and a new host has to be started. A fault of one session
    closes that session alone; the host stays `alive`.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        folder: str,
        call_timeout: float,
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._folder = folder  # the child's working folder: some simulators write logs where they stand
        self._call_timeout = call_timeout
        self._queue: deque[_Waiting] = deque()  # in the order the child serves them
        self._watchdog: asyncio.TimerHandle | None = None
        self._fault: str | None = None
        self._opened = 0
        self.sessions: dict[int, EnvironmentSpec] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, timeout: float = 30.0, call_timeout: float = 30.0) -> "SimulatorHost":
        """Start a child. Raises EnvironmentFault if it does not answer within `timeout` seconds.

        `call_timeout` is the longest that one call may take once the child has begun it.
        """
        ours, theirs = socket.socketpair()
        folder = tempfile.mkdtemp(prefix="nexus-simulator-")
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "nexus_bus.envs.host", str(theirs.fileno()), str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,  # some simulators ask questions
                stdout=asyncio.subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        host = cls(process, await asyncio.open_unix_connection(sock=ours), folder, call_timeout)
        try:
            await host._ask(Request(0, "ping"), timeout)
        except BaseException:
            await host.stop()
            raise
        return host

    @property
    def alive(self) -> bool:
        """Whether calls can still be made."""
        return self._fault is None

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    async def open(self, spec: EnvironmentSpec, timeout: float = 120.0) -> int:
        """Open a session and return its number. Raises NotFound, BadJob, Unavailable as `Session` does."""
        self._opened += 1
        session = self._opened
        await self._ask(Request(session, "open", spec=spec), timeout)
        self.sessions[session] = spec
        return session

    async def call(self, session: int, call: SessionCall, encoding: Encoding | None = None) -> SessionReply:
        """One call on a session; the reply is ready for the wire, its pictures in `encoding` (unset: the spec's).

        `close` ends the episode and keeps the simulator for whoever leases it next; `SimulatorHost.close` frees it.
        Raises what `Session` raises, NotFound for a session that is not open here, EnvironmentFault when the simulator failed.
        """
        answer = await self._ask(Request(session, "call", call=call, encoding=encoding or self._encoding(session)))
        return answer.reply or SessionReply()

    async def expert(self, session: int) -> np.ndarray:
        """The scripted expert's action, float32 `[D]`."""
        return from_tensor(cast(Tensor, (await self._ask(Request(session, "expert"))).action))

    async def save(self, session: int) -> bytes:
        """The session's whole episode, for `restore` here or in another host."""
        return (await self._ask(Request(session, "save"))).state

    async def restore(self, session: int, state: bytes) -> SessionReply:
        """Put a saved episode into a session of the same environment."""
        answer = await self._ask(Request(session, "restore", state=state, encoding=self._encoding(session)))
        return answer.reply or SessionReply()

    async def close(self, session: int) -> None:
        """Free a session's simulator. Closing one that is not open does nothing."""
        await self._ask(Request(session, "close"))
        self.sessions.pop(session, None)

    async def stop(self) -> None:
        """End the child and wait for it; what is still waiting gets an EnvironmentFault. Calling it twice does nothing."""
        self._fail("the host was stopped")
        self._reading.cancel()
        self._writer.close()  # the child ends at the end of its input
        try:
            await asyncio.wait_for(self._process.wait(), 2.0)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        shutil.rmtree(self._folder, ignore_errors=True)

    def _encoding(self, session: int) -> Encoding:
        if session not in self.sessions:
            raise EnvironmentFault(self._fault) if self._fault else NotFound(f"session: {session} is not open here")
        return self.sessions[session].image_encoding

    async def _ask(self, request: Request, limit: float | None = None) -> Answer:
        if self._fault is not None:
            raise EnvironmentFault(self._fault)
        what = request.call.op if request.call else request.op
        waiting = _Waiting(what, limit or self._call_timeout, asyncio.get_running_loop().create_future())
        frame = msgspec.msgpack.encode(request)
        self._writer.write(_LENGTH.pack(len(frame)) + frame)
        self._queue.append(waiting)
        if len(self._queue) == 1:
            self._arm()
        answer = await asyncio.shield(waiting.answer)  # a caller that gives up must not lose its place in the order
        if not answer.code:
            return answer
        error = _error(answer.code, answer.message)
        if isinstance(error, EnvironmentFault):  # the child has closed it
            self.sessions.pop(request.session, None)
        raise error

    def _arm(self) -> None:
        """Watch the call that the child works on now: the oldest without an answer."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._queue:
            head = self._queue[0]
            text = f"simulator gave no answer to {head.what} within {head.limit:g} s and was killed"
            self._watchdog = asyncio.get_running_loop().call_later(head.limit, self._expire, text)

    def _expire(self, text: str) -> None:
        self._kill()
        self._fail(text)

    async def _read(self) -> None:
        try:
            while True:
                (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                answer = msgspec.msgpack.decode(await self._reader.readexactly(size), type=Answer)
                waiting = self._queue.popleft()
                self._arm()
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
        except (OSError, EOFError):
            await self._process.wait()
            self._fail(f"simulator process ended with code {self._process.returncode}")

    def _fail(self, text: str) -> None:
        self._fault = self._fault or text
        waiting = list(self._queue)
        self._queue.clear()
        self._arm()
        self.sessions.clear()
        for one in waiting:
            if not one.answer.done():
                one.answer.set_exception(EnvironmentFault(self._fault))
                one.answer.exception()  # a caller that gave up does not read it: no "never retrieved" in the log

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _error(code: str, message: str) -> NexusError:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NexusError)]
    return next((kind for kind in kinds if kind.code == code), EnvironmentFault)(message)


class _Child:
    """The other end: sessions by number, one request at a time."""

    def __init__(self) -> None:
        from nexus_bus.envs.session import Session  # here: the parent never needs it

        self._open = Session
        self._sessions: dict[int, Session] = {}

    def serve(self, channel: socket.socket) -> None:
        """Answer requests until the parent closes its end."""
        with channel.makefile("rwb") as stream:
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                request = msgspec.msgpack.decode(stream.read(_LENGTH.unpack(head)[0]), type=Request)
                frame = msgspec.msgpack.encode(self._answer(request))
                stream.write(_LENGTH.pack(len(frame)) + frame)
                stream.flush()
        for session in self._sessions.values():
            session.close()

    def _answer(self, request: Request) -> Answer:
        try:
            return self._handle(request)
        except NexusError as error:
            if isinstance(error, EnvironmentFault):
                self._close(request.session)
            return Answer(code=error.code, message=str(error))
        except Exception as error:  # noqa: BLE001 - the other sessions of this child must go on
            self._close(request.session)
            return Answer(code=EnvironmentFault.code, message=f"{request.op}: {type(error).__name__}: {error}")

    def _close(self, session: int) -> None:
        if session in self._sessions:
            self._sessions.pop(session).close()

    def _handle(self, request: Request) -> Answer:
        if request.op == "ping":
            return Answer()
        if request.op == "open":
            self._sessions[request.session] = self._open(cast(EnvironmentSpec, request.spec))
            return Answer()
        if request.op == "close":
            self._close(request.session)
            return Answer()
        session = self._sessions.get(request.session)
        if session is None:
            raise NotFound(f"session: {request.session} is not open here")
        if request.op == "save":
            return Answer(state=session.save())
        if request.op == "expert":
            return Answer(action=to_tensor(session.expert()))
        begin = time.perf_counter()
        if request.op == "restore":
            reply = _reply(session, session.restore(request.state), request.encoding)
        else:
            reply = _call(session, cast(SessionCall, request.call), request.encoding)
        return Answer(reply=msgspec.structs.replace(reply, device_s=time.perf_counter() - begin))


def _call(session: Any, call: SessionCall, encoding: Encoding) -> SessionReply:
    if call.op == "reset":
        return _reply(session, session.reset(call.seed, call.trial), encoding)
    if call.op == "render":
        return SessionReply(image=encode_image(session.render(), encoding), steps=session.steps)
    if call.op == "close":
        session.leave()
        return SessionReply()
    if call.actions is None:
        raise BadMessage("actions: a step needs them")
    done = session.step(from_tensor(call.actions))
    return msgspec.structs.replace(
        _reply(session, done.observed, encoding),
        rewards=done.rewards,
        successes=done.successes,
        terminated=done.terminated,
        truncated=done.truncated,
    )


def _reply(session: Any, observed: Observed, encoding: Encoding) -> SessionReply:
    images = {camera: encode_image(picture, encoding) for camera, picture in observed.images.items()}
    observation = Observation(images=images, state=to_tensor(observed.state), instruction=observed.instruction)
    return SessionReply(observation=observation, end=session.end, steps=session.steps)


def _die_with(parent: int) -> None:
    """Be killed when the parent ends, even while wedged inside a simulator (Linux; elsewhere the closed socket has to do)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """The child: `python -m nexus_bus.envs.host FD PARENT`."""
    _die_with(int(sys.argv[2]))
    _Child().serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
