"""What host.py and child.py say to each other: length-prefixed msgpack over a socket pair, and nothing that is unpickled."""

import struct
from typing import Literal

import msgspec

from schemas.base import Tensor
from schemas.environment import SessionCall, SessionReply
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec

Op = Literal["ping", "tasks", "describe", "open", "call", "expert", "close"]
Encoding = Literal["png", "jpeg", "raw"]

PROTOCOL = 3  # raised when an end of another number would misunderstand this one; asked of every child that starts
LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20  # bytes; a child that announces more has lost its mind


class Request(msgspec.Struct, omit_defaults=True):
    """Parent to child: one call on one session."""

    session: int
    op: Op
    spec: EnvironmentSpec | None = None  # tasks, describe, open
    call: SessionCall | None = None  # call
    encoding: Encoding = "png"  # call


class Described(msgspec.Struct):
    """What a policy must fit, as the child sees it: the packages whose versions count are installed there."""

    action: ActionSpec
    observation: ObservationSpec
    max_steps: int
    instructions: list[str]
    simulator: str
    expert: bool
    success: str


class Answer(msgspec.Struct, omit_defaults=True):
    """Child to parent, in the order of the requests: the reply, or the code and text of a NexusError."""

    reply: SessionReply | None = None
    action: Tensor | None = None  # expert
    described: Described | None = None  # describe, open
    tasks: list[str] = []  # tasks
    protocol: int = 0  # ping
    code: str = ""
    message: str = ""
