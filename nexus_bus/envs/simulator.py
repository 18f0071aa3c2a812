"""What an adapter must provide so that a `Session` can hold it. One adapter per simulator, behind workers/environment.py.

An adapter does the simulator's part and nothing else: limits, refusals, end reasons and reproducibility are the
session's, so that they are the same for every simulator. One that derives from `Simulator` leaves out what its own cannot do.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from nexus_bus.errors import NotFound


@dataclass(frozen=True)
class Observed:
    """What a policy sees: HWC uint8 pictures by camera, float32 state `[S]`, and the sentence that says what to do."""

    images: dict[str, np.ndarray]
    state: np.ndarray
    instruction: str


@dataclass(frozen=True)
class Moment:
    """What one action brought. `truncated` is for simulators that stop by themselves; the session has its own limit."""

    reward: float
    success: bool
    terminated: bool = False
    truncated: bool = False


class Simulator(Protocol):
    """One episode at a time. Calls come from one thread, because a GL context belongs to one."""

    def reset(self, seed: int) -> None:
        """Start an episode; the seed alone decides everything in it, whatever came before."""
        ...

    def act(self, action: np.ndarray) -> Moment:
        """Do one action, float64 `[D]`, finite and within bounds."""
        ...

    def observe(self) -> Observed:
        """Picture and state of this moment. It changes nothing that a later step could see."""
        ...

    def expert(self) -> np.ndarray:
        """The scripted expert's action here, `[D]`. Raises NotFound where there is none."""
        raise NotFound("this environment has no scripted expert; import demonstrations if there are any")

    def save(self) -> bytes:
        """The whole state of the episode. Raises NotFound where the simulator cannot."""
        raise NotFound("this simulator cannot save an episode; play it again from its seed and trial")

    def restore(self, state: bytes) -> None:
        """Go back to a saved state, to the bit. Raises NotFound where the simulator cannot."""
        del state
        raise NotFound("this simulator cannot restore an episode; play it again from its seed and trial")

    def close(self) -> None:
        """Free models and GL contexts. Calling it twice does nothing."""
        ...


@runtime_checkable
class Numbered(Protocol):
    """A simulator whose initial states are recorded and numbered: a protocol plays each of them once, by the trial's number."""

    def choose(self, trial: int) -> None:
        """Which one the next `reset` takes; the number goes round."""
        ...
