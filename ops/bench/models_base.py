"""What the model benches are run on: the shipped backbone and a larger one of the same family with random weights."""

import json
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from nexus_bus.learning.algorithms import Algorithm, SftWork, make_algorithm
from nexus_bus.learning.group import Member
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import resolve_base
from nexus_bus.models.contract import build_contract
from nexus_bus.models.families import Profile
from nexus_bus.models.features import Look
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Slot, build_module
from nexus_bus.tensors import encode_image, to_tensor
from ops.bench.timing import alternate
from schemas.environment import Observation
from schemas.job import HeadSpec, LoraSpec, Scalar, Sft
from schemas.policy import ActionSpec, ObservationSpec, PolicyContract
from schemas.training import TrainingBatch, TrainingSample

NANO = "nexus-nano"
SIZES: dict[str, dict[str, dict[str, int]]] = {  # name → what differs from nexus-nano
    "24m": {
        "text_config": {
            "hidden_size": 448, "intermediate_size": 1280, "num_hidden_layers": 8,
            "num_attention_heads": 14, "num_key_value_heads": 7,
        },
        "vision_config": {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 8, "out_hidden_size": 448},
    },
    "tiny": {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 2}},  # for a quick look
}  # fmt: skip
WORDS = ("touch the red block", "push the blue block to the left", "touch the small green block", "open the upper drawer")
STATE, ACTION, HORIZON = 3, 3, 8

Numbers = dict[str, float]


@dataclass
class Bench:
    """Where and how to measure; `quick` runs everything once, to see that it runs."""

    directory: Path  # for what is written on the way
    device: str = "cpu"
    profile: Profile = "exact"
    quick: bool = False
    numbers: Numbers = field(default_factory=dict)

    @cached_property
    def backbones(self) -> dict[str, Backbone]:
        """By the suffix of their keys: "" for the shipped one."""
        name = "tiny" if self.quick else "24m"
        larger = write_backbone(self.directory / f"random-{name}", SIZES[name])
        return {"": self.load(NANO), f"_{name}": self.load(str(larger))}

    @property
    def trained(self) -> dict[str, Backbone]:
        """Those that whole steps are measured on; for a quick look the shipped one suffices."""
        return {"": self.backbones[""]} if self.quick else self.backbones

    def load(self, base: str) -> Backbone:
        """One backbone, on the bench's device."""
        return Backbone.load(base, self.device, self.profile)

    def time(self, **works: Any) -> dict[str, float]:
        """Median seconds of each, in turns."""
        return alternate(works, next(iter(self.backbones.values())).device, quick=self.quick)


def write_backbone(path: Path, changes: dict[str, dict[str, int]]) -> Path:
    """A checkpoint of nexus-nano's family and tokenizer in another size, with random weights."""
    source = resolve_base(NANO)
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    for part, fields in changes.items():
        config[part].update(fields)
    (path / "config.json").write_text(json.dumps(config))
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    about = json.loads((path / "nexus.json").read_text())
    (path / "nexus.json").write_text(json.dumps(about | {"name": path.name}))
    return path


def looks(count: int, tenants: int = 1, words: tuple[str, ...] = WORDS, seed: int = 0) -> list[Look]:
    """Different pictures of noise, the wordings in turn, `tenants` owners one after another."""
    rng = np.random.default_rng(seed)
    pictures = rng.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8)
    return [
        Look(Prompt([picture], words[i % len(words)]), scope=f"tenant-{i * tenants // count}")
        for i, picture in enumerate(pictures)
    ]


def contract(backbone: Backbone, head: str, lora: LoraSpec | None = None, **options: Scalar) -> PolicyContract:
    """What a tenant of the bench trains."""
    return build_contract(
        backbone=backbone.info,
        head=HeadSpec(type=head, horizon=HORIZON, options=options),
        action=ActionSpec(size=ACTION, low=[-1.0] * ACTION, high=[1.0] * ACTION),
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=STATE),
        lora=lora,
    )


def slot(backbone: Backbone, terms: PolicyContract, seed: int) -> tuple[Slot, Algorithm[Any]]:
    """A tenant's slot before its first step."""
    algorithm = make_algorithm(Sft(), seed)
    module = build_module(terms, backbone.shape, seed).to(backbone.device)
    adapter = backbone.adapter(terms.lora, seed) if terms.lora is not None else None
    return algorithm.make_slot(f"tenant-{seed}", "bench", terms, module, adapter), algorithm


def members(backbone: Backbone, heads: list[str], local: int, lora: LoraSpec | None = None) -> list[Member]:
    """A tenant for each head, with `local` samples of its own."""
    made = []
    for seed, head in enumerate(heads):
        needs_adapter = head == "fast"
        terms = contract(backbone, head, LoraSpec() if needs_adapter and lora is None else lora)
        own, algorithm = slot(backbone, terms, seed)
        made.append(Member(own, algorithm, SftWork.from_message(batch(terms, local, seed), terms)))
    return made


def batch(terms: PolicyContract, count: int, seed: int) -> TrainingBatch:
    """Samples with noise for pictures and actions."""
    rng = np.random.default_rng(seed)
    samples = [
        TrainingSample(
            observation=observation(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8), WORDS[(seed + i) % len(WORDS)]),
            actions=to_tensor(rng.uniform(-1, 1, (terms.horizon, terms.action.size)).astype(np.float32)),
            action_is_pad=to_tensor(np.zeros(terms.horizon, np.bool_)),
        )
        for i in range(count)
    ]
    return TrainingBatch(id="bench/0", tenant=f"tenant-{seed}", job="bench", batch=0, samples=samples)


def observation(picture: Any, words: str) -> Observation:
    """What a policy of the bench sees."""
    state = to_tensor(np.zeros(STATE, np.float32))
    return Observation(images={"front": encode_image(picture, "raw")}, state=state, instruction=words)
