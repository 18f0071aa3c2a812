"""How much pictures may unfold to. One of a single colour takes a few KB as it travels and a thousand times that in memory, so
pixels are counted besides bytes, before any of them is unfolded. Pure.
"""

from collections.abc import Mapping

CAMERAS = 16  # of a policy
SEEN = 8 << 20  # that a policy is shown at once, four cameras of full HD: a forward unfolds those of its whole group
UNIT = 1 << 30  # of one unit of work, an update's episodes or a batch: 3 GB, which a trainer holds while it learns


def pixels(cameras: Mapping[str, tuple[int, int, int]]) -> int:
    """Of one observation."""
    return sum(height * width for height, width, _ in cameras.values())
