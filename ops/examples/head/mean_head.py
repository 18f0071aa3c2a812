"""`mean`: the smallest useful head. An MLP on the mean of the real tokens and the state gives the whole chunk, with L2 loss.

| tensor          | shape        |
|-----------------|--------------|
| features.hidden | [B, L, H]    |
| inside          | [B, W]       |
| answer          | [B, T, D]    |
"""

import torch
from torch import nn

from nexus_bus.models.catalog import Option
from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads.base import ActionModule, FeatureShape, masked_mean
from schemas.job import HeadSpec


class Mean(ActionModule):
    """Regression from the mean token."""

    summary = "An MLP on the mean token and the state, L2 loss."
    options = {"width": Option(128, 8, 4096, "width of the MLP")}  # noqa: RUF012 - declared in the base

    def __init__(self, spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int) -> None:
        super().__init__(spec, shape, state_size, action_size)
        width = self.option("width")
        self.norm = nn.LayerNorm(shape.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden + state_size, width), nn.ReLU(), nn.Linear(width, spec.horizon * action_size)
        )

    def forward(self, features: FeatureBatch, state: torch.Tensor) -> torch.Tensor:
        """Actions [B, T, D]."""
        mask = features.mask.unsqueeze(-1)
        mean = (features.hidden * mask).sum(dim=1) / mask.sum(dim=1)
        flat = self.mlp(torch.cat([self.norm(mean), state], dim=-1))
        return flat.view(-1, self.horizon, self.action_size)

    def loss(
        self,
        features: FeatureBatch,
        state: torch.Tensor,
        actions: torch.Tensor,
        pad: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """L2. The generator is not used."""
        return masked_mean((self(features, state) - actions).square(), pad)

    def predict(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """As in training."""
        return self(features, state)
