"""Publishing into streams: a bounded window, a deadline per message, retries under the same id.

The stock `publish_async` swallows errors and leaves futures open after a disconnect (#985), and a publish that "timed out" may
have been stored. So every message has an id, is sent again until the server confirms it or its deadline passes, and the
server drops what it has already.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from nexus_bus import faults
from nexus_bus.bus import headers as wire
from nexus_bus.errors import Conflict, NexusError, Refused, Unavailable
from schemas.subjects import SubjectEntry

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

WINDOW = 256  # messages in flight per connection
RESEND_S = 2.0  # no answer for this long: send again
PAUSE_S = 1.0  # between tries of what finds no room, after shorter ones; from then on the log says so
INLINE_BYTES = 512 * 1024  # above it the payload travels by the object store
WRONG_REVISION = frozenset({10071, 10164})
FULL = frozenset({10077, 10023, 10028, 10047})  # queue of this subject full, stream full, no room on the server
UNDER_WAY = 10158  # of a cluster: an earlier try of ours, which the other servers have not confirmed yet
LATER = 429  # too many at once; from here on the fault is the server's (5xx), and passes or is mended there


@dataclass(frozen=True)
class Published:
    """The server's confirmation. `duplicate`: it had this id already, maybe from an earlier try of ours."""

    seq: int
    duplicate: bool


class ServerError(msgspec.Struct):
    """What the server says it is about."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class _Confirmation(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: ServerError | None = None


_CONFIRMATION = msgspec.json.Decoder(_Confirmation)


class _NotNowError(NexusError):
    """No room, nobody there, or not settled, right now."""


class Publisher:
    """The one way into a stream."""

    def __init__(self, bus: "Bus") -> None:
        """Use `bus.publisher`."""
        self._bus = bus
        self._window = asyncio.Semaphore(WINDOW)
        self._flying: dict[str, asyncio.Future[Published]] = {}
        self._inbox = ""
        self._next = 0

    async def start(self) -> None:
        """Make the inbox that confirmations come to."""
        self._inbox = self._bus.client.new_inbox()
        await self._bus.client.take(f"{self._inbox}.*", self._confirmed)

    def stop(self) -> None:
        """Nothing more will be confirmed."""
        self._fail(Unavailable("the connection was closed before the server confirmed the message"))

    def resend(self) -> None:
        """The server is back: whatever was not confirmed goes out again at once."""
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        for future in self._flying.values():
            if not future.done():
                future.set_exception(error)

    async def publish(
        self, row: SubjectEntry, on: str, payload: bytes, msg_id: str, deadline: float, extra: dict[str, str] | None
    ) -> Published:
        """Publish a row's encoded message."""
        given = wire.build(row, self._bus.name, msg_id, extra)
        if len(payload) > INLINE_BYTES:
            ref = await self._bus.payloads.put(payload, media_type=given[wire.CONTENT_TYPE])
            given[wire.BLOB] = ref.sha256
            payload = msgspec.json.encode(ref)
        published = await self.send(on, payload, given, deadline)
        faults.at("after-publish", row.name)
        return published

    async def send(self, on: str, payload: bytes, given: dict[str, str], deadline: float) -> Published:
        """Send until confirmed. A full queue is waited for with growing pauses, as long as the deadline allows.

        Raises:
            Conflict: the expected revision was not the current one.
            Refused: the server will never take it; the text says why.
            Unavailable: not confirmed within `deadline` seconds.
        """
        ends = time.monotonic() + deadline
        pause, why = 0.02, ""
        while (left := ends - time.monotonic()) > 0:
            try:
                return await self._once(on, payload, given, min(left, RESEND_S))
            except TimeoutError:  # sent again under the same id
                if not why or left > RESEND_S:  # else there was no time left for an answer, and the one before holds
                    why = "no answer from the server"
            except _NotNowError as error:
                why = str(error)
                if pause == PAUSE_S:
                    self._bus.log.warning("a message waits for room", subject=on, why=why)
                await asyncio.sleep(min(pause, max(0.0, ends - time.monotonic())))  # outside the window: others go on
                pause = min(pause * 2, PAUSE_S)
        raise Unavailable(f"{on}: not stored within {deadline:g} s: {why}")

    async def _once(self, on: str, payload: bytes, given: dict[str, str], wait: float) -> Published:
        async with asyncio.timeout(wait):
            await self._bus.up.wait()
            await self._window.acquire()
        self._next += 1
        token = str(self._next)
        future = self._flying[token] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(wait):
                await self._bus.client.publish(on, payload, reply=f"{self._inbox}.{token}", headers=given)
                return await future
        except MaxPayloadError as error:
            raise Refused(f"{on}: {len(payload)} bytes, more than the server takes in one message") from error
        except NatsError as error:  # outbound buffer full, or between two connections
            raise _NotNowError(repr(error)) from error
        finally:
            del self._flying[token]
            self._window.release()

    async def _confirmed(self, msg: Any) -> None:
        future = self._flying.get(msg.subject.rpartition(".")[2])
        if future is None or future.done():
            return
        if wire.get(msg, "Status") == "503":
            future.set_exception(_NotNowError("no stream takes this subject"))
            return
        answer = _CONFIRMATION.decode(msg.data)
        if answer.error is None:
            future.set_result(Published(answer.seq, answer.duplicate))
        else:
            future.set_exception(_meaning(answer.error))


def _meaning(error: ServerError) -> NexusError:
    if error.err_code in WRONG_REVISION:
        return Conflict(f"changed by somebody else first ({error.description})")
    if error.err_code in FULL:
        return _NotNowError(f"the queue is full ({error.description})")
    if error.err_code == UNDER_WAY or error.code >= LATER:
        return _NotNowError(f"the server cannot store it right now ({error.description})")
    return Refused(f"the server refused the message: {error.description} ({error.err_code})")
