"""`gr00t` and `pi`: the network and the loss against loops over the formulas, the times, the integration, the mask."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nexus_bus.errors import BadJob
from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import FeatureShape, Gr00t, Pi, build_head
from nexus_bus.models.heads.flow import FlowModule
from schemas.job import HeadSpec, Scalar

Array = NDArray[np.float64]
H, S, D, T = 32, 5, 3, 4
LAYERS = 2
SMALL: dict[str, Scalar] = {"width": 32, "heads": 2, "tokens": 2, "repeats": 3}
BOTH = pytest.mark.parametrize("name", ["gr00t", "pi"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head(name: str, state_size: int = S, **options: Scalar) -> FlowModule:
    """With weights that no start at zero hides."""
    default: dict[str, Scalar] = SMALL | ({"layers": LAYERS} if name == "gr00t" else {})
    spec = HeadSpec(type=name, horizon=T, options=default | options)
    module = build_head(spec, FeatureShape(H, LAYERS), state_size, D, seed=0)
    assert isinstance(module, FlowModule)
    g = generator(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return module


def batch(module: FlowModule, count: int, seed: int = 1, length: int = 6) -> FeatureBatch:
    g = generator(seed)
    mask = torch.ones(count, length, dtype=torch.bool)
    mask[::2, -3:] = False
    hidden = torch.randn(count, length, H * len(module.needs.layers), generator=g) * mask.unsqueeze(-1)
    return FeatureBatch(hidden, mask, torch.randn(count, 8, H, generator=g))


def target(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator(2)
    pad = torch.zeros(count, T, dtype=torch.bool)
    pad[0, 2:] = True
    return torch.randn(count, S, generator=g), torch.rand(count, T, D, generator=g) * 2 - 1, pad


class Slow:
    """One sample and one draw at a time, one token at a time, in numpy."""

    def __init__(self, module: FlowModule) -> None:
        self.kind, self.heads = type(module), int(module.spec.options["heads"])
        self.weights = {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}
        self.width = len(self.weights["output.weight"][0])

    def linear(self, x: Array, name: str) -> Array:
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]

    def norm(self, x: Array, name: str = "") -> Array:
        y = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
        return y * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"] if name else y

    def mlp(self, x: Array, name: str, last: int = 2) -> Array:
        y = self.linear(x, f"{name}.0")
        y = np.maximum(y, 0) if name == "state" else gelu(y) if name.startswith("layers") else silu(y)
        return self.linear(y, f"{name}.{last}")

    def attend(self, x: Sequence[Array], pairs: Sequence[Array], name: str) -> list[Array]:
        """Every token's queries against all keys and values [2W], head by head."""
        size, found = self.width // self.heads, []
        for token in x:
            query, mixed = self.linear(token, f"{name}.query"), np.zeros(self.width)
            for h in range(self.heads):
                part = slice(h * size, (h + 1) * size)
                scores = np.array([query[part] @ pair[: self.width][part] / math.sqrt(size) for pair in pairs])
                shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                mixed[part] = sum(share * pair[self.width :][part] for share, pair in zip(shares, pairs, strict=True))
            found.append(self.linear(mixed, f"{name}.output"))
        return found

    def layer(self, i: int, x: list[Array], time: Array, tokens: Sequence[Array]) -> list[Array]:
        """`tokens`: the real ones of the backbone's layer(s)."""
        name = f"layers.{i}"
        shift, scale = np.split(self.linear(silu(time), f"{name}.modulation"), 2)
        y = [self.norm(token) * (1 + scale) + shift for token in x]
        if self.kind is Pi:
            context = [self.norm(token[i * H : (i + 1) * H], f"context_norm.{i}") for token in tokens]
            pairs = [self.linear(token, f"{name}.attention.key_value") for token in context]
            pairs += [self.linear(token, f"{name}.attention.own_key_value") for token in y]
        else:
            read = y if i % 2 else [self.norm(token, "context_norm") for token in tokens]
            pairs = [self.linear(token, f"{name}.attention.key_value") for token in read]
        x = [a + b for a, b in zip(x, self.attend(y, pairs, f"{name}.attention"), strict=True)]
        return [a + self.mlp(self.norm(a, f"{name}.mlp_norm"), f"{name}.mlp") for a in x]

    def velocity(self, tokens: Sequence[Array], state: Array, noisy: Array, bucket: int) -> Array:
        half = self.width // 2
        angles = [bucket * 10_000.0 ** (-k / half) for k in range(half)]
        wave = np.array([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
        time = self.mlp(wave, "time")
        x = [self.mlp(state, "state")] if len(state) else []
        x += list(self.weights["learned"])
        for t in range(T):
            pair = np.concatenate([self.linear(noisy[t], "action"), wave])
            x.append(self.mlp(pair, "action_mlp") + self.weights["place"][t])
        for i in range(LAYERS):
            x = self.layer(i, x, time, tokens)
        shift, scale = np.split(self.linear(silu(time), "output_modulation"), 2)
        return np.array([self.linear(self.norm(token) * (1 + scale) + shift, "output") for token in x[-T:]])


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def real_tokens(features: FeatureBatch, row: int) -> list[Any]:
    return list(features.hidden[row][features.mask[row]].double().numpy())


@BOTH
def test_the_loss_is_flow_matching_as_written(name: str):
    """Every noise draw by itself: x_t = (1 - t)·noise + t·a, v = a - noise, and past the end the last action is held."""
    module = head(name)
    slow, features, (state, actions, pad) = Slow(module), batch(module, 3), target(3)
    loss = module.loss(features, state, actions, pad, generator(5))
    g = generator(5)
    noise = torch.randn(3, 3, T, D, generator=g).double().numpy()
    uniform = torch.rand(3, 3, generator=g)
    held = actions.double().numpy().copy()
    held[0, 2:] = held[0, 1]
    total, count = 0.0, 0
    for b in range(3):
        for r in range(3):
            z = float(uniform[b, r]) ** (1 / 1.5)
            t = (0.999 - min(z, 0.999)) / 0.999
            noisy = (1 - t) * noise[b, r] + t * held[b]
            velocity = slow.velocity(real_tokens(features, b), state[b].double().numpy(), noisy, int(t * 1000))
            for i in range(T):
                if not pad[b, i]:
                    total += float(((velocity[i] - (held[b, i] - noise[b, r, i])) ** 2).sum())
                    count += D
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-4)


@BOTH
@pytest.mark.parametrize("state_size", [0, S])
def test_the_answer_is_four_euler_steps_from_noise(name: str, state_size: int):
    module = head(name, state_size)
    slow, features = Slow(module), batch(module, 1)
    state = torch.randn(1, state_size, generator=generator(7))
    x = torch.randn(1, 1, T, D, generator=generator(3))[0, 0].double().numpy()
    for bucket in (0, 250, 500, 750):
        x = x + 0.25 * slow.velocity(real_tokens(features, 0), state[0].double().numpy(), x, bucket)
    np.testing.assert_allclose(module.predict(features, state, generator(3))[0].detach().numpy(), x, atol=1e-4)


def test_times_follow_their_distribution():
    times = head("gr00t").draw_times((200_000,), generator())
    assert float(times.min()) >= 0.0
    assert float(times.max()) < 1.0
    assert float(times.mean()) == pytest.approx(1 - 0.6, abs=0.005), "E[Beta(1.5, 1)] = 0.6"
    for edge in (0.2, 0.5, 0.8):  # P(t <= edge) = P(z >= s(1 - edge)) = 1 - (s(1 - edge))^1.5
        assert float((times <= edge).float().mean()) == pytest.approx(1 - (0.999 * (1 - edge)) ** 1.5, abs=0.005)


@BOTH
def test_the_mask_reaches_the_attention(name: str):
    """Leaving it out is a published bug: what padding holds would then count."""
    module = head(name)
    features, (state, actions, pad) = batch(module, 4), target(4)
    spoilt = FeatureBatch(features.hidden.masked_fill(~features.mask.unsqueeze(-1), 1e3), features.mask, features.query)
    assert torch.equal(
        module.loss(spoilt, state, actions, pad, generator()), module.loss(features, state, actions, pad, generator())
    )
    open_mask = FeatureBatch(features.hidden, torch.ones_like(features.mask), features.query)
    assert not torch.equal(module.predict(open_mask, state, generator()), module.predict(features, state, generator()))


def test_pi_has_a_block_for_every_layer_it_reads_and_the_state_reaches_the_actions():
    shape = FeatureShape(H, 5)
    all_layers = build_head(HeadSpec(type="pi", options=SMALL), shape, S, D, 0)
    last_two = build_head(HeadSpec(type="pi", options=SMALL | {"layers": 2}), shape, S, D, 0)
    assert (all_layers.needs.layers, last_two.needs.layers) == ((1, 2, 3, 4, -1), (4, -1))
    assert isinstance(last_two, Pi)
    assert len(last_two.layers) == 2
    features = batch(last_two, 1)
    one, other = (last_two.predict(features, state, generator()) for state in (torch.zeros(1, S), torch.ones(1, S)))
    assert not torch.equal(one, other)
    for block in range(2):  # each layer counts
        changed = features.hidden.clone()
        changed[..., block * H : (block + 1) * H] *= torch.randn(H, generator=generator(4))
        assert not torch.equal(
            last_two.predict(FeatureBatch(changed, features.mask, features.query), torch.zeros(1, S), generator()), one
        )


def test_more_layers_than_the_backbone_has_are_refused():
    with pytest.raises(BadJob, match=r"head.options.layers: 3, but the backbone has 2"):
        head("pi", layers=3)


def test_gr00t_takes_the_last_layer_alone():
    module = head("gr00t")
    assert isinstance(module, Gr00t)
    assert module.needs.layers == (-1,)
