"""Grouped answers: equal to solitary ones to the bit, and one bad request costs only itself."""

import numpy as np
import pytest
import torch

from nexus_bus.errors import BadMessage
from nexus_bus.models.act import Asked, act_group
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.contract import build_contract
from nexus_bus.models.heads import FeatureShape
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import PolicySlot, build_module
from schemas.job import HeadSpec, LoraSpec
from schemas.policy import ActionSpec, ObservationSpec


@pytest.fixture(scope="module")
def policies(backbone: Backbone) -> list[PolicySlot]:
    made: list[PolicySlot] = []
    for i, (head, horizon) in enumerate([("oft", 8), ("oft", 4), ("gr00t", 6)]):
        contract = build_contract(
            backbone=backbone.info,
            head=HeadSpec(type=head, horizon=horizon),
            action=ActionSpec(size=2 + i, low=[-1.0] * (2 + i), high=[1.0] * (2 + i)),
            observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3),
        )
        made.append(PolicySlot.load(f"job{i}@0", contract, build_module(contract, FeatureShape(128, 4), seed=i)))
    return made


def ask(policies: list[PolicySlot], i: int, instruction: str = "") -> Asked:
    rng = np.random.default_rng(i)
    prompt = Prompt([rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)], instruction or "touch the block " * (1 + i % 4))
    return Asked(f"t{i % 3}", policies[i % 3], prompt, rng.normal(size=3).astype(np.float32), greedy=i % 2 == 0, seed=i)


@pytest.mark.parametrize("cached", [False, True])
def test_an_answer_is_the_same_alone_and_among_others(backbone: Backbone, policies: list[PolicySlot], cached: bool):
    asked = [ask(policies, i) for i in range(12)]
    cache = FeatureCache() if cached else None
    for mine, answer in zip(asked, act_group(backbone, cache, asked), strict=True):
        alone = act_group(backbone, None, [mine])[0]
        assert answer.acted is not None
        assert alone.acted is not None
        assert np.array_equal(answer.acted.actions, alone.acted.actions)
        assert answer.acted.log_prob == alone.acted.log_prob
        assert answer.acted.value == alone.acted.value
        assert answer.feature_id == alone.feature_id


def test_one_bad_request_is_refused_alone(backbone: Backbone, policies: list[PolicySlot]):
    good = ask(policies, 0)
    forged = ask(policies, 1, "touch <|image_pad|>")
    misfit = Asked("t0", policies[0], good.prompt, np.zeros(5, np.float32), greedy=True, seed=0)
    answers = act_group(backbone, None, [forged, good, misfit])
    assert isinstance(answers[0].error, BadMessage)
    assert isinstance(answers[2].error, BadMessage)
    assert answers[1].acted is not None
    assert act_group(backbone, None, []) == []


def test_two_tenants_with_one_version_name_are_answered_by_their_own_adapters(backbone: Backbone):
    """A known fault of servers of many adapters: the live request of one is answered with another's, or with the base."""
    lora = LoraSpec(rank=2)
    contract = build_contract(
        backbone=backbone.info,
        head=HeadSpec(horizon=4),
        action=ActionSpec(size=2, low=[-1.0] * 2, high=[1.0] * 2),
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3),
        lora=lora,
    )
    slots = []
    for seed in (1, 2):
        adapter = backbone.adapter(lora, seed)
        for up in adapter.up:
            up.data.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
        slots.append(PolicySlot.load("pick@3", contract, build_module(contract, FeatureShape(128, 4), seed=7), adapter))
    picture = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    asked = [
        Asked(f"t{i % 2}", slots[i % 2], Prompt([picture], "touch the block"), np.zeros(3, np.float32), greedy=True, seed=0)
        for i in range(6)
    ]
    cache = FeatureCache()
    for _ in range(2):
        answers = [answer.acted.actions for answer in act_group(backbone, cache, asked) if answer.acted is not None]
        assert len(answers) == 6
        for i, actions in enumerate(answers):
            assert np.array_equal(actions, answers[i % 2]), "the same tenant, the same answer"
        assert not np.array_equal(answers[0], answers[1]), "and never the other's"
