"""Simulators in a child process, many sessions in one: what workers/environment.py holds instead of simulators.

A simulator can crash, hang, leak or talk; then the child is killed and its sessions are lost with an `EnvironmentFault`, while
the worker and its event loop go on. One child serves one thread of calls in order, so a GL context never changes threads.
Both ends talk over a socket pair (wire.py), so what a simulator prints disturbs nobody; pictures are encoded in the child, off
the event loop. A simulator whose packages clash with ours has a child on an interpreter of its own (recipes.py).
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import psutil

from nexus_bus import errors
from nexus_bus.envs.catalog import ENVIRONMENTS
from nexus_bus.envs.recipes import interpreter, variables
from nexus_bus.envs.wire import LENGTH, MAX_FRAME, PROTOCOL, Answer, Described, Encoding, Request
from nexus_bus.errors import EnvironmentFault, NexusError, NotFound
from nexus_bus.failures import ending, last_words
from nexus_bus.tensors import from_tensor
from schemas.base import Tensor
from schemas.environment import SessionCall, SessionReply
from schemas.job import EnvironmentSpec

MEMORY = 8 << 30  # bytes that a child may hold in memory
WATCH_S = 0.5  # how often its memory is looked at
NOISE = 4 << 20  # bytes of its complaints that are kept


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
        folder: Path,
        *,
        call_timeout: float,
        memory: int,
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._folder = folder  # the child's working folder: some simulators write logs where they stand
        self._call_timeout = call_timeout
        self._memory = memory
        self._queue: deque[_Waiting] = deque()  # in the order the child serves them
        self._watchdog: asyncio.TimerHandle | None = None
        self._fault: str | None = None
        self._opened = 0
        self.sessions: dict[int, EnvironmentSpec] = {}
        self._reading = asyncio.create_task(self._read())
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        timeout: float = 30.0,
        call_timeout: float = 30.0,
        *,
        environment: str = "",
        memory: int = MEMORY,
        own: str = "",
    ) -> "SimulatorHost":
        """Start a child. Raises EnvironmentFault if it does not answer within `timeout` seconds.

        Args:
            call_timeout: seconds that one call may take once the child has begun it.
            environment: whose simulators it is for; one with a virtual environment of its own gets that interpreter.
            memory: bytes it may hold; one that takes more is killed.
            own: `module:callable` of an environment that is not ours (own.py), found from the working directory too.
        """
        ours, theirs = socket.socketpair()
        folder = Path(tempfile.mkdtemp(prefix="nexus-simulator-"))
        python = interpreter(ENVIRONMENTS[environment].venv) if environment in ENVIRONMENTS else None
        with theirs, (folder / "stderr").open("ab") as complaints:
            process = await asyncio.create_subprocess_exec(
                str(python or sys.executable), "-m", "nexus_bus.envs.child", str(theirs.fileno()), str(os.getpid()),
                *([own] if own else []),
                stdin=asyncio.subprocess.DEVNULL,  # some simulators ask questions
                stdout=asyncio.subprocess.DEVNULL,
                stderr=complaints,
                cwd=folder,
                env=variables(folder, python, here=bool(own)),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # what a simulator starts ends with it
            )  # fmt: skip
        host = cls(process, await asyncio.open_unix_connection(sock=ours), folder, call_timeout=call_timeout, memory=memory)
        try:
            answer = await host._ask(Request(0, "ping"), timeout)
            if answer.protocol != PROTOCOL:
                raise EnvironmentFault(  # noqa: TRY301 - it has to be stopped as after any other
                    f"{python}: speaks protocol {answer.protocol}, this host {PROTOCOL}: another version of ours is on its path"
                )
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

    async def describe(self, spec: EnvironmentSpec, timeout: float = 120.0) -> Described:
        """What a policy must fit, asked of the child: for environments whose packages are not installed here."""
        return cast(Described, (await self._ask(Request(0, "describe", spec=spec), timeout)).described)

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
        """The session's whole episode, for `restore` here or in another host. Raises NotFound where the simulator cannot."""
        return (await self.call(session, SessionCall(op="save"))).state

    async def restore(self, session: int, state: bytes) -> SessionReply:
        """Put a saved episode into a session of the same environment."""
        return await self.call(session, SessionCall(op="restore", state=state))

    async def close(self, session: int) -> None:
        """Free a session's simulator. Closing one that is not open does nothing."""
        await self._ask(Request(session, "close"))
        self.sessions.pop(session, None)

    async def stop(self) -> None:
        """End the child and wait for it; what is still waiting gets an EnvironmentFault. Calling it twice does nothing."""
        self._fail("the host was stopped")
        self._writer.close()  # the child ends at the end of its input
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 2.0)
        self._kill()
        await self._process.wait()
        for task in (self._reading, self._watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
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
        self._writer.write(LENGTH.pack(len(frame)) + frame)
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
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > MAX_FRAME:
                    raise ValueError(f"an answer of {size} bytes")  # noqa: TRY301 - it ends as one that cannot be read does
                answer = msgspec.msgpack.decode(await self._reader.readexactly(size), type=Answer)
                waiting = self._queue.popleft()
                self._arm()
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
        except (ValueError, IndexError) as error:  # msgspec's are ValueErrors
            self._expire(f"simulator process answered nonsense ({error}) and was killed")
        except (OSError, EOFError):
            await self._ended()

    async def _watch(self) -> None:
        """Look after memory and noise, and see the end of a child whose own children keep its socket open."""
        try:
            child = psutil.Process(self.pid)
            while child.status() != psutil.STATUS_ZOMBIE:
                used = child.memory_info().rss
                if used > self._memory:
                    limit = f"more than its limit of {self._memory / 1e9:.2f} GB"
                    self._expire(f"simulator held {used / 1e9:.2f} GB of memory, {limit} (memory_gb), and was killed")
                    return
                if (self._folder / "stderr").stat().st_size > NOISE:
                    os.truncate(self._folder / "stderr", 0)  # it appends: what comes now is kept
                await asyncio.sleep(WATCH_S)
        except (psutil.Error, OSError):
            pass
        await asyncio.wait([self._reading], timeout=1.0)  # its last answers come first
        await self._ended()

    async def _ended(self) -> None:
        code = await self._process.wait()
        words = last_words(self._folder / "stderr")
        self._fail(f"simulator process {ending(code)}" + (f": {words}" if words else ""))

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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _error(code: str, message: str) -> NexusError:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NexusError)]
    return next((kind for kind in kinds if kind.code == code), EnvironmentFault)(message)
