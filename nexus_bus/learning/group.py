"""The group step: one encode for several tenants' work, then private learning, one after another. Heart of the trainer.

Grouped or alone, a member's numbers are the same: features do not depend on their neighbours (exact profile), and all that
follows is the member's own. A member that fails, fails alone, and its slot stands where it stood before.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nexus_bus.errors import NexusError
from nexus_bus.learning.algorithms import Algorithm, LearnResult
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import EncodeStats, FeatureCache, encode_cached
from nexus_bus.models.features import VLAFeature
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Slot


@dataclass(frozen=True, eq=False)
class Member:
    """One tenant's part of a group: a slot, and one unit of work for its algorithm."""

    slot: Slot
    algorithm: Algorithm[Any]
    work: Any


@dataclass(frozen=True, eq=False)
class _Wanted:
    prompts: list[Prompt]
    ids: list[str]
    error: NexusError | None = None


@dataclass(frozen=True)
class MemberResult:
    """What became of a member. Either `result` or `error` is set."""

    result: LearnResult | None
    error: Exception | None
    forward_s: float  # its share of the grouped forward
    private_s: float  # loss, backward, step
    group: int  # samples in the group, all members together
    tenants: int
    stats: EncodeStats | None  # of the group

    @property
    def device_s(self) -> float:
        """Time this member owes."""
        return self.forward_s + self.private_s


class GroupTrainer:
    """Runs groups on one backbone and one cache."""

    def __init__(self, backbone: Backbone, cache: FeatureCache | None = None) -> None:
        self.backbone = backbone
        self.cache = cache

    def run(self, members: Sequence[Member]) -> list[MemberResult]:
        """One grouped step. Results stand in the members' order; a failing member raises nothing."""
        results: list[MemberResult | None] = [None] * len(members)
        by_layers: dict[tuple[int, ...], list[int]] = {}
        for i, member in enumerate(members):
            by_layers.setdefault(member.slot.module.needs.layers, []).append(i)
        for layers, rows in by_layers.items():
            for i, result in zip(rows, self._group([members[i] for i in rows], layers), strict=True):
                results[i] = result
        return [result for result in results if result is not None]

    def _group(self, members: list[Member], layers: tuple[int, ...]) -> list[MemberResult]:
        wanted = [self._wanted(member, layers) for member in members]
        prompts = [prompt for want in wanted for prompt in want.prompts]
        ids = [name for want in wanted for name in want.ids]
        features, stats = encode_cached(self.backbone, prompts, self.cache, layers, ids)
        askers = Counter(name for want in wanted for name in set(want.ids) & stats.forwarded)
        tenants = len({member.slot.tenant for member in members})
        results: list[MemberResult] = []
        start = 0
        for member, want in zip(members, wanted, strict=True):
            own = features[start : start + len(want.ids)]
            start += len(want.ids)
            started = time.perf_counter()
            result, error = (None, want.error) if want.error else self._learn(member, own)
            results.append(
                MemberResult(
                    result=result,
                    error=error,
                    forward_s=_share(set(want.ids) & stats.forwarded, askers, stats),
                    private_s=time.perf_counter() - started,
                    group=len(prompts),
                    tenants=tenants,
                    stats=stats,
                )
            )
        return results

    def _wanted(self, member: Member, layers: tuple[int, ...]) -> _Wanted:
        """Prompts and feature names of a member; one that cannot be read drops out of the group before it forms."""
        try:
            prompts = member.algorithm.prompts(member.work)
            return _Wanted(prompts, self.backbone.ids(prompts, layers))
        except NexusError as error:
            return _Wanted([], [], error)

    def _learn(self, member: Member, features: list[VLAFeature]) -> tuple[LearnResult | None, Exception | None]:
        before = member.slot.snapshot()
        try:
            return member.algorithm.learn(member.slot, member.work, features), None
        except Exception as error:  # noqa: BLE001 - whatever one tenant's work does, the others of the group go on
            member.slot.restore(before)
            return None, error


def _share(own: set[str], askers: Counter[str], stats: EncodeStats) -> float:
    """Seconds of the forward a member owes: by samples that needed it, split among those who asked for the same one."""
    return stats.forward_s * sum(1 / askers[name] for name in own) / len(stats.forwarded) if own else 0.0
