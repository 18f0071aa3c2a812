"""Heads: that each keeps what is promised of all, that it can learn at all, and `oft` against its formulas."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from nexus_bus.models.catalog import HEADS
from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import FeatureShape, Oft, build_head, conformance
from nexus_bus.models.heads.base import ActionModule
from nexus_bus.models.normalize import Normalize
from schemas.job import HeadSpec, Scalar
from schemas.policy import Normalizer, Statistics

H, S, D = 32, 5, 3
SHAPE = FeatureShape(H, 2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def oft() -> Oft:
    module = build_head(HeadSpec(type="oft", horizon=4), SHAPE, S, D, seed=0)
    assert isinstance(module, Oft)
    return module


def batch(module: ActionModule, count: int, seed: int = 1, length: int = 12) -> FeatureBatch:
    g = generator(seed)
    mask = torch.ones(count, length, dtype=torch.bool)
    mask[::2, -3:] = False
    width = H * len(module.needs.layers)
    hidden = torch.randn(count, length, width, generator=g) * mask.unsqueeze(-1)
    return FeatureBatch(hidden, mask, torch.randn(count, 8, width, generator=g))


def target(count: int, horizon: int = 4, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator(seed)
    pad = torch.zeros(count, horizon, dtype=torch.bool)
    pad[0, 2:] = True
    return torch.randn(count, S, generator=g), torch.rand(count, horizon, D, generator=g) * 2 - 1, pad


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_shipped_head_keeps_every_promise(name: str):
    assert conformance.check(name) == []


@pytest.mark.parametrize("name", sorted(HEADS))
def test_default_heads_are_small(name: str):
    module = build_head(HeadSpec(type=name), FeatureShape(128, 4), 8, 4, 0)
    assert sum(parameter.numel() for parameter in module.parameters()) < 500_000


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("oft", {}, 300),
        ("gr00t", {"width": 48, "layers": 2, "tokens": 2, "repeats": 4}, 250),
        ("pi", {"width": 48, "tokens": 2, "repeats": 4}, 250),
    ],
)
def test_a_head_can_learn_sixteen_samples_by_heart(name: str, options: dict[str, Scalar], steps: int):
    """Actions in raw units of very different sizes come back, within a few hundredths of each dimension's range."""
    low, high = np.array([-0.02, 5.0, -300.0]), np.array([0.03, 9.0, 100.0])
    statistics = Statistics(
        min=low.tolist(), max=high.tolist(), mean=[0.0] * D, std=[1.0] * D, q01=low.tolist(), q99=high.tolist(), count=64
    )
    norm = Normalize(Normalizer(mode="min_max", statistics=statistics), D, "contract.action_norm")
    module = build_head(HeadSpec(type=name, horizon=4, options=options), SHAPE, S, D, seed=0)
    features, (state, unit, pad) = batch(module, 16), target(16)
    raw = torch.from_numpy((low + (unit.numpy() + 1) / 2 * (high - low)).astype(np.float32))
    actions = norm.forward(raw)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, fused=True)
    g = generator()
    losses: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / steps)) + 1e-5
        optimizer.zero_grad()
        loss = module.loss(features, state, actions, pad, g)
        loss.backward()
        losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    assert np.mean(losses[-10:]) < 0.05 * losses[0]
    with torch.no_grad():
        answer = norm.inverse(module.predict(features, state, generator(4)))
    error = (answer - raw).abs() / torch.from_numpy((high - low).astype(np.float32))
    assert float(error[~pad].mean()) < 0.03


def test_oft_loss_is_the_mean_absolute_error_over_what_is_no_padding():
    module = oft()
    weights = {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}
    features, (state, actions, pad) = batch(module, 3), target(3)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean()
        return centred / np.sqrt((centred**2).mean() + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    errors: list[float] = []
    for b in range(3):
        for t in range(4):
            x = linear(norm(features.query[b, t].double().numpy(), "input_norm"), "input") + weights["place"][t]
            x = np.maximum(x + weights["state.weight"] @ state[b].double().numpy(), 0)
            for i in range(2):
                x = x + np.maximum(linear(norm(x, f"blocks.{i}.norm"), f"blocks.{i}.linear"), 0)
            mean = linear(norm(x, "output_norm"), "output")
            errors += [abs(mean[d] - float(actions[b, t, d])) for d in range(D) if not pad[b, t]]
    loss = module.loss(features, state, actions, pad, generator())
    assert float(loss.detach()) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_the_gaussian_is_torchs_own():
    module = oft()
    with torch.no_grad():
        module.log_std.copy_(torch.tensor([-1.0, -0.3, 0.2]))
    features, state = batch(module, 3), torch.randn(3, S)
    drawn = module.sample(features, state, generator(1))
    mean = module.predict(features, state, generator())
    reference = torch.distributions.Normal(mean, module.log_std.exp().expand_as(mean))
    assert torch.allclose(drawn.log_prob, reference.log_prob(drawn.actions).sum(-1), atol=1e-5)
    log_prob, entropy, value = module.evaluate(features, state, drawn.actions)
    assert torch.equal(log_prob, drawn.log_prob)
    assert torch.equal(value, drawn.value)
    assert torch.allclose(entropy, reference.entropy().sum(-1), atol=1e-5)
    noise = (drawn.actions - mean) / module.log_std.exp()
    assert torch.allclose(noise, torch.randn(mean.shape, generator=generator(1)), atol=1e-5)


def test_the_value_shares_nothing_with_the_policy():
    module = oft()
    _, _, value = module.evaluate(batch(module, 3), torch.randn(3, S), torch.zeros(3, 4, D))
    value.sum().backward()
    own = {id(parameter) for parameter in module.value_parameters()}
    assert all((parameter.grad is not None) == (id(parameter) in own) for parameter in module.parameters())
