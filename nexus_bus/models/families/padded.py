"""Idefics3, SmolVLM, PaliGemma, Gemma3, InternVL and LLaVA: one forward over rows padded on the right.

Tokens come from the checkpoint's own processor, pixels from its own image processor, image by image; what a family needs
besides is a line in `MANNERS`. Cutting an image into tiles is off everywhere, so that a view has a fixed number of tokens.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, ProcessorMixin

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.models.bases import KINDS, BackboneInfo
from nexus_bus.models.families.base import Family, Hidden, Profile, Row, load_model, query_id
from nexus_bus.models.grafts import Grafts
from nexus_bus.models.prompt import IMAGE, QUERY, TEXT, TokenizedText, load_processor


@dataclass(frozen=True)
class Manners:
    """What one model type needs besides the common way."""

    whole: Mapping[str, bool] = field(default_factory=dict)  # arguments that keep its image processor from making tiles
    query_type: int = 0  # token type of queries, for a model that takes token types


# Without tiles, Idefics3 and SmolVLM show the image at the size of their vision model, which `fit` has given it already:
# enlarging it four times before, as they do for tiles, would only cost time.
_ONE_TILE = {"do_image_splitting": False, "do_resize": False}
MANNERS = {
    "idefics3": Manners(_ONE_TILE),
    "smolvlm": Manners(_ONE_TILE),
    "internvl": Manners({"crop_to_patches": False}),
    "gemma3": Manners({"do_pan_and_scan": False}),
    "paligemma": Manners(query_type=1),  # its answers' type: they read the prompt, which reads itself both ways but not them
    "llava": Manners(),
}


EAGER = ("gemma2",)  # text models that cap their attention's logits, which SDPA cannot


class Padded(Family):
    """Whatever `AutoModelForImageTextToText` loads that takes ids, one mask and pixels."""

    def __init__(self, info: BackboneInfo, device: torch.device, profile: Profile) -> None:
        """Raises BadJob for a processor that wants a package which is not installed."""
        super().__init__(info, device, profile)
        self._manners = MANNERS[info.model_type]
        try:
            self.processor = load_processor(info.path)
        except ImportError as error:
            named = "num2words" if "num2words" in str(error) else str(error)
            raise BadJob(f"base: {info.name!r}: its processor needs a package; install {named}") from error
        text: Any = AutoConfig.from_pretrained(info.path).get_text_config()
        whole = load_model(info, device, profile, attention="eager" if text.model_type in EAGER else None)
        self.model = whole.model  # without the language-model head: nobody reads its logits
        part = "language_model" if hasattr(self.model, "language_model") else "text_model"
        self.grafts = Grafts(getattr(self.model, part), f"model.{part}")
        self.tokenizer = self.processor.tokenizer
        self.reserved = [str(token) for token in self.tokenizer.get_added_vocab() if token.strip(" \n\t▁")]
        self._typed = "token_type_ids" in inspect.signature(self.model.forward).parameters
        self._image_id = whole.config.image_token_id
        self._query_id = query_id(info, self.tokenizer)

    def tokenize(self, instruction: str, images: int) -> TokenizedText:
        """The stock processor's tokens of a chat turn, or of bare text where the checkpoint has no chat template; queries.

        Raises:
            BadMessage: fewer images than the family can do with.
        """
        least = KINDS[self.info.model_type].least_views
        if images < least:
            raise BadMessage(f"observation.images: {images} images; a {self.info.model_type} needs at least {least}")
        made = self._process(self.info.prompt.replace("{instruction}", instruction), images)
        ids = made["input_ids"][0]
        queries = ids.new_full((self.info.query_tokens,), self._query_id)
        tokens = torch.cat([ids, queries])
        kind = torch.where(tokens == self._image_id, IMAGE, TEXT).to(torch.uint8)
        kind[len(ids) :] = QUERY
        extra: dict[str, torch.Tensor] = {}
        if self._typed:
            extra["types"] = torch.cat([made["token_type_ids"][0], torch.full_like(queries, self._manners.query_type)])
        return TokenizedText(ids=tokens, token_type=kind, query_span=(len(ids), len(tokens)), extra=extra)

    def _process(self, text: str, images: int) -> Mapping[str, torch.Tensor]:
        """What the processor makes of a text beside that many images; their content does not matter here."""
        size = self.info.image_size
        blank = np.zeros((size, size, 3), np.uint8)
        if self.processor.chat_template is None:
            marks = self.processor.image_token * images
            given = [blank] * images or None
            return self.processor(text=marks + text, images=given, return_tensors="pt", **self._manners.whole)
        content: list[Any] = [*[{"type": "image", "image": blank}] * images, {"type": "text", "text": text}]
        turns: Any = [{"role": "user", "content": content}]
        # The common method: SmolVLM's own asks its video half, which is missing without torchvision.
        made: Any = ProcessorMixin.apply_chat_template(
            self.processor,
            turns,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=dict(self._manners.whole),
        )
        return made

    def forward(self, rows: Sequence[Row], layers: Sequence[int], start: int = 0) -> list[Hidden]:
        """As `Family.forward`; rows carry no suffix."""
        lengths = [len(row.text.ids) for row in rows]
        inputs: dict[str, torch.Tensor] = {
            "input_ids": _pad([row.text.ids for row in rows], self._query_id),  # any id but an image's
            "attention_mask": _pad([torch.ones_like(row.text.ids) for row in rows]),
        }
        if self._typed:
            inputs["token_type_ids"] = _pad([row.text.extra["types"] for row in rows])
        # One by one: what a processor makes of an image must not depend on the others.
        pixels = [self._pixels(self.fit(image)) for row in rows for image in row.images]
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels).to(self.model.dtype)
        longest = max(lengths)
        # Not merged where a tenant's rows are neighbours: the padding between them would enter its gradient's sums.
        spans = [(i * longest, i * longest + lengths[i], row.adapter) for i, row in enumerate(rows) if row.adapter is not None]
        # Positions are left to the model: under right padding its own count is right for every row (PaliGemma's starts at 1).
        with self.grafts.on(spans):
            out = self.model(
                **{name: tensor.to(self.device) for name, tensor in inputs.items()},
                use_cache=False,
                output_hidden_states=any(layer != -1 for layer in layers),
            )
        hidden = {layer: out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in layers}
        return [{layer: states[i, :length] for layer, states in hidden.items()} for i, length in enumerate(lengths)]

    def _pixels(self, image: np.ndarray) -> torch.Tensor:
        """As the image processor makes them, with a leading axis of one image."""
        made = self.processor.image_processor(
            images=[image], return_tensors="pt", input_data_format="channels_last", **self._manners.whole
        )
        return made["pixel_values"]


def _pad(rows: Sequence[torch.Tensor], value: int = 0) -> torch.Tensor:
    """[B, Lmax], padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
