"""The grouped answer: one encode for requests of many tenants, then each policy acts on its own row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nexus_bus.errors import NexusError
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache, encode_cached
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Acted, PolicySlot


@dataclass(frozen=True, eq=False)
class Asked:
    """One request, decoded."""

    slot: PolicySlot
    prompt: Prompt
    state: NDArray[np.float32]  # [S] raw
    greedy: bool
    seed: int


@dataclass(frozen=True, eq=False)
class Answer:
    """What came of it: `acted`, or the error of this request alone."""

    feature_id: str = ""
    acted: Acted | None = None
    error: NexusError | None = None


def act_group(backbone: Backbone, cache: FeatureCache | None, asked: Sequence[Asked]) -> list[Answer]:
    """Answers in the order asked. An answer depends on its request alone, whoever shares the forward."""
    answers: list[Answer] = [Answer()] * len(asked)
    by_layers: dict[tuple[int, ...], list[int]] = {}
    for i, ask in enumerate(asked):
        by_layers.setdefault(ask.slot.module.needs.layers, []).append(i)
    for layers, rows in by_layers.items():
        ids: dict[int, str] = {}
        for i in rows:  # a prompt that cannot be read drops out before the group forms
            try:
                ids[i] = backbone.ids([asked[i].prompt], layers)[0]
            except NexusError as error:
                answers[i] = Answer(error=error)
        features, _ = encode_cached(backbone, [asked[i].prompt for i in ids], cache, layers, list(ids.values()))
        for i, feature in zip(ids, features, strict=True):
            ask = asked[i]
            try:
                answers[i] = Answer(feature.feature_id, ask.slot.act(feature, ask.state, greedy=ask.greedy, seed=ask.seed))
            except NexusError as error:
                answers[i] = Answer(feature.feature_id, error=error)
    return answers
