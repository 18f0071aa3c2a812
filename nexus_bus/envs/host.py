"""Simulators in a child process, many sessions in one: what workers/environment.py holds instead of simulators.

A simulator can crash, hang, leak or talk; then the child is killed and its sessions are lost with an `EnvironmentFault`, while
the worker and its event loop go on. One child serves one thread of calls in order, so a GL context never changes threads.
Both ends talk over a socket pair (wire.py), so what a simulator prints disturbs nobody: of ours it is thrown away, of its
owner's own it goes to stderr. Pictures are encoded in the child, off the event loop. A simulator whose packages clash with ours
has a child on an interpreter of its own (recipes.py).
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
from collections.abc import Callable
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
LISTED = Path("/proc/thread-self/children").exists()  # whether the system tells what a process started

_STDERR = 2
_DECODER = msgspec.msgpack.Decoder(Answer)


@dataclass
class _Waiting:
    what: str
    limit: float
    answer: asyncio.Future[Answer]


class _Answers(asyncio.Protocol):
    """Cuts what a child sends into answers; `over` is done once nothing more comes."""

    def __init__(self, take: Callable[[Answer], None], nonsense: Callable[[str], None]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take, self._nonsense = take, nonsense
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while len(self._received) >= LENGTH.size:
                end = LENGTH.size + (size := LENGTH.unpack_from(self._received)[0])
                if size > MAX_FRAME:
                    raise ValueError(f"an answer of {size} bytes")  # noqa: TRY301 - it ends as one that cannot be read does
                if len(self._received) < end:
                    return
                with memoryview(self._received) as received:
                    answer = _DECODER.decode(received[LENGTH.size : end])
                del self._received[:end]
                self._take(answer)
        except (ValueError, IndexError) as error:  # msgspec's are ValueErrors
            self._nonsense(f"simulator process answered nonsense ({error}) and was killed")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


class SimulatorHost:
    """One child process and its sessions. Use from one event loop; calls may overlap and are served in order.

    Any call raises EnvironmentFault when the child died, or when a call made no progress within its time limit: then the
    child is killed, all its sessions are gone, `alive` is False, and a new host has to be started. A fault of one session
    closes that session alone; the host stays `alive`.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: Path,
        *,
        call_timeout: float,
        memory: int,
    ) -> None:
        self._process = process
        self._folder = folder  # the child's working folder: some simulators write logs where they stand
        self._call_timeout = call_timeout
        self._memory = memory
        self._queue: deque[_Waiting] = deque()  # in the order the child serves them
        self._watchdog: asyncio.TimerHandle | None = None
        self._fault: str | None = None
        self._opened = 0
        self.sessions: dict[int, EnvironmentSpec] = {}
        self._answers = _Answers(self._answered, self._expire)
        self._channel: asyncio.Transport
        self._watching: asyncio.Task[None]

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
                stdout=_STDERR if own else asyncio.subprocess.DEVNULL,  # who writes a simulator looks at what it prints
                stderr=complaints,
                cwd=folder,
                env=variables(folder, python, here=bool(own)) | ({"PYTHONUNBUFFERED": "1"} if own else {}),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # what a simulator starts ends with it
            )  # fmt: skip
        host = cls(process, folder, call_timeout=call_timeout, memory=memory)
        host._channel, _ = await asyncio.get_running_loop().create_unix_connection(lambda: host._answers, sock=ours)
        host._watching = asyncio.create_task(host._watch())
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

    async def tasks(self, environment: str, timeout: float = 120.0) -> list[str]:
        """What the child can play of an environment that the catalogue here does not list."""
        return (await self._ask(Request(0, "tasks", spec=EnvironmentSpec(id=environment, task="")), timeout)).tasks

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
        self._channel.close()  # the child ends at the end of its input
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 2.0)
        self._kill()
        await self._process.wait()
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
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
        self._channel.write(LENGTH.pack(len(frame)) + frame)
        self._queue.append(waiting)
        if len(self._queue) == 1:
            self._arm()
        answer = await waiting.answer  # a caller that gives up keeps its place in the order: it stays in the queue
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
            which = " (call_timeout_s)" if head.limit == self._call_timeout else ""
            did_not = "was not loaded" if head.what == "ping" else f"gave no answer to {head.what}"
            text = f"simulator {did_not} within {head.limit:g} s{which} and was killed"
            self._watchdog = asyncio.get_running_loop().call_later(head.limit, self._expire, text)

    def _expire(self, text: str) -> None:
        self._kill()
        self._fail(text)

    def _answered(self, answer: Answer) -> None:
        waiting = self._queue.popleft()
        self._arm()
        if not waiting.answer.done():
            waiting.answer.set_result(answer)

    async def _watch(self) -> None:
        """Look after memory and noise until the end, which a child whose own children keep its socket open hides."""
        over = {self._answers.over}
        try:
            child = psutil.Process(self.pid)
            while not self._answers.over.done() and child.status() != psutil.STATUS_ZOMBIE:
                used = held(child, self._memory)
                if used > self._memory:
                    limit = f"more than its limit of {self._memory / 1e9:.2f} GB"
                    self._expire(f"simulator held {used / 1e9:.2f} GB of memory, {limit} (memory_gb), and was killed")
                    return
                if (self._folder / "stderr").stat().st_size > NOISE:
                    os.truncate(self._folder / "stderr", 0)  # it appends: what comes now is kept
                await asyncio.wait(over, timeout=WATCH_S)
        except (psutil.Error, OSError):
            pass
        await asyncio.wait(over, timeout=1.0)  # its last answers come first
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


def held(child: psutil.Process, limit: int) -> int:
    """Bytes that a process and whatever it started hold in memory; more than `limit` only if that is so without counting twice
    what they share, which takes longer to find out.
    """
    tree = [child, *_descendants(child)]
    held = sum(_asked(one, lambda one: one.memory_info().rss) for one in tree)
    if len(tree) > 1 and held > limit:
        held = sum(_asked(one, lambda one: getattr(full := one.memory_full_info(), "pss", full.uss)) for one in tree)
    return held


def _asked(one: psutil.Process, what: Callable[[psutil.Process], int]) -> int:
    try:
        return what(one)
    except psutil.Error:  # it has just ended
        return 0


def _descendants(child: psutil.Process) -> list[psutil.Process]:
    """All that a process started, and what those started. Linux lists them; elsewhere every process is read."""
    if not LISTED:
        return child.children(recursive=True)
    found: list[psutil.Process] = []
    parents = [child]
    while parents:
        with contextlib.suppress(OSError, psutil.Error):  # what has just ended is passed over
            for listed in Path(f"/proc/{parents.pop().pid}/task").glob("*/children"):
                started = [psutil.Process(int(pid)) for pid in listed.read_text().split()]
                found += started
                parents += started
    return found


def _error(code: str, message: str) -> NexusError:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NexusError)]
    return next((kind for kind in kinds if kind.code == code), EnvironmentFault)(message)
