"""What a query token says: named groups of location tokens, and how a number becomes one.

Every action-query position predicts one token of *each* group (a softmax inside the group). A head that reads a single
position therefore finds the whole situation there: where the named object is, where the gripper is, and what lies
between them. Lengths are metres in the table's frame, image coordinates run from 0 (left, top) to 1.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

QUERY_TOKEN = "<|action_query|>"  # noqa: S105 - not that kind of token
QUERY_TOKENS = 8
ACTS = (
    "touch", "left", "right", "forward", "back", "lift", "place", "open", "close", "press", "turn", "toward",
)  # fmt: skip

# Table frame: x towards the camera, y to the right in the picture. A push begins `BEHIND` metres on the other side.
DIRECTIONS = {"left": (0.0, -1.0), "right": (0.0, 1.0), "forward": (-1.0, 0.0), "back": (1.0, 0.0)}
BEHIND = 0.06


@dataclass(frozen=True)
class Group:
    """A run of vocabulary tokens that together code one number (or one word).

    `scale` > 0 codes `asinh(value / scale)`: fine near zero, where the last centimetres of a reach are decided, coarse
    far away. Values outside `low`..`high` land in the outermost bin.
    """

    name: str
    bins: int
    low: float
    high: float
    weight: float
    scale: float = 0.0
    metric: bool = False  # only asked when the camera is close to the front pose, or metres could not be known

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of this group, in order."""
        if self.name == "act":
            return tuple(f"<act_{word}>" for word in ACTS)
        return tuple(f"<{self.name}_{index:02d}>" for index in range(self.bins))

    def _bend(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.arcsinh(value / self.scale) if self.scale else value

    def encode(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return where `value` lies, in bins: 0 is the centre of the first token, `bins - 1` of the last."""
        low, high = self._bend(np.asarray([self.low, self.high]))
        place = (self._bend(np.asarray(value, float)) - low) / (high - low) * self.bins - 0.5
        return np.clip(place, 0, self.bins - 1)

    def decode(self, place: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the number at `place` (in bins, may be fractional)."""
        low, high = self._bend(np.asarray([self.low, self.high]))
        bent = (np.asarray(place, float) + 0.5) / self.bins * (high - low) + low
        return np.sinh(bent) * self.scale if self.scale else bent


GROUPS: tuple[Group, ...] = (
    Group("tx", 48, -0.42, 0.42, 1.0, metric=True),  # the named object on the table
    Group("ty", 48, -0.42, 0.42, 1.0, metric=True),
    Group("px", 48, -0.42, 0.42, 0.5, metric=True),  # the gripper tip
    Group("py", 48, -0.42, 0.42, 0.5, metric=True),
    Group("pz", 24, 0.0, 0.24, 0.5, metric=True),
    Group("dx", 48, -0.8, 0.8, 1.0, scale=0.04, metric=True),  # object minus tip
    Group("dy", 48, -0.8, 0.8, 1.0, scale=0.04, metric=True),
    Group("dz", 24, -0.24, 0.12, 0.5, metric=True),
    Group("dd", 24, 0.0, 0.8, 0.5, scale=0.04, metric=True),  # horizontal distance of the two
    Group("ax", 48, -0.8, 0.8, 0.7, scale=0.04, metric=True),  # where to begin (for a push: behind the object) minus tip
    Group("ay", 48, -0.8, 0.8, 0.7, scale=0.04, metric=True),
    Group("iu", 24, 0.0, 1.0, 0.5),  # the named object in the picture
    Group("iv", 24, 0.0, 1.0, 0.5),
    Group("ju", 24, 0.0, 1.0, 0.25),  # the gripper tip in the picture
    Group("jv", 24, 0.0, 1.0, 0.25),
    Group("act", len(ACTS), 0, len(ACTS), 0.5),  # what the sentence asks for
    Group("step", QUERY_TOKENS, 0, QUERY_TOKENS, 0.05),  # which of the query tokens this is
)
BY_NAME = {group.name: group for group in GROUPS}
LOCATION_TOKENS: tuple[str, ...] = tuple(token for group in GROUPS for token in group.tokens)
