"""What an inference worker does on its compute thread: groups are answered at once, long answers a few tokens at a time.

Between the worker, which takes requests and sends answers, and the models, which know of neither. Imports torch.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nexus_bus.errors import NexusError, Unavailable
from nexus_bus.learning.algorithms.base import observation_prompt
from nexus_bus.models.act import Answer, Asked, Decoding, act_group
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.slots import state_row
from nexus_bus.split import split
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
            The answers, with shares that add up to the seconds it took, those of whoever goes on included; and these.
        """
        started = time.perf_counter()
        answers: list[Answer | None] = [None] * len(asks)
        owed = [0.0] * len(asks)
        at_once: dict[int, Asked] = {}
        for i, ask in enumerate(asks):
            began = time.perf_counter()
            try:
                asked = ask.asked = _asked(ask)
                name = self.backbone.ids([asked.look()])[0]
                if ask.slot.module.needs.decodes:
                    self.decoding.add(id(ask), asked, name)
                else:
                    at_once[i] = asked
            except NexusError as error:
                answers[i] = Answer(error=error)
            except Exception as error:  # noqa: BLE001 - whatever a codec makes of its pictures, the others go on
                answers[i] = Answer(error=self._broken(ask.delivery.tenant, ask.slot.version, error))
            owed[i] = time.perf_counter() - began  # its pictures are its own, whatever comes of it
        for i, answer in zip(at_once, self._act(list(at_once.values())), strict=True):
            answers[i] = answer
            owed[i] += answer.device_s
        spent = time.perf_counter() - started
        for i, share in enumerate(split(spent, owed)):
            if (answer := answers[i]) is not None:
                answers[i] = replace(answer, device_s=share)
            else:
                self.decoding.owe(id(asks[i]), share)
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
        started = time.perf_counter()
        try:
            return act_group(self.backbone, self.cache, asked)
        except Exception as error:  # noqa: BLE001 - as above
            if len(asked) == 1:
                said = self._broken(asked[0].tenant, asked[0].slot.version, error)
                return [Answer(error=said, device_s=time.perf_counter() - started)]
            middle = len(asked) // 2
            return self._act(asked[:middle]) + self._act(asked[middle:])

    def _broken(self, tenant: str, policy: str, error: Exception) -> NexusError:
        self.log.error("a request cannot be answered", tenant=tenant, policy=policy, exc_info=error)
        return NexusError(f"policy {policy}: fails on this request; the provider's log has the reason")


def _asked(ask: Any) -> Asked:
    """Decode a request: what costs nothing to look at before its pictures."""
    seen, contract = ask.request.observation, ask.slot.contract
    state = from_tensor(seen.state)
    state_row(ask.slot.state_norm, state, contract.observation.state_size)
    prompt = observation_prompt(seen, contract)
    return Asked(ask.delivery.tenant, ask.slot, prompt, state, ask.request.greedy, ask.request.seed)
