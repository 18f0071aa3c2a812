"""`gr00t`: flow matching with a diffusion transformer that attends in turn to the backbone's tokens and to its own.

After GR00T N1 as StarVLA ships it, scaled by options: tokens are the state, some learned ones and the noisy actions; layer
norms are shifted and scaled by the time. With actions a and time t: x_t = (1 - t)·noise + t·a, and the network learns the
velocity v = a - noise; t = (s - min(z, s))/s for z ~ Beta(alpha, 1), in buckets. Inference integrates v from t = 0 in a few
Euler steps.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads.base import ActionModule, masked_mean
from schemas.job import HeadSpec


class Attention(nn.Module):
    """Multi-head attention of x to `context` under a mask of real tokens."""

    def __init__(self, width: int, context_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(context_size, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """x [B, N, W], context [B, L, C], mask [B, L] True where a token is real."""
        key, value = (self._split(part) for part in self.key_value(context).chunk(2, dim=-1))
        allowed = None if mask is None else mask[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(self._split(self.query(x)), key, value, attn_mask=allowed)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Attention under an adaptive norm, then a feed-forward network."""

    def __init__(self, width: int, context_size: int | None, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.cross = context_size is not None
        self.modulation = nn.Linear(width, 2 * width)
        self.attention = Attention(width, width if context_size is None else context_size, heads)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU("tanh"), nn.Linear(mlp_ratio * width, width))

    def forward(self, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [B, R, N, W] (R noise draws of each sample), time [B, R, W], context [B, L, H], mask [B, L]."""
        shift, scale = self.modulation(functional.silu(time)).unsqueeze(2).chunk(2, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        if self.cross:  # the draws of a sample ask the same context: its keys and values are made once
            y = self.attention(y.flatten(1, 2), context, mask).unflatten(1, x.shape[1:3])
        else:
            flat = y.flatten(0, 1)
            y = self.attention(flat, flat, None).unflatten(0, x.shape[:2])
        x = x + y
        return x + self.mlp(self.mlp_norm(x))


class Gr00t(ActionModule):
    """Flow-matching head."""

    def __init__(self, spec: HeadSpec, feature_size: int, state_size: int, action_size: int) -> None:
        super().__init__(spec, feature_size, state_size, action_size)
        width, heads, ratio = self.option("width"), self.option("heads"), self.option("mlp_ratio")
        self.width = width
        self.repeats, self.steps, self.buckets = self.option("repeats"), self.option("steps"), self.option("buckets")
        self.alpha, self.limit = float(spec.options["noise_alpha"]), float(spec.options["noise_s"])
        self.context_norm = nn.LayerNorm(feature_size)
        self.state = nn.Sequential(nn.Linear(state_size, width), nn.ReLU(), nn.Linear(width, width)) if state_size else None
        self.learned = nn.Parameter(torch.zeros(self.option("tokens"), width))
        self.action = nn.Linear(action_size, width)
        self.action_mlp = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.place = nn.Parameter(torch.zeros(spec.horizon, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(
            Layer(width, feature_size if i % 2 == 0 else None, heads, ratio) for i in range(self.option("layers"))
        )
        self.output_modulation = nn.Linear(width, 2 * width)
        self.output_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.output = nn.Linear(width, action_size)

    def draw(self, generator: torch.Generator) -> None:
        """Learned tokens and place embeddings small; adaptive norms start as plain ones."""
        nn.init.normal_(self.learned, std=0.02, generator=generator)
        nn.init.normal_(self.place, std=0.02, generator=generator)
        for name, weight in self.named_parameters():
            if name.endswith("modulation.weight"):
                nn.init.zeros_(weight)

    def velocity(self, features: FeatureBatch, state: torch.Tensor, noisy: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        """v [B, R, T, D] at noisy actions [B, R, T, D] and time buckets [B, R] (whole numbers)."""
        context = self.context_norm(features.hidden)
        batch, repeats = bucket.shape
        wave = _sinusoid(bucket, self.width)
        time = self.time(wave)
        steps = torch.cat([self.action(noisy), wave.unsqueeze(2).expand(-1, -1, self.horizon, -1)], dim=-1)
        tokens = [self.learned.expand(batch, repeats, -1, -1), self.action_mlp(steps) + self.place]
        if self.state is not None:
            tokens.insert(0, self.state(state)[:, None, None].expand(-1, repeats, -1, -1))
        x = torch.cat(tokens, dim=2)
        for layer in self.layers:
            x = layer(x, time, context, features.mask)
        shift, scale = self.output_modulation(functional.silu(time)).unsqueeze(2).chunk(2, dim=-1)
        return self.output(self.output_norm(x[:, :, -self.horizon :]) * (1 + scale) + shift)

    def draw_times(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Times in [0, 1), most of them near 0 (much noise). Beta(alpha, 1) is a uniform number to the power 1/alpha."""
        z = torch.rand(shape, generator=generator).pow(1 / self.alpha)
        return (self.limit - z.clamp_max(self.limit)) / self.limit

    def loss(
        self,
        features: FeatureBatch,
        state: torch.Tensor,
        actions: torch.Tensor,
        pad: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Mean squared error of the velocity, over several noise draws of every sample."""
        shape = (len(actions), self.repeats, *actions.shape[1:])
        noise = torch.randn(shape, generator=generator).to(actions.device)
        time = self.draw_times(shape[:2], generator).to(actions.device)
        target = actions.unsqueeze(1).expand(shape)
        mix = time[:, :, None, None]
        noisy = (1 - mix) * noise + mix * target
        velocity = self.velocity(features, state, noisy, (time * self.buckets).long())
        error = (velocity - (target - noise)).square()
        return masked_mean(error.flatten(0, 1), pad.repeat_interleave(self.repeats, dim=0))

    def predict(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Euler from noise at t = 0 to actions at t = 1."""
        shape = (len(features), 1, self.horizon, self.action_size)
        x = torch.randn(shape, generator=generator).to(features.hidden.device)
        for step in range(self.steps):
            bucket = torch.full(shape[:2], int(step / self.steps * self.buckets), device=x.device)
            x = x + self.velocity(features, state, x, bucket) / self.steps
        return x.squeeze(1)


def _sinusoid(position: torch.Tensor, width: int) -> torch.Tensor:
    """Sinusoidal code [..., width] of whole positions, as in transformers' diffusion models."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, device=position.device) * (-math.log(10_000.0) / half))
    angle = position.unsqueeze(-1) * frequency
    return functional.pad(torch.cat([angle.sin(), angle.cos()], dim=-1), (0, width - 2 * half))
