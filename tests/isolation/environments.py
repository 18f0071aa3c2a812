"""Environments of the siege: the provider's simulators, without simulators, and a tenant's own worker by hand.

A session keeps what `restore` brought and `save` gives it back: what the victim kept there is what an attack might get.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from nexus_bus.bus.topology import OFFER_S
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.tensors import from_tensor
from schemas.environment import SessionCall, SessionReply
from schemas.job import EnvironmentSpec
from workers.environment import Environment

PACKED = {"Content-Type": "application/msgpack"}
SEEN = {"cameras": {"wrist": [8, 8, 3]}, "state_size": 2}
TASK = {
    "action": {"size": 2, "low": [-1.0, -1.0], "high": [1.0, 1.0]},
    "observation": SEEN,
    "max_steps": 40,
    "instruction": "open the door",
}
CHUNK = {"dtype": "float32", "shape": [4, 2], "data": bytes(32)}  # actions of a step

Said = dict[str, Any]  # of an ask, an answer, an offer


class Stage:
    """Stands for a process of simulators."""

    alive = True

    def __init__(self) -> None:
        self.kept: list[bytes] = []  # by session

    async def open(self, _: EnvironmentSpec) -> int:
        """Another session, after the loop had time for others."""
        await asyncio.sleep(0.005)
        self.kept.append(b"")
        return len(self.kept) - 1

    async def call(self, session: int, call: SessionCall, _: str) -> SessionReply:
        """As a simulator's process does, of a step what it unpacks."""
        if call.actions is not None:
            from_tensor(call.actions)
        if call.op in ("restore", "close"):
            self.kept[session] = call.state
        return SessionReply(state=self.kept[session])

    async def close(self, session: int) -> None:
        """Nothing is there to be freed."""

    async def stop(self) -> None:
        """Nothing is there to be ended."""


class Theatre(Environment):
    """The environment worker, on stages."""

    async def _start(self, spec: EnvironmentSpec) -> SimulatorHost:
        return cast(SimulatorHost, Stage())


def offer(**fields: Any) -> Said:
    """As an honest worker offers one arm and one door."""
    return {
        "environment": "own-arm", "worker": "robot", "sessions": 4, "tasks": {"door": TASK}, "simulator": "arm 1"
    } | fields  # fmt: skip


def observation(**fields: Any) -> Said:
    """What it sees, as it was offered."""
    picture = {"encoding": "raw", "shape": [8, 8, 3], "data": bytes(192)}
    state = {"dtype": "float32", "shape": [2], "data": bytes(8)}
    return {"images": {"wrist": picture}, "state": state, "instruction": "open the door"} | fields


def reply(call: Said, kept: bytes = b"", **fields: Any) -> Said:
    """What an honest worker replies to a call."""
    op = call["op"]
    seen = {"observation": observation()} if op in ("reset", "step", "restore") else {}
    done = call["actions"]["shape"][0] if op == "step" else 0
    told = {"rewards": [0.0] * done, "successes": [False] * done, "state": kept if op == "save" else b""}
    return {"reply": seen | told | fields}


class Robot:
    """A tenant's own environment worker over a bare client. `answer` says what is answered to an ask; None: nothing."""

    def __init__(self, client: Client, kept: bytes = b"", **fields: Any) -> None:
        """Nothing is heard until `listen`. `fields` replace those of `offer`."""
        self.client, self.offered, self.kept = client, offer(**fields), kept
        self.asks: list[Said] = []
        self.offered_at = 0.0
        self.answer: Callable[[Said], Said | None] = self.honest

    def honest(self, ask: Said) -> Said:
        """What is expected of it."""
        if (opened := ask.get("open")) is not None:
            return {"opened": {"session": opened["session"], "subject": "", "worker": "robot", "version": "arm 1"}}
        return reply(ask["call"], self.kept)

    async def listen(self) -> None:
        """Hear what is asked, and offer."""
        await self.client.subscribe("ask.>", cb=self._hear)
        await self.offer()

    async def offer(self) -> None:
        """Say that it is here."""
        answer = await self.client.request("env.offer", json.dumps(self.offered).encode(), timeout=60)
        assert "Nexus-Error-Code" not in (answer.headers or {}), answer.data
        self.offered_at = time.monotonic()

    @property
    def fading(self) -> bool:
        """Whether its offer is over soon: what is not repeated is forgotten."""
        return time.monotonic() - self.offered_at > OFFER_S / 2

    async def say(self, ask: Said, answer: Said) -> None:
        """Answer an ask."""
        body = msgspec.msgpack.encode({"id": ask["id"], "gateway": ask["gateway"], **answer})
        await self.client.publish("env.answer", body, headers=PACKED)

    async def _hear(self, msg: Msg) -> None:
        if "Nexus-Probe" in (msg.headers or {}):
            return
        ask = msgspec.msgpack.decode(msg.data)
        self.asks.append(ask | {"inbox": msg.reply})
        if (answer := self.answer(ask)) is not None:
            await self.say(ask, answer)


def _seen(**fields: Any) -> Said:
    return {"observation": observation(**fields)}


def _picture(**fields: Any) -> Said:
    return _seen(images={"wrist": {"encoding": "png", "shape": [8, 8, 3], "data": b""} | fields})


def _state(**fields: Any) -> Said:
    return _seen(state={"dtype": "float32", "shape": [2], "data": bytes(8)} | fields)


NAN, INF = float("nan"), float("inf")
_FOUR: Sequence[bool] = (False,) * 4
# Of a step with 4 actions, in an episode of 40 steps: what is wrong, and what the error says of it.
AMISS: dict[str, tuple[Said, str]] = {
    "more rewards than actions": ({"rewards": [0.0] * 5, "successes": [False] * 5}, "rewards: 5, and 5 successes, for 4"),
    "rewards by the thousand": ({"rewards": [0.0] * 5000, "successes": [False] * 5000}, "rewards: 5000"),
    "successes that nothing was done for": ({"successes": [True] * 9}, "rewards: 4, and 9 successes"),
    "a reward that is none": ({"rewards": [NAN] * 4, "successes": _FOUR}, "rewards: [nan"),
    "an infinite reward": ({"rewards": [0.0, INF, 0.0, 0.0], "successes": _FOUR}, "rewards: [0.0, inf"),
    "a reward that no training could hold": ({"rewards": [1e300] * 4, "successes": _FOUR}, "within 1e+09"),
    "endless work": ({"device_s": INF}, "device_s: inf"),
    "work that is none": ({"device_s": NAN}, "device_s: nan"),
    "work that gives time back": ({"device_s": -1e9}, "device_s: -1000000000.0"),
    "an end that goes on": ({"end": "success"}, "end: success after a step, terminated False"),
    "an end without a reason": ({"terminated": True}, "end: running after a step, terminated True"),
    "nothing to see": ({"observation": None}, "observation: missing"),
    "no picture": (_seen(images={}), "observation.images: []; expected ['wrist']"),
    "a picture too many": (
        _seen(images={name: {"encoding": "raw", "shape": [8, 8, 3], "data": bytes(192)} for name in ("wrist", "other")}),
        "observation.images: ['other', 'wrist']",
    ),
    "a picture of another size": (_picture(shape=[16, 8, 3]), "wrist: shape [16, 8, 3]; expected [8, 8, 3]"),
    "a picture that unfolds to 800 MB": (_picture(shape=[1 << 14, 1 << 14, 3], data=b"\x89PNG"), "shape [16384, 16384, 3]"),
    "a picture of other bytes": (_picture(encoding="raw", data=bytes(191)), "191 bytes; raw, it takes 192"),
    "a rendering that unfolds to 800 MB": (
        {"image": {"encoding": "png", "shape": [1 << 14, 1 << 14, 3], "data": b""}},
        "image: shape [16384, 16384, 3]",
    ),
    "a state of another size": (_state(shape=[3], data=bytes(12)), "observation.state: float32[3] in 12 bytes"),
    "a state that is not what it says": (_state(data=bytes(7)), "float32[2] in 7 bytes"),
    "a state of 2^48 numbers": (_state(shape=[1 << 24, 1 << 24]), "in 8 bytes; expected float32[2]"),
    "a state of other numbers": (_state(dtype="float64", data=bytes(16)), "float64[2] in 16 bytes"),
    "a state that is no number": (_state(data=b"\0\0\xc0\x7f" * 2), "observation.state: a number that is not finite"),
    "a book for a sentence": (_seen(instruction="x" * 30_000), "observation.instruction: 30000 characters; at most 400"),
}
