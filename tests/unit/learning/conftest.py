"""The shipped backbone, and builders of the messages that work is made from."""

import sys
from typing import Any

import pytest

from nexus_bus.models import process

if "torch" not in sys.modules:
    process.settings()

import numpy as np

from nexus_bus.learning.algorithms import LearnResult
from nexus_bus.learning.group import GroupTrainer, Member
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.contract import build_contract
from nexus_bus.models.slots import Slot
from nexus_bus.tensors import encode_image, to_tensor
from schemas.environment import Observation
from schemas.job import HeadSpec, LoraSpec, Scalar
from schemas.policy import ActionSpec, ObservationSpec, PolicyContract
from schemas.rollout import RolloutRecord, RolloutStep
from schemas.training import TrainingBatch, TrainingSample

TEXTS = ("touch the red block", "push the blue block slowly to the left", "open the drawer")


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")


class Maker:
    """Contracts, batches and records, drawn from seeds."""

    def learn(
        self, backbone: Backbone, algorithm: Any, slot: Slot, work: Any, cache: FeatureCache | None = None
    ) -> LearnResult:
        """One unit of work alone; what fails is raised."""
        done = GroupTrainer(backbone, cache).run([Member(slot, algorithm, work)])[0]
        if done.error is not None:
            raise done.error
        assert done.result is not None
        return done.result

    def contract(
        self,
        head: str = "oft",
        horizon: int = 4,
        state_size: int = 3,
        size: int = 2,
        lora: LoraSpec | None = None,
        **options: Scalar,
    ) -> PolicyContract:
        return build_contract(
            backbone=describe_backbone("nexus-nano"),
            head=HeadSpec(type=head, horizon=horizon, options=options),
            action=ActionSpec(size=size, low=[-1.0] * size, high=[1.0] * size),
            observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=state_size),
            lora=lora,
        )

    def observation(self, contract: PolicyContract, seed: int) -> Observation:
        rng = np.random.default_rng(seed)
        picture = rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)
        state = rng.normal(size=contract.observation.state_size).astype(np.float32)
        return Observation(
            images={"front": encode_image(picture, "raw")}, state=to_tensor(state), instruction=TEXTS[seed % len(TEXTS)]
        )

    def batch(self, contract: PolicyContract, number: int, count: int = 4, seed: int = 0) -> TrainingBatch:
        rng = np.random.default_rng([seed, number])
        samples = [
            TrainingSample(
                observation=self.observation(contract, seed + (number * count + i) % 16),
                actions=to_tensor(rng.uniform(-1, 1, (contract.horizon, contract.action.size)).astype(np.float32)),
                action_is_pad=to_tensor(np.arange(contract.horizon) >= contract.horizon - i % 2),
            )
            for i in range(count)
        ]
        return TrainingBatch(id=f"pick/{number}", tenant="acme", job="pick", batch=number, samples=samples)

    def record(self, contract: PolicyContract, index: int, chunks: int = 3, version: int = 0) -> RolloutRecord:
        rng = np.random.default_rng(index)
        steps = [
            RolloutStep(
                observation=self.observation(contract, index * 10 + i),
                actions=to_tensor(rng.normal(size=(contract.horizon, contract.action.size)).astype(np.float32)),
                log_prob=float(-rng.uniform(1, 5)),
                value=float(rng.normal()),
                executed=contract.horizon - (1 if i == chunks - 1 else 0),
                rewards=[0.0] * (contract.horizon - (2 if i == chunks - 1 else 1)) + [float(rng.uniform())],
                version=f"pick@{version}",
                feature_id="",
            )
            for i in range(chunks)
        ]
        return RolloutRecord(
            id=f"pick/0/{index}", tenant="acme", job="pick", batch=0, index=index, policy=f"pick@{version}", task="touch",
            seed=index, trial=0, steps=steps, terminated=index % 2 == 0, truncated=index % 2 == 1, end="success",
            success=index % 2 == 0, final_value=0.5, episode_return=1.0, length=chunks * contract.horizon - 1,
        )  # fmt: skip


@pytest.fixture(scope="session")
def make() -> Maker:
    return Maker()
