"""Safetensors files as bytes, checked without torch: what a tenant brings is looked through before anybody loads it.

Format: 8 bytes little-endian length, a JSON header {name: {dtype, shape, data_offsets}}, then the data without holes
(github.com/huggingface/safetensors). Client and master use this; workers with torch load with the library.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from nexus_bus.errors import BadMessage, ContractError
from schemas.job import LoraSpec

HEADER_LIMIT = 1 << 24  # bytes of JSON
TENSORS = 1 << 14  # of one file: the largest heads and adapters have a tenth of them
_ADAPTED = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")  # peft's names
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Entry(msgspec.Struct):
    """Bounded, so that to multiply a shape out costs nothing: a header has room for a million numbers."""

    dtype: str
    shape: Annotated[list[Length], msgspec.Meta(max_length=8)]
    data_offsets: tuple[Length, Length]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its data lies in bytes `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(data: bytes, what: str) -> dict[str, TensorInfo]:
    """The tensors of a file; `what` names it in errors.

    Raises:
        BadMessage: not a safetensors file, or its header does not fit its size.
    """
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else HEADER_LIMIT + 1
    start = 8 + length
    if length > HEADER_LIMIT or start > len(data):
        raise BadMessage(f"{what}: not a safetensors file")
    try:
        header = msgspec.json.decode(data[8:start], type=dict[str, Any])
        msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
        if len(header) > TENSORS:
            raise BadMessage(f"{what}: holds {len(header)} tensors; at most {TENSORS} are read")
        entries = msgspec.convert(header, dict[str, _Entry])
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise BadMessage(f"{what}: not a safetensors file: {error}") from error
    found: dict[str, TensorInfo] = {}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in _SIZES:
            raise BadMessage(f"{what}: {name!r} is {entry.dtype}; there are {', '.join(_SIZES)}")
        size = math.prod(entry.shape) * _SIZES[entry.dtype]
        if begin != at or end - begin != size:
            raise BadMessage(f"{what}: {name!r} is {entry.dtype}{entry.shape}, {size} bytes, but has bytes {begin} to {end}")
        found[name], at = TensorInfo(entry.dtype, tuple(entry.shape), start + begin, start + end), end
    if start + at != len(data):
        raise BadMessage(f"{what}: its tensors take {start + at} bytes, the file has {len(data)}")
    return found


def check_tensors(data: bytes, what: str) -> dict[str, TensorInfo]:
    """The tensors of a file whose numbers are all finite.

    Raises:
        BadMessage: as `read_header`, or it holds no tensor.
        ContractError: names the tensor that holds NaN or infinity.
    """
    found = read_header(data, what)
    if not found:
        raise BadMessage(f"{what}: holds no tensor")
    for name, info in found.items():
        part = memoryview(data)[info.begin : info.end]
        if info.dtype in _FLOATS:
            finite = bool(np.isfinite(np.frombuffer(part, _FLOATS[info.dtype])).all())
        else:  # bfloat16, the upper half of a float32: not finite where all bits of the exponent are set
            finite = info.dtype != "BF16" or not ((np.frombuffer(part, "<u2") & 0x7F80) == 0x7F80).any()
        if not finite:
            raise ContractError(f"{what}: {name!r} holds numbers that are not finite")
    return found


def adapted_layers(tensors: Mapping[str, TensorInfo], what: str) -> dict[str, tuple[int, int, int]]:
    """The layers that an adapter under peft's names adapts: full name → its rank and (in, out) sizes.

    Raises:
        ContractError: a tensor that is no part of a LoRA pair, or pairs that do not fit; names the tensor.
    """
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, info in tensors.items():
        named = _ADAPTED.fullmatch(name)
        if named is None or len(info.shape) != 2:
            raise ContractError(f"{what}: {name!r} is {list(info.shape)}; expected base_model.model.….lora_A.weight [rank, in]")
        if info.dtype not in ("BF16", *_FLOATS):
            raise ContractError(f"{what}: {name!r} is {info.dtype}; an adapter holds floating-point numbers")
        halves.setdefault(named[1], {})[named[2]] = info.shape
    found: dict[str, tuple[int, int, int]] = {}
    for layer, pair in sorted(halves.items()):
        down, up = pair.get("A"), pair.get("B")
        if down is None or up is None or down[0] != up[1]:
            raise ContractError(f"{what}: {layer!r} has lora_A {down} and lora_B {up}; expected [rank, in] and [out, rank]")
        found[layer] = (down[0], down[1], up[0])
    return found


def check_adapter(tensors: Mapping[str, TensorInfo], lora: LoraSpec, what: str) -> None:
    """Whether an adapter is one of this specification.

    Raises:
        ContractError: other ranks, targets or numbers of layers than the contract's.
    """
    layers = adapted_layers(tensors, what)
    for layer, (rank, _, _) in layers.items():
        if rank != lora.rank:
            raise ContractError(f"{what}: {layer!r} has rank {rank}, contract.lora.rank is {lora.rank}")
    has, wanted = sorted({layer.rpartition(".")[2] for layer in layers}), sorted(set(lora.targets))
    if has != wanted:
        raise ContractError(f"{what}: adapts {', '.join(has)}, contract.lora.targets are {', '.join(wanted)}")
    blocks = {block for layer in layers if (block := re.search(r"\.layers\.(\d+)\.", layer)) and block[1]}
    numbers = {block[1] for block in blocks}
    if lora.last_layers and len(numbers) != lora.last_layers:
        raise ContractError(f"{what}: adapts {len(numbers)} layers, contract.lora.last_layers is {lora.last_layers}")


def adapter_config(lora: LoraSpec, tensors: Mapping[str, TensorInfo], base: str) -> dict[str, Any]:
    """`adapter_config.json`, with which `peft.PeftModel.from_pretrained` loads the adapter onto `base`.

    Targets are the layers' full names, so that no other layer of the same last name (a vision tower's) is adapted.
    """
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(adapted_layers(tensors, "adapter_model.safetensors")),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
