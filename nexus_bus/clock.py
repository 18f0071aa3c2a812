"""Time and seeds as messages carry them."""

import hashlib
from datetime import UTC, datetime


def now() -> str:
    """The current time as RFC 3339 in UTC, with microseconds."""
    return datetime.now(UTC).isoformat()


def derive_seed(seed: int, *path: str | int) -> int:
    """A seed for one place in a job: the same path under the same seed gives the same number, other paths unrelated ones.

    Returns:
        An integer in [0, 2**48), which JSON in any language holds exactly.
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
