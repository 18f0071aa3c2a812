"""What every kind of backbone is: it reads prompts, and turns rows of a group into hidden states in one forward.

A family knows its model's inputs and nothing else; profile, tiles, names of features and caching are `Backbone`'s.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.models.bases import BackboneInfo
from nexus_bus.models.grafts import Adapter, Grafts, Span
from nexus_bus.models.past import Past
from nexus_bus.models.prompt import TokenizedText

Profile = Literal["exact", "fast"]
Hidden = dict[int, torch.Tensor]  # layer → [L, H]; layers count as in `hidden_states`: 0 the embeddings, -1 after the norm
REMEMBERED = 4096  # tokenised texts
CHARACTERS = 16  # of an instruction, for each token of the longest prompt: a longer one is not even tokenised


@dataclass(frozen=True, eq=False)
class Row:
    """One sample of a forward."""

    text: TokenizedText
    images: Sequence[NDArray[np.uint8]]  # HWC, of any size
    adapter: Adapter | None = None  # low-rank deltas of this sample's tenant
    suffix: torch.Tensor | None = None  # [n, H] embeddings that follow the prompt, with gradients
    pictures: tuple[str, bytes] | None = None  # scope and hash under which what the pictures became may be kept
    prefix: torch.Tensor | None = None  # [L, H] hidden states at the layer that the forward starts from
    past: Past | None = None  # what came before: then the suffix alone goes through the model


class Family(ABC):
    """A loaded model of one family."""

    suffixes: bool = False  # whether rows may carry a suffix
    resumes: int | None = None  # the lowest layer that a forward may start from, given its input; None: it cannot
    grafts: Grafts  # where adapters go in; a family that takes none has no such attribute

    def __init__(self, info: BackboneInfo, device: torch.device, profile: Profile) -> None:
        self.info, self.device = info, device
        self.profile: Profile = profile
        self._texts: OrderedDict[tuple[str, int], TokenizedText] = OrderedDict()
        self.reserved: list[str] = []  # the tokenizer's own tokens, which an instruction must not hold

    @abstractmethod
    def tokenize(self, instruction: str, images: int) -> TokenizedText:
        """Tokens of a prompt with so many images: the same numbers whoever shares the forward."""

    @abstractmethod
    def forward(self, rows: Sequence[Row], layers: Sequence[int], start: int = 0) -> list[Hidden]:
        """One forward over all rows, with gradients where grad mode is on; per row its real tokens, suffix included.

        From layer `start` > 0 on, all rows carry their prefix of that layer, and neither suffix nor past.
        """

    def text(self, instruction: str, images: int) -> TokenizedText:
        """`tokenize`, remembered: texts repeat, one a task.

        Raises:
            BadMessage: the instruction holds one of the tokenizer's own tokens, or is too long.
        """
        key = (instruction, images)
        if (known := self._texts.get(key)) is not None:
            self._texts.move_to_end(key)
            return known
        if len(instruction) > (most := CHARACTERS * self.info.max_tokens):  # megabytes of it would hold up everybody
            raise BadMessage(f"observation.instruction: {len(instruction)} characters, more than {most}")
        if (found := next((token for token in self.reserved if token in instruction), None)) is not None:
            raise BadMessage(f"observation.instruction: holds the reserved token {found!r}")
        made = self.tokenize(instruction, images)
        if len(made.ids) > self.info.max_tokens:
            has, most = len(made.ids), self.info.max_tokens
            raise BadMessage(f"observation.instruction: the prompt has {has} tokens, more than {most}")
        self._texts[key] = made
        if len(self._texts) > REMEMBERED:
            self._texts.popitem(last=False)
        return made

    def fit(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bring an image to the backbone's size, bicubic; one that has it already is returned as it is."""
        size = self.info.image_size
        if image.shape[:2] == (size, size):
            return image
        return np.asarray(Pillow.fromarray(image).resize((size, size), Pillow.Resampling.BICUBIC))


def load_model(info: BackboneInfo, device: torch.device, profile: Profile, attention: str | None = None) -> Any:
    """The model as transformers loads it: weights mapped from the file, frozen, in evaluation mode.

    Raises:
        BadJob: the checkpoint lacks weights of the model that its configuration describes.
    """
    loader: Any = AutoModelForImageTextToText
    model, report = loader.from_pretrained(
        info.path,
        dtype=torch.float32 if profile == "exact" else torch.bfloat16,
        attn_implementation=attention or ("eager" if profile == "exact" else "sdpa"),
        output_loading_info=True,
        use_safetensors=True,  # anything else would be unpickled
    )
    if report["missing_keys"]:
        raise BadJob(f"base: {info.name!r} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])} …")
    return model.eval().requires_grad_(False).to(device)


def query_id(info: BackboneInfo, tokenizer: Any) -> int:
    """Id of the token that prompts end with.

    Raises:
        BadJob: the tokenizer has no such token.
    """
    token = info.query_token or tokenizer.eos_token
    known = tokenizer.get_vocab()
    if token not in known:
        raise BadJob(f"base: {info.name}: the query token {token!r} is not in its tokenizer")
    return known[token]


def spans(rows: Sequence[Row], lengths: Sequence[int]) -> list[Span]:
    """Tokens of each adapter in the flattened group; rows of one adapter that stand side by side make one span."""
    found: list[Span] = []
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        stop = start + length
        if row.adapter is not None:
            if found and found[-1][2] is row.adapter and found[-1][1] == start:
                found[-1] = (found[-1][0], stop, row.adapter)
            else:
                found.append((start, stop, row.adapter))
        start = stop
    return found


Loader = Callable[[BackboneInfo, torch.device, Profile], Family]
