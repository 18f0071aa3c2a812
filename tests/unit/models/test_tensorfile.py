"""Safetensors without torch: what a tenant brings is whole, finite, and of its contract's adapter, or refused by name."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.models.tensorfile import adapter_config, check_adapter, check_tensors, read_header
from schemas.job import LoraSpec

LAYER = "base_model.model.model.language_model.layers.{}.self_attn.{}"
LORA = LoraSpec(rank=2, alpha=8.0, targets=("q_proj", "v_proj"))


def file(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def adapter(rank: int = 2, targets: tuple[str, ...] = ("q_proj", "v_proj"), layers: int = 2) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for layer in range(layers):
        for target in targets:
            tensors[LAYER.format(layer, target) + ".lora_A.weight"] = np.ones((rank, 8), np.float32)
            tensors[LAYER.format(layer, target) + ".lora_B.weight"] = np.ones((4, rank), np.float32)
    return tensors


def test_the_header_is_read_as_the_library_writes_it():
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.int64), "c": np.zeros((0, 4), np.float16)}
    data = save(tensors, {"note": "mine"})
    found = read_header(data, "file")
    assert {name: info.shape for name, info in found.items()} == {"a": (2, 3), "b": (), "c": (0, 4)}
    assert data[found["b"].begin : found["b"].end] == bytes(8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float):
    largest = torch.finfo(dtype)
    check_tensors(save_torch({"ok": torch.tensor([0.0, -1.5, largest.max, largest.min, largest.tiny], dtype=dtype)}), "file")
    with pytest.raises(ContractError, match="file: 'poisoned' holds numbers that are not finite"):
        check_tensors(save_torch({"poisoned": torch.tensor([1.0, bad], dtype=dtype)}), "file")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a safetensors file"),
        (b"PK\x03\x04 pickled by somebody", "not a safetensors file"),
        (b"\xff" * 40, "not a safetensors file"),
        (file([1]), "not a safetensors file"),
        (file({"a": {"dtype": "F32", "shape": "wide", "data_offsets": [0, 4]}}), "not a safetensors file"),
        (file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)), "take .* bytes, the file has"),
        (file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), r"'a' is F32\[2\], 8 bytes"),
        (file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}), "not a safetensors file: Expected `int` >= 0"),
        (file({"a": {"dtype": "F32", "shape": [1 << 62] * 60_000 + [0], "data_offsets": [0, 0]}}), "of length <= 8"),
        (file({"a": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}), "Expected `int` <="),
        (file({"__metadata__": {"a": [1]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, bytes(1)), "`str`"),
        (file({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}), "20000 tensors"),
        (file({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "'a' is F4; there are"),
        (file({n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}, bytes(2)), "'b' is U8"),
        (file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, bytes(2)), "'a' is U8"),
        (file({}), "holds no tensor"),
        (save({"a": np.zeros(3, np.float32)})[:-2], "take .* bytes, the file has"),
        (save({"a": np.zeros(3, np.float32)}) + b"more", "take .* bytes, the file has"),
    ],
)
def test_what_is_no_file_of_this_format_is_refused(data: bytes, says: str):
    with pytest.raises(BadMessage, match=says):
        check_tensors(data, "file")


def test_an_adapter_of_the_contract_passes():
    check_adapter(read_header(save(adapter()), "adapter"), LORA, "adapter")
    last = LoraSpec(rank=2, targets=("v_proj", "q_proj"), last_layers=2)
    check_adapter(read_header(save(adapter()), "adapter"), last, "adapter")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (adapter(rank=3), "has rank 3, contract.lora.rank is 2"),
        (adapter(targets=("q_proj",)), "adapts q_proj, contract.lora.targets are q_proj, v_proj"),
        (adapter(targets=("q_proj", "v_proj", "o_proj")), "adapts o_proj, q_proj, v_proj"),
        ({"head.weight": np.ones((2, 2), np.float32)}, "'head.weight' is .*expected base_model.model"),
        ({LAYER.format(0, "q_proj") + ".lora_A.weight": np.ones((2, 8), np.float32)}, "lora_B None"),
        ({LAYER.format(0, "q_proj") + ".lora_A.weight": np.ones(8, np.float32)}, "expected base_model.model"),
        ({LAYER.format(0, "q_proj") + ".lora_A.weight": np.ones((2, 8), np.int8)}, "is I8; an adapter holds floating-point"),
    ],
)
def test_an_adapter_of_another_contract_is_refused(change: dict[str, np.ndarray], says: str):
    with pytest.raises(ContractError, match=says):
        check_adapter(read_header(save(change), "adapter"), LORA, "adapter")


def test_an_adapter_of_other_layers_is_refused():
    few = LoraSpec(rank=2, targets=("q_proj", "v_proj"), last_layers=1)
    with pytest.raises(ContractError, match=r"adapts 2 layers, contract\.lora\.last_layers is 1"):
        check_adapter(read_header(save(adapter()), "adapter"), few, "adapter")


def test_the_peft_configuration_names_each_adapted_layer():
    config = adapter_config(LORA, read_header(save(adapter(layers=1)), "adapter"), "nexus-nano")
    assert config["target_modules"] == [
        "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.v_proj",
    ]  # fmt: skip
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 8.0, "LORA")
