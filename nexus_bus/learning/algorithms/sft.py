"""Supervised fine-tuning: one gradient step per batch of observations and the action chunks that followed them."""

from dataclasses import dataclass

import numpy as np
import torch

from nexus_bus.errors import BadMessage
from nexus_bus.learning.algorithms.base import (
    BETAS,
    Algorithm,
    Descend,
    Features,
    Learning,
    LearnResult,
    numbers,
    observation_prompts,
    observation_states,
)
from nexus_bus.learning.schedule import cosine
from nexus_bus.models.heads import ActionModule
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Slot
from nexus_bus.tensors import from_tensor
from schemas.environment import Observation
from schemas.job import Sft as SftSpec
from schemas.policy import PolicyContract
from schemas.training import TrainingBatch


@dataclass(frozen=True, eq=False)
class SftWork:
    """One decoded batch."""

    observations: list[Observation]
    prompts: list[Prompt]
    actions: torch.Tensor  # [B, T, D] raw
    pad: torch.Tensor  # [B, T] bool

    @classmethod
    def from_message(cls, batch: TrainingBatch, contract: PolicyContract) -> "SftWork":
        """Decode and check.

        Raises:
            BadMessage: names the field that does not fit the contract.
        """
        if not batch.samples:
            raise BadMessage(f"samples: batch {batch.id} is empty")
        shape = (contract.horizon, contract.action.size)
        pads = [from_tensor(sample.action_is_pad) for sample in batch.samples]
        for i, pad in enumerate(pads):
            if pad.shape != shape[:1] or pad.dtype != np.bool_:
                raise BadMessage(f"samples[{i}].action_is_pad: {pad.dtype}{list(pad.shape)} is not bool[{shape[0]}]")
        actions = [numbers(sample.actions, shape, f"samples[{i}].actions") for i, sample in enumerate(batch.samples)]
        observations = [sample.observation for sample in batch.samples]
        return cls(
            observations=observations,
            prompts=observation_prompts(observations, contract),
            actions=torch.from_numpy(np.stack(actions)),
            pad=torch.from_numpy(np.stack(pads)),
        )


class Sft(Algorithm[SftWork]):
    """The head's own loss, AdamW, cosine schedule with warm-up."""

    def __init__(self, spec: SftSpec, slot_seed: int) -> None:
        super().__init__(slot_seed)
        self.spec = spec

    def optimizer(self, module: ActionModule) -> torch.optim.Optimizer:
        """One group."""
        groups = [{"params": list(module.parameters()), "name": "policy"}]
        return torch.optim.AdamW(
            groups, lr=self.spec.learning_rate, betas=BETAS, weight_decay=self.spec.weight_decay, fused=True
        )

    def prompts(self, work: SftWork) -> list[Prompt]:
        """One per sample."""
        return work.prompts

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        spec = self.spec
        return cosine(step, peak=spec.learning_rate, floor=spec.min_learning_rate, warmup=spec.warmup_steps, total=spec.steps)

    def learn(self, slot: Slot, work: SftWork) -> Learning:
        """One gradient step."""
        state = observation_states(work.observations, slot)
        actions = slot.action_norm.forward(work.actions).to(slot.device)
        pad = work.pad.to(slot.device)
        features = yield Features(suffix=slot.module.suffix(state, actions, pad))
        loss = slot.module.loss(features, state, actions, pad, slot.generator)
        rate = self.rate(slot.step)
        rates = {"policy": rate}
        if slot.contract.lora is not None:  # the same curve at a height of its own
            rates["adapter"] = slot.contract.lora.learning_rate * rate / self.spec.learning_rate
        norm = yield Descend(loss, self.spec.grad_clip, rates, last=True)
        slot.batches += 1
        slot.records += len(work.observations)
        value = float(loss.detach())
        metrics = {"loss": value, "grad_norm": norm, "learning_rate": rate}
        return LearnResult(loss=value, metrics=metrics, samples=len(work.observations), steps=1)
