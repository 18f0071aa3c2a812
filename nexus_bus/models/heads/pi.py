"""`pi`: flow matching with a transformer of one block per layer of the backbone; block i reads layer i.

After π0 as StarVLA ships it (layer-wise flow matching), scaled by options; the flow matching itself stands in flow.py. As in
π0, a block attends to its layer's tokens and to its own tokens in one softmax: with cross attention alone no action would ever
hear of the state or of the action before it. Shapes as in flow.py, K layers read (all, or the last `layers` of them):

| tensor                    | shape                                          |
|---------------------------|------------------------------------------------|
| features.hidden           | [B, L, K·H], the layers side by side           |
| context of block i        | [B, L, H] under the mask, after its own norm   |
| keys and values, block i  | [B, R, L + N, 2W]: H → 2W of layer i, W → 2W of the tokens |
| tokens                    | [B, R, N, W], N = state + learned + T          |
| answer                    | [B, T, D]                                      |
"""

import torch
from torch import nn

from nexus_bus.models.catalog import head_layers
from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads.base import FeatureShape, HeadNeeds
from nexus_bus.models.heads.flow import Attention, FlowModule
from schemas.job import HeadSpec


class Joint(Attention):
    """Attention to the context and to x itself at once."""

    def __init__(self, width: int, context_size: int, heads: int) -> None:
        super().__init__(width, context_size, heads)
        self.own_key_value = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The context's keys and values are made once for all draws; tokens of x are never masked."""
        repeats, tokens = x.shape[1:3]
        flat = x.flatten(0, 1)
        seen = self.key_value(context).repeat_interleave(repeats, dim=0)
        allowed = torch.cat([mask.repeat_interleave(repeats, dim=0), mask.new_ones(len(flat), tokens)], dim=1)
        return self.mix(flat, torch.cat([seen, self.own_key_value(flat)], dim=1), allowed).unflatten(0, x.shape[:2])


class Pi(FlowModule):
    """Flow-matching head on all layers."""

    def __init__(self, spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int) -> None:
        width, heads = int(spec.options["width"]), int(spec.options["heads"])
        reads = head_layers(spec, shape.layers)
        norms = nn.ModuleList(nn.LayerNorm(shape.hidden) for _ in reads)
        attentions = [Joint(width, shape.hidden, heads) for _ in reads]
        super().__init__(spec, shape, state_size, action_size, norms, attentions)
        self.needs = HeadNeeds(layers=reads)

    def contexts(self, features: FeatureBatch) -> list[torch.Tensor]:
        """Layer by layer."""
        parts = features.hidden.chunk(len(self.layers), dim=-1)
        return [norm(part) for norm, part in zip(self.context_norm.children(), parts, strict=True)]
