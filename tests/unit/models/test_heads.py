"""Heads: their losses against slow references, their noise from the given generator alone, and that they can learn at all."""

import math

import pytest
import torch
from torch import nn

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import Gr00t, Oft, PolicyModule, build_head
from nexus_bus.models.heads.base import ActionModule
from schemas.job import HeadSpec, Scalar

H, S, D = 32, 5, 3
SMALL: dict[str, dict[str, Scalar]] = {"oft": {}, "gr00t": {"width": 32, "layers": 2, "tokens": 2, "repeats": 4}}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head(name: str, horizon: int = 4, state_size: int = S, seed: int = 0, **options: Scalar) -> ActionModule:
    return build_head(HeadSpec(type=name, horizon=horizon, options=SMALL[name] | options), H, state_size, D, seed)


def batch(count: int, seed: int = 1, length: int = 12) -> FeatureBatch:
    g = generator(seed)
    mask = torch.ones(count, length, dtype=torch.bool)
    mask[::2, -3:] = False
    hidden = torch.randn(count, length, H, generator=g) * mask.unsqueeze(-1)
    return FeatureBatch(hidden, mask, torch.randn(count, 8, H, generator=g))


def target(count: int, horizon: int = 4, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator(seed)
    pad = torch.zeros(count, horizon, dtype=torch.bool)
    pad[0, 2:] = True
    return torch.randn(count, S, generator=g), torch.rand(count, horizon, D, generator=g) * 2 - 1, pad


@pytest.mark.parametrize("name", ["oft", "gr00t"])
def test_weights_come_from_the_seed_alone(name: str):
    torch.manual_seed(1)
    first = head(name, seed=7).state_dict()
    torch.manual_seed(2)
    second, third = head(name, seed=7).state_dict(), head(name, seed=8).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)


@pytest.mark.parametrize("name", ["oft", "gr00t"])
@pytest.mark.parametrize("state_size", [0, 1, 9])
@pytest.mark.parametrize("horizon", [1, 8])
def test_shapes(name: str, state_size: int, horizon: int):
    module = head(name, horizon, state_size)
    answer = module.predict(batch(3), torch.randn(3, state_size), generator())
    assert answer.shape == (3, horizon, D)
    pad = torch.zeros(3, horizon, dtype=torch.bool)
    loss = module.loss(batch(3), torch.randn(3, state_size), torch.zeros(3, horizon, D), pad, generator())
    assert loss.shape == ()
    loss.backward()


@pytest.mark.parametrize("name", ["oft", "gr00t"])
def test_default_heads_are_small(name: str):
    module = build_head(HeadSpec(type=name), 128, 8, 4, 0)
    assert sum(parameter.numel() for parameter in module.parameters()) < 500_000


def test_oft_loss_is_the_mean_absolute_error_over_what_is_no_padding():
    module = head("oft")
    state, actions, pad = target(3)
    loss = module.loss(batch(3), state, actions, pad, generator())
    mean = module.predict(batch(3), state, generator())
    off = (mean - actions).detach()
    errors = [abs(float(off[b, t, d])) for b in range(3) for t in range(4) for d in range(D) if not pad[b, t]]
    assert float(loss.detach()) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_gr00t_loss_is_flow_matching_as_written():
    """Every noise draw by itself, with the formulas spelled out: x_t = (1 - t)·noise + t·a, v = a - noise."""
    module = head("gr00t")
    assert isinstance(module, Gr00t)
    features = batch(3)
    state, actions, pad = target(3)
    loss = module.loss(features, state, actions, pad, generator(5))
    g = generator(5)
    noise = torch.randn(3, 4, 4, D, generator=g)
    uniform = torch.rand(3, 4, generator=g)
    total, count = 0.0, 0
    for b in range(3):
        for r in range(4):
            z = float(uniform[b, r]) ** (1 / 1.5)
            t = (0.999 - min(z, 0.999)) / 0.999
            noisy = (1 - t) * noise[b, r] + t * actions[b]
            bucket = torch.tensor([[int(t * 1000)]])
            velocity = module.velocity(features.rows(torch.tensor([b])), state[b : b + 1], noisy[None, None], bucket)[
                0, 0
            ].detach()
            for i in range(4):
                if not pad[b, i]:
                    total += float((velocity[i] - (actions[b, i] - noise[b, r, i])).square().sum())
                    count += D
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-4)


def test_times_follow_their_distribution():
    module = head("gr00t")
    assert isinstance(module, Gr00t)
    times = module.draw_times((200_000,), generator())
    assert float(times.min()) >= 0.0
    assert float(times.max()) < 1.0
    assert float(times.mean()) == pytest.approx(1 - 0.6, abs=0.005), "E[Beta(1.5, 1)] = 0.6"
    for edge in (0.2, 0.5, 0.8):  # P(t <= edge) = P(z >= s(1 - edge)) = 1 - (s(1 - edge))^1.5
        assert float((times <= edge).float().mean()) == pytest.approx(1 - (0.999 * (1 - edge)) ** 1.5, abs=0.005)


def test_gr00t_integrates_in_euler_steps():
    module = head("gr00t", steps=4)
    assert isinstance(module, Gr00t)
    features, state = batch(1), torch.randn(1, S)
    x = torch.randn(1, 1, 4, D, generator=generator(3))
    for bucket in (0, 250, 500, 750):
        x = x + 0.25 * module.velocity(features, state, x, torch.tensor([[bucket]]))
    assert torch.allclose(module.predict(features, state, generator(3)), x[0], atol=1e-6)


def test_what_padding_holds_never_reaches_a_head():
    """The attention mask must reach the cross-attention: leaving it out is a published bug."""
    module = head("gr00t")
    features = batch(4)
    state, actions, pad = target(4)
    spoilt = FeatureBatch(features.hidden.masked_fill(~features.mask.unsqueeze(-1), 1e3), features.mask, features.query)
    for run in (features, spoilt):
        loss = module.loss(run, state, actions, pad, generator())
        assert torch.equal(loss, module.loss(features, state, actions, pad, generator()))
    open_mask = FeatureBatch(features.hidden, torch.ones_like(features.mask), features.query)
    assert not torch.equal(module.predict(open_mask, state, generator()), module.predict(features, state, generator()))


@pytest.mark.parametrize("name", ["oft", "gr00t"])
def test_noise_is_the_callers_alone(name: str):
    module, features = head(name), batch(3)
    state, actions, pad = target(3)
    torch.manual_seed(1)
    first = module.loss(features, state, actions, pad, generator(9))
    torch.manual_seed(2)
    assert torch.equal(first, module.loss(features, state, actions, pad, generator(9)))
    assert torch.equal(module.predict(features, state, generator(9)), module.predict(features, state, generator(9)))


@pytest.mark.parametrize(("name", "steps", "below"), [("oft", 300, 0.02), ("gr00t", 200, 0.06)])
def test_a_head_can_learn_sixteen_samples_by_heart(name: str, steps: int, below: float):
    options: dict[str, Scalar] = {} if name == "oft" else {"width": 48}
    module, features = head(name, **options), batch(16)
    state, actions, pad = target(16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, fused=True)
    g = generator()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / steps)) + 1e-5
        optimizer.zero_grad()
        module.loss(features, state, actions, pad, g).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        error = (module.predict(features, state, generator(4)) - actions).abs()[~pad].mean()
    assert float(error) < below


def test_the_gaussian_is_torchs_own():
    module = head("oft")
    assert isinstance(module, PolicyModule)
    with torch.no_grad():
        module.log_std.copy_(torch.tensor([-1.0, -0.3, 0.2]))
    features, state = batch(3), torch.randn(3, S)
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
    module = head("oft")
    assert isinstance(module, Oft)
    _, _, value = module.evaluate(batch(3), torch.randn(3, S), torch.zeros(3, 4, D))
    value.sum().backward()
    own = {id(parameter) for parameter in module.value_parameters()}
    assert all((parameter.grad is not None) == (id(parameter) in own) for parameter in module.parameters())
