"""Qwen-VL (3, 2.5 and 2): three-dimensional positions, patches by the processor's own numbers, rows packed end to end."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from nexus_bus.models.bases import BackboneInfo
from nexus_bus.models.families import packing
from nexus_bus.models.families.base import Family, Hidden, Profile, Row, load_model, query_id, spans
from nexus_bus.models.grafts import Grafts
from nexus_bus.models.prompt import IMAGE, QUERY, TokenizedText, load_processor

PICTURE_BYTES = 128 << 20

Name = tuple[str, bytes, int]  # scope, hash of a sample's pictures, which of them


class Qwen(Family):
    """Rows of a group lie end to end in one sequence; each attends to itself alone."""

    suffixes = True

    def __init__(self, info: BackboneInfo, device: torch.device, profile: Profile) -> None:
        super().__init__(info, device, profile)
        whole = load_model(info, device, profile)
        self.model = whole.model  # without the language-model head: nobody reads its logits
        packed = packing.EXACT if profile == "exact" else packing.FAST
        for config in (whole.config.text_config, whole.config.vision_config):
            config._attn_implementation = packed  # noqa: SLF001 - asked for by name it would look for a flash kernel
        self.language = self.model.language_model
        embed = self.model.visual.patch_embed
        embed.forward = partial(_embed_patches, embed.proj)
        self.grafts = Grafts(self.language, "model.language_model")
        self.processor = load_processor(info.path)
        self.tokenizer = self.processor.tokenizer
        self.reserved = [str(token) for token in self.tokenizer.get_added_vocab()]
        self.patches = PatchMaker(self.processor.image_processor, info.image_size)
        deep = getattr(whole.config.vision_config, "deepstack_visual_indexes", None) or []
        self.resumes = len(deep)  # below that pictures still enter
        self._pictures = Pictures(PICTURE_BYTES)
        self._image_id = whole.config.image_token_id
        self._query_id = query_id(info, self.tokenizer)

    def tokenize(self, instruction: str, images: int) -> TokenizedText:
        """Chat template, one image token per merged patch, query tokens."""
        text = self.info.prompt.replace("{instruction}", instruction)
        content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
        chat = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        token = self.processor.image_token
        per_image = int(self.patches.grid.prod()) // self.processor.image_processor.merge_size**2
        ids: list[int] = self.tokenizer(chat.replace(token, token * per_image))["input_ids"]
        start = len(ids)
        tokens = torch.tensor(ids + [self._query_id] * self.info.query_tokens)
        kind = (tokens == self._image_id).to(torch.uint8)  # TEXT or IMAGE
        grids = self.patches.grid.repeat(images, 1)
        positions, _ = self.model.get_rope_index(
            input_ids=tokens[None], mm_token_type_ids=kind.int()[None], image_grid_thw=grids if images else None
        )
        kind[start:] = QUERY
        extra = {"positions": positions[:, 0], "grids": grids}
        return TokenizedText(ids=tokens, token_type=kind, query_span=(start, len(tokens)), extra=extra)

    def forward(self, rows: Sequence[Row], layers: Sequence[int], start: int = 0) -> list[Hidden]:
        """As `Family.forward`; the picture and the prompt's embeddings carry no gradient, the suffixes' do."""
        if start:
            lengths = [len(row.text.ids) for row in rows]
            positions = torch.cat([row.text.extra["positions"] for row in rows], dim=-1)[:, None].to(self.device)
            prefix = torch.cat([row.prefix for row in rows if row.prefix is not None]).to(self.device)
            with self.grafts.on(spans(rows, lengths)):
                states = self._resume(prefix[None], positions, lengths, start)
        else:
            lengths, states = self._whole(rows, layers)
        split = {layer: states[layer][0].split(lengths) for layer in layers}
        return [{layer: parts[i] for layer, parts in split.items()} for i in range(len(rows))]

    def _whole(self, rows: Sequence[Row], layers: Sequence[int]) -> tuple[list[int], Hidden]:
        """Lengths of the rows, and hidden states [1, tokens, H] of all of them by layer."""
        fresh = [row for row in rows if not _continues(row)]
        kinds = torch.cat([row.text.token_type for row in fresh]) if fresh else torch.zeros(0, dtype=torch.uint8)
        with torch.no_grad():
            ids = torch.cat([row.text.ids for row in fresh]) if fresh else torch.zeros(0, dtype=torch.long)
            embedded = self.language.embed_tokens(ids.to(self.device))
            seen = self._see(fresh)
            if seen is not None:
                embedded[(kinds == IMAGE).to(self.device)] = seen[0]
        positions = [row.text.extra["positions"] for row in fresh]
        lengths = [len(row.text.ids) for row in fresh]
        if any(row.suffix is not None for row in rows):
            embedded, kinds, positions, lengths = _append(rows, embedded)
        extra: dict[str, Any] = {}
        if seen is not None and seen[1]:  # Qwen3-VL: pictures enter its first layers, too
            extra = {"visual_pos_masks": (kinds == IMAGE)[None].to(self.device), "deepstack_visual_embeds": seen[1]}
        if any(row.past is not None for row in rows):
            extra["pasts"] = [row.past for row in rows]
        with self.grafts.on(spans(rows, lengths)):
            out = self.language(
                inputs_embeds=embedded[None],
                position_ids=torch.cat(positions, dim=-1)[:, None].to(self.device),
                use_cache=False,
                output_hidden_states=any(layer != -1 for layer in layers),
                lengths=lengths,
                **extra,
            )
        for row, place in zip(rows, positions, strict=True):
            if row.past is not None:
                row.past.position = int(place.max()) + 1
        return lengths, {layer: out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in layers}

    def _resume(self, hidden: torch.Tensor, positions: torch.Tensor, lengths: list[int], start: int) -> Hidden:
        """The layers from `start` on: the language model's own loop, entered halfway."""
        rotary = self.language.rotary_emb(hidden, positions)
        states = {start: hidden}
        for i in range(start, len(self.language.layers)):
            hidden = self.language.layers[i](hidden, attention_mask=None, position_embeddings=rotary, lengths=lengths)
            states[i + 1] = hidden
        states[-1] = states[len(self.language.layers)] = self.language.norm(hidden)
        return states

    def _see(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Embeddings of all pictures [image tokens, H], and what enters deeper layers."""
        names = [(*row.pictures, i) if row.pictures else None for row in rows for i in range(len(row.images))]
        images = [image for row in rows for image in row.images]
        if not images:
            return None
        seen = [self._pictures.get(name) for name in names]
        missing = [i for i, known in enumerate(seen) if known is None]
        if missing:
            pixels = torch.from_numpy(self.patches([self.fit(images[i]) for i in missing])).to(self.device)
            out = self.model.get_image_features(pixels, self.patches.grid.repeat(len(missing), 1).to(self.device))
            deeper = getattr(out, "deepstack_features", None) or []
            for n, i in enumerate(missing):
                made = seen[i] = (out.pooler_output[n], *(features[n] for features in deeper))
                self._pictures.put(names[i], made)
        first, *rest = (torch.cat(parts) for parts in zip(*(parts for parts in seen if parts is not None), strict=True))
        return first, rest


class Pictures:
    """What the vision tower made of pictures, the least recently used dropped first. Adapters do not reach it, so the samples
    of a tier `lora` meet it again in every epoch."""

    def __init__(self, bound: int) -> None:
        """`bound` in bytes."""
        self.bound = bound
        self.used = 0
        self._kept: OrderedDict[Name, tuple[torch.Tensor, ...]] = OrderedDict()

    def get(self, name: Name | None) -> tuple[torch.Tensor, ...] | None:
        """Its embeddings and what enters deeper layers."""
        if name is None or name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name]

    def put(self, name: Name | None, parts: tuple[torch.Tensor, ...]) -> None:
        """Keep copies of their own: the parts are views of a whole group."""
        if name is None or name in self._kept:
            return
        self._kept[name] = tuple(part.clone() for part in parts)
        self.used += sum(part.nbytes for part in parts)
        while self.used > self.bound:
            _, dropped = self._kept.popitem(last=False)
            self.used -= sum(part.nbytes for part in dropped)


def _embed_patches(proj: torch.nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """A convolution whose kernel is the whole patch is a matrix product, and six times faster as one on a CPU."""
    return functional.linear(patches.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)


def _continues(row: Row) -> bool:
    return row.past is not None and not row.past.empty


def _append(rows: Sequence[Row], embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[int]]:
    """Put each row's suffix after its prompt, or after its past; its positions go on counting."""
    parts, kinds, places, lengths = [], [], [], []
    at = 0
    for row in rows:
        prompt = 0 if _continues(row) else len(row.text.ids)
        n = 0 if row.suffix is None else len(row.suffix)
        parts.append(embedded[at : at + prompt])
        kinds.append(row.text.token_type[:prompt])
        place = row.text.extra["positions"][:, :prompt]
        if row.suffix is not None:
            parts.append(row.suffix.to(embedded.dtype))
            kinds.append(row.text.token_type.new_full((n,), QUERY))
            first = row.past.position if row.past is not None and not prompt else int(place.max()) + 1
            place = torch.cat([place, (first + torch.arange(n)).expand(3, n)], dim=-1)
        places.append(place)
        lengths.append(prompt + n)
        at += prompt
    return torch.cat(parts), torch.cat(kinds), places, lengths


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
