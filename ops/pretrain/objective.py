"""The loss: cross entropy over location tokens, with targets that are spread over neighbouring bins.

Each query position is scored once per group, by a softmax over the tokens of that group. Spreading the target tells the model
that the bin next door is nearly right, which a hard label would not, and gives a resolution below one bin when decoded.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

from ops.pretrain.language import COLOURS
from ops.pretrain.questions import NUMBERS, Batch, Questioner, patches
from ops.pretrain.vocabulary import BY_NAME, QUERY_TOKENS

HELPER = 0.5  # weight of the helper's loss
SPREAD = 0.8  # standard deviation of a target, in bins


@dataclass
class Terms:
    """The parts of one step's loss, and how far decoded places are off."""

    loss: torch.Tensor
    helper: float
    query: float
    answer: float
    target_cm: float  # mean distance of the decoded object from the true one, on the table
    group_loss: dict[str, float]  # above the entropy of the spread target


class Objective:
    """Holds what stays the same from step to step: token spans and the helper.

    The helper is a linear layer on the picture tokens that says which colours (and the tip) each one covers, and where. It
    gives the vision tower a direct signal, without which the language model takes long to find out that pictures matter. It
    is thrown away after training.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, questioner: Questioner, width: int) -> None:
        self.helper = nn.Linear(width, (len(COLOURS) + 1) * 3)
        self.spans = group_spans(tokenizer)
        self._questioner = questioner

    def hidden(self, model: Qwen3VLForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden states [pictures * length, hidden] of a batch of branched prompts, and its picture tokens."""
        inner = model.model
        seen = look(model, batch.images)
        span = self._questioner.image_span
        embedded = inner.language_model.embed_tokens(batch.ids)
        embedded = torch.cat([embedded[:, : span.start], seen, embedded[:, span.stop :]], dim=1)
        states = inner.language_model(
            inputs_embeds=embedded,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        return states.flatten(0, 1), seen

    def __call__(self, model: Qwen3VLForConditionalGeneration, batch: Batch) -> Terms:
        """Score one batch."""
        hidden, seen = self.hidden(model, batch)
        logits = model.lm_head(hidden[batch.query_at.flatten()])
        query, parts = torch.zeros(()), {}
        for name, span in self.spans.items():
            group = BY_NAME[name]
            if name == "act":
                loss = functional.cross_entropy(logits[:, span], batch.acts.repeat_interleave(QUERY_TOKENS))
            elif name == "step":
                loss = functional.cross_entropy(logits[:, span], torch.arange(QUERY_TOKENS).repeat(len(batch.acts)))
            else:
                values = batch.numbers[:, NUMBERS.index(name)]
                known = np.flatnonzero(~np.isnan(values))
                wanted = spread(torch.from_numpy(group.encode(values[known])), group.bins).float()
                scores = logits[:, span].view(len(values), QUERY_TOKENS, -1)[torch.from_numpy(known)]
                wanted = wanted[:, None].expand_as(scores)
                loss = functional.kl_div(functional.log_softmax(scores, -1), wanted, reduction="sum") / max(
                    1, len(known) * QUERY_TOKENS
                )
            query = query + group.weight * loss
            parts[name] = float(loss.detach())
        query = query / sum(BY_NAME[name].weight for name in self.spans)
        answer = functional.cross_entropy(model.lm_head(hidden[batch.answer_at]), batch.answers, reduction="sum")
        answer = answer / max(1, len(batch.answers))
        helper = self.picture_loss(seen, batch.cells)
        total = query + 0.25 * answer + HELPER * helper
        return Terms(
            total, float(helper.detach()), float(query.detach()), float(answer.detach()), self._off(logits, batch), parts
        )

    def picture_loss(self, seen: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """The helper's loss on picture tokens [n, tokens, hidden]: presence and place."""
        said = self.helper(seen).view_as(cells)
        present = cells[..., 0]
        found = functional.binary_cross_entropy_with_logits(said[..., 0], present, pos_weight=torch.tensor(3.0))
        off = functional.smooth_l1_loss(said[..., 1:], cells[..., 1:], reduction="none", beta=0.1).sum(-1)
        # Silence (zero) where there is nothing: then even evenly spread attention reads a place.
        return found + (off * present).sum() / present.sum() + 3 * (off * (1 - present)).mean()

    def _off(self, logits: torch.Tensor, batch: Batch) -> float:
        with torch.no_grad():
            gaps = [
                read_out(logits[:, self.spans[name]], name).reshape(-1, QUERY_TOKENS).mean(1)
                - batch.numbers[:, NUMBERS.index(name)]
                for name in ("tx", "ty")
            ]
        return float(np.nanmean(np.hypot(*gaps)) * 100)


def look(model: Qwen3VLForConditionalGeneration, images: NDArray[np.uint8]) -> torch.Tensor:
    """Picture tokens [n, tokens, hidden] of pictures [n, H, W, 3]."""
    config = model.config.vision_config
    side = images.shape[1] // config.patch_size
    grids = torch.tensor([[1, side, side]]).expand(len(images), 3)
    return model.model.visual(patches(images), grid_thw=grids).pooler_output.view(len(images), -1, config.out_hidden_size)


def group_spans(tokenizer: PreTrainedTokenizerFast) -> dict[str, slice]:
    """Where each group's tokens stand in the vocabulary (they are consecutive)."""
    spans = {}
    for name, group in BY_NAME.items():
        first = tokenizer.convert_tokens_to_ids(group.tokens[0])
        spans[name] = slice(first, first + group.bins)
        assert tokenizer.convert_tokens_to_ids(group.tokens[-1]) == first + group.bins - 1
    return spans


def spread(place: torch.Tensor, bins: int) -> torch.Tensor:
    """Distributions [n, bins] around `place` [n] (in bins)."""
    return torch.softmax(-((torch.arange(bins) - place[:, None]) ** 2) / (2 * SPREAD**2), dim=-1)


def read_out(scores: torch.Tensor, name: str) -> NDArray[np.float64]:
    """The number that scores [n, bins] of a group stand for: the mean place, decoded."""
    group = BY_NAME[name]
    place = (torch.softmax(scores.double(), -1) * torch.arange(group.bins)).sum(-1)
    return group.decode(place.numpy())
