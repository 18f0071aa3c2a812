"""The process that simulators live in: sessions by number, one request at a time. The other end of host.py.

It runs on whichever interpreter has the simulator's packages, so nothing here needs more than NumPy, Pillow and msgspec.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import cast

import msgspec

from nexus_bus import memory
from nexus_bus.envs.blame import place
from nexus_bus.envs.catalog import ENVIRONMENTS, EnvDescription, describe
from nexus_bus.envs.session import Session
from nexus_bus.envs.stepped import Stepped, restart
from nexus_bus.envs.wire import LENGTH, PROTOCOL, Answer, Described, Encoding, Request
from nexus_bus.errors import BadMessage, EnvironmentFault, NexusError, NotFound
from nexus_bus.tensors import encode_image, from_tensor, to_tensor
from schemas.environment import Observation, SessionCall, SessionReply
from schemas.job import EnvironmentSpec


class Child:
    """All sessions of this process.

    Args:
        failed: it could not load what it is for, and says so to whatever is asked.
        own: the simulator is its owner's, who is told where in its code a fault was. Of ours the place is nobody's business.
    """

    def __init__(self, failed: Answer | None = None, *, own: bool = False) -> None:
        self.failed = failed
        self.own = own
        self.sessions: dict[int, Session] = {}

    def serve(self, channel: socket.socket) -> None:
        """Answer requests until the parent closes its end."""
        decoder, encoder, frame = msgspec.msgpack.Decoder(Request), msgspec.msgpack.Encoder(), bytearray()
        with channel.makefile("rb") as stream:
            while len(head := stream.read(LENGTH.size)) == LENGTH.size:
                request = decoder.decode(stream.read(LENGTH.unpack(head)[0]))
                encoder.encode_into(self.answer(request), frame, LENGTH.size)  # behind its length: pictures are copied once
                LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
                channel.sendall(frame)
        for number in list(self.sessions):
            self._close(number)

    def answer(self, request: Request) -> Answer:
        """Do what is asked; a fault closes its session, a refusal does not."""
        if self.failed is not None:
            return self.failed
        try:
            return self._handle(request)
        except NexusError as error:
            if not isinstance(error, EnvironmentFault):
                return Answer(code=error.code, message=str(error))
            return self._fault(request, str(error), error)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - other sessions go on
            return self._fault(request, f"{request.op}: {type(error).__name__}: {error}", error)

    def _fault(self, request: Request, text: str, error: BaseException) -> Answer:
        self._close(request.session)
        return Answer(code=EnvironmentFault.code, message=text + (place(error) if self.own else ""))

    def _close(self, session: int) -> None:
        if session in self.sessions:
            with contextlib.suppress(Exception):  # it is over either way, and the other sessions of this child must go on
                self.sessions.pop(session).close()

    def _handle(self, request: Request) -> Answer:
        match request.op:
            case "ping":
                return Answer(protocol=PROTOCOL)
            case "tasks":
                return Answer(tasks=list(ENVIRONMENTS[cast(EnvironmentSpec, request.spec).id].tasks))
            case "describe":
                return Answer(described=_described(describe(cast(EnvironmentSpec, request.spec))))
            case "open":
                session = self.sessions[request.session] = Session(cast(EnvironmentSpec, request.spec))
                return Answer(described=_described(session.description))
            case "close":
                self._close(request.session)
                return Answer()
            case _:
                return self._on(request)

    def _on(self, request: Request) -> Answer:
        """A call on a session that is open."""
        session = self.sessions.get(request.session)
        if session is None:
            raise NotFound(f"session: {request.session} is not open here")
        if request.op == "expert":
            return Answer(action=to_tensor(session.expert()))
        begin = time.perf_counter()
        reply = _call(session, cast(SessionCall, request.call), request.encoding)
        return Answer(reply=msgspec.structs.replace(reply, device_s=time.perf_counter() - begin))


def _described(known: EnvDescription) -> Described:
    return Described(
        known.action,
        known.observation,
        known.max_steps,
        known.instructions,
        known.simulator,
        known.expert,
        known.success,
    )


def _call(session: Session, call: SessionCall, encoding: Encoding) -> SessionReply:
    match call.op:
        case "reset":
            return _reply(session, restart(session.reset(call.seed, call.trial)), encoding)
        case "render":
            return SessionReply(image=encode_image(session.render(), encoding), steps=session.steps)
        case "save":
            return SessionReply(state=session.save(), end=session.end or "running", steps=session.steps)
        case "restore":
            reply = _reply(session, restart(session.restore(call.state)), encoding)
            return msgspec.structs.replace(reply, end=session.end or "running")
        case "close":
            session.leave()
            return SessionReply()
        case "step":
            if call.actions is None:
                raise BadMessage("actions: a step needs them")
            return _reply(session, session.step(from_tensor(call.actions)), encoding)


def _reply(session: Session, stepped: Stepped, encoding: Encoding) -> SessionReply:
    seen = stepped.observed
    images = {camera: encode_image(picture, encoding) for camera, picture in seen.images.items()}
    return SessionReply(
        observation=Observation(images=images, state=to_tensor(seen.state), instruction=seen.instruction),
        rewards=stepped.rewards,
        successes=stepped.successes,
        terminated=stepped.terminated,
        truncated=stepped.truncated,
        end=stepped.end,
        steps=session.steps,
        clipped=stepped.clipped,
    )


def _load(target: str) -> Answer | None:
    """What goes wrong with somebody's own code is told in one line, with the place; a traceback's last line may be anything."""
    try:
        importlib.import_module("nexus_bus.envs.own").register(target)
    except NexusError as error:
        return Answer(code=error.code, message=str(error))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - it is answered
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return Answer(code=EnvironmentFault.code, message=f"--env {target}: {what}{place(error)}")
    return None


def _die_with(parent: int) -> None:
    """Be killed when the parent ends, even while wedged inside a simulator (Linux; elsewhere the closed socket has to do)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        with contextlib.suppress(OSError):  # if memory runs out faster than the parent looks, the kernel takes this one
            Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """The child: `python -m nexus_bus.envs.child FD PARENT [MODULE:CALLABLE]`."""
    descriptor, parent, *own = sys.argv[1:]
    _die_with(int(parent))
    memory.keep()
    faulthandler.enable()  # a crash in native code says where, and the parent repeats the last line
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)  # a process that a simulator starts must not keep it open
    Child(_load(own[0]) if own else None, own=bool(own)).serve(channel)


if __name__ == "__main__":
    main()
