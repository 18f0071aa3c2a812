"""Slots and checkpoints: versions that act alike alone and together, states that go on to the bit, and no pickle."""

import numpy as np
import pytest
import torch

from nexus_bus.bounds import MARGIN
from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.checkpoint import training_state_bytes
from nexus_bus.models.contract import build_contract
from nexus_bus.models.features import FeatureBatch, VLAFeature
from nexus_bus.models.heads import FeatureShape
from nexus_bus.models.slots import PolicySlot, Slot, build_module
from schemas.job import HeadSpec
from schemas.policy import ActionSpec, ObservationSpec, PolicyContract

INFO = describe_backbone("nexus-nano")


def contract(head: str = "oft", horizon: int = 4) -> PolicyContract:
    return build_contract(
        backbone=INFO,
        head=HeadSpec(type=head, horizon=horizon, options={"width": 32, "layers": 2} if head == "gr00t" else {}),
        action=ActionSpec(size=2, low=[-0.1, -0.5], high=[0.1, 0.5]),
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3),
    )


def feature(seed: int = 0, length: int = 40) -> VLAFeature:
    hidden = torch.randn(length, 128, generator=torch.Generator().manual_seed(seed))
    return VLAFeature(f"{seed}", hidden, torch.zeros(length, dtype=torch.uint8), (length - 8, length))


def policy(head: str = "oft") -> PolicySlot:
    return PolicySlot.load("pick@3", contract(head), build_module(contract(head), FeatureShape(128, 4), seed=1))


def slot(head: str = "oft") -> Slot:
    module = build_module(contract(head), FeatureShape(128, 4), seed=1)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return Slot("acme", "pick", contract(head), module, optimizer, torch.Generator().manual_seed(3))


def train(held: Slot, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        batch = FeatureBatch.collate([feature(held.step * 10 + i, 36 + i) for i in range(4)])
        goal = torch.rand(4, 4, 2, generator=held.generator)
        held.optimizer.zero_grad()
        loss = held.module.loss(batch, torch.zeros(4, 3), goal, torch.zeros(4, 4, dtype=torch.bool), held.generator)
        loss.backward()
        held.optimizer.step()
        held.step += 1
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("head", ["oft", "gr00t"])
@pytest.mark.parametrize("greedy", [True, False])
def test_an_answer_depends_on_its_request_alone(head: str, greedy: bool):
    acting, state = policy(head), np.zeros(3, np.float32)
    first = acting.act(feature(), state, greedy=greedy, seed=5)
    acting.act(feature(1), state + 1, greedy=False, seed=6)
    again = acting.act(feature(), state, greedy=greedy, seed=5)
    assert np.array_equal(first.sample, again.sample)
    assert first.log_prob == again.log_prob
    assert (first.log_prob is None) == (head == "gr00t")


def test_executed_actions_stay_inside_the_space_and_the_sample_does_not():
    wide = policy()
    with torch.no_grad():
        wide.module.log_std.fill_(1.0)  # type: ignore[operator]
    acted = wide.act(feature(), np.zeros(3, np.float32), greedy=False, seed=1)
    assert np.abs(acted.sample).max() > 1
    assert (np.abs(acted.actions) <= np.array([0.1, 0.5], np.float32)).all()
    inside = np.abs(acted.sample) < 1
    assert np.allclose(acted.actions[inside], (acted.sample * np.array([0.1, 0.5], np.float32))[inside], atol=1e-6)
    assert acted.actions.dtype == np.float32
    assert acted.clipped == pytest.approx((np.abs(acted.sample) > 1 + 2 * MARGIN).mean())
    assert acted.clipped > 0


def test_the_policy_fails_closed():
    with pytest.raises(BadMessage, match=r"observation.state: shape \[4\], the contract says \[3\]"):
        policy().act(feature(), np.zeros(4, np.float32))
    with pytest.raises(BadMessage, match="not finite"):
        policy().act(feature(), np.array([0, np.nan, 0], np.float32))
    broken = policy()
    broken.module.output.bias.data.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(ContractError, match="policy pick@3: its actions are not finite"):
        broken.act(feature(), np.zeros(3, np.float32))


def test_a_snapshot_is_a_copy():
    held = slot()
    train(held, 2)
    before, saved = held.snapshot(), training_state_bytes(held)
    train(held, 3)
    assert training_state_bytes(held) != saved
    held.restore(before)
    assert training_state_bytes(held) == saved
