"""`fast`: the tokens against the formula of the transform, the loss against loops, and that a language model can decode."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import Fast, FeatureShape, build_head
from nexus_bus.models.heads.dct import DctTokens
from nexus_bus.models.normalize import Normalize
from schemas.job import HeadSpec, Scalar
from schemas.policy import Normalizer, Statistics

H, S, D, T = 32, 5, 2, 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head(state_size: int = S, **options: Scalar) -> Fast:
    module = build_head(HeadSpec(type="fast", horizon=T, options=options), FeatureShape(H, 2), state_size, D, seed=0)
    assert isinstance(module, Fast)
    return module


class LanguageModel(nn.Module):
    """One causal layer over a prompt's embeddings and a suffix: what the backbone with a trained adapter is."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(H, 2, 2 * H, dropout=0.0, batch_first=True, norm_first=True)
            self.place = nn.Parameter(0.1 * torch.randn(32, H))

    def forward(self, prompts: torch.Tensor, suffixes: Sequence[torch.Tensor]) -> FeatureBatch:
        """prompts [B, L, H] → hidden states there and at the suffixes."""
        length = prompts.shape[1]
        x = torch.cat([prompts, nn.utils.rnn.pad_sequence(list(suffixes), batch_first=True)], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.layer(x + self.place[: x.shape[1]], src_mask=mask, is_causal=True)
        real = torch.ones(prompts.shape[:2], dtype=torch.bool)
        return FeatureBatch(y[:, :length], real, y[:, :1], y[:, length:])


@torch.no_grad()
def decode(module: Fast, model: LanguageModel, prompt: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The answer to one prompt [L, H], and how often the model was asked."""
    talk, asked = module.decode(state, generator()), 0
    suffix = next(talk)
    while True:
        asked += 1
        hidden = model(prompt[None], [suffix]).suffix
        assert hidden is not None
        assert len(suffix) == asked, "the whole suffix so far, one longer each time"
        try:
            suffix = talk.send(hidden[0])
        except StopIteration as done:
            return done.value, asked


def test_tokens_are_rounded_cosine_coefficients_low_frequencies_first():
    actions = torch.rand(T, D, generator=generator(1)) * 2 - 1
    tokens = DctTokens(T, D, scale=10.0, limit=20)
    levels: list[int] = []
    for k in range(T):
        for d in range(D):
            total = sum(float(actions[t, d]) * math.cos(math.pi / T * k * (t + 0.5)) for t in range(T))
            norm = math.sqrt((1 if k == 0 else 2) / T)
            levels.append(max(-20, min(20, round(10.0 * norm * total))))
    while levels and levels[-1] == 0:
        levels.pop()
    assert tokens.encode(actions).tolist() == [level + 20 for level in levels] + [tokens.end]
    assert (tokens.end, tokens.vocabulary) == (41, 42)


@given(st.integers(1, 16), st.integers(1, 7), st.sampled_from([1.0, 10.0, 40.0]), st.integers(0, 1000))
def test_decoding_comes_within_the_stated_rounding(horizon: int, size: int, scale: float, seed: int):
    actions = torch.rand(horizon, size, generator=generator(seed)) * 2 - 1
    tokens = DctTokens(horizon, size, scale, limit=512)
    ids = tokens.encode(actions)
    assert len(ids) <= tokens.longest
    back = tokens.decode(ids)
    assert float((back - actions).abs().max()) <= 0.5 * math.sqrt(horizon) / scale + 1e-6
    assert torch.equal(tokens.encode(back), ids), "what was cut off comes back: lossless behind the rounding"


def test_still_and_smooth_chunks_are_short_and_large_ones_are_clipped():
    tokens = DctTokens(8, 3, scale=10.0, limit=15)
    assert tokens.encode(torch.zeros(8, 3)).tolist() == [tokens.end]
    assert len(tokens.encode(torch.full((8, 3), 0.5))) == 4, "one frequency of three dimensions, and the end"
    clipped = tokens.decode(tokens.encode(torch.ones(8, 3)))
    torch.testing.assert_close(clipped, torch.full((8, 3), 15 / 10 / math.sqrt(8)))
    garbage = torch.tensor([tokens.end, 3, 7])
    assert torch.equal(tokens.decode(garbage), torch.zeros(8, 3)), "nothing behind the end is read"


@pytest.mark.parametrize("state_size", [0, S])
def test_the_loss_is_the_cross_entropy_of_each_next_token(state_size: int):
    module, model = head(state_size), LanguageModel()
    g = generator(2)
    state, actions = torch.randn(3, state_size, generator=g), torch.rand(3, T, D, generator=g) * 2 - 1
    prompts = torch.randn(3, 6, H, generator=g)
    pad = torch.zeros(3, T, dtype=torch.bool)
    pad[0, 2:], pad[2] = True, True  # one ends early, one is all padding
    suffixes = module.suffix(state, actions, pad)
    loss = module.loss(model(prompts, suffixes), state, actions, pad, generator())
    held = actions.clone()
    held[0, 2:] = actions[0, 1]
    weights = {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}
    total, count = 0.0, 0
    for b in range(2):
        ids = module.tokens.encode(held[b]).tolist()
        begin = weights["begin"] + (weights["state.weight"] @ state[b].double().numpy() if state_size else 0)
        for n, told in enumerate(ids):  # each by itself: nothing of the model's mask is trusted
            shown = np.stack([begin, *(weights["embedding"][i] for i in ids[:n])])
            np.testing.assert_allclose(suffixes[b][: n + 1].detach().numpy(), shown, atol=1e-6)
            with torch.no_grad():
                hidden = model(prompts[b : b + 1], [torch.from_numpy(shown).float()]).suffix
            assert hidden is not None
            x = hidden[0, -1].double().numpy()
            x = (x - x.mean()) / math.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
            x = x * weights["norm.weight"] + weights["norm.bias"]
            logits = weights["output.weight"] @ x + weights["output.bias"]
            total += math.log(sum(math.exp(v - logits.max()) for v in logits)) + logits.max() - logits[told]
            count += 1
        assert len(suffixes[b]) == len(ids)
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-4)


def test_a_batch_of_nothing_but_padding_costs_nothing():
    module, model = head(), LanguageModel()
    state, actions, pad = torch.zeros(1, S), torch.zeros(1, T, D), torch.ones(1, T, dtype=torch.bool)
    features = model(torch.zeros(1, 6, H), module.suffix(state, actions, pad))
    assert float(module.loss(features, state, actions, pad, generator()).detach()) == 0.0


def test_decoding_stops_at_the_end_token_or_when_the_chunk_is_full():
    module, model = head(), LanguageModel()
    prompt, state = torch.randn(6, H, generator=generator(1)), torch.randn(S, generator=generator(2))
    with torch.no_grad():
        module.output.weight.zero_()
        module.output.bias[module.tokens.end] = 5.0
    answer, asked = decode(module, model, prompt, state)
    assert asked == 1
    assert torch.equal(answer, torch.zeros(T, D))
    with torch.no_grad():
        module.output.bias[module.tokens.end] = -5.0
        module.output.bias[module.tokens.limit + 1] = 5.0
    answer, asked = decode(module, model, prompt, state)
    assert asked == T * D
    assert torch.equal(answer, module.tokens.decode(torch.full((T * D,), module.tokens.limit + 1)))


def test_it_says_that_it_needs_its_suffix_and_has_no_answer_in_one_pass():
    module = head()
    features = FeatureBatch(torch.zeros(1, 6, H), torch.ones(1, 6, dtype=torch.bool), torch.zeros(1, 8, H))
    pad = torch.zeros(1, T, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"features\.suffix: missing"):
        module.loss(features, torch.zeros(1, S), torch.zeros(1, T, D), pad, generator())
    with pytest.raises(NotImplementedError, match="token by token; use `decode`"):
        module.predict(features, torch.zeros(1, S), generator())
    assert module.needs.decodes


def test_it_can_learn_sixteen_samples_by_heart():
    """Raw actions come back within the rounding of the tokens."""
    low, high = np.array([-0.02, -300.0]), np.array([0.03, 100.0])
    statistics = Statistics(
        min=low.tolist(), max=high.tolist(), mean=[0.0] * D, std=[1.0] * D, q01=low.tolist(), q99=high.tolist(), count=64
    )
    norm = Normalize(Normalizer(mode="min_max", statistics=statistics), D, "contract.action_norm")
    g = generator(3)
    unit = torch.rand(16, T, D, generator=g).numpy()
    raw = torch.from_numpy((low + unit * (high - low)).astype(np.float32))
    prompts, state = torch.randn(16, 6, H, generator=g), torch.randn(16, S, generator=g)
    pad = torch.zeros(16, T, dtype=torch.bool)
    module, model = head(levels=31), LanguageModel()
    parameters = [*module.parameters(), *model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3, fused=True)
    losses: list[float] = []
    for _ in range(150):
        optimizer.zero_grad()
        actions = norm.forward(raw)
        loss = module.loss(model(prompts, module.suffix(state, actions, pad)), state, actions, pad, generator())
        loss.backward()
        losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    assert losses[-1] < 0.02 * losses[0]
    scale = torch.from_numpy((high - low).astype(np.float32))
    for row in range(16):
        answer, _ = decode(module, model, prompts[row], state[row])
        error = (norm.inverse(answer) - raw[row]).abs() / scale
        assert float(error.max()) <= 0.5 * math.sqrt(T) / 10 / 2 + 1e-4, "half of a range is one unit of the head"
