"""A vision encoder beside a text encoder (DINOv2 and MiniLM by example), which never see each other: heads join them.

A directory with a nexus.json names both: `{"kind": "pair", "vision": "dinov2-small", "text": "all-MiniLM-L6-v2"}`; names that
are not absolute lie below it. Beside what every base may say (image_size, query_tokens, prompt) it takes `view_width`.

A token is [what is seen, what is said], V + W wide:

    view i     class token and patches   [vision state, 0]     V is `view_width`, or the vision encoder's width
    text       its tokens                [0, text state]       W is the text encoder's width
    queries    all alike                 [view map, text mean]

A head that reads query tokens alone must find all of the picture in each of them, and where things are. So a view map holds,
for every channel of the vision encoder, its mean over the patches and the place (x, y) where it is strongest: a spatial
soft-argmax (Levine et al. 2016), which finds one thing among others where pooling over regions blurs it: in a trial on
synthetic patches, an MLP missed a named object by .06 of the picture's edge with it, by .17 with means of 4 × 4 regions and by
.18 with as many cosine waves. These 3 · width numbers are brought to V by a fixed matrix with orthonormal columns, another for
every view, and summed: such a projection keeps distances (Johnson and Lindenstrauss 1984). With two views the miss was .09, and
.06 again with `view_width` doubled, which makes the heads wider. What of it matters is for the head to learn.
Queries need no place of their own: a head knows them apart by its own.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.models.bases import BackboneInfo, pair_paths
from nexus_bus.models.families.base import REMEMBERED, Family, Hidden, Profile, Row
from nexus_bus.models.prompt import IMAGE, QUERY, TEXT, TokenizedText

SHARPNESS = 2.0  # of the soft-argmax, for channels of deviation 1
LOUDNESS = 2.0  # of places, which lie in -1 … 1, beside states
SEED = 0  # of the fixed matrices: part of what a feature means, so it never changes
PATCH_ID, QUERY_ID = -1, -2  # stand in the ids for tokens that no tokenizer made


class Pair(Family):
    """Two encoders, loaded as `AutoModel` loads them."""

    def __init__(self, info: BackboneInfo, device: torch.device, profile: Profile) -> None:
        """Raises BadJob where an encoder's directory lacks weights."""
        super().__init__(info, device, profile)
        seen, said = pair_paths(info.path, info.options)
        self.vision, self.language = (_load(path, device, profile) for path in (seen, said))
        self.images = AutoImageProcessor.from_pretrained(seen)
        self.tokenizer = AutoTokenizer.from_pretrained(said)
        self.reserved = [str(token) for token in self.tokenizer.all_special_tokens]
        self._said: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        side = info.image_size // self.vision.config.patch_size
        self.patches = side**2
        line = torch.linspace(-LOUDNESS, LOUDNESS, side)
        self._places = torch.stack(torch.meshgrid(line, line, indexing="xy")).flatten(1).to(device)  # [2, patches]: x and y
        self.view_width = info.hidden - self.language.config.hidden_size
        self._mixers: list[torch.Tensor] = []

    def tokenize(self, instruction: str, images: int) -> TokenizedText:
        """Patches of each view, the words, queries.

        Raises:
            BadMessage: more words than the text encoder has places for.
        """
        text: list[int] = self.tokenizer(self.info.prompt.replace("{instruction}", instruction))["input_ids"]
        most = min(self.tokenizer.model_max_length, self.language.config.max_position_embeddings - self._offset)
        if len(text) > most:
            raise BadMessage(f"observation.instruction: {len(text)} tokens; the text encoder takes {most}")
        shown = images * (1 + self.patches)
        ids = torch.tensor([PATCH_ID] * shown + text + [QUERY_ID] * self.info.query_tokens)
        kind = torch.full((len(ids),), TEXT, dtype=torch.uint8)
        kind[:shown] = IMAGE
        kind[shown + len(text) :] = QUERY
        return TokenizedText(ids=ids, token_type=kind, query_span=(shown + len(text), len(ids)))

    @property
    def _offset(self) -> int:
        """Places that RoBERTa and MPNet keep for padding."""
        return 0 if self.language.config.model_type == "bert" else 1 + self.language.config.pad_token_id

    def forward(self, rows: Sequence[Row], layers: Sequence[int], start: int = 0) -> list[Hidden]:
        """As `Family.forward`, for the last layer alone."""
        if set(layers) != {-1}:
            raise BadJob(f"head.type: it reads layers {list(layers)}; {self.info.name!r}, a pair, has -1 alone")
        views = iter(self._see(rows))
        return [{-1: self._join([next(views) for _ in row.images], self._read(row.text))} for row in rows]

    def _join(self, views: list[torch.Tensor], words: torch.Tensor) -> torch.Tensor:
        """Tokens of one row [L, V + W] from its views [1 + patches, vision width] and words [n, W]."""
        mapped = words.new_zeros(self.view_width)
        for i, view in enumerate(views):
            mapped += (self._map(view[1:].float()) @ self._mixer(i, view.shape[1])).to(words.dtype)
        query = torch.cat([mapped, words.mean(0)]).expand(self.info.query_tokens, -1)
        beside = self.view_width, words.shape[1]
        seen = [torch.cat([view, view.new_zeros(len(view), sum(beside) - view.shape[1])], dim=1) for view in views]
        said = torch.cat([words.new_zeros(len(words), beside[0]), words], dim=1)
        return torch.cat([*seen, said, query])

    def _map(self, patches: torch.Tensor) -> torch.Tensor:
        """[3 · width]: mean, x and y of every channel of [patches, width], in float32 whatever the profile."""
        mean = patches.mean(0)
        spread = patches.std(0, correction=0) + 1e-6
        weights = ((patches - mean) * (SHARPNESS / spread)).softmax(0)
        return torch.cat([mean, (self._places @ weights).flatten()])

    def _mixer(self, view: int, width: int) -> torch.Tensor:
        """[3 · width, V]: another matrix for every view, so that what two of them show stays apart in the sum."""
        while len(self._mixers) <= view:
            draw = torch.Generator().manual_seed(SEED + len(self._mixers))
            columns, _ = torch.linalg.qr(torch.randn(3 * width, self.view_width, generator=draw))
            # As loud as the states that they mix, although there are fewer numbers.
            self._mixers.append((columns * math.sqrt(len(columns) / self.view_width)).to(self.device))
        return self._mixers[view]

    @torch.no_grad()
    def _see(self, rows: Sequence[Row]) -> tuple[torch.Tensor, ...]:
        """Class token and patches of every view [1 + patches, vision width]; registers, if it has any, are dropped."""
        # At the size that `fit` gave it already, so that nothing is cropped away at the borders; one by one, so that what a
        # processor makes of an image cannot depend on the others.
        pixels = [
            self.images(
                images=[self.fit(image)],
                return_tensors="pt",
                input_data_format="channels_last",
                do_resize=False,
                do_center_crop=False,
            )["pixel_values"]
            for row in rows
            for image in row.images
        ]
        if not pixels:
            return ()
        states = self.vision(torch.cat(pixels).to(self.device, self.vision.dtype)).last_hidden_state
        return torch.cat([states[:, :1], states[:, -self.patches :]], dim=1).unbind()

    @torch.no_grad()
    def _read(self, text: TokenizedText) -> torch.Tensor:
        """States of the words [n, W]; each text by itself, and remembered, since there are few."""
        if (known := self._said.get(text.digest)) is None:
            ids = text.ids[text.token_type == TEXT][None].to(self.device)
            known = self._said[text.digest] = self.language(ids, torch.ones_like(ids)).last_hidden_state[0]
            if len(self._said) > REMEMBERED:
                self._said.popitem(last=False)
        return known


def _load(path: Any, device: torch.device, profile: Profile) -> Any:
    model, report = AutoModel.from_pretrained(
        path,
        dtype=torch.float32 if profile == "exact" else torch.bfloat16,
        attn_implementation="eager" if profile == "exact" else "sdpa",
        output_loading_info=True,
        use_safetensors=True,
    )
    # A pooler is not among what the hub's files hold for every encoder, and nobody reads it here.
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise BadJob(f"base: {path} lacks weights: {', '.join(missing[:3])} …")
    return model.eval().requires_grad_(False).to(device)
