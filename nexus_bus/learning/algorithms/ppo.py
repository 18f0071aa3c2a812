"""Proximal policy optimisation over action chunks (Schulman et al. 2017), for heads with a density and a value.

A chunk is one action of the Markov process: its reward is the sum over the executed actions, its log-prob the sum over executed
actions and their dimensions, gamma applies once per chunk. Dual clip after Ye et al. 2020, decoupled proximal policy for
records made by an older version after Hilton et al. 2022. Defaults of the field: clip 0.2, dual clip 3, value clip 0.2 with
Huber delta 10, gamma 0.99, lambda 0.95, advantages (A - mean)/(std + 1e-5).

What is learned from here can do something already, and is not to lose it. The density of a chunk is that of all its numbers
together, and a step of Adam has its size however small the gradient is, so a rate that suits small policies throws a chunk far:
at 3e-4 the first update of the tabletop example ended 2 to 12 nats from where it began. The default rate, 5e-5, takes it to
about 0.1 (the field has 5e-6 for whole models, 5e-5 to 1e-4 for heads and adapters), and `target_kl` ends an update that goes
further all the same, as one with a wider head or an adapter may.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from nexus_bus.errors import BadJob, BadMessage
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
from nexus_bus.learning.gae import gae
from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import ActionModule, PolicyModule
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Slot
from schemas.environment import Observation
from schemas.job import Ppo as PpoSpec
from schemas.policy import PolicyContract
from schemas.rollout import RolloutRecord

HUBER_DELTA = 10.0
BEHAVIOUR_CUT = 2.0  # largest weight of a sample drawn by an older policy


@dataclass(frozen=True, eq=False)
class PpoWork:
    """The episodes of one update, in the order given; chunk arrays run over all episodes one after another."""

    episodes: list[RolloutRecord]
    observations: list[Observation]
    prompts: list[Prompt]
    actions: torch.Tensor  # [N, T, D] in the head's space, as sampled
    executed: torch.Tensor  # [N, T] bool
    log_prob: torch.Tensor  # [N] of the behaviour policy
    version: torch.Tensor  # [N] policy versions that drew them

    @classmethod
    def from_messages(cls, records: list[RolloutRecord], contract: PolicyContract) -> "PpoWork":
        """Decode and check.

        Raises:
            BadMessage: names the record and the field that does not fit the contract.
        """
        shape = (contract.horizon, contract.action.size)
        steps = [(f"record {record.id}: steps[{i}]", step) for record in records for i, step in enumerate(record.steps)]
        if not steps:
            raise BadMessage("records: an update needs at least one decision")
        for where, step in steps:
            if step.executed > contract.horizon or len(step.rewards) != step.executed:
                raise BadMessage(
                    f"{where}.executed: {step.executed} of {contract.horizon} actions with {len(step.rewards)} rewards"
                )
            if not np.isfinite([step.log_prob, step.value, *step.rewards]).all():
                raise BadMessage(f"{where}: log_prob, value or a reward is not finite")
        executed = np.array([step.executed for _, step in steps])
        actions = np.stack([numbers(step.actions, shape, f"{where}.actions") for where, step in steps])
        observations = [step.observation for _, step in steps]
        return cls(
            episodes=records,
            observations=observations,
            prompts=observation_prompts(observations, contract),
            actions=torch.from_numpy(actions),
            executed=torch.from_numpy(np.arange(contract.horizon) < executed[:, None]),
            log_prob=torch.tensor([step.log_prob for _, step in steps]),
            version=torch.tensor([int(step.version.rpartition("@")[2]) for _, step in steps]),
        )

    def targets(self, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Advantages, returns and behaviour values, each [N] float32, not normalised."""
        rows: list[NDArray[np.float64]] = []
        for record in self.episodes:
            if not record.steps:
                continue
            rewards = np.array([sum(step.rewards) for step in record.steps])
            values = np.array([step.value for step in record.steps])
            advantages, returns = gae(
                rewards, values, terminated=record.terminated, final_value=record.final_value, gamma=gamma, lam=lam
            )
            rows.append(np.stack([advantages, returns, values]))
        advantages, returns, values = torch.from_numpy(np.concatenate(rows, axis=1)).float()
        return advantages, returns, values


@dataclass(frozen=True, eq=False)
class _Batch:
    """Tensors of one update, all over N chunks."""

    state: torch.Tensor
    actions: torch.Tensor
    executed: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor
    value: torch.Tensor
    proximal: torch.Tensor  # log-prob that the ratio is taken against
    weight: torch.Tensor  # proximal over behaviour, cut


class Ppo(Algorithm[PpoWork]):
    """One update: several epochs of minibatches over the episodes of a batch."""

    def __init__(self, spec: PpoSpec, slot_seed: int) -> None:
        super().__init__(slot_seed)
        self.spec = spec

    def optimizer(self, module: ActionModule) -> torch.optim.Optimizer:
        """Two groups, policy and value, each with its rate; the deviation starts at `init_log_std`.

        Raises:
            BadJob: the head has no density.
        """
        policy = _policy(module)
        value = policy.value_parameters()
        ids = {id(parameter) for parameter in value}
        rest = [parameter for parameter in policy.parameters() if id(parameter) not in ids]
        with torch.no_grad():
            policy.log_std.fill_(self.spec.init_log_std)
        groups = [{"params": rest, "name": "policy"}, {"params": value, "name": "value"}]
        return torch.optim.AdamW(groups, betas=BETAS, weight_decay=self.spec.weight_decay, fused=True)

    def prompts(self, work: PpoWork) -> list[Prompt]:
        """One per decision."""
        return work.prompts

    def learn(self, slot: Slot, work: PpoWork) -> Learning:
        """One update; the metrics are means over its minibatches."""
        spec, module = self.spec, _policy(slot.module)
        features = yield Features(grad=False)
        batch = self._prepare(slot, work, features, module)
        warming = slot.batches < spec.value_warmup_updates
        rates = {"policy": spec.learning_rate, "value": spec.value_learning_rate}
        if slot.contract.lora is not None:
            rates["adapter"] = slot.contract.lora.learning_rate
        sums: dict[str, float] = {}
        steps = 0
        stopped = False
        for _ in range(spec.epochs):
            order = torch.randperm(len(batch.actions), generator=slot.generator)
            for rows in order.split(spec.minibatch):
                features = yield Features(rows=rows)
                loss, metrics = self._loss(module, batch, features, rows.to(slot.device), warming)
                # Before the first step nothing has moved: a distance then is the records' own fault, and the loss tells it.
                if spec.target_kl is not None and steps and not warming and metrics["kl"] > spec.target_kl:
                    stopped = True
                    break
                metrics["grad_norm"] = yield Descend(loss, spec.grad_clip, rates)
                for name, number in metrics.items():
                    sums[name] = sums.get(name, 0.0) + number
                steps += 1
            if stopped:
                break
        slot.batches += 1
        slot.records += len(work.episodes)
        metrics = {name: total / max(1, steps) for name, total in sums.items()} | self._summary(slot, work, batch)
        return LearnResult(loss=metrics.get("loss", 0.0), metrics=metrics, samples=len(batch.actions), steps=steps)

    @torch.no_grad()
    def _prepare(self, slot: Slot, work: PpoWork, features: FeatureBatch, module: PolicyModule) -> _Batch:
        spec, device = self.spec, slot.device
        advantage, returns, value = (part.to(device) for part in work.targets(spec.gamma, spec.lam))
        state, actions, executed = (
            observation_states(work.observations, slot),
            work.actions.to(device),
            work.executed.to(device),
        )
        per_action, _, _ = module.evaluate(features, state, actions)
        present = (per_action * executed).sum(-1)
        behaviour = work.log_prob.to(device)
        proximal = torch.where(work.version.to(device) < slot.version, present, behaviour)
        return _Batch(
            state=state,
            actions=actions,
            executed=executed,
            advantage=(advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-5),
            returns=returns,
            value=value,
            proximal=proximal,
            weight=(proximal - behaviour).exp().clamp_max(BEHAVIOUR_CUT),
        )

    def _loss(
        self, module: PolicyModule, batch: _Batch, features: FeatureBatch, rows: torch.Tensor, warming: bool
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Clipped surrogate, clipped Huber value loss, entropy bonus, over the chunks `rows`."""
        spec = self.spec
        per_action, entropy, value = module.evaluate(features, batch.state[rows], batch.actions[rows])
        executed = batch.executed[rows]
        log_ratio = (per_action * executed).sum(-1) - batch.proximal[rows]
        ratio = log_ratio.exp()
        advantage = batch.advantage[rows]
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - spec.clip, 1 + spec.clip) * advantage)
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, spec.dual_clip * advantage), surrogate)
        policy_loss = -(batch.weight[rows] * surrogate).mean()
        value_loss = clipped_value_loss(value, batch.value[rows], batch.returns[rows], spec.value_clip)
        bonus = (entropy * executed).sum() / executed.sum()
        loss = value_loss if warming else policy_loss + value_loss - spec.entropy * bonus
        parts = {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": bonus,
            "kl": ((ratio - 1) - log_ratio).mean(),  # Schulman's k3 estimate, never negative
            "clip_fraction": ((ratio - 1).abs() > spec.clip).float().mean(),
        }
        return loss, {name: float(part.detach()) for name, part in parts.items()}

    def _summary(self, slot: Slot, work: PpoWork, batch: _Batch) -> dict[str, float]:
        spread = float(batch.returns.var(correction=0))
        left = float((batch.returns - batch.value).var(correction=0))
        return {
            "return": float(np.mean([record.episode_return for record in work.episodes])),
            "success_rate": float(np.mean([record.success for record in work.episodes])),
            "length": float(np.mean([record.length for record in work.episodes])),
            "lag": float((slot.version - work.version).clamp_min(0).float().mean()),
            "std": float(_policy(slot.module).log_std.detach().exp().mean()),
            "explained_variance": 1 - left / spread if spread > 1e-12 else 0.0,
            "behaviour_weight": float(batch.weight.mean()),
        }


def clipped_value_loss(value: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Mean of the larger of two Huber losses: of the value, and of the value kept within ± clip of what it was."""
    near = before + (value - before).clamp(-clip, clip)
    free = functional.huber_loss(value, returns, reduction="none", delta=HUBER_DELTA)
    held = functional.huber_loss(near, returns, reduction="none", delta=HUBER_DELTA)
    return torch.maximum(free, held).mean()


def _policy(module: ActionModule) -> PolicyModule:
    if not isinstance(module, PolicyModule):
        raise BadJob(f"head.type: {module.spec.type!r} has no density, so ppo cannot train it; use 'oft'")
    return module
