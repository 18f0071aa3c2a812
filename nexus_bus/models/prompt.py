"""What a policy shows to a backbone, and what becomes of its text. First step of every forward."""

import hashlib
import inspect
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from nexus_bus.errors import BadMessage

TEXT, IMAGE, QUERY = 0, 1, 2  # token types


@dataclass(frozen=True, eq=False)
class Prompt:
    """What one sample shows to the backbone: HWC uint8 images in the contract's camera order, and an instruction."""

    images: Sequence[NDArray[np.uint8]]
    instruction: str

    @cached_property
    def pixels(self) -> bytes:
        """Hash of the pictures."""
        return content_digest(self.images)

    def __post_init__(self) -> None:
        """Raises BadMessage for an image that is not HWC uint8."""
        for image in self.images:
            if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
                raise BadMessage(f"observation.images: {image.dtype}{list(image.shape)} is not uint8[H, W, 3]")


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Everything of a prompt but the pixels."""

    ids: torch.Tensor  # [L]
    token_type: torch.Tensor  # [L] uint8: TEXT, IMAGE or QUERY
    query_span: tuple[int, int]  # first and one past the last query token
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what the family's model wants besides

    @cached_property
    def digest(self) -> bytes:
        """Hash of the token ids."""
        return hashlib.blake2b(self.ids.numpy().tobytes(), digest_size=16).digest()


def load_processor(path: Path) -> Any:
    """`AutoProcessor`, or the same class without its video half where torchvision is missing.

    Qwen-VL and InternVL processors hold a video processor that wants torchvision; images and text do not.
    """
    try:
        return AutoProcessor.from_pretrained(path)
    except (ImportError, ValueError) as error:
        if "orchvision" not in str(error):
            raise
    stock: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(path))]

    class ImageTextOnly(stock):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if "video" in argument_name and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    ImageTextOnly.__name__ = stock.__name__
    tokenizer = AutoTokenizer.from_pretrained(path)
    saved = path / "processor_config.json"
    accepted = set(inspect.signature(stock.__init__).parameters) - {"chat_template", "tokenizer"}
    extra = json.loads(saved.read_text()) if saved.is_file() else {}
    return ImageTextOnly(
        image_processor=AutoImageProcessor.from_pretrained(path),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=tokenizer.chat_template,
        **{key: value for key, value in extra.items() if key in accepted and not key.endswith("processor")},
    )


def content_digest(images: Sequence[NDArray[np.uint8]]) -> bytes:
    """Hash of raw pixels and their shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(struct.pack("<III", *image.shape))
        digest.update(np.ascontiguousarray(image).data)
    return digest.digest()
