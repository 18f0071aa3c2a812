"""From what a policy sees to what the backbone reads: token ids, positions and image patches. First step of every forward.

The texts repeat (one per task), so everything that depends on text and image sizes alone is remembered; the pixels take a
short path that is checked bit for bit against the checkpoint's own image processor when it is loaded.
"""

import hashlib
import inspect
import json
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.models.catalog import BackboneInfo

MAX_TOKENS = 1024  # of one prompt: a longer one would make everybody in its group wait
TEXT, IMAGE, QUERY = 0, 1, 2  # token types


@dataclass(frozen=True, eq=False)
class Prompt:
    """What one sample shows to the backbone: HWC uint8 images in the contract's camera order, and an instruction."""

    images: Sequence[NDArray[np.uint8]]
    instruction: str

    def __post_init__(self) -> None:
        """Raises BadMessage for an image that is not HWC uint8."""
        for image in self.images:
            if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
                raise BadMessage(f"observation.images: {image.dtype}{list(image.shape)} is not uint8[H, W, 3]")


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Everything of a prompt but the pixels. `position_ids` is [3, L] (time, height, width)."""

    ids: torch.Tensor
    token_type: torch.Tensor
    position_ids: torch.Tensor
    grids: torch.Tensor  # [images, 3]: patches in time, height, width
    query_span: tuple[int, int]
    digest: bytes


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


class PromptReader:
    """Tokens and patches of prompts, for one backbone."""

    def __init__(self, info: BackboneInfo, rope_index: Any, image_token_id: int) -> None:
        """`rope_index(ids, token_types, grids)` is the model's own, giving its three-dimensional positions."""
        self.info = info
        self.processor = load_processor(info.path)
        self.tokenizer = self.processor.tokenizer
        self._rope_index = rope_index
        self._image_token_id = image_token_id
        self._query_id = self._query_token()
        self._reserved = [str(token) for token in self.tokenizer.get_added_vocab()]
        self._patches = PatchMaker(self.processor.image_processor, info.image_size)
        self._texts: OrderedDict[tuple[str, int], TokenizedText] = OrderedDict()

    def _query_token(self) -> int:
        token = self.info.query_token or self.tokenizer.eos_token
        known = self.tokenizer.get_vocab()
        if token not in known:
            raise BadJob(f"base: {self.info.name}: the query token {token!r} is not in its tokenizer")
        return known[token]

    def text(self, instruction: str, images: int) -> TokenizedText:
        """Tokens of a prompt with so many images.

        Raises:
            BadMessage: the instruction holds one of the tokenizer's own tokens, or is too long.
        """
        key = (instruction, images)
        if (known := self._texts.get(key)) is not None:
            self._texts.move_to_end(key)
            return known
        made = self._texts[key] = self._tokenize(instruction, images)
        if len(self._texts) > 4096:
            self._texts.popitem(last=False)
        return made

    def _tokenize(self, instruction: str, images: int) -> TokenizedText:
        if (found := next((token for token in self._reserved if token in instruction), None)) is not None:
            raise BadMessage(f"observation.instruction: holds the reserved token {found!r}")
        text = self.info.prompt.replace("{instruction}", instruction)
        content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
        chat = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        image_token = self.processor.image_token
        per_image = int(self._patches.grid.prod()) // self.processor.image_processor.merge_size**2
        ids: list[int] = self.tokenizer(chat.replace(image_token, image_token * per_image))["input_ids"]
        start = len(ids)
        ids = ids + [self._query_id] * self.info.query_tokens
        if len(ids) > MAX_TOKENS:
            raise BadMessage(f"observation.instruction: the prompt has {len(ids)} tokens, more than {MAX_TOKENS}")
        tokens = torch.tensor(ids)
        kind = (tokens == self._image_token_id).to(torch.uint8)  # TEXT or IMAGE
        grids = self._patches.grid.repeat(images, 1)
        positions, _ = self._rope_index(tokens[None], kind.int()[None], grids if images else None)
        kind[start:] = QUERY
        return TokenizedText(
            ids=tokens,
            token_type=kind,
            position_ids=positions[:, 0],
            grids=grids,
            query_span=(start, len(ids)),
            digest=hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest(),
        )

    def fit(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bring an image to the backbone's size, bicubic; one that has it already is returned as it is."""
        size = self.info.image_size
        if image.shape[:2] == (size, size):
            return image
        return np.asarray(Pillow.fromarray(image).resize((size, size), Pillow.Resampling.BICUBIC))

    def patches(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Image patches [n, patch values] of images that `fit` has brought to size."""
        return self._patches(images)


class PatchMaker:
    """What the checkpoint's image processor computes, five times faster: a look-up per channel, then a transposition.

    Both tables are read off the processor itself and compared with it on a noise image; where they do not reproduce it to
    the bit (a processor of another family, or one that resizes), the processor does the work.
    """

    def __init__(self, processor: Any, size: int) -> None:
        self._processor = processor
        self._table: NDArray[np.float32] | None = None
        self._size = size
        ramp = np.repeat((np.arange(size * size) % 256).astype(np.uint8).reshape(size, size, 1), 3, axis=2)
        made, grid = self._slow([ramp])
        self.grid = torch.from_numpy(grid)  # [1, 3]
        fits = all(hasattr(processor, name) for name in ("patch_size", "merge_size", "temporal_patch_size"))
        if not fits or int(grid[0, 1]) * processor.patch_size != size or int(grid[0, 2]) * processor.patch_size != size:
            return
        channel = np.broadcast_to(np.arange(3, dtype=np.uint8), (size, size, 3))
        table = np.zeros((3, 256), np.float32)
        table[self._arrange(channel).astype(int), self._arrange(ramp).astype(int)] = made
        noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
        if np.array_equal(self._fast(noise, table), self._slow([noise])[0]):
            self._table = table

    @property
    def fast(self) -> bool:
        """Whether the short path is in use."""
        return self._table is not None

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Patches of all images, one after another."""
        if self._table is None:
            return self._slow(images)[0]
        return np.concatenate([self._fast(image, self._table) for image in images])

    def _slow(self, images: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        made = self._processor(images=list(images), return_tensors="np", input_data_format="channels_last")
        return made["pixel_values"], made["image_grid_thw"]

    def _fast(self, image: NDArray[np.uint8], table: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._arrange(np.stack([table[c][image[:, :, c]] for c in range(3)], axis=2))

    def _arrange(self, image: NDArray[Any]) -> NDArray[Any]:
        """[H, W, C] → [patches, C · time · patch · patch], patches of a merge block side by side (Qwen2-VL's order)."""
        p, m, t = self._processor.patch_size, self._processor.merge_size, self._processor.temporal_patch_size
        blocks = self._size // (p * m)
        parts = image.reshape(blocks, m, p, blocks, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        parts = np.broadcast_to(parts[:, :, :, :, :, None], (*parts.shape[:5], t, p, p))
        return parts.reshape((self._size // p) ** 2, 3 * t * p * p)


def content_digest(images: Sequence[NDArray[np.uint8]]) -> bytes:
    """Hash of raw pixels and their shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(struct.pack("<III", *image.shape))
        digest.update(np.ascontiguousarray(image).data)
    return digest.digest()
