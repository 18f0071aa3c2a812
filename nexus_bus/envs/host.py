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
from typing import Literal, cast

import msgspec
import numpy as np

from nexus_bus import errors
from nexus_bus.errors import BadMessage, EnvironmentFault, NexusError, NotFound
from nexus_bus.tensors import encode_image, from_tensor, to_tensor
from schemas.base import Tensor
from schemas.environment import Observation, SessionReply
from schemas.job import EnvironmentSpec

Op = Literal["open", "reset", "step", "render", "expert", "save", "restore", "close"]

_LENGTH = struct.Struct("<I")
_LIMIT = 1 << 30  # bytes of one frame: four uncompressed cameras at 4096 px, far above any real one


class Request(msgspec.Struct, omit_defaults=True):
    """Parent to child: one call on one session."""

    id: int
    session: str
    op: Op
    spec: EnvironmentSpec | None = None  # open
    seed: int = 0  # reset
    trial: int = 0  # reset
    actions: Tensor | None = None  # step
    state: bytes = b""  # restore


class Answer(msgspec.Struct, omit_defaults=True):
    """Child to parent: the reply, or the code and text of a NexusError."""

    id: int
    reply: SessionReply | None = None
    state: bytes = b""  # save
    action: Tensor | None = None  # expert
    version: str = ""  # open: simulator and versions
    code: str = ""
    message: str = ""


@dataclass
class _Waiting:
    id: int
    op: Op
    limit: float
    answer: asyncio.Future[Answer]


class SimulatorHost:
    """One child process and its sessions. Use from one event loop; calls may overlap and are served in order.

    Any call raises EnvironmentFault when the child died, or when a call made no progress within its time limit: then the
    child is killed, all its sessions are gone, `alive` is False, and a new host has to be started.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        self._process = process
        self._folder = folder  # the child's working folder: some simulators write logs where they stand
        self._queue: deque[_Waiting] = deque()  # in the order the child serves them
        self._watchdog: asyncio.TimerHandle | None = None
        self._fault: str | None = None
        self._next = 0
        self.sessions: dict[str, EnvironmentSpec] = {}
        self.versions: dict[str, str] = {}  # session -> simulator and versions

    @classmethod
    async def start(cls, timeout: float = 30.0) -> "SimulatorHost":
        """Start a child that answers. Raises EnvironmentFault if it does not within `timeout` seconds."""
        ours, theirs = socket.socketpair()
        folder = tempfile.mkdtemp(prefix="nexus-simulator-")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.envs.host", str(theirs.fileno()), str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,  # some simulators ask questions
            stdout=asyncio.subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
        theirs.close()
        host = cls(process, folder)
        ours.setblocking(False)  # noqa: FBT003 - the socket API
        host._reader, host._writer = await asyncio.open_unix_connection(sock=ours)
        host._reading = asyncio.create_task(host._read())
        try:
            await host._ask("close", "", limit=timeout)  # any answer will do: closing an unknown session is nothing
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

    async def open(self, spec: EnvironmentSpec, session: str | None = None, limit: float = 120.0) -> str:
        """Open a session and return its id. Raises NotFound, BadJob, Unavailable as `Session` does."""
        name = session or f"s{self._next}"
        if name in self.sessions:
            raise BadMessage(f"session: {name} is already open")
        self.sessions[name] = spec
        try:
            answer = await self._ask("open", name, limit, spec=spec)
        except BaseException:
            self.sessions.pop(name, None)
            raise
        self.versions[name] = answer.version
        return name

    async def call(
        self,
        session: str,
        op: Literal["reset", "step", "render", "close"],
        *,
        seed: int = 0,
        trial: int = 0,
        actions: np.ndarray | Tensor | None = None,
        limit: float = 30.0,
    ) -> SessionReply:
        """One call on a session; the reply is ready for the wire, its pictures in the spec's encoding.

        `limit` is the longest this call may take once the child has begun it. Raises what `Session` raises, NotFound for a
        session that is not open here, EnvironmentFault when the simulator failed (that session is then closed).
        """
        packed = to_tensor(actions) if isinstance(actions, np.ndarray) else actions
        answer = await self._ask(op, session, limit, seed=seed, trial=trial, actions=packed)
        if op == "close":
            self.sessions.pop(session, None)
            self.versions.pop(session, None)
        return answer.reply or SessionReply()

    async def expert(self, session: str, limit: float = 30.0) -> np.ndarray:
        """The scripted expert's action, float32 `[D]`."""
        return from_tensor(cast(Tensor, (await self._ask("expert", session, limit)).action))

    async def save(self, session: str, limit: float = 30.0) -> bytes:
        """The session's whole episode, for `restore` here or in another host."""
        return (await self._ask("save", session, limit)).state

    async def restore(self, session: str, state: bytes, limit: float = 30.0) -> SessionReply:
        """Put a saved episode into a session of the same environment."""
        return (await self._ask("restore", session, limit, state=state)).reply or SessionReply()

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

    async def _ask(self, op: Op, session: str, limit: float, **fields: object) -> Answer:
        if self._fault is not None:
            raise EnvironmentFault(self._fault)
        waiting = _Waiting(self._next, op, limit, asyncio.get_running_loop().create_future())
        self._next += 1
        frame = msgspec.msgpack.encode(Request(waiting.id, session, op, **fields))  # type: ignore[arg-type]
        self._writer.write(_LENGTH.pack(len(frame)) + frame)
        self._queue.append(waiting)
        if len(self._queue) == 1:
            self._arm()
        answer = await asyncio.shield(waiting.answer)
        if not answer.code:
            return answer
        error = _error(answer.code, answer.message)
        if isinstance(error, EnvironmentFault):  # the child has closed it
            self.sessions.pop(session, None)
            self.versions.pop(session, None)
        raise error

    def _arm(self) -> None:
        """Watch the call that the child works on now: the oldest without an answer."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._queue:
            head = self._queue[0]
            text = f"simulator gave no answer to {head.op} within {head.limit:g} s and was killed"
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
        self.versions.clear()
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
    """The other end: sessions by name, one request at a time."""

    def __init__(self) -> None:
        from nexus_bus.envs.session import Session  # noqa: PLC0415 - the parent never needs it

        self._open = Session
        self._sessions: dict[str, Session] = {}

    def serve(self, channel: socket.socket) -> None:
        with channel.makefile("rwb") as stream:
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                size = _LENGTH.unpack(head)[0]
                if size > _LIMIT:
                    return
                frame = msgspec.msgpack.encode(self._answer(msgspec.msgpack.decode(stream.read(size), type=Request)))
                stream.write(_LENGTH.pack(len(frame)) + frame)
                stream.flush()
        for session in self._sessions.values():
            session.close()

    def _answer(self, request: Request) -> Answer:
        try:
            return self._handle(request)
        except NexusError as error:
            if isinstance(error, EnvironmentFault) and request.session in self._sessions:
                self._sessions.pop(request.session).close()
            return Answer(request.id, code=error.code, message=str(error))
        except Exception as error:  # noqa: BLE001 - the other sessions of this child must go on
            return Answer(request.id, code=EnvironmentFault.code, message=f"{request.op}: {type(error).__name__}: {error}")

    def _handle(self, request: Request) -> Answer:
        if request.op == "open":
            session = self._open(cast(EnvironmentSpec, request.spec))
            self._sessions[request.session] = session
            return Answer(request.id, version=session.description.simulator)
        if request.op == "close":
            if request.session in self._sessions:
                self._sessions.pop(request.session).close()
            return Answer(request.id)
        session = self._sessions.get(request.session)
        if session is None:
            raise NotFound(f"session: {request.session} is not open here")
        if request.op == "save":
            return Answer(request.id, state=session.save())
        if request.op == "expert":
            return Answer(request.id, action=to_tensor(session.expert()))
        begin = time.perf_counter()
        encoding = session.spec.image_encoding
        if request.op == "render":
            reply = SessionReply(image=encode_image(session.render(), encoding), steps=session.steps)
        elif request.op == "step":
            if request.actions is None:
                raise BadMessage("actions: a step needs them")
            done = session.step(from_tensor(request.actions))
            reply = SessionReply(
                observation=_observation(done.observed, encoding),
                rewards=done.rewards,
                successes=done.successes,
                terminated=done.terminated,
                truncated=done.truncated,
                end=done.end,
                steps=session.steps,
            )
        else:
            restoring = request.op == "restore"
            observed = session.restore(request.state) if restoring else session.reset(request.seed, request.trial)
            reply = SessionReply(
                observation=_observation(observed, encoding), end=session.end or "running", steps=session.steps
            )
        return Answer(request.id, reply=msgspec.structs.replace(reply, device_s=time.perf_counter() - begin))


def _observation(observed, encoding) -> Observation:  # type: ignore[no-untyped-def]
    images = {camera: encode_image(picture, encoding) for camera, picture in observed.images.items()}
    return Observation(images=images, state=to_tensor(observed.state), instruction=observed.instruction)


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
