"""What every action module is: a tenant's private head on the shared features. Shapes: B samples, T actions, D action size,
S state size, L tokens, Q query tokens, H feature width. All randomness comes from the caller's generator, so that a result
never depends on who else was in the batch; there is no dropout for the same reason.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from nexus_bus.models.catalog import Option
from nexus_bus.models.features import FeatureBatch
from schemas.job import HeadSpec


@dataclass(frozen=True)
class FeatureShape:
    """What a backbone gives: H, the width of one layer's hidden states, and N, its layers."""

    hidden: int
    layers: int


@dataclass(frozen=True)
class HeadNeeds:
    """What a head reads of the backbone."""

    layers: tuple[int, ...] = (-1,)  # as in `hidden_states`: -1 is the last, after its norm
    query_tokens: int = 0
    decodes: bool = False  # the language model answers token by token: `suffix` in training, `decode` instead of `predict`


@dataclass(frozen=True, eq=False)
class HeadSample:
    """A stochastic answer: actions [B, T, D] in the head's space, log_prob [B, T] summed over dimensions, value [B]."""

    actions: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor


class ActionModule(nn.Module):
    """Base of the heads. A head that is installed beside ours describes itself by the class attributes below."""

    summary: ClassVar[str] = ""  # one sentence for `nexus catalog`
    options: ClassVar[Mapping[str, Option]] = {}  # what `head.options` may hold
    tiers: ClassVar[tuple[str, ...]] = ("frozen", "lora")

    needs: HeadNeeds = HeadNeeds()
    queries: ClassVar[bool] = False  # reads one query token per action, so that its horizon is the backbone's at most

    def __init__(self, spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int) -> None:
        """`spec.options` is complete: the catalogue filled in the defaults. Weights are drawn by `initialise`, not here."""
        super().__init__()
        self.spec = spec
        self.shape, self.state_size, self.action_size = shape, state_size, action_size
        self.horizon = spec.horizon

    def option(self, name: str) -> int:
        """A whole-numbered option, its default filled in by the catalogue."""
        return int(self.spec.options[name])

    def initialise(self, seed: int) -> None:
        """Draw all weights from the seed alone: torch's usual distributions, but not its global generator."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        self.draw(generator)

    def draw(self, generator: torch.Generator) -> None:
        """Weights that stand in no Linear or LayerNorm, and those that start elsewhere than usual."""

    def suffix(self, state: torch.Tensor, actions: torch.Tensor, pad: torch.Tensor) -> list[torch.Tensor] | None:
        """What each sample appends to its prompt in training, B tensors [n_i, H] with gradients; None where nothing.

        The hidden states there come back as `features.suffix`. Arguments are those of `loss`.
        """
        return None

    def loss(
        self,
        features: FeatureBatch,
        state: torch.Tensor,
        actions: torch.Tensor,
        pad: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Supervised loss, a scalar. state [B, S], actions [B, T, D] normalised, pad [B, T] True past an episode's end."""
        raise NotImplementedError

    def predict(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The greedy answer [B, T, D] in the head's space."""
        raise NotImplementedError

    def decode(self, state: torch.Tensor, generator: torch.Generator) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The answer of one sample, where `needs.decodes`. state [S].

        Yields the whole suffix so far [n, H], is sent the hidden states at it [n, D], and returns actions [T, D].
        """
        raise NotImplementedError


class PolicyModule(ActionModule):
    """A head that reinforcement learning can train: it has a density and a value."""

    log_std: nn.Parameter  # [D]

    def sample(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> HeadSample:
        """Draw actions, with what a learner needs to know of the draw."""
        raise NotImplementedError

    def evaluate(
        self, features: FeatureBatch, state: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """log_prob [B, T] and entropy [B, T] (summed over D) of actions [B, T, D], and value [B], all with gradients."""
        raise NotImplementedError

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters of the value alone; they share nothing with the policy."""
        raise NotImplementedError


def hold_last(actions: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
    """Actions [B, T, D] with those past an episode's end replaced by its last one, as datasets show them anyway."""
    last = (~pad).sum(dim=1, keepdim=True).sub(1).clamp_min(0)
    index = torch.arange(pad.shape[1], device=pad.device).minimum(last)
    return actions.take_along_dim(index.unsqueeze(-1), dim=1)


def masked_mean(error: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
    """Mean of error [B, T, D] over what is no padding. Zero if everything is."""
    kept = (~pad).unsqueeze(-1).to(error.dtype)
    return (error * kept).sum() / (kept.sum() * error.shape[-1]).clamp_min(1.0)
