"""Tenants' slots: a `Slot` is everything private that a trainer holds of a job, a `PolicySlot` one version that acts.

A trainer commits a slot's state with what it learned; an inference worker loads immutable versions and swaps by pointer.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nexus_bus.bounds import outside
from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.models.features import FeatureBatch, VLAFeature
from nexus_bus.models.grafts import Adapter
from nexus_bus.models.heads import ActionModule, FeatureShape, PolicyModule, build_head
from nexus_bus.models.normalize import Normalize
from schemas.policy import PolicyContract

State = tuple[dict[str, torch.Tensor], dict[str, int]]


def build_module(contract: PolicyContract, shape: FeatureShape, seed: int | None = 0) -> ActionModule:
    """The head a contract describes, with fresh weights, or without a seed none yet. `shape` is the backbone's."""
    return build_head(contract.head, shape, contract.observation.state_size, contract.action.size, seed)


@dataclass(eq=False)
class Slot:
    """What a job trains: module, optimizer, generator and counters. The learning rate is a function of `step` alone."""

    tenant: str
    job: str
    contract: PolicyContract
    module: ActionModule
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    adapter: Adapter | None = None
    step: int = 0  # gradient steps
    batches: int = 0  # batches (SFT) or updates (RL) learned
    records: int = 0  # samples or rollout records learned
    version: int = -1  # newest published policy version
    action_norm: Normalize = field(init=False)
    state_norm: Normalize = field(init=False)
    _shapes: list[torch.Size] = field(init=False, default_factory=list)  # of an emptied slot's weights

    def __post_init__(self) -> None:
        """Raises ContractError when a normalizer lacks its statistics."""
        self.action_norm = Normalize(self.contract.action_norm, self.contract.action.size, "contract.action_norm")
        self.state_norm = Normalize(self.contract.state_norm, self.contract.observation.state_size, "contract.state_norm")

    @property
    def device(self) -> torch.device:
        """Where the module lives."""
        return next(self.module.parameters()).device

    @property
    def nbytes(self) -> int:
        """Memory of weights and optimizer."""
        entries = (value for entry in self.optimizer.state.values() for value in entry.values())
        return sum(tensor.nbytes for tensor in (*self._weights(), *entries) if isinstance(tensor, torch.Tensor))

    def empty(self) -> None:
        """Let go of all numbers. Module, adapter and optimizer stay the objects they are, so that nobody holds a stale one."""
        self._shapes = [weight.shape for weight in self._weights()]
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        for weight in self._weights():
            weight.data = weight.data.new_empty(0)

    def refill(self) -> None:
        """Make room for the numbers again; `restore` puts them in."""
        for weight, shape in zip(self._weights(), self._shapes, strict=True):
            weight.data = weight.data.new_zeros(shape)

    def _weights(self) -> list[torch.Tensor]:
        modules = [self.module] if self.adapter is None else [self.module, self.adapter]
        return [weight for module in modules for weight in (*module.parameters(), *module.buffers())]

    def state(self) -> State:
        """All that training goes on from: tensors by name (not copied), and counters."""
        tensors = {f"module.{name}": tensor for name, tensor in self.module.state_dict().items()}
        if self.adapter is not None:
            tensors |= {f"adapter.{name}": tensor for name, tensor in self.adapter.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entries.items()}
        tensors["generator"] = self.generator.get_state()
        return tensors, self._counters()

    def snapshot(self, *, weights: bool = True) -> State:
        """A copy of the state, to roll back to; without weights and optimizer where these have not been touched yet."""
        tensors, counters = self.state() if weights else ({"generator": self.generator.get_state()}, self._counters())
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}, counters

    def _counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("step", "batches", "records", "version")}

    def restore(self, state: State) -> None:
        """Go on from a state; one without weights leaves them as they are.

        Raises:
            ContractError: its tensors are not those of this slot's head.
        """
        tensors, counters = state
        if len(tensors) > 1:
            self._restore_weights(tensors)
        self.optimizer.zero_grad(set_to_none=True)
        self.generator.set_state(tensors["generator"].cpu())
        for name, value in counters.items():
            setattr(self, name, value)

    def _restore_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        load_tensors(self.module, _below("module.", tensors))
        adapter = _below("adapter.", tensors)
        if self.adapter is not None:
            load_tensors(self.adapter, adapter)
        elif adapter:
            raise ContractError("training state: it has an adapter, the job's contract has none")
        entries: dict[int, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, entry = name.split(".")
                entries.setdefault(int(index), {})[entry] = tensor.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def load_tensors(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copy weights into a module, in place, after comparing every name, shape and number; a shell takes the tensors themselves.

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
    shell = any(tensor.is_meta for tensor in own.values())
    module.load_state_dict(tensors, assign=shell)


@dataclass(frozen=True, eq=False)
class Acted:
    """One answer of a policy."""

    actions: NDArray[np.float32]  # [T, D] raw units, inside the action space's bounds
    sample: NDArray[np.float32]  # [T, D] in the head's space, as it came
    log_prob: list[float] | None  # per action, of heads that have a density
    value: float | None
    clipped: float = 0.0  # share of the components that lay outside the bounds (bounds.py)


@dataclass(frozen=True, eq=False)
class PolicySlot:
    """One immutable policy version, ready to act."""

    version: str  # <job>@<n>
    contract: PolicyContract
    module: ActionModule
    adapter: Adapter | None
    action_norm: Normalize
    state_norm: Normalize

    @classmethod
    def load(cls, version: str, contract: PolicyContract, module: ActionModule, adapter: Adapter | None = None) -> "PolicySlot":
        """Wrap a module and an adapter whose weights are final.

        Raises:
            ContractError: a normalizer lacks its statistics.
        """
        return cls(
            version=version,
            contract=contract,
            module=module.eval().requires_grad_(False),
            adapter=adapter.eval().requires_grad_(False) if adapter is not None else None,
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
        rows = self._state(state)[None]
        batch = FeatureBatch.collate([feature], rows.device)
        generator = torch.Generator().manual_seed(seed)
        if isinstance(self.module, PolicyModule) and not greedy:
            drawn = self.module.sample(batch, rows, generator)
            return self._acted(drawn.actions[0], drawn.log_prob[0], drawn.value)
        actions = self.module.predict(batch, rows, generator)
        if isinstance(self.module, PolicyModule):
            density, _, worth = self.module.evaluate(batch, rows, actions)
            return self._acted(actions[0], density[0], worth)
        return self._acted(actions[0])

    def decode(self, state: NDArray[np.float32], *, seed: int = 0) -> Generator[torch.Tensor, torch.Tensor, Acted]:
        """Answer one request of a head that decodes: yields suffixes, is sent the hidden states at them, returns the answer.

        Raises:
            BadMessage, ContractError: as `act`.
        """
        return self._acted((yield from self.module.decode(self._state(state), torch.Generator().manual_seed(seed))))

    def _state(self, state: NDArray[np.float32]) -> torch.Tensor:
        row = state_row(self.state_norm, state, self.contract.observation.state_size)
        return torch.from_numpy(row).to(next(self.module.parameters()).device)

    def _acted(self, actions: torch.Tensor, log_prob: torch.Tensor | None = None, value: torch.Tensor | None = None) -> Acted:
        """actions [T, D] in the head's space, log_prob [T]."""
        sample = actions.cpu().numpy()
        if not np.isfinite(sample).all():
            raise ContractError(f"policy {self.version}: its actions are not finite")
        space = self.contract.action
        given, low, high = self.action_norm.inverse(sample), np.array(space.low), np.array(space.high)
        density, worth = log_prob.tolist() if log_prob is not None else None, float(value) if value is not None else None
        return Acted(np.clip(given, low, high).astype(np.float32), sample, density, worth, outside(given, low, high))


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
