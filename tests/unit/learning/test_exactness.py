"""Promise 2, as a matrix: {solo, grouped, other neighbours, other order, padding} × every head × both tiers × SFT and PPO.

Equal to the bit in the exact profile: losses, gradient norms, all weights and optimizer state after training, and actions.
In the fast profile (bfloat16) within FAST_LOSS, which the README states.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nexus_bus.learning.algorithms import Ppo, PpoWork, Sft, SftWork
from nexus_bus.learning.canary import TOLERANCE as FEATURES
from nexus_bus.learning.canary import difference
from nexus_bus.learning.group import GroupTrainer, Member
from nexus_bus.models.act import Asked, act_group
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.canary import TOLERANCE as ACTIONS
from nexus_bus.models.canary import gap
from nexus_bus.models.checkpoint import training_state_bytes
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import PolicySlot, Slot, build_module
from schemas import job
from schemas.job import LoraSpec

FAST_LOSS = 0.02  # relative difference of a loss, grouped against alone, in the fast profile

SMALL: dict[str, dict[str, Any]] = {
    "oft": {"blocks": 1},
    "gr00t": {"width": 32, "layers": 2, "repeats": 2},
    "pi": {"width": 32, "layers": 2, "heads": 2},
    "fast": {"levels": 15},
}
LORAS = (None, LoraSpec(rank=4, learning_rate=1e-3), LoraSpec(rank=2, targets=("o_proj", "up_proj"), last_layers=1))


@dataclass(frozen=True)
class Tenant:
    """One row of the matrix: no two agree in head, horizon, state, action, batch, adapter or seed."""

    head: str
    lora: LoraSpec | None
    algorithm: str = "sft"
    horizon: int = 4
    state: int = 3
    size: int = 2
    batch: int = 2
    seed: int = 0

    def begin(self, backbone: Backbone, make: Any) -> tuple[Any, Slot]:
        contract = make.contract(self.head, self.horizon, self.state, self.size, lora=self.lora, **SMALL[self.head])
        module = build_module(contract, backbone.shape, self.seed)
        adapter = backbone.adapter(self.lora, self.seed) if self.lora is not None else None
        algorithm: Any
        if self.algorithm == "ppo":
            algorithm = Ppo(job.Ppo(minibatch=3, epochs=2), self.seed)
        else:
            algorithm = Sft(job.Sft(learning_rate=1e-3 * (1 + self.seed), warmup_steps=1, grad_clip=0.5, steps=300), self.seed)
        return algorithm, algorithm.make_slot(f"t{self.seed}", "pick", contract, module, adapter)

    def member(self, make: Any, algorithm: Any, slot: Slot, number: int) -> Member:
        if self.algorithm == "ppo":
            records = [make.record(slot.contract, 20 * self.seed + 4 * number + i, chunks=1 + i) for i in range(2)]
            return Member(slot, algorithm, PpoWork.from_messages(records, slot.contract))
        batch = make.batch(slot.contract, number, count=self.batch, seed=100 * self.seed)
        return Member(slot, algorithm, SftWork.from_message(batch, slot.contract))


MATRIX = [
    Tenant("oft", None, horizon=8, batch=3, seed=1),
    Tenant("gr00t", None, state=0, size=3, seed=2),
    Tenant("pi", None, horizon=6, size=4, seed=3),
    Tenant("oft", LORAS[1], state=7, batch=5, seed=4),
    Tenant("gr00t", LORAS[2], horizon=2, seed=5),
    Tenant("pi", LORAS[1], state=0, batch=1, seed=6),
    Tenant("fast", LORAS[1], horizon=3, size=2, seed=7),
    Tenant("oft", None, algorithm="ppo", seed=8),
    Tenant("oft", LORAS[2], algorithm="ppo", horizon=2, seed=9),
]
ORDERS = {
    "together": range(len(MATRIX)),
    "another order": (6, 2, 8, 0, 4, 1, 7, 5, 3),
    "half of the neighbours": (0, 3, 5, 6, 8),
    "the other half": (1, 2, 4, 7),
}

Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def train(backbone: Backbone, make: Any, rows: Any, steps: int, cache: FeatureCache | None) -> dict[int, tuple[Curve, bytes]]:
    """Curves and final states of the tenants in `rows`, stepping together."""
    seats = {i: MATRIX[i].begin(backbone, make) for i in rows}
    curves: dict[int, Curve] = {i: [] for i in rows}
    trainer = GroupTrainer(backbone, cache)
    for number in range(steps):
        members = [MATRIX[i].member(make, algorithm, slot, number) for i, (algorithm, slot) in seats.items()]
        for i, result in zip(seats, trainer.run(members), strict=True):
            assert result.error is None, result.error
            assert result.result is not None
            curves[i].append((result.result.loss, result.result.metrics["grad_norm"]))
    return {i: (curves[i], training_state_bytes(slot)) for i, (_, slot) in seats.items()}


def compare(backbone: Backbone, make: Any, steps: int, orders: list[str]) -> None:
    alone = {i: train(backbone, make, [i], steps, None)[i] for i in range(len(MATRIX))}
    for order in orders:
        for i, (curve, state) in train(backbone, make, ORDERS[order], steps, FeatureCache()).items():
            assert curve == alone[i][0], (order, MATRIX[i])
            assert state == alone[i][1], (order, MATRIX[i])


def test_training_is_the_same_to_the_bit_whoever_else_trains(backbone: Backbone, make: Any):
    compare(backbone, make, 4, list(ORDERS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_steps_end_in_the_same_weights(backbone: Backbone, make: Any):
    compare(backbone, make, 200, ["together"])


def asked(backbone: Backbone, make: Any) -> list[Asked]:
    """A request of every head and tier, ragged, some with two pictures; adapters are not at their beginning."""
    made = []
    rng = np.random.default_rng(0)
    for tenant in MATRIX[:7]:
        contract = make.contract(tenant.head, tenant.horizon, tenant.state, tenant.size, lora=tenant.lora, **SMALL[tenant.head])
        adapter = backbone.adapter(tenant.lora, tenant.seed) if tenant.lora is not None else None
        for up in adapter.up if adapter is not None else []:
            up.data.normal_(std=0.05, generator=torch.Generator().manual_seed(tenant.seed))
        slot = PolicySlot.load(f"pick@{tenant.seed}", contract, build_module(contract, backbone.shape, tenant.seed), adapter)
        for i in range(2):
            pictures = [rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)] * (1 + i)
            prompt = Prompt(pictures, "touch the block " * (1 + tenant.seed % 3))
            state = rng.normal(size=tenant.state).astype(np.float32)
            made.append(Asked(f"t{tenant.seed}", slot, prompt, state, greedy=i == 0, seed=tenant.seed))
    return made


def test_actions_are_the_same_to_the_bit_whoever_else_asks(backbone: Backbone, make: Any):
    requests = asked(backbone, make)
    alone = [act_group(backbone, None, [request])[0].acted for request in requests]
    for rows in (range(14), (13, 2, 7, 0, 9, 4, 11, 6, 1, 8, 3, 10, 5, 12), (0, 13, 6), (5, 12, 3, 8)):
        for i, answer in zip(rows, act_group(backbone, FeatureCache(), [requests[i] for i in rows]), strict=True):
            acted, expected = answer.acted, alone[i]
            assert answer.error is None
            assert acted is not None
            assert expected is not None
            assert np.array_equal(acted.actions, expected.actions), i
            assert np.array_equal(acted.sample, expected.sample), i
            assert (acted.log_prob, acted.value) == (expected.log_prob, expected.value)


def test_the_fast_profile_stays_within_its_tolerance(make: Any):
    quick = Backbone.load("nexus-nano", device="cpu", profile="fast")
    together = train(quick, make, range(7), 3, None)
    for i in range(7):
        for (ours, _), (theirs, _) in zip(together[i][0], train(quick, make, [i], 3, None)[i][0], strict=True):
            assert ours == pytest.approx(theirs, rel=FAST_LOSS), MATRIX[i]


def test_features_and_actions_of_the_fast_profile_stay_within_theirs(make: Any):
    quick = Backbone.load("nexus-nano", device="cpu", profile="fast")
    requests = [request for request in asked(quick, make) if not request.slot.module.needs.decodes]
    looks = [request.look() for request in requests]
    with torch.no_grad():
        for look, feature in zip(looks, quick.encode(looks), strict=True):
            assert difference(quick.encode([look])[0].hidden, feature.hidden) <= FEATURES["fast"]
    for request, answer in zip(requests, act_group(quick, None, requests), strict=True):
        alone = act_group(quick, None, [request])[0].acted
        assert answer.acted is not None
        assert alone is not None
        assert gap(answer.acted, alone, "fast") <= ACTIONS["fast"]
