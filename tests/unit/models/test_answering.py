"""Answers that come token by token stand aside for those that come at once; one that fails, fails alone, and pays for it."""

import zlib
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from nexus_bus import answering as module
from nexus_bus.answering import Answering
from nexus_bus.errors import BadMessage
from nexus_bus.learning.algorithms import base
from nexus_bus.models import act, cache
from nexus_bus.models.act import Asked, act_group
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.models.slots import PolicySlot, build_module
from nexus_bus.tensors import decode_image, encode_image, to_tensor
from schemas.base import Image
from schemas.environment import Observation
from schemas.job import HeadSpec, LoraSpec
from schemas.policy import ActionSpec, ObservationSpec


def ask(backbone: Backbone, head: str, seed: int, *cameras: str) -> Any:
    lora = LoraSpec(rank=2) if head == "fast" else None
    contract = build_contract(
        backbone=backbone.info,
        head=HeadSpec(type=head, horizon=4),
        action=ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3),
        observation=ObservationSpec(cameras=dict.fromkeys(("front", *cameras), (96, 96, 3)), state_size=2),
        lora=lora,
    )
    made = build_module(contract, backbone.shape, seed)
    if head == "fast":
        made.output.bias.data[-1] = -1e9  # type: ignore[union-attr]  # it never says that it has ended
    slot = PolicySlot.load(f"{head}@{seed}", contract, made, backbone.adapter(lora, seed) if lora else None)
    rng = np.random.default_rng(seed)
    seen = Observation(
        images={"front": encode_image(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8), "raw")},
        state=to_tensor(rng.normal(size=2).astype(np.float32)),
        instruction="touch the red block",
    )
    request = SimpleNamespace(observation=seen, greedy=True, seed=seed)
    return SimpleNamespace(delivery=SimpleNamespace(tenant="acme"), request=request, slot=slot, asked=None)


def test_a_long_answer_delays_nobody_by_more_than_a_token(backbone: Backbone):
    answering = Answering(backbone, None, structlog.get_logger())
    long, short = ask(backbone, "fast", 1), ask(backbone, "oft", 2)
    answers, spent = answering.forward([long, short])
    assert answers[0] is None
    assert answers[1] is not None
    assert answers[1].acted is not None
    assert 0 < answers[1].device_s < spent
    rounds, ended = 0, {}
    while not ended:
        ended = answering.decode()
        rounds += 1
        late = ask(backbone, "oft", 10 + rounds)
        assert answering.forward([late])[0][0] is not None, "it is answered between two tokens"
    assert rounds > 1
    assert isinstance(long.asked, Asked)
    alone = act_group(backbone, None, [long.asked])[0]
    assert alone.acted is not None
    assert np.array_equal(ended[id(long)].acted.actions, alone.acted.actions)
    assert ended[id(long)].device_s > 0


def test_a_head_that_breaks_while_it_decodes_breaks_alone(backbone: Backbone, monkeypatch: pytest.MonkeyPatch):
    answering = Answering(backbone, None, structlog.get_logger())
    good, bad = ask(backbone, "fast", 1), ask(backbone, "fast", 2)

    def broken(*_: Any) -> Any:
        raise ValueError("no")
        yield

    monkeypatch.setattr(bad.slot.module, "decode", broken)
    answering.forward([good, bad])
    ended: dict[int, Any] = {}
    while len(ended) < 2:
        ended |= answering.decode()
    assert ended[id(good)].acted is not None
    assert "fast@2: fails on this request; the provider's log has the reason" in str(ended[id(bad)].error)


class Clock:
    """Every look at it takes a millisecond, and a picture of this policy's a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, large: Any) -> None:
        self.now, self.large = 0.0, large.request.observation.images["front"]
        for one in (module, act, cache):
            monkeypatch.setattr(one, "time", SimpleNamespace(perf_counter=self.look))
        monkeypatch.setattr(base, "decode_image", self.decode)

    def look(self) -> float:
        self.now += 0.001
        return self.now

    def decode(self, image: Image) -> Any:
        self.now += 1.0 if image is self.large else 0.0
        return decode_image(image)


@pytest.mark.parametrize("fails", [True, False])
def test_pictures_are_paid_by_who_sent_them_whatever_comes_of_it(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    small, large = ask(backbone, "oft", 1), ask(backbone, "oft", 2)
    if fails:
        seen = large.request.observation
        lying = {"front": Image(encoding="raw", shape=(96, 96, 3), data=b"none of it")}
        large.request.observation = msgspec.structs.replace(seen, images=lying)
    Clock(monkeypatch, large)
    answers, spent = Answering(backbone, None, structlog.get_logger()).forward([small, large])
    assert answers[0] is not None
    assert answers[0].acted is not None
    assert answers[1] is not None
    assert (answers[1].acted is None) == fails
    assert answers[0].device_s + answers[1].device_s == pytest.approx(spent)
    assert answers[1].device_s > 1.0 > 20 * answers[0].device_s > 0


def test_pictures_of_a_long_answer_are_its_own_too(backbone: Backbone, monkeypatch: pytest.MonkeyPatch):
    small, large = ask(backbone, "oft", 1), ask(backbone, "fast", 2)
    answering = Answering(backbone, None, structlog.get_logger())
    Clock(monkeypatch, large)
    answers, spent = answering.forward([small, large])
    assert answers[0] is not None
    assert answers[1] is None
    owed = answering.decoding.drop(id(large))
    assert owed + answers[0].device_s == pytest.approx(spent)
    assert owed > 1.0 > 20 * answers[0].device_s > 0


def test_what_costs_nothing_is_looked_at_before_a_picture_is_unfolded(backbone: Backbone, monkeypatch: pytest.MonkeyPatch):
    unfolded: list[Image] = []
    monkeypatch.setattr(base, "decode_image", lambda image: unfolded.append(image) or decode_image(image))
    fields: list[tuple[dict[str, Any], str]] = [
        ({"state": to_tensor(np.zeros(3, np.float32))}, "observation.state: shape [3]"),
        ({"state": to_tensor(np.full(2, np.nan, np.float32))}, "observation.state: holds numbers that are not finite"),
        ({}, "observation.images: no camera 'wrist'; there is front"),
    ]
    for changes, said in fields:
        bad = ask(backbone, "oft", 1, "wrist")
        bad.request.observation = msgspec.structs.replace(bad.request.observation, **changes)
        answer = Answering(backbone, None, structlog.get_logger()).forward([bad])[0][0]
        assert answer is not None
        assert isinstance(answer.error, BadMessage)
        assert said in str(answer.error)
    assert not unfolded


def test_what_no_codec_should_raise_costs_its_own_request(backbone: Backbone, monkeypatch: pytest.MonkeyPatch):
    good, bad = ask(backbone, "oft", 1), ask(backbone, "oft", 2)

    def decode(image: Image) -> Any:
        if image is bad.request.observation.images["front"]:
            raise zlib.error("incomplete")
        return decode_image(image)

    monkeypatch.setattr(base, "decode_image", decode)
    answers, _ = Answering(backbone, None, structlog.get_logger()).forward([bad, good])
    assert answers[0] is not None
    assert "oft@2: fails on this request" in str(answers[0].error)
    assert answers[1] is not None
    assert answers[1].acted is not None
