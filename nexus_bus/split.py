"""How the time of a group becomes its members' own. Pure; used by the answer and the step alike."""

from collections.abc import Sequence


def split(whole: float, owed: Sequence[float]) -> list[float]:
    """Measured seconds, all of them, in the proportion of what each member is known to owe; equally where that is nothing."""
    total = sum(owed)
    return [whole * one / total if total else whole / len(owed) for one in owed]
