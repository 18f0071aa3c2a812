"""The canary of training: one sample in a hundred is encoded once more, alone. A difference from its group is an alarm."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nexus_bus.models.backbone import Backbone
from nexus_bus.models.features import Look, VLAFeature

TOLERANCE = {"exact": 0.0, "fast": 0.02}  # |alone - grouped| / |alone|; bfloat16 has eight bits


@dataclass(frozen=True)
class Gap:
    """A sample that came out otherwise among neighbours than alone."""

    feature_id: str
    error: float  # |alone - grouped| / |alone|
    tolerance: float
    group: int  # samples it shared the forward with


class Canary:
    """Counts samples, re-runs every so manieth of them."""

    def __init__(self, every: int = 100) -> None:
        """`every` 0: never."""
        self.every = every
        self.runs = 0
        self.seconds = 0.0  # spent on them: nobody's job asked for it
        self._seen = 0
        self._gaps: list[Gap] = []

    def watch(self, backbone: Backbone, looks: Sequence[Look], features: Sequence[VLAFeature]) -> None:
        """Compare what is due of a group with the same look alone, without any cache."""
        for i in self._due(len(looks)):
            started = time.perf_counter()
            self.runs += 1
            with torch.no_grad():
                alone = backbone.encode([looks[i]])[0].hidden
            error = difference(alone, features[i].hidden.detach())
            if error > TOLERANCE[backbone.profile]:
                self._gaps.append(Gap(features[i].feature_id, error, TOLERANCE[backbone.profile], len(looks)))
            self.seconds += time.perf_counter() - started

    def take(self) -> list[Gap]:
        """Gaps since the last time."""
        taken, self._gaps = self._gaps, []
        return taken

    def _due(self, count: int) -> list[int]:
        start, self._seen = self._seen, self._seen + count
        return [i for i in range(count) if (start + i + 1) % self.every == 0] if self.every else []


def difference(alone: torch.Tensor, grouped: torch.Tensor) -> float:
    """Relative error of a grouped result: 0 if the bits agree, infinite if it is not a number."""
    if torch.equal(alone, grouped):
        return 0.0
    error = float((alone.float() - grouped.float()).norm() / alone.float().norm().clamp_min(1e-12))
    return error if error == error else float("inf")  # noqa: PLR0124 - that is the test for not a number
