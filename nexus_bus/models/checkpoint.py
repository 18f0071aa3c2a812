"""Weights and training state as bytes: safetensors and JSON, never pickle. What a trainer commits and a tenant takes home."""

import json
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from nexus_bus.errors import BadMessage
from nexus_bus.models.heads import ActionModule
from nexus_bus.models.slots import PolicySlot, Slot, build_module, load_tensors
from schemas.policy import PolicyContract

HEADER_LIMIT = 1 << 24


def weights_bytes(module: ActionModule) -> bytes:
    """The module's weights as safetensors."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()})


def load_weights(module: ActionModule, data: bytes) -> None:
    """Put weights into a module.

    Raises:
        BadMessage: not safetensors.
        ContractError: the weights of another head, or not finite; names the tensor.
    """
    load_tensors(module, _read(data, "weights"))


def load_policy(version: str, contract: PolicyContract, weights: bytes, feature_size: int) -> PolicySlot:
    """A policy version ready to act.

    Raises:
        BadMessage, ContractError: as `load_weights`.
    """
    module = build_module(contract, feature_size)
    load_weights(module, weights)
    return PolicySlot.load(version, contract, module)


def training_state_bytes(slot: Slot) -> bytes:
    """All that training goes on from, to the bit: weights, optimizer, generator, counters."""
    tensors, counters = slot.state()
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"nexus": json.dumps(counters)})


def restore_training_state(slot: Slot, data: bytes) -> None:
    """Go on from a committed state. The slot has been made under the same contract and algorithm.

    Raises:
        BadMessage: not a training state.
        ContractError: of another head.
    """
    tensors = _read(data, "training state")
    try:
        size = int.from_bytes(data[:8], "little")
        counters = json.loads(json.loads(data[8 : 8 + min(size, HEADER_LIMIT)])["__metadata__"]["nexus"])
        slot.restore((tensors, {name: int(counters[name]) for name in ("step", "batches", "records", "version")}))
    except (KeyError, ValueError, TypeError) as error:
        raise BadMessage(f"training state: {error!r} is missing or wrong") from error


def _read(data: bytes, what: str) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except SafetensorError as error:
        raise BadMessage(f"{what}: not a safetensors file ({error})") from error


def export(directory: Path, contract: PolicyContract, weights: bytes) -> None:
    """Write a policy for its owner: `action_head.safetensors`, and `policy_contract.json` with all that must fit it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "action_head.safetensors").write_bytes(weights)
    (directory / "policy_contract.json").write_bytes(msgspec.json.format(msgspec.json.encode(contract), indent=2))


def read_export(directory: Path) -> tuple[PolicyContract, bytes]:
    """Read what `export` wrote.

    Raises:
        BadMessage: the contract does not decode; names the field.
    """
    try:
        contract = msgspec.json.decode((directory / "policy_contract.json").read_bytes(), type=PolicyContract)
    except (OSError, msgspec.DecodeError) as error:
        raise BadMessage(f"policy_contract.json: {error}") from error
    return contract, (directory / "action_head.safetensors").read_bytes()
