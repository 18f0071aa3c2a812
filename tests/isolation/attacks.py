"""All attacks, in order: importing this fills the list."""

from tests.isolation import (
    attacks_calls,
    attacks_floods,
    attacks_headers,
    attacks_keys,
    attacks_listening,
    attacks_streams,
)
from tests.isolation.attack import ATTACKS, Attack, carry_out, run_all

__all__ = [
    "ATTACKS",
    "Attack",
    "attacks_calls",
    "attacks_headers",
    "attacks_listening",
    "attacks_streams",
    "carry_out",
    "run_all",
]
