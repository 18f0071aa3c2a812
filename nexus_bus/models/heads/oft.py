"""`oft`: the whole chunk in one pass, one query token per action, L1 loss; a Gaussian around it for reinforcement learning.

After StarVLA's OFT head (LayerNorm, Linear H → 2H, ReLU, residual MLP blocks, LayerNorm, Linear → D); the state and the place
in the chunk are added at the width of the MLP. The value is a small MLP of its own on the raw features, so that its
gradients never reach the policy.

| tensor                | shape                                                       |
|-----------------------|-------------------------------------------------------------|
| features.query        | [B, Q, H], the last layer at the query tokens; first T read |
| inside (W = 2H)       | [B, T, W], the state S → W added to each                    |
| mean, answer          | [B, T, D]                                                   |
| log_std               | [D]                                                         |
| log_prob, entropy     | [B, T]                                                      |
| value                 | [B], from the mean query H and the state S                  |
"""

import math

import torch
from torch import nn

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads.base import FeatureShape, HeadNeeds, HeadSample, PolicyModule, masked_mean
from schemas.job import HeadSpec

LOG_2PI = math.log(2 * math.pi)


class Residual(nn.Module):
    """x + ReLU(Linear(LayerNorm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape in and out."""
        return x + torch.relu(self.linear(self.norm(x)))


class Oft(PolicyModule):
    """Regression head."""

    queries = True

    def __init__(self, spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int) -> None:
        super().__init__(spec, shape, state_size, action_size)
        self.needs = HeadNeeds(query_tokens=spec.horizon)
        width = self.option("width") or 2 * shape.hidden
        value_width = self.option("value_width")
        self.input_norm = nn.LayerNorm(shape.hidden)
        self.input = nn.Linear(shape.hidden, width)
        self.state = nn.Linear(state_size, width, bias=False) if state_size else None
        self.place = nn.Parameter(torch.zeros(spec.horizon, width))
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(self.option("blocks"))))
        self.output_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, action_size)
        self.log_std = nn.Parameter(torch.full((action_size,), -1.0))
        self.value_norm = nn.LayerNorm(shape.hidden)
        self.value = nn.Sequential(
            nn.Linear(shape.hidden + state_size, value_width),
            nn.ReLU(),
            nn.Linear(value_width, value_width),
            nn.ReLU(),
            nn.Linear(value_width, 1),
        )

    def draw(self, generator: torch.Generator) -> None:
        """Place embeddings small; the value starts at zero."""
        nn.init.normal_(self.place, std=0.02, generator=generator)
        nn.init.constant_(self.log_std, -1.0)
        last = self.value[-1]
        if isinstance(last, nn.Linear):
            nn.init.zeros_(last.weight)

    def forward(self, features: FeatureBatch, state: torch.Tensor) -> torch.Tensor:
        """Mean actions [B, T, D]."""
        x = self.input(self.input_norm(features.query[:, : self.horizon])) + self.place
        if self.state is not None:
            x = x + self.state(state).unsqueeze(1)
        return self.output(self.output_norm(self.blocks(torch.relu(x))))

    def loss(
        self,
        features: FeatureBatch,
        state: torch.Tensor,
        actions: torch.Tensor,
        pad: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """L1. The generator is not used."""
        return masked_mean((self(features, state) - actions).abs(), pad)

    def predict(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The mean. The generator is not used."""
        return self(features, state)

    def sample(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> HeadSample:
        """Gaussian around the mean, one deviation per action dimension."""
        mean = self(features, state)
        noise = torch.randn(mean.shape, generator=generator).to(mean.device)
        actions = mean + noise * self.log_std.exp()
        return HeadSample(actions, self._log_prob(actions, mean), self._value(features, state))

    def evaluate(
        self, features: FeatureBatch, state: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Density of given actions under the present weights."""
        mean = self(features, state)
        entropy = (0.5 + 0.5 * LOG_2PI + self.log_std).sum().expand(mean.shape[:2])
        return self._log_prob(actions, mean), entropy, self._value(features, state)

    def value_parameters(self) -> list[nn.Parameter]:
        """Of the value MLP and its norm."""
        return [*self.value_norm.parameters(), *self.value.parameters()]

    def _log_prob(self, actions: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        scaled = (actions - mean) * (-self.log_std).exp()
        return (-0.5 * scaled.square() - self.log_std - 0.5 * LOG_2PI).sum(-1)

    def _value(self, features: FeatureBatch, state: torch.Tensor) -> torch.Tensor:
        seen = self.value_norm(features.query.mean(dim=1))
        return self.value(torch.cat([seen, state], dim=-1)).squeeze(-1)
