"""The grouped answer: one encode for requests of many tenants, then each policy acts on its own row."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from nexus_bus.errors import NexusError
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache, encode_cached
from nexus_bus.models.features import Look
from nexus_bus.models.past import Past
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Acted, PolicySlot
from nexus_bus.split import split

Key = TypeVar("Key", bound=Hashable)
log: Any = structlog.get_logger()


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
    device_s: float = 0.0  # what it owes: its share of the forwards, by tokens, and its own time besides


@torch.no_grad()
def act_group(backbone: Backbone, cache: FeatureCache | None, asked: Sequence[Asked]) -> list[Answer]:
    """Answers in the order asked. An answer depends on its request alone, whoever shares the forward."""
    answers: list[Answer] = [Answer()] * len(asked)
    ids: dict[int, str] = {}
    for i, ask in enumerate(asked):  # a prompt that cannot be read drops out before the group forms
        started = time.perf_counter()
        try:
            ids[i] = backbone.ids([ask.look()])[0]
        except NexusError as error:
            answers[i] = Answer(error=error, device_s=time.perf_counter() - started)
    at_once = [i for i in ids if not asked[i].slot.module.needs.decodes]
    features, stats = encode_cached(backbone, [asked[i].look() for i in at_once], cache, [ids[i] for i in at_once])
    everybody = Counter((asked[i].tenant, ids[i]) for i in at_once)
    for i, feature in zip(at_once, features, strict=True):
        ask, started = asked[i], time.perf_counter()
        answer = _answer(ids[i], lambda a=ask, f=feature: a.slot.act(f, a.state, greedy=a.greedy, seed=a.seed))
        share = stats.share({(ask.tenant, ids[i]): 1}, everybody)
        answers[i] = replace(answer, device_s=share + time.perf_counter() - started)
    decoding: Decoding[int] = Decoding(backbone)
    for i in ids.keys() - set(at_once):
        decoding.add(i, asked[i], ids[i])
    while decoding:
        for i, answer in decoding.step().items():
            answers[i] = answer
    return answers


@dataclass(eq=False)
class _Decoded:
    """A request on its way, token by token."""

    ask: Asked
    feature_id: str
    decoding: Generator[torch.Tensor, torch.Tensor, Acted]
    past: Past = field(default_factory=Past)
    hidden: torch.Tensor | None = None  # at the whole suffix so far
    spent: float = 0.0


class Decoding(Generic[Key]):
    """Requests that are answered token by token, in no group: every step is one forward for the next token of all of them.

    Between two steps others have their turn, so that a long answer delays nobody by more than a token.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._rows: dict[Key, _Decoded] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: Key, ask: Asked, feature_id: str = "") -> None:
        """Begin a request."""
        self._rows[key] = _Decoded(ask, feature_id, ask.slot.decode(ask.state, seed=ask.seed))

    @torch.no_grad()
    def step(self) -> dict[Key, Answer]:
        """The next token of all; answers of those who have their last."""
        ended: dict[Key, Answer] = {}
        looks: dict[Key, Look] = {}
        began, before = time.perf_counter(), {key: row.spent for key, row in self._rows.items()}
        for key, row in self._rows.items():
            started = time.perf_counter()
            try:
                suffix = row.decoding.send(row.hidden)  # pyright: ignore[reportArgumentType] - a generator starts with None
                looks[key] = row.ask.look(suffix[0 if row.hidden is None else len(row.hidden) :], row.past)
            except StopIteration as done:
                ended[key] = Answer(row.feature_id, done.value)
            except NexusError as error:
                ended[key] = Answer(row.feature_id, error=error)
            except Exception:  # a head's own fault: the others go on
                log.exception("a request cannot be decoded", tenant=row.ask.tenant, policy=row.ask.slot.version)
                said = f"policy {row.ask.slot.version}: fails on this request; the provider's log has the reason"
                ended[key] = Answer(row.feature_id, error=NexusError(said))
            row.spent += time.perf_counter() - started
        self._forward(looks)
        self._charge(time.perf_counter() - began, before)
        return {key: replace(answer, device_s=self._rows.pop(key).spent) for key, answer in ended.items()}

    def drop(self, key: Key) -> float:
        """Nobody waits for it any more; the seconds it has taken."""
        row = self._rows.pop(key, None)
        return row.spent if row is not None else 0.0

    def clear(self) -> dict[Key, float]:
        """Give all of them up; the seconds that each has taken."""
        spent = {key: row.spent for key, row in self._rows.items()}
        self._rows.clear()
        return spent

    def owe(self, key: Key, seconds: float) -> None:
        """What it took to begin it."""
        self._rows[key].spent += seconds

    def _charge(self, whole: float, before: dict[Key, float]) -> None:
        """All of a step's measured seconds, in the proportion of what each is known to have taken."""
        shares = split(whole, [self._rows[key].spent - spent for key, spent in before.items()])
        for (key, spent), share in zip(before.items(), shares, strict=True):
            self._rows[key].spent = spent + share

    def _forward(self, looks: dict[Key, Look]) -> None:
        started = time.perf_counter()
        features = self._backbone.encode(list(looks.values()))
        taken, tokens = time.perf_counter() - started, sum(len(feature.hidden) for feature in features)
        for key, feature in zip(looks, features, strict=True):
            row = self._rows[key]
            end = feature.hidden[feature.length :].float()
            row.hidden = end if row.hidden is None else torch.cat([row.hidden, end])
            row.spent += taken * len(feature.hidden) / tokens


def _answer(feature_id: str, act: Callable[[], Acted]) -> Answer:
    try:
        return Answer(feature_id, act())
    except NexusError as error:
        return Answer(feature_id, error=error)
