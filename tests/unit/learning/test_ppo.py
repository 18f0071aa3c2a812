"""PPO: chunk-level densities and rewards, its losses against slow references, and that it improves a one-step task."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.learning.algorithms import Descend, LearnResult, Ppo, PpoWork
from nexus_bus.learning.algorithms.ppo import clipped_value_loss
from nexus_bus.learning.gae import gae
from nexus_bus.learning.group import clip, take_step
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache, encode_cached
from nexus_bus.models.checkpoint import training_state_bytes
from nexus_bus.models.features import FeatureBatch, Look
from nexus_bus.models.heads import FeatureShape, PolicyModule
from nexus_bus.models.slots import PolicySlot, Slot, build_module
from nexus_bus.tensors import from_tensor, to_tensor
from schemas import job
from schemas.policy import PolicyContract
from schemas.rollout import RolloutRecord, RolloutStep


def fresh(contract: PolicyContract, **spec: Any) -> tuple[Ppo, Slot]:
    algorithm = Ppo(job.Ppo(**spec), slot_seed=3)
    slot = algorithm.make_slot("acme", "pick", contract, build_module(contract, FeatureShape(128, 4), seed=5))
    slot.version = 0
    return algorithm, slot


def behave(record: RolloutRecord, slot: Slot, backbone: Backbone) -> RolloutRecord:
    """The record as this very policy would have left it: its own densities and values."""
    work = PpoWork.from_messages([record], slot.contract)
    features = FeatureBatch.collate(encode_cached(backbone, [Look(prompt) for prompt in work.prompts])[0])
    states = torch.from_numpy(np.stack([from_tensor(o.state) for o in work.observations]))
    assert isinstance(slot.module, PolicyModule)
    with torch.no_grad():
        log_prob, _, value = slot.module.evaluate(features, states, work.actions)
    steps = [
        msgspec.structs.replace(step, log_prob=float(log_prob[i, : step.executed].sum()), value=float(value[i]))
        for i, step in enumerate(record.steps)
    ]
    return msgspec.structs.replace(record, steps=steps)


def test_targets_are_chunk_level(make: Any):
    contract = make.contract()
    records = [make.record(contract, i) for i in range(4)]
    advantages, returns, values = PpoWork.from_messages(records, contract).targets(0.9, 0.8)
    row = 0
    for record in records:
        expected, _ = gae(
            np.array([sum(step.rewards) for step in record.steps]), np.array([step.value for step in record.steps]),
            terminated=record.terminated, final_value=0.5, gamma=0.9, lam=0.8,
        )  # fmt: skip
        rows = slice(row, row + 3)
        np.testing.assert_allclose(advantages[rows], expected, rtol=1e-5)
        np.testing.assert_allclose(returns[rows] - values[rows], expected, rtol=1e-4)
        row += 3


def test_the_first_minibatch_has_ratio_one_and_the_losses_of_the_formulas(backbone: Backbone, make: Any):
    contract = make.contract()
    algorithm, slot = fresh(contract, epochs=1, minibatch=100, entropy=0.01, init_log_std=-1.0)
    records = [behave(make.record(contract, i), slot, backbone) for i in range(4)]
    work = PpoWork.from_messages(records, contract)
    advantages, returns, values = work.targets(0.99, 0.95)
    result = make.learn(backbone, algorithm, slot, work)
    assert result.metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["clip_fraction"] == 0.0
    normalised = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-5)
    assert result.metrics["policy_loss"] == pytest.approx(-float(normalised.mean()), abs=1e-5)
    huber = [0.5 * e * e if abs(e) < 10 else 10 * (abs(e) - 5) for e in (values - returns).tolist()]
    assert result.metrics["value_loss"] == pytest.approx(sum(huber) / len(huber), rel=1e-4)
    assert result.metrics["entropy"] == pytest.approx(2 * (0.5 * math.log(2 * math.pi * math.e) - 1.0), rel=1e-5)
    assert (result.steps, result.samples, slot.batches, slot.records) == (1, 12, 1, 4)
    assert result.metrics["std"] == pytest.approx(math.exp(-1.0), rel=1e-2)


def surrogate(ratio: float, advantage: float, spec: job.Ppo) -> float:
    clipped = min(ratio * advantage, min(max(ratio, 1 - spec.clip), 1 + spec.clip) * advantage)
    return max(clipped, spec.dual_clip * advantage) if advantage < 0 else clipped


@pytest.mark.parametrize("lag", [0, 2])
def test_clips_and_weights_are_those_of_the_formulas(backbone: Backbone, make: Any, lag: int):
    """Densities far from the present ones, so that every clip is at work; with lag the ratio is taken against the present."""
    contract = make.contract()
    algorithm, slot = fresh(contract)
    records = []
    for i, shift in enumerate((-5.0, -0.5, 0.1, 0.5, 1.5, 5.0)):
        record = behave(make.record(contract, i, chunks=2), slot, backbone)
        moved = [msgspec.structs.replace(step, log_prob=step.log_prob + shift) for step in record.steps]
        records.append(msgspec.structs.replace(record, steps=moved))
    slot.version = lag
    work = PpoWork.from_messages(records, contract)
    assert isinstance(slot.module, PolicyModule)
    features = FeatureBatch.collate(backbone.encode([Look(prompt) for prompt in work.prompts]))
    batch = algorithm._prepare(slot, work, features, slot.module)
    _, metrics = algorithm._loss(slot.module, batch, features, torch.arange(12), warming=False)
    total = 0.0
    for i, shift in enumerate((-5.0, -0.5, 0.1, 0.5, 1.5, 5.0)):
        for j in range(2):
            advantage = float(batch.advantage[2 * i + j])
            weight = min(math.exp(-shift), 2.0) if lag else 1.0
            total += weight * surrogate(1.0 if lag else math.exp(-shift), advantage, algorithm.spec)
    assert metrics["policy_loss"] == pytest.approx(-total / 12, rel=1e-3)
    assert float(batch.weight.max()) == pytest.approx(2.0 if lag else 1.0)


def test_the_value_is_held_near_what_it_was():
    value = torch.tensor([1.0, 0.1, 30.0], requires_grad=True)
    loss = clipped_value_loss(value, torch.zeros(3), torch.tensor([1.0, 1.0, 0.0]), 0.2)
    expected = (0.5 * 0.8**2 + 0.5 * 0.9**2 + 10 * (30 - 5)) / 3
    assert float(loss.detach()) == pytest.approx(expected)


def test_only_executed_actions_count(backbone: Backbone, make: Any):
    contract = make.contract()
    algorithm, slot = fresh(contract, epochs=1, minibatch=100)
    record = behave(make.record(contract, 0), slot, backbone)
    changed = [
        msgspec.structs.replace(
            step,
            actions=to_tensor(
                np.where(np.arange(4)[:, None] < step.executed, from_tensor(step.actions), 9.0).astype(np.float32)
            ),
        )
        for step in record.steps
    ]
    losses = []
    for steps in (record.steps, changed):
        algorithm, slot = fresh(contract, epochs=1, minibatch=100)
        work = PpoWork.from_messages([msgspec.structs.replace(record, steps=steps)], contract)
        losses.append(make.learn(backbone, algorithm, slot, work).metrics["policy_loss"])
    assert losses[0] == losses[1]


def test_updates_repeat_to_the_bit(backbone: Backbone, make: Any):
    contract = make.contract()
    states = []
    for _ in range(2):
        algorithm, slot = fresh(contract, minibatch=5)
        work = PpoWork.from_messages([make.record(contract, i) for i in range(3)], contract)
        make.learn(backbone, algorithm, slot, work)
        states.append(training_state_bytes(slot))
    assert states[0] == states[1]


def test_value_warm_up_leaves_the_policy_alone(backbone: Backbone, make: Any):
    contract = make.contract()
    algorithm, slot = fresh(contract, value_warmup_updates=1, target_kl=1e-9)
    work = PpoWork.from_messages([make.record(contract, i) for i in range(3)], contract)
    assert isinstance(slot.module, PolicyModule)
    values = {id(parameter) for parameter in slot.module.value_parameters()}
    before = [(p, p.detach().clone()) for p in slot.module.parameters()]
    assert make.learn(backbone, algorithm, slot, work).steps == 4
    assert all(torch.equal(p, old) for p, old in before if id(p) not in values)
    assert any(not torch.equal(p, old) for p, old in before if id(p) in values)


def test_an_error_of_the_value_does_not_shrink_the_policys_step(make: Any):
    weights = []
    for error in (0.0, 1e6):
        _, slot = fresh(make.contract())
        assert isinstance(slot.module, PolicyModule)
        values = slot.module.value_parameters()
        kept = {id(parameter) for parameter in values}
        rest = [parameter for parameter in slot.module.parameters() if id(parameter) not in kept]
        loss = sum(p.square().sum() for p in rest) + error * sum(p.square().sum() for p in values)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        ask = Descend(loss, 1.0, {"policy": 1e-3, "value": 1e-3})
        clip(slot, ask)
        take_step(slot, ask)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in rest]))
    assert torch.equal(weights[0], weights[1])


def test_too_large_a_move_ends_the_update(backbone: Backbone, make: Any):
    contract = make.contract()
    algorithm, slot = fresh(contract, target_kl=1e-6, epochs=10)
    records = [behave(make.record(contract, i), slot, backbone) for i in range(3)]
    work = PpoWork.from_messages(records, contract)
    result = make.learn(backbone, algorithm, slot, work)
    assert 1 <= result.steps < 5
    assert slot.batches == 1


def test_heads_without_a_density_are_refused(make: Any):
    with pytest.raises(BadJob, match="'gr00t' has no density, so ppo cannot train it; use 'oft'"):
        fresh(make.contract("gr00t"))


def test_records_that_do_not_fit_are_refused_by_field(make: Any):
    contract = make.contract()
    good = make.record(contract, 0)

    def refused(says: str, **changes: Any) -> None:
        steps = [good.steps[0], msgspec.structs.replace(good.steps[1], **changes)]
        with pytest.raises(BadMessage, match=says):
            PpoWork.from_messages([msgspec.structs.replace(good, steps=steps)], contract)

    refused(r"record pick/0/0: steps\[1\]\.executed: 5 of 4 actions", executed=5)
    refused(r"steps\[1\]\.executed: 4 of 4 actions with 1 rewards", rewards=[1.0])
    refused(r"steps\[1\]: log_prob, value or a reward is not finite", log_prob=float("nan"))
    refused(r"steps\[1\]\.actions: shape \[2, 2\]", actions=to_tensor(np.zeros((2, 2), np.float32)))
    with pytest.raises(BadMessage, match="needs at least one decision"):
        PpoWork.from_messages([], contract)


def test_it_improves_a_one_step_task(backbone: Backbone, make: Any):
    """Reward is nearness to a target that depends on the state: only a policy that learned earns it."""
    contract = make.contract(horizon=1, size=1, state_size=1)
    algorithm, slot = fresh(
        contract, learning_rate=3e-4, value_learning_rate=3e-3, minibatch=32, updates=20, target_kl=0.2, init_log_std=-1.0
    )  # fmt: skip
    cache = FeatureCache()
    sight = make.observation(contract, 0)

    def play(update: int) -> tuple[list[RolloutRecord], float]:
        policy = PolicySlot.load("pick@0", contract, build_module(contract, FeatureShape(128, 4)))
        policy.module.load_state_dict(slot.module.state_dict())
        records = []
        for i in range(64):
            state = np.array([1.0 if i % 2 else -1.0], np.float32)
            seen = msgspec.structs.replace(sight, state=to_tensor(state))
            prompt = PpoWork.from_messages([wrap(seen, 0, 0.0, 0.0)], contract).prompts[0]
            feature = encode_cached(backbone, [Look(prompt, scope="acme")], cache)[0][0]
            acted = policy.act(feature, state, greedy=False, seed=update * 1000 + i)
            assert acted.log_prob is not None
            assert acted.value is not None
            reward = -abs(float(acted.sample[0, 0]) - 0.8 * float(state[0]))
            records.append(wrap(seen, reward, acted.log_prob[0], acted.value, acted.sample))
        return records, float(np.mean([record.episode_return for record in records]))

    def wrap(seen: Any, reward: float, log_prob: float, value: float, actions: Any = None) -> RolloutRecord:
        step = RolloutStep(
            observation=seen, actions=to_tensor(np.zeros((1, 1), np.float32) if actions is None else actions),
            log_prob=log_prob, value=value, executed=1, rewards=[reward], version="pick@0", feature_id="",
        )  # fmt: skip
        base = make.record(contract, 0, chunks=1)
        return msgspec.structs.replace(base, steps=[step], episode_return=reward, terminated=True, truncated=False)

    history: list[float] = []
    result: LearnResult | None = None
    for update in range(20):
        records, mean = play(update)
        history.append(mean)
        work = PpoWork.from_messages(records, contract)
        result = make.learn(backbone, algorithm, slot, work)
    assert np.mean(history[:2]) < -0.5
    assert np.mean(history[-3:]) > 0.6 * np.mean(history[:2]), history
    assert result is not None
    assert result.metrics["explained_variance"] > -1
