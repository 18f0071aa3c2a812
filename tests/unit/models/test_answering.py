"""Answers that come token by token stand aside for those that come at once, and one that fails fails alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from nexus_bus.answering import Answering
from nexus_bus.models.act import Asked, act_group
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.models.slots import PolicySlot, build_module
from nexus_bus.tensors import encode_image, to_tensor
from schemas.environment import Observation
from schemas.job import HeadSpec, LoraSpec
from schemas.policy import ActionSpec, ObservationSpec


def ask(backbone: Backbone, head: str, seed: int) -> Any:
    lora = LoraSpec(rank=2) if head == "fast" else None
    contract = build_contract(
        backbone=backbone.info,
        head=HeadSpec(type=head, horizon=4),
        action=ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3),
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=2),
        lora=lora,
    )
    module = build_module(contract, backbone.shape, seed)
    if head == "fast":
        module.output.bias.data[-1] = -1e9  # type: ignore[union-attr]  # it never says that it has ended
    slot = PolicySlot.load(f"{head}@{seed}", contract, module, backbone.adapter(lora, seed) if lora else None)
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
    assert answers[1].device_s == pytest.approx(spent)
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
