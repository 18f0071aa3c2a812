"""`gr00t`: flow matching with a transformer that attends in turn to the backbone's last layer and to its own tokens.

After GR00T N1 as StarVLA ships it, scaled by options; the flow matching itself stands in flow.py. Shapes as there:

| tensor               | shape                                      |
|----------------------|--------------------------------------------|
| features.hidden      | [B, L, H], the last layer under its mask   |
| tokens               | [B, R, N, W], N = state + learned + T      |
| layers 0, 2, …       | cross attention: keys and values H → 2W    |
| layers 1, 3, …       | attention to the own tokens: W → 2W        |
| answer               | [B, T, D]                                  |
"""

import torch
from torch import nn

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads.base import FeatureShape
from nexus_bus.models.heads.flow import Cross, FlowModule, Own
from schemas.job import HeadSpec


class Gr00t(FlowModule):
    """Flow-matching head on the last layer."""

    def __init__(self, spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int) -> None:
        width, heads, layers = (int(spec.options[name]) for name in ("width", "heads", "layers"))
        attentions = [Own(width, heads) if i % 2 else Cross(width, shape.hidden, heads) for i in range(layers)]
        super().__init__(spec, shape, state_size, action_size, nn.LayerNorm(shape.hidden), attentions)

    def contexts(self, features: FeatureBatch) -> list[torch.Tensor]:
        """The same for every layer; every other one reads it."""
        return [self.context_norm(features.hidden)] * len(self.layers)
