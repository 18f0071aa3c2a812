"""Attention over sequences laid end to end: no token of padding anywhere, and no sequence sees another.

Sequences of equal length share a batched product, others do not: what one computes never depends on how long its neighbours
are. transformers hands the bounds of sequences only to implementations whose name holds "flash"; hence ours.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from nexus_bus.models.past import Past

EXACT, FAST = "nexus_packed_flash_exact", "nexus_packed_flash_fast"


@lru_cache(maxsize=256)
def _plan(lengths: tuple[int, ...]) -> tuple[list[tuple[int, torch.Tensor]], torch.Tensor]:
    """Per distinct length the tokens of its sequences, and where each token comes to lie once these stand in a row."""
    start, by_length = 0, defaultdict(list)
    for length in lengths:
        by_length[length].append(torch.arange(start, start + length))
        start += length
    groups = [(length, torch.cat(tokens)) for length, tokens in by_length.items()]
    return groups, torch.cat([tokens for _, tokens in groups]).argsort()


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None, exact: bool
) -> torch.Tensor:
    """Attention of equally long sequences: query [B, heads, L, d], key and value [B, heads, ≥ L, d], out [B, L, heads, d]."""
    groups = query.shape[1] // key.shape[1]
    causal, length, whole = bool(module.is_causal), query.shape[2], key.shape[2]
    mask: torch.Tensor | None = None
    if causal and (exact or length < whole or (window and whole > window)):
        mask = torch.ones(length, whole, dtype=torch.bool, device=query.device).tril(whole - length)
        if window:
            mask = mask.triu(whole - length + 1 - window)
    if not exact:
        plain = causal and mask is None
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=plain, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if mask is not None:
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    weights = functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


def _packed(
    exact: bool,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value [1, heads, tokens, d]; out [1, tokens, heads, d].

    The lengths of the sequences come from our own call (`lengths`), or from the vision tower's as bounds (`cu_seq_lens_q`).
    """
    lengths: Sequence[int] = given["lengths"] if "lengths" in given else given["cu_seq_lens_q"].diff().tolist()
    window: int | None = given.get("sliding_window")
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [tokens, heads, d]

    def run(parts: list[torch.Tensor], length: int) -> torch.Tensor:
        q, k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in parts)
        return _attend(module, q, k, v, scaling, window, exact).flatten(0, 1)

    if (pasts := given.get("pasts")) is not None:  # somebody continues: each row by itself, since no two have the same past
        rows = zip(*(tensor.split(list(lengths)) for tensor in flat), pasts, strict=True)
        out = [_continue(module, q, k, v, past, scaling, window, exact) for q, k, v, past in rows]
        return torch.cat(out).unsqueeze(0), None
    if len(set(lengths)) == 1:
        return run(flat, lengths[0]).unsqueeze(0), None
    groups, back = _plan(tuple(lengths))
    device = query.device
    out = torch.cat([run([tensor[tokens.to(device)] for tensor in flat], length) for length, tokens in groups])
    return out[back.to(device)].unsqueeze(0), None


def _continue(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: Past | None,
    scaling: float,
    window: int | None,
    exact: bool,
) -> torch.Tensor:
    """One sequence [tokens, heads, d] after its past, which grows by it."""
    if past is not None:
        key, value = past.extend(module.layer_idx, key, value)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    return _attend(module, q, k, v, scaling, window, exact)[0]


AttentionInterface.register(EXACT, partial(_packed, True))
AttentionInterface.register(FAST, partial(_packed, False))
