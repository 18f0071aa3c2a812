"""Flow matching with a diffusion transformer: what `gr00t` and `pi` share. They differ in what their layers attend to.

Tokens are the state, some learned ones and the noisy actions; layer norms are shifted and scaled by the time. With actions a
and time t: x_t = (1 - t)·noise + t·a, and the network learns the velocity v = a - noise; t = (s - min(z, s))/s for
z ~ Beta(alpha, 1), in buckets. Inference integrates v from t = 0 in a few Euler steps.

Shapes, beside those of base.py: R noise draws of each sample, W width, C context width, N = 1 + learned + T tokens (without a
state, learned + T).

| tensor            | shape        |
|-------------------|--------------|
| noise, x_t, v     | [B, R, T, D] |
| time, its bucket  | [B, R]       |
| time code         | [B, R, W]    |
| tokens            | [B, R, N, W] |
| context of layer  | [B, L, C]    |
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads.base import ActionModule, FeatureShape, hold_last, masked_mean
from schemas.job import HeadSpec


class Attention(nn.Module):
    """Multi-head attention of x [B, R, N, W] to keys and values made from another tensor."""

    def __init__(self, width: int, context_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(context_size, 2 * width)
        self.output = nn.Linear(width, width)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, W] by heads: [B, heads, N, W / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def mix(self, x: torch.Tensor, key_value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """x [B, N, W] attends to key_value [B, L, 2W] where mask [B, L] is True (all of it without one)."""
        key, value = (self.split(part) for part in key_value.chunk(2, dim=-1))
        allowed = None if mask is None else mask[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(self.split(self.query(x)), key, value, attn_mask=allowed)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Same shape out. context [B, L, C], mask [B, L] True where a token is real."""
        raise NotImplementedError


class Cross(Attention):
    """Attention to the context alone."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The draws of a sample ask the same context: its keys and values are made once."""
        return self.mix(x.flatten(1, 2), self.key_value(context), mask).unflatten(1, x.shape[1:3])


class Own(Attention):
    """Attention to x itself; every draw of noise for itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, width, heads)

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The context is not read."""
        flat = x.flatten(0, 1)
        return self.mix(flat, self.key_value(flat), None).unflatten(0, x.shape[:2])


class Layer(nn.Module):
    """Attention under an adaptive norm, then a feed-forward network."""

    def __init__(self, width: int, attention: Attention, mlp_ratio: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.attention = attention
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU("tanh"), nn.Linear(mlp_ratio * width, width))

    def forward(self, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [B, R, N, W], time [B, R, W], context [B, L, C], mask [B, L]."""
        shift, scale = self.modulation(functional.silu(time)).unsqueeze(2).chunk(2, dim=-1)
        x = x + self.attention(self.norm(x) * (1 + scale) + shift, context, mask)
        return x + self.mlp(self.mlp_norm(x))


class FlowModule(ActionModule):
    """A flow-matching head. A subclass chooses the attentions, and gives every layer its context."""

    def __init__(
        self,
        spec: HeadSpec,
        shape: FeatureShape,
        state_size: int,
        action_size: int,
        context_norm: nn.Module,
        attentions: Sequence[Attention],
    ) -> None:
        """`context_norm`: kept for the subclass under this name."""
        super().__init__(spec, shape, state_size, action_size)
        width, ratio = self.option("width"), self.option("mlp_ratio")
        self.width = width
        self.repeats, self.steps, self.buckets = self.option("repeats"), self.option("steps"), self.option("buckets")
        self.alpha, self.limit = float(spec.options["noise_alpha"]), float(spec.options["noise_s"])
        self.context_norm = context_norm
        self.state = nn.Sequential(nn.Linear(state_size, width), nn.ReLU(), nn.Linear(width, width)) if state_size else None
        self.learned = nn.Parameter(torch.zeros(self.option("tokens"), width))
        self.action = nn.Linear(action_size, width)
        self.action_mlp = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.place = nn.Parameter(torch.zeros(spec.horizon, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(Layer(width, attention, ratio) for attention in attentions)
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

    def contexts(self, features: FeatureBatch) -> list[torch.Tensor]:
        """What each layer may attend to, [B, L, C], normalised."""
        raise NotImplementedError

    def velocity(self, features: FeatureBatch, state: torch.Tensor, noisy: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        """v [B, R, T, D] at noisy actions [B, R, T, D] and time buckets [B, R] (whole numbers)."""
        return self._velocity(self.contexts(features), features.mask, state, noisy, bucket)

    def _velocity(
        self,
        contexts: list[torch.Tensor],
        mask: torch.Tensor,
        state: torch.Tensor,
        noisy: torch.Tensor,
        bucket: torch.Tensor,
    ) -> torch.Tensor:
        batch, repeats = bucket.shape
        wave = _sinusoid(bucket, self.width)
        time = self.time(wave)
        steps = torch.cat([self.action(noisy), wave.unsqueeze(2).expand(-1, -1, self.horizon, -1)], dim=-1)
        tokens = [self.learned.expand(batch, repeats, -1, -1), self.action_mlp(steps) + self.place]
        if self.state is not None:
            tokens.insert(0, self.state(state)[:, None, None].expand(-1, repeats, -1, -1))
        x = torch.cat(tokens, dim=2)
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, time, context, mask)
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
        target = hold_last(actions, pad).unsqueeze(1).expand(shape)  # own attention would carry padding to real steps
        mix = time[:, :, None, None]
        noisy = (1 - mix) * noise + mix * target
        velocity = self.velocity(features, state, noisy, (time * self.buckets).long())
        error = (velocity - (target - noise)).square()
        return masked_mean(error.flatten(0, 1), pad.repeat_interleave(self.repeats, dim=0))

    def predict(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Euler from noise at t = 0 to actions at t = 1."""
        shape = (len(features), 1, self.horizon, self.action_size)
        x = torch.randn(shape, generator=generator).to(features.hidden.device)
        contexts = self.contexts(features)
        for step in range(self.steps):
            bucket = torch.full(shape[:2], int(step / self.steps * self.buckets), device=x.device)
            x = x + self._velocity(contexts, features.mask, state, x, bucket) / self.steps
        return x.squeeze(1)


def _sinusoid(position: torch.Tensor, width: int) -> torch.Tensor:
    """Sinusoidal code [..., width] of whole positions, as in transformers' diffusion models."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, device=position.device) * (-math.log(10_000.0) / half))
    angle = position.unsqueeze(-1) * frequency
    return functional.pad(torch.cat([angle.sin(), angle.cos()], dim=-1), (0, width - 2 * half))
