"""One file per algorithm; the trainer knows none of them, it looks up the tag of the job's specification here."""

from typing import Any

import msgspec

from nexus_bus.learning.algorithms.base import Algorithm, Descend, Diverged, Features, Learning, LearnResult
from nexus_bus.learning.algorithms.ppo import Ppo, PpoWork
from nexus_bus.learning.algorithms.sft import Sft, SftWork
from schemas import job

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Descend",
    "Diverged",
    "Features",
    "LearnResult",
    "Learning",
    "Ppo",
    "PpoWork",
    "Sft",
    "SftWork",
    "make_algorithm",
]

ALGORITHMS: dict[str, Any] = {"sft": Sft, "ppo": Ppo}


def make_algorithm(spec: job.Sft | job.Ppo, slot_seed: int) -> Algorithm[Any]:
    """The algorithm a job's specification names."""
    return ALGORITHMS[str(msgspec.inspect.type_info(type(spec)).tag)](spec, slot_seed)  # pyright: ignore[reportAttributeAccessIssue]
