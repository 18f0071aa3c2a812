"""The grouped answer: one encode for requests of many tenants, then each policy acts on its own row."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nexus_bus.errors import NexusError
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache, encode_cached
from nexus_bus.models.features import Look
from nexus_bus.models.past import Past
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Acted, PolicySlot

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Asked:
    """One request, decoded."""

    tenant: str
    slot: PolicySlot
    prompt: Prompt
    state: NDArray[np.float32]  # [S] raw
    greedy: bool
    seed: int

    def look(self, suffix: torch.Tensor | None = None, past: Past | None = None) -> Look:
        """What it asks of the backbone."""
        return Look(self.prompt, self.slot.module.needs.layers, self.slot.adapter, suffix, self.tenant, past=past)


@dataclass(frozen=True, eq=False)
class Answer:
    """What came of it: `acted`, or the error of this request alone."""

    feature_id: str = ""
    acted: Acted | None = None
    error: NexusError | None = None


@torch.no_grad()
def act_group(backbone: Backbone, cache: FeatureCache | None, asked: Sequence[Asked]) -> list[Answer]:
    """Answers in the order asked. An answer depends on its request alone, whoever shares the forward."""
    answers: list[Answer] = [Answer()] * len(asked)
    ids: dict[int, str] = {}
    for i, ask in enumerate(asked):  # a prompt that cannot be read drops out before the group forms
        try:
            ids[i] = backbone.ids([ask.look()])[0]
        except NexusError as error:
            answers[i] = Answer(error=error)
    at_once = [i for i in ids if not asked[i].slot.module.needs.decodes]
    features, _ = encode_cached(backbone, [asked[i].look() for i in at_once], cache, [ids[i] for i in at_once])
    for i, feature in zip(at_once, features, strict=True):
        ask = asked[i]
        answers[i] = _answer(ids[i], lambda a=ask, f=feature: a.slot.act(f, a.state, greedy=a.greedy, seed=a.seed))
    decoding = {i: asked[i].slot.decode(asked[i].state, seed=asked[i].seed) for i in ids if i not in at_once}
    for i, answer in _decode(backbone, asked, decoding, ids).items():
        answers[i] = answer
    return answers


def _decode(
    backbone: Backbone,
    asked: Sequence[Asked],
    decoding: dict[int, Generator[torch.Tensor, torch.Tensor, Acted]],
    ids: dict[int, str],
) -> dict[int, Answer]:
    """Answers of those who decode token by token: one forward for the next token of all."""
    answers: dict[int, Answer] = {}
    pasts = {i: Past() for i in decoding}
    hidden: dict[int, torch.Tensor | None] = dict.fromkeys(decoding)  # at the whole suffix so far
    while hidden:
        new: dict[int, torch.Tensor] = {}
        for i, seen in hidden.items():
            try:
                suffix = decoding[i].send(seen)  # pyright: ignore[reportArgumentType] - a generator starts with None
                new[i] = suffix[0 if seen is None else len(seen) :]
            except StopIteration as done:
                answers[i] = Answer(ids[i], done.value)
            except NexusError as error:
                answers[i] = Answer(ids[i], error=error)
        features = backbone.encode([asked[i].look(suffix, pasts[i]) for i, suffix in new.items()])
        ends = {i: feature.hidden[feature.length :].float() for i, feature in zip(new, features, strict=True)}
        hidden = {i: end if (seen := hidden[i]) is None else torch.cat([seen, end]) for i, end in ends.items()}
    return answers


def _answer(feature_id: str, act: Callable[[], Acted]) -> Answer:
    try:
        return Answer(feature_id, act())
    except NexusError as error:
        return Answer(feature_id, error=error)
