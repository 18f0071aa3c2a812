"""Tenants' slots: a `Slot` is everything private that a trainer holds of a job, a `PolicySlot` one version that acts.

A trainer commits a slot's state with what it learned; an inference worker loads immutable versions and swaps by pointer.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.models.features import FeatureBatch, VLAFeature
from nexus_bus.models.heads import ActionModule, PolicyModule, build_head
from nexus_bus.models.normalize import Normalize
from schemas.policy import PolicyContract

State = tuple[dict[str, torch.Tensor], dict[str, int]]


def build_module(contract: PolicyContract, feature_size: int, seed: int = 0) -> ActionModule:
    """The head a contract describes, with fresh weights. `feature_size` is the backbone's hidden size."""
    return build_head(contract.head, feature_size, contract.observation.state_size, contract.action.size, seed)


@dataclass(eq=False)
class Slot:
    """What a job trains: module, optimizer, generator and counters. The learning rate is a function of `step` alone."""

    tenant: str
    job: str
    contract: PolicyContract
    module: ActionModule
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0  # gradient steps
    batches: int = 0  # batches (SFT) or updates (RL) learned
    records: int = 0  # samples or rollout records learned
    version: int = -1  # newest published policy version
    action_norm: Normalize = field(init=False)
    state_norm: Normalize = field(init=False)

    def __post_init__(self) -> None:
        """Raises ContractError when a normalizer lacks its statistics."""
        self.action_norm = Normalize(self.contract.action_norm, self.contract.action.size, "contract.action_norm")
        self.state_norm = Normalize(self.contract.state_norm, self.contract.observation.state_size, "contract.state_norm")

    def state(self) -> State:
        """All that training goes on from: tensors by name (not copied), and counters."""
        tensors = {f"module.{name}": tensor for name, tensor in self.module.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entries.items()}
        tensors["generator"] = self.generator.get_state()
        return tensors, {name: getattr(self, name) for name in ("step", "batches", "records", "version")}

    def snapshot(self) -> State:
        """A copy of the state, to roll back to."""
        tensors, counters = self.state()
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}, counters

    def restore(self, state: State) -> None:
        """Go on from a state.

        Raises:
            ContractError: its tensors are not those of this slot's head.
        """
        tensors, counters = state
        load_tensors(self.module, {n.removeprefix("module."): t for n, t in tensors.items() if n.startswith("module.")})
        entries: dict[int, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, entry = name.split(".")
                entries.setdefault(int(index), {})[entry] = tensor.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        self.optimizer.zero_grad(set_to_none=True)
        self.generator.set_state(tensors["generator"].cpu())
        for name, value in counters.items():
            setattr(self, name, value)


def load_tensors(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copy weights into a module, in place, after comparing every name, shape and number.

    Raises:
        ContractError: names the first tensor that does not fit.
    """
    own = module.state_dict()
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise ContractError(f"weights: {odd[0]!r} is in only one of the file and the head ({len(odd)} such tensors)")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            has, gets = (f"{t.dtype}{list(t.shape)}" for t in (own[name], tensor))
            raise ContractError(f"weights: {name!r} is {gets}, the head has {has}")
        if not torch.isfinite(tensor).all():
            raise ContractError(f"weights: {name!r} holds numbers that are not finite")
    module.load_state_dict(tensors)


@dataclass(frozen=True, eq=False)
class Acted:
    """One answer of a policy."""

    actions: NDArray[np.float32]  # [T, D] raw units, inside the action space's bounds
    sample: NDArray[np.float32]  # [T, D] in the head's space, as it came
    log_prob: list[float] | None  # per action, of heads that have a density
    value: float | None


@dataclass(frozen=True, eq=False)
class PolicySlot:
    """One immutable policy version, ready to act."""

    version: str  # <job>@<n>
    contract: PolicyContract
    module: ActionModule
    action_norm: Normalize
    state_norm: Normalize

    @classmethod
    def load(cls, version: str, contract: PolicyContract, module: ActionModule) -> "PolicySlot":
        """Wrap a module whose weights are final.

        Raises:
            ContractError: a normalizer lacks its statistics.
        """
        return cls(
            version=version,
            contract=contract,
            module=module.eval().requires_grad_(False),
            action_norm=Normalize(contract.action_norm, contract.action.size, "contract.action_norm"),
            state_norm=Normalize(contract.state_norm, contract.observation.state_size, "contract.state_norm"),
        )

    @torch.no_grad()
    def act(self, feature: VLAFeature, state: NDArray[np.float32], *, greedy: bool = True, seed: int = 0) -> Acted:
        """Answer one request. It depends on the request alone: its noise comes from `seed`, its rows share no product.

        Raises:
            BadMessage: the state has another size or is not finite.
            ContractError: the policy gave something that is not finite.
        """
        rows = torch.from_numpy(state_row(self.state_norm, state, self.contract.observation.state_size))[None]
        batch = FeatureBatch.collate([feature])
        generator = torch.Generator().manual_seed(seed)
        log_prob, value = None, None
        if isinstance(self.module, PolicyModule) and not greedy:
            drawn = self.module.sample(batch, rows, generator)
            actions, log_prob, value = drawn.actions, drawn.log_prob[0].tolist(), float(drawn.value)
        else:
            actions = self.module.predict(batch, rows, generator)
            if isinstance(self.module, PolicyModule):
                density, _, worth = self.module.evaluate(batch, rows, actions)
                log_prob, value = density[0].tolist(), float(worth)
        sample = actions[0].numpy()
        if not np.isfinite(sample).all():
            raise ContractError(f"policy {self.version}: its actions are not finite")
        space = self.contract.action
        raw = np.clip(self.action_norm.inverse(sample), space.low, space.high)
        return Acted(raw.astype(np.float32), sample, log_prob, value)


def state_row(norm: Normalize, state: NDArray[Any], size: int) -> NDArray[np.float32]:
    """A checked and normalised state [S].

    Raises:
        BadMessage: another size, or not finite.
    """
    if state.shape != (size,):
        raise BadMessage(f"observation.state: shape {list(state.shape)}, the contract says [{size}]")
    row = np.asarray(state, np.float32)
    if not np.isfinite(row).all():
        raise BadMessage("observation.state: holds numbers that are not finite")
    return norm.forward(row)


class PolicySlots:
    """Loaded versions, the least recently used dropped first. Keys are (tenant, version): names of two tenants may agree."""

    def __init__(self, capacity: int = 64) -> None:
        """`capacity` versions at most."""
        self.capacity = capacity
        self._slots: OrderedDict[tuple[str, str], PolicySlot] = OrderedDict()

    def get(self, tenant: str, version: str) -> PolicySlot | None:
        """The slot if it is loaded; the caller loads what is not."""
        slot = self._slots.get((tenant, version))
        if slot is not None:
            self._slots.move_to_end((tenant, version))
        return slot

    def put(self, tenant: str, slot: PolicySlot) -> None:
        """Keep a slot; a version is immutable, so a second one under its name is the same."""
        self._slots[tenant, slot.version] = slot
        self._slots.move_to_end((tenant, slot.version))
        while len(self._slots) > self.capacity:
            self._slots.popitem(last=False)

    def versions(self) -> Sequence[tuple[str, str]]:
        """What is loaded, least recently used first."""
        return list(self._slots)
