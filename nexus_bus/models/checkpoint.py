"""Weights and training state as bytes: safetensors and JSON, never pickle. A trainer commits them, an inference worker loads.

The same bytes are the files that a tenant takes home: see nexus_bus/exported.py.
"""

import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.models.grafts import Adapter
from nexus_bus.models.heads import ActionModule, FeatureShape
from nexus_bus.models.slots import PolicySlot, Slot, build_module, load_tensors
from nexus_bus.models.tensorfile import HEADER_LIMIT, adapted_layers, check_adapter, read_header
from schemas.policy import PolicyVersion

Places = Mapping[str, tuple[int, int]]  # full name of each adapted layer → its (in, out) sizes, as `Grafts.places` gives them


def weights_bytes(module: ActionModule) -> bytes:
    """The module's weights as safetensors."""
    return _save(module.state_dict())


def adapter_bytes(adapter: Adapter) -> bytes:
    """The adapter's weights as safetensors under peft's names."""
    return _save(adapter.tensors())


def load_weights(module: ActionModule, data: bytes) -> None:
    """Put weights into a module.

    Raises:
        BadMessage: not safetensors.
        ContractError: the weights of another head, or not finite; names the tensor.
    """
    load_tensors(module, _read(data, "weights"))


def load_adapter(adapter: Adapter, data: bytes) -> None:
    """Put weights into an adapter.

    Raises:
        BadMessage: not safetensors.
        ContractError: of another rank, for other layers or sizes, or not finite; names the tensor.
    """
    check_adapter(read_header(data, "adapter"), adapter.spec, "adapter")
    adapter.load(_read(data, "adapter"))


def load_policy(
    version: PolicyVersion, weights: bytes, adapter: bytes | None, shape: FeatureShape, places: Places | None = None
) -> PolicySlot:
    """A policy version ready to act.

    Args:
        weights, adapter: the content of `version.weights` and `version.adapter`.
        shape: of the resident backbone's features.
        places: layers of the resident backbone that `contract.lora` adapts, so that others are refused; without them the
            file's own are taken.

    Raises:
        BadMessage, ContractError: as `load_weights` and `load_adapter`, or the adapter is missing, or one too many.
    """
    contract = version.contract
    module = build_module(contract, shape, None)
    load_weights(module, weights)
    if (contract.lora is None) != (adapter is None):
        has, says = ("none came", "has one") if adapter is None else ("one came", "has none")
        raise ContractError(f"adapter: {has} with {version.id}, its contract.lora {says}")
    loaded: Adapter | None = None
    if contract.lora is not None and adapter is not None:
        loaded = Adapter(contract.lora, _places(adapter) if places is None else places)
        load_adapter(loaded, adapter)
    return PolicySlot.load(version.id, contract, module, loaded)


def _places(data: bytes) -> Places:
    layers = adapted_layers(read_header(data, "adapter"), "adapter")
    return {name: (size_in, size_out) for name, (_, size_in, size_out) in layers.items()}


def training_state_bytes(slot: Slot) -> bytes:
    """All that training goes on from, to the bit: weights of head and adapter, optimizer, generator, counters.

    Its owner is in it: jobs that are alike to the bit must not share content that the first to go on would delete.
    """
    tensors, counters = slot.state()
    return _save(tensors, {"nexus": json.dumps({**counters, "owner": f"{slot.tenant}/{slot.job}"})})


def restore_training_state(slot: Slot, data: bytes) -> None:
    """Go on from a committed state. The slot has been made under the same contract and algorithm.

    Raises:
        BadMessage: not a training state.
        ContractError: of another head or adapter.
    """
    tensors = _read(data, "training state")
    try:
        size = int.from_bytes(data[:8], "little")
        counters = json.loads(json.loads(data[8 : 8 + min(size, HEADER_LIMIT)])["__metadata__"]["nexus"])
        slot.restore((tensors, {name: int(counters[name]) for name in ("step", "batches", "records", "version")}))
    except (KeyError, ValueError, TypeError) as error:
        raise BadMessage(f"training state: {error!r} is missing or wrong") from error


def _save(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)


def _read(data: bytes, what: str) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except (SafetensorError, RuntimeError) as error:  # the latter of shapes that torch cannot have
        raise BadMessage(f"{what}: not a safetensors file ({error})") from error
