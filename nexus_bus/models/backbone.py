"""The frozen backbone: one vision-language model a process, turning prompts of many tenants into features in one forward.

Exact profile: float32 and eager attention. A sample's feature is then the same to the bit whoever shares its forward, if the
matrix library is told so (`MKL_CBWR`, see process.py). `Backbone.load` tries it out; where it does not hold, samples go
through one at a time, so that the promise stands and only speed is lost.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from nexus_bus.errors import BadJob
from nexus_bus.models.catalog import BackboneInfo, describe_backbone
from nexus_bus.models.features import VLAFeature, feature_id
from nexus_bus.models.prompt import Prompt, PromptReader, TokenizedText, content_digest

Profile = Literal["exact", "fast"]
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
TILE = {"exact": 16, "fast": 64}  # samples per forward: above it nothing is gained (measured on CPU)


class Backbone:
    """A loaded backbone. Safe to call from one thread at a time."""

    def __init__(self, info: BackboneInfo, model: Any, device: torch.device, profile: Profile) -> None:
        """Use `Backbone.load`."""
        self.info = info
        self.profile: Profile = profile
        self.device = device
        self._model = model.model  # without the language-model head: nobody reads its logits
        self._reader = PromptReader(info, self._rope_index, model.config.image_token_id)
        self.tile = TILE[profile]
        if profile == "exact" and not self._invariant():
            self.tile = 1

    @classmethod
    def load(cls, base: str, device: str = "auto", profile: Profile = "exact") -> "Backbone":
        """Load by the same path whether shipped, a directory or from the hub.

        Raises:
            NotFound: no such base.
            BadJob: not of a family we can read, or its weights are incomplete.
        """
        info = describe_backbone(base)
        if info.model_type not in FAMILIES:
            raise BadJob(f"base: {base!r} is a {info.model_type!r}; served are {', '.join(FAMILIES)}")
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        transformers_logging.disable_progress_bar()
        loader: Any = AutoModelForImageTextToText
        model, report = loader.from_pretrained(
            info.path,
            dtype=torch.float32 if profile == "exact" else torch.bfloat16,
            attn_implementation="eager" if profile == "exact" else "sdpa",
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise BadJob(f"base: {base!r} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])} …")
        return cls(info, model.eval().requires_grad_(False).to(place), place, profile)

    @property
    def fingerprint(self) -> str:
        """Hash of configuration and weights."""
        return self.info.fingerprint

    @property
    def hidden_size(self) -> int:
        """H, the width of one layer's hidden states."""
        return self.info.hidden

    @property
    def num_layers(self) -> int:
        """Layers of the language model."""
        return self.info.layers

    def ids(self, prompts: Sequence[Prompt], layers: Sequence[int] = (-1,)) -> list[str]:
        """Content names of the features that `encode` would give, without a forward."""
        texts = [self._reader.text(prompt.instruction, len(prompt.images)) for prompt in prompts]
        return [self._id(text, prompt, layers) for text, prompt in zip(texts, prompts, strict=True)]

    def encode(self, prompts: Sequence[Prompt], layers: Sequence[int] = (-1,)) -> list[VLAFeature]:
        """Hidden states of every prompt; no gradient flows back.

        Layers count as in `hidden_states` of transformers: 0 the embeddings, -1 the last, after its norm.

        Raises:
            BadMessage: an image or an instruction that cannot be shown to the backbone.
        """
        texts = [self._reader.text(prompt.instruction, len(prompt.images)) for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(texts[i].ids))  # alike lengths together: less padding
        features: list[VLAFeature | None] = [None] * len(prompts)
        for start in range(0, len(order), self.tile):
            rows = order[start : start + self.tile]
            hidden = self._forward([texts[i] for i in rows], [prompts[i] for i in rows], layers)
            for row, i in enumerate(rows):
                features[i] = VLAFeature(
                    feature_id=self._id(texts[i], prompts[i], layers),
                    hidden=hidden[row, : len(texts[i].ids)].clone(),
                    token_type=texts[i].token_type,
                    query_span=texts[i].query_span,
                )
        return [feature for feature in features if feature is not None]

    def _id(self, text: TokenizedText, prompt: Prompt, layers: Sequence[int]) -> str:
        return feature_id(self.fingerprint, self.profile, layers, text.digest, content_digest(prompt.images))

    @torch.no_grad()
    def _forward(self, texts: list[TokenizedText], prompts: list[Prompt], layers: Sequence[int]) -> torch.Tensor:
        """One padded forward: [B, Lmax, n_layers · H] on the CPU."""
        longest = max(len(text.ids) for text in texts)
        ids = torch.zeros((len(texts), longest), dtype=torch.long)
        mask = torch.zeros((len(texts), longest), dtype=torch.long)
        kinds = torch.zeros((len(texts), longest), dtype=torch.int)
        positions = torch.zeros((3, len(texts), longest), dtype=torch.long)
        for row, text in enumerate(texts):
            length = len(text.ids)
            ids[row, :length] = text.ids
            mask[row, :length] = 1
            kinds[row, :length] = text.token_type == 1
            positions[:, row, :length] = text.position_ids
        inputs: dict[str, torch.Tensor] = {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": kinds,
            "position_ids": positions,  # given, because the model would keep the last group's offsets on itself
        }
        images = [self._reader.fit(image) for prompt in prompts for image in prompt.images]
        if images:
            inputs["pixel_values"] = torch.from_numpy(self._reader.patches(images))
            inputs["image_grid_thw"] = torch.cat([text.grids for text in texts])
        moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        out = self._model(**moved, use_cache=False, output_hidden_states=any(layer != -1 for layer in layers))
        chosen = [out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in layers]
        return torch.cat(chosen, dim=-1).cpu()

    def _rope_index(self, ids: torch.Tensor, kinds: torch.Tensor, grids: torch.Tensor | None) -> Any:
        return self._model.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grids)

    def _invariant(self) -> bool:
        """Whether features come out the same to the bit, alone and among ragged neighbours."""
        noise = np.random.default_rng(0)
        size = self.info.image_size
        probes = [
            Prompt([noise.integers(0, 256, (size, size, 3), dtype=np.uint8)], "go " * (1 + 5 * (i % 3))) for i in range(5)
        ]
        together = self.encode(probes)
        return all(
            torch.equal(self.encode([probe])[0].hidden, both.hidden) for probe, both in zip(probes, together, strict=True)
        )
