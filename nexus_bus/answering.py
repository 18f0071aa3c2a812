"""What an inference worker does on its compute thread: groups are answered at once, long answers a few tokens at a time.

Between the worker, which takes requests and sends answers, and the models, which know of neither. Imports torch.
"""

import time
from collections.abc import Sequence
from typing import Any

from nexus_bus.errors import NexusError, Unavailable
from nexus_bus.learning.algorithms.base import observation_prompt
from nexus_bus.models.act import Answer, Asked, Decoding, act_group, charged
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.tensors import from_tensor

SLICE_S = 0.01  # of decoding between two groups; at least one token


class Answering:
    """The backbone at work."""

    def __init__(self, backbone: Backbone, cache: FeatureCache | None, log: Any) -> None:
        """`log` is told what a tenant is not."""
        self.backbone, self.cache, self.log = backbone, cache, log
        self.decoding: Decoding[int] = Decoding(backbone)

    def forward(self, asks: Sequence[Any]) -> tuple[list[Answer | None], float]:
        """Decode pictures, encode the group once, let every slot act on its row; None for those that go on by `decode`.

        `asks`: of workers/inference.py; each is told what it asks.

        Returns:
            The answers, with shares that add up to the seconds it took; and these.
        """
        started = time.perf_counter()
        answers: list[Answer | None] = [None] * len(asks)
        at_once: dict[int, Asked] = {}
        for i, ask in enumerate(asks):
            request = ask.request
            try:
                prompt = observation_prompt(request.observation, ask.slot.contract)
                state = from_tensor(request.observation.state)
                ask.asked = Asked(ask.delivery.tenant, ask.slot, prompt, state, request.greedy, request.seed)
                if ask.slot.module.needs.decodes:
                    self.decoding.add(id(ask), ask.asked, self.backbone.ids([ask.asked.look()])[0])
                else:
                    at_once[i] = ask.asked
            except NexusError as error:
                answers[i] = Answer(error=error)
        for i, answer in zip(at_once, self._act(list(at_once.values())), strict=True):
            answers[i] = answer
        done = [i for i, answer in enumerate(answers) if answer is not None]
        spent = time.perf_counter() - started
        shares = charged([answer for answer in answers if answer is not None], spent)
        for i, answer in zip(done, shares, strict=True):
            answers[i] = answer
        if not done:
            self.decoding.owe([id(ask) for ask in asks], spent)
        return answers, spent

    def decode(self) -> dict[int, Answer]:
        """The next tokens of all that are being decoded; answers of those that have their last, by the id of their ask."""
        ended: dict[int, Answer] = {}
        closes = time.perf_counter() + SLICE_S
        while self.decoding:
            try:
                ended |= self.decoding.step()
            except Exception:  # out of memory: what they hold is given up, and they may come again
                self.log.exception("decoding failed")
                error = Unavailable("decoding failed on this worker; ask again")
                return ended | {key: Answer(error=error, device_s=spent) for key, spent in self.decoding.clear().items()}
            if time.perf_counter() >= closes:
                break
        return ended

    def _act(self, asked: list[Asked]) -> list[Answer]:
        """If a group fails (out of memory, a head's own fault), its halves do what they can."""
        try:
            return act_group(self.backbone, self.cache, asked)
        except Exception:
            if len(asked) == 1:
                policy = asked[0].slot.version
                self.log.exception("a request cannot be answered", tenant=asked[0].tenant, policy=policy)
                return [Answer(error=NexusError(f"policy {policy}: fails on this request; the provider's log has the reason"))]
            middle = len(asked) // 2
            return self._act(asked[:middle]) + self._act(asked[middle:])
