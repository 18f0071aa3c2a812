"""A tenant with valid credentials and bad intentions: the stock NATS client, and bare sockets for what it would not send.

Nothing here is of our client library. Whatever reaches the attacker is kept, so that it can be searched afterwards.
"""

import asyncio
import base64
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import nats
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from nexus_bus.bus.jwt import Key

SILENCE_S = 0.3  # after which nobody is going to answer what the server did not refuse
ANSWER_S = 60.0
ERROR = "Nexus-Error-Code"
_TOKEN = re.compile(r"BEGIN NATS USER JWT-+\s*(\S+)")
_SEED = re.compile(r"(SU[A-Z2-7]{56})")


@dataclass(frozen=True)
class Answer:
    """What came back."""

    data: bytes
    headers: dict[str, str]

    @property
    def error(self) -> str:
        """The gateway's code of an error, or the server's, or nothing."""
        if code := self.headers.get(ERROR) or self.headers.get("Status", ""):
            return code
        with suppress(ValueError):
            content = json.loads(self.data)
            if isinstance(content, dict) and "error" in content:
                return str(content["error"])
        return ""

    @property
    def content(self) -> Any:
        """Decoded, by its content type."""
        packed = "msgpack" in self.headers.get("Content-Type", "")
        return msgspec.msgpack.decode(self.data) if packed else msgspec.json.decode(self.data)

    def without_ids(self, *names: str) -> tuple[bytes, dict[str, str]]:
        """As it would be for any other name: what is the asker's own, or new with each message, is blotted out."""
        data = self.data
        for name in names:
            data = data.replace(name.encode(), b"<name>")
        passing = {"ce-id", "ce-time", "traceparent", "Nats-Msg-Id"}
        return data, {key: value for key, value in self.headers.items() if key not in passing}


@dataclass
class Attacker:
    """Connected. Use `attacker`."""

    client: Client
    creds: str
    url: str
    fenced: bool  # its key is the issued one, which may only speak on the calls' subjects
    heard: list[Msg] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # of the server
    sockets: "list[Wire]" = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def received(self) -> bytes:
        """Everything that came, on all its connections."""
        parts = [bytes(wire.said) for wire in self.sockets]
        for msg in self.heard:
            if (msg.headers or {}).get("Status") != "503":  # nobody answers: it names only what was asked
                parts.append(f"{msg.subject} {json.dumps(msg.headers)} ".encode() + msg.data)
        return b"\n".join(parts)

    async def listen(self, subject: str, queue: str = "") -> None:
        """Subscribe, and keep what comes."""

        async def keep(msg: Msg) -> None:
            self.heard.append(msg)

        await self.client.subscribe(subject, queue=queue, cb=keep)
        await self.client.flush()

    async def send(self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Publish; when this returns, the server has it."""
        await self.client.publish(subject, payload, reply=reply, headers=headers)
        await self.client.flush()

    async def ask(
        self, subject: str, payload: Any = b"", headers: dict[str, str] | None = None, within: float = SILENCE_S
    ) -> Answer | None:
        """A request; None if the server refuses to take it, or nobody answers in time."""
        inbox, answers = self.client.new_inbox(), list[Answer]()

        async def take(msg: Msg) -> None:
            self.heard.append(msg)
            answers.append(Answer(msg.data, dict(msg.headers or {})))
            self.news.set()

        subscription = await self.client.subscribe(inbox, cb=take)
        body, before = payload if isinstance(payload, bytes) else json.dumps(payload).encode(), len(self.complaints)
        refusal = f'"{subject.lower()}"'
        await self.client.publish(subject, body, reply=inbox, headers=headers)
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not answers and not any(refusal in one for one in self.complaints[before:]):
                    self.news.clear()
                    await self.news.wait()
        await subscription.unsubscribe()
        return answers[0] if answers else None

    async def call(self, name: str, payload: Any, headers: dict[str, str] | None = None) -> Answer:
        """One of the calls a tenant has, by hand. It is answered, or the test fails."""
        answer = await self.ask(name, payload, headers, ANSWER_S)
        assert answer is not None, f"{name} got no answer: {self.complaints[-1:]}"
        return answer

    async def pack(self, name: str, content: dict[str, Any]) -> Answer:
        """One of the calls whose messages are msgpack."""
        return await self.call(name, msgspec.msgpack.encode(content), {"Content-Type": "application/msgpack"})

    async def outcome(self, taken: Answer) -> dict[str, Any]:
        """The event that answers an order; `event.>` must be listened to."""
        submission = taken.content["submission"]
        async with asyncio.timeout(ANSWER_S):
            while True:
                for msg in self.heard:
                    if msg.subject.startswith("event.") and (event := json.loads(msg.data)).get("submission") == submission:
                        return event
                await asyncio.sleep(0.01)

    async def any_of(self, *subjects: str, payload: bytes = b"", headers: dict[str, str] | None = None) -> str | None:
        """Ask on each of some subjects that are none of a tenant's; evidence, if one is answered with anything but an error.

        With a key that is not fenced, its own account answers some of them about itself: those are searched by the caller.
        """
        for subject in subjects:
            answer = await self.ask(subject, payload, headers, SILENCE_S if self.fenced else 0.1)
            if answer is not None and not answer.error and self.fenced:
                return f"{subject} answered {answer.data[:200]!r}"
        return None

    async def wire(self, creds: str | None = None, **connect: Any) -> "Wire":
        """A connection of its own by hand."""
        wire = await Wire.open(self.url)
        self.sockets.append(wire)
        await wire.login(creds or self.creds, **connect)
        return wire


class Wire:
    """A connection whose every byte is ours."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `Wire.open`."""
        self.said = bytearray()  # by the server
        self._reader, self._writer = reader, writer
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self.ended = False
        self.sid = 100  # of the newest subscription

    @classmethod
    async def open(cls, url: str) -> "Wire":
        """A TCP connection, with the server's greeting."""
        host, _, port = url.removeprefix("nats://").partition(":")
        wire = cls(*await asyncio.open_connection(host, int(port)))
        await wire.until(lambda: b"\r\n" in wire.said)
        return wire

    async def _read(self) -> None:
        with suppress(OSError):
            while part := await self._reader.read(1 << 16):
                self.said += part
                self._news.set()
        self.ended = True
        self._news.set()

    async def until(self, condition: Callable[[], Any], within: float = ANSWER_S) -> bool:
        """Wait; False if it does not come to pass before the connection ends."""
        async with asyncio.timeout(within):
            while not condition():
                if self.ended:
                    return False
                self._news.clear()
                await self._news.wait()
        return True

    @property
    def info(self) -> dict[str, Any]:
        """The greeting."""
        return json.loads(bytes(self.said).split(b"\r\n", 1)[0].removeprefix(b"INFO "))

    async def login(self, creds: str, **fields: Any) -> bool:
        """Say who we are; fields replace those of an honest CONNECT. Whether the server let us in."""
        token, seed = _TOKEN.search(creds), _SEED.search(creds)
        honest = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "lang": "test", "version": "1"}
        if token and seed:
            signature = Key.of_seed(seed[1]).sign(self.info["nonce"].encode())
            honest |= {"jwt": token[1], "sig": base64.urlsafe_b64encode(signature).rstrip(b"=").decode()}
        return await self.connect({key: value for key, value in (honest | fields).items() if value is not None})

    async def connect(self, fields: dict[str, Any]) -> bool:
        """A CONNECT of these fields, and nothing else; whether the server let us in."""
        return b"PONG" in await self.say(f"CONNECT {json.dumps(fields)}\r\n".encode())

    async def say(self, text: bytes) -> bytes:
        """Send bytes and a PING; what came until its PONG, or until the server hung up."""
        start = len(self.said)
        with suppress(OSError):
            self._writer.write(text + b"PING\r\n")
            await self._writer.drain()
        await self.until(lambda: b"PONG\r\n" in self.said[start:])
        return bytes(self.said[start:])

    async def utter(self, text: bytes) -> bytes:
        """Send bytes of another protocol; what came until the server hung up, or said something."""
        start = len(self.said)
        with suppress(OSError):
            self._writer.write(text)
            await self._writer.drain()
        with suppress(TimeoutError):
            await self.until(lambda: len(self.said) > start, 1.0)
        return bytes(self.said[start:])

    async def request(self, subject: str, body: bytes, header: bytes | None = None) -> Answer:
        """A call with a header block of our own making. It is answered, or the test fails."""
        inbox, start, self.sid = f"_INBOX.{uuid.uuid4().hex}", len(self.said), self.sid + 1
        if header is None:
            sent = f"PUB {subject} {inbox} {len(body)}\r\n".encode() + body + b"\r\n"
        else:
            sent = f"HPUB {subject} {inbox} {len(header)} {len(header) + len(body)}\r\n".encode() + header + body + b"\r\n"
        await self.say(f"SUB {inbox} {self.sid}\r\n".encode() + sent)
        shape = re.compile(f"HMSG {inbox} {self.sid} ".encode() + rb"(\d+) (\d+)\r\n")
        assert await self.until(lambda: shape.search(self.said, start)), bytes(self.said[start:])
        found = shape.search(self.said, start)
        assert found is not None
        head, total = int(found[1]), int(found[2])
        await self.until(lambda: len(self.said) >= found.end() + total)
        whole = bytes(self.said[found.end() : found.end() + total])
        lines = [line.partition(": ") for line in whole[:head].decode().split("\r\n")[1:] if line]
        return Answer(whole[head:], {key: value for key, _, value in lines})

    def write(self, text: bytes) -> None:
        """Send bytes, whether or not anybody takes them."""
        self._writer.write(text)

    def pause(self) -> None:
        """Read no more."""
        self._reading.cancel()

    async def close(self) -> None:
        """Hang up."""
        self._reading.cancel()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


@asynccontextmanager
async def attacker(url: str, creds: str, fenced: bool) -> AsyncIterator[Attacker]:
    """Connect with credentials."""
    one = Attacker(Client(), creds, url, fenced)

    async def complaint(error: Exception) -> None:
        one.complaints.append(str(error).lower())
        one.news.set()

    one.client = await nats.connect(
        url, user_credentials=RawCredentials(creds), error_cb=complaint, allow_reconnect=False, connect_timeout=60
    )
    try:
        yield one
    finally:
        for wire in one.sockets:
            await wire.close()
        with suppress(NatsError):
            await one.client.close()
