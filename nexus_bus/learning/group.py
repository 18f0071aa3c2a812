"""The group step: what several tenants' algorithms ask for, served together: one forward, one backward, private steps.

Grouped or alone, a member's numbers are the same: neither features nor gradients depend on who shares the forward (exact
profile), and all else is the member's own. A member that fails, fails alone, and its slot stands where it stood before. What
fails for all of a group (out of memory, one that breaks the forward) is tried again in halves, until it fails for one.
"""

import math
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nexus_bus.learning.algorithms import Algorithm, Descend, Diverged, Features, Learning, LearnResult
from nexus_bus.learning.canary import Canary
from nexus_bus.learning.poison import out_of_memory
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import EncodeStats, FeatureCache, encode_cached
from nexus_bus.models.features import PUBLIC, FeatureBatch, Look, VLAFeature
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Slot, State
from nexus_bus.split import split


@dataclass(frozen=True, eq=False)
class Member:
    """One tenant's part of a group: a slot, and one unit of work for its algorithm."""

    slot: Slot
    algorithm: Algorithm[Any]
    work: Any
    public: bool = False  # the work is of data that every tenant may read, so its features may be shared
    trial: bool = False  # only to see whether it fails: the slot is left as it was

    def looks(self, prompts: Sequence[Prompt], suffix: Sequence[torch.Tensor] | None = None) -> list[Look]:
        """What prompts of this work ask of the backbone."""
        scope = PUBLIC if self.public else self.slot.tenant
        layers, adapter = self.slot.module.needs.layers, self.slot.adapter
        ends = suffix if suffix is not None else [None] * len(prompts)
        return [Look(prompt, layers, adapter, end, scope) for prompt, end in zip(prompts, ends, strict=True)]


@dataclass(frozen=True)
class MemberResult:
    """What became of a member. Either `result` or `error` is set."""

    result: LearnResult | None
    error: Exception | None
    forward_s: float  # its share of the grouped forwards
    private_s: float  # loss, backward, step
    group: int  # samples in the group, all members together
    tenants: int
    stats: EncodeStats | None  # of what was encoded, or found in the cache, before anybody learned

    @property
    def device_s(self) -> float:
        """Time this member owes."""
        return self.forward_s + self.private_s


@dataclass(eq=False)
class _Run:
    """A member on its way through the group."""

    member: Member
    prompts: list[Prompt]
    before: State  # with weights once a step has been taken
    learning: Learning
    whole: FeatureBatch | None = None  # features of all prompts, where they are frozen
    asks: Features | Descend | None = None
    result: LearnResult | None = None
    error: Exception | None = None
    stepped: bool = False
    again: bool = False  # failed together with others: to be tried again with fewer of them
    forward_s: float = 0.0
    private_s: float = 0.0
    recent_s: float = field(default=0.0)  # private time since the last descent: what a shared backward is split by

    @property
    def slot(self) -> Slot:
        return self.member.slot

    def send(self, answer: Any) -> None:
        """Let the algorithm go on until its next ask, its end, or its failure."""
        started = time.perf_counter()
        try:
            self.asks = self.learning.send(answer)
        except StopIteration as done:
            self.asks, self.result = None, done.value
        except Exception as error:  # noqa: BLE001 - whatever one tenant's work does, the others of the group go on
            self.fail(error)
        spent = time.perf_counter() - started
        self.private_s += spent
        self.recent_s += spent

    def descend(self, ask: Descend) -> None:
        """Take the step whose gradients are there. The last one is taken when nothing can fail any more, so that work of a
        single step, most of supervised learning, needs no copy of the weights to be rolled back."""
        started = time.perf_counter()
        try:
            norm = clip(self.slot, ask)
        except Diverged as error:
            self.fail(error)
            return
        if not ask.last:
            if not self.stepped:
                self.before, self.stepped = (self.slot.snapshot()[0] | self.before[0], self.before[1]), True
            take_step(self.slot, ask)
        self.private_s += time.perf_counter() - started
        self.send(norm)
        if ask.last and self.error is None and not self.member.trial:
            started = time.perf_counter()
            take_step(self.slot, ask)
            self.private_s += time.perf_counter() - started

    def fail(self, error: Exception) -> None:
        """End here, as if nothing had been learned, and let go of what the attempt held: others are to have that memory."""
        self.asks, self.error = None, error
        self.learning.close()
        self.whole = None
        self.slot.restore(self.before)
        traceback.clear_frames(error.__traceback__)


class GroupTrainer:
    """Runs groups on one backbone and one cache."""

    def __init__(self, backbone: Backbone, cache: FeatureCache | None = None, canary: Canary | None = None) -> None:
        self.backbone = backbone
        self.cache = cache
        self.canary = canary

    def run(self, members: Sequence[Member]) -> list[MemberResult]:
        """One grouped step. Results stand in the members' order; a failing member raises nothing."""
        runs = [self._begin(member) for member in members]
        stats = self._encode([run for run in runs if run.error is None and run.slot.adapter is None])
        for run in runs:
            if run.error is None:
                run.send(None)
        while asking := [run for run in runs if run.asks is not None]:
            if wanting := [run for run in asking if isinstance(run.asks, Features)]:
                self._look(wanting)
            else:
                self._descend(asking)
        for run in runs:
            if run.member.trial and run.error is None:
                run.slot.restore(run.before)
            run.again = run.again or (len(runs) > 1 and run.error is not None and out_of_memory(run.error))
        group, tenants = sum(len(run.prompts) for run in runs), len({run.slot.tenant for run in runs})
        again = iter(self._halves([run.member for run in runs if run.again]))
        return [
            replace(once := next(again), private_s=once.private_s + r.forward_s + r.private_s)
            if r.again
            else MemberResult(r.result, r.error, r.forward_s, r.private_s, group, tenants, stats)
            for r in runs
        ]

    def _halves(self, members: list[Member]) -> list[MemberResult]:
        """Those who failed together, in two groups: who fails alone in the end is to blame, the others lose nothing."""
        middle = (len(members) + 1) // 2
        return [result for part in (members[:middle], members[middle:]) if part for result in self.run(part)]

    def _begin(self, member: Member) -> _Run:
        """A prompt that cannot be read ends its member before the group forms."""
        run = _Run(member, [], member.slot.snapshot(weights=False), member.algorithm.learn(member.slot, member.work))
        started = time.perf_counter()
        try:
            run.prompts = member.algorithm.prompts(member.work)
            self.backbone.ids(member.looks(run.prompts))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with its pictures, the others of the group go on
            run.fail(error)
        run.private_s = time.perf_counter() - started
        return run

    def _encode(self, runs: list[_Run]) -> EncodeStats | None:
        """Features of all frozen members, from the cache or one grouped encode."""
        looks = [run.member.looks(run.prompts) for run in runs]
        flat = [look for own in looks for look in own]
        ids = self.backbone.ids(flat)
        try:
            features, stats = encode_cached(self.backbone, flat, self.cache, ids)
            if self.canary is not None:
                self.canary.watch(self.backbone, flat, features)
        except Exception as error:  # noqa: BLE001 - one of them is to blame, or all are too much together
            _fail_together(runs, error)
            return None
        asked = Counter((look.scope, name) for look, name in zip(flat, ids, strict=True))
        start = 0
        for run, own in zip(runs, looks, strict=True):
            stop = start + len(own)
            if own:
                run.whole = FeatureBatch.collate(features[start:stop], run.slot.device)
            names = Counter((look.scope, name) for look, name in zip(own, ids[start:stop], strict=True))
            run.forward_s = stats.share(names, asked)
            start = stop
        return stats

    def _look(self, runs: list[_Run]) -> None:
        """Answer those who ask for features: from what is encoded already, or by one forward through everybody's adapters."""
        adapted = [run for run in runs if run.whole is None]
        batches = self._adapted(adapted) if adapted else {}
        for run in runs:
            if run.error is not None:
                continue
            rows = _ask(run).rows
            batch = batches[id(run)] if run.whole is None else run.whole if rows is None else run.whole.rows(rows)
            run.send(batch)

    def _adapted(self, runs: list[_Run]) -> dict[int, FeatureBatch]:
        looks: list[list[Look]] = []
        for run in runs:
            ask = _ask(run)
            prompts = run.prompts if ask.rows is None else [run.prompts[i] for i in ask.rows.tolist()]
            looks.append(run.member.looks(prompts, ask.suffix))
        started = time.perf_counter()
        try:
            features = self._forward(runs, [look for own in looks for look in own])
        except Exception as error:  # noqa: BLE001 - as above
            _fail_together(runs, error)
            return {}
        spent = time.perf_counter() - started
        batches, start = {}, 0
        tokens = [sum(len(f.hidden) for f in part) for part in _split(features, looks)]
        for run, own, share in zip(runs, looks, tokens, strict=True):
            batches[id(run)] = FeatureBatch.collate(features[start : start + len(own)], run.slot.device)
            run.forward_s += spent * share / sum(tokens)
            run.recent_s += spent * share / sum(tokens)
            start += len(own)
        return batches

    def _forward(self, runs: list[_Run], looks: list[Look]) -> list[VLAFeature]:
        looks = self._below(looks)
        with torch.set_grad_enabled(any(_ask(run).grad for run in runs)):
            features = self.backbone.encode(looks)
        if self.canary is not None:
            self.canary.watch(self.backbone, looks, features)
        return features

    def _below(self, looks: list[Look]) -> list[Look]:
        """Put under each look what its adapter does not change: encoded once for all steps where last layers are adapted."""
        prefixes = {i: prefix for i, look in enumerate(looks) if (prefix := self.backbone.prefix_of(look)) is not None}
        features, _ = encode_cached(self.backbone, list(prefixes.values()), self.cache)
        known = {i: (prefixes[i].layers[0], feature.hidden) for i, feature in zip(prefixes, features, strict=True)}
        return [replace(look, prefix=known[i]) if i in known else look for i, look in enumerate(looks)]

    def _descend(self, runs: list[_Run]) -> None:
        """One backward over the sum of losses that share no parameter, then each member's own step."""
        for run in runs:
            run.slot.optimizer.zero_grad(set_to_none=True)
        started = time.perf_counter()
        losses = [_descent(run).loss for run in runs]
        try:
            (losses[0] if len(losses) == 1 else torch.stack(losses).sum()).backward()
        except Exception as error:  # noqa: BLE001 - as above
            _fail_together(runs, error)
            return
        spent, whole = time.perf_counter() - started, sum(run.recent_s for run in runs)
        for run in runs:
            run.private_s += spent * (run.recent_s / whole if whole else 1 / len(runs))
            run.recent_s = 0.0
            run.descend(_descent(run))


def charged(results: Sequence[MemberResult], whole: float) -> list[MemberResult]:
    """The results of a group with shares that add up to its measured seconds, whatever else a group takes."""
    shares = split(whole, [result.device_s for result in results])
    return [replace(one, private_s=share - one.forward_s) for one, share in zip(results, shares, strict=True)]


def _fail_together(runs: Sequence[_Run], error: Exception) -> None:
    """Out of memory, or one of them is broken: all stand where they stood, and are tried again with fewer neighbours."""
    for run in runs:
        run.fail(error)
        run.again = len(runs) > 1


def clip(slot: Slot, ask: Descend) -> float:
    """Clip each parameter group to a norm of its own; the norm of all before that.

    Raises:
        Diverged: loss or gradient not finite; no weight has been touched.
    """
    groups = slot.optimizer.param_groups
    norm = math.hypot(*(float(torch.nn.utils.clip_grad_norm_(group["params"], ask.grad_clip)) for group in groups))
    if not math.isfinite(norm) or not torch.isfinite(ask.loss):
        raise Diverged(
            f"step {slot.step}: loss {float(ask.loss.detach()):g}, gradient norm {norm:g}; "
            "lower the learning rate or check the data"
        )
    return norm


def take_step(slot: Slot, ask: Descend) -> None:
    """One step of the optimizer with the rates asked for."""
    for group in slot.optimizer.param_groups:
        group["lr"] = ask.rates[group["name"]]
    slot.optimizer.step()
    slot.optimizer.zero_grad(set_to_none=True)
    slot.step += 1


def _ask(run: _Run) -> Features:
    assert isinstance(run.asks, Features)  # noqa: S101 - narrows the type
    return run.asks


def _descent(run: _Run) -> Descend:
    assert isinstance(run.asks, Descend)  # noqa: S101 - narrows the type
    return run.asks


def _split(features: Sequence[VLAFeature], looks: Sequence[Sequence[Look]]) -> list[Sequence[VLAFeature]]:
    parts, start = [], 0
    for own in looks:
        parts.append(features[start : start + len(own)])
        start += len(own)
    return parts
