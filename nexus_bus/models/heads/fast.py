"""`fast`: the language model itself decodes actions as tokens. Nothing of it is separable, so it runs in tier `lora` only.

The head adds a small vocabulary of its own to the backbone: embeddings in, logits out. What it appends to a prompt (`suffix`)
is the state and the tokens so far; the hidden states there tell the next token. Actions become tokens as in dct.py. A state
that a chunk begins with stands for the beginning too, so there is one hidden state for every token to tell.

V tokens, n of a chunk (the end included), nmax the most in a batch:

| tensor           | shape                                          |
|------------------|------------------------------------------------|
| embedding        | [V, H], V = 2·levels + 2                       |
| begin            | [H], plus the state S → H                      |
| suffix of a row  | [n, H]: begin, t1, …, t(n-1)                   |
| features.suffix  | [B, nmax, H], last layer                       |
| logits           | [B, nmax, V], against t1, …, tn                |
| answer           | [T, D], greedily, after T·D + 1 tokens at most |
"""

from collections.abc import Generator

import torch
from torch import nn
from torch.nn import functional

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads.base import ActionModule, FeatureShape, HeadNeeds, hold_last
from nexus_bus.models.heads.dct import DctTokens
from schemas.job import HeadSpec


class Fast(ActionModule):
    """Next-token cross entropy; greedy decoding."""

    needs = HeadNeeds(decodes=True)

    def __init__(self, spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int) -> None:
        super().__init__(spec, shape, state_size, action_size)
        self.tokens = DctTokens(spec.horizon, action_size, float(spec.options["scale"]), self.option("levels"))
        self.embedding = nn.Parameter(torch.zeros(self.tokens.vocabulary, shape.hidden))
        self.begin = nn.Parameter(torch.zeros(shape.hidden))
        self.state = nn.Linear(state_size, shape.hidden, bias=False) if state_size else None
        self.norm = nn.LayerNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, self.tokens.vocabulary)

    def draw(self, generator: torch.Generator) -> None:
        """Everything that enters the language model is as small as its own embeddings."""
        for weight in (self.embedding, self.begin, *([] if self.state is None else [self.state.weight])):
            nn.init.normal_(weight, std=0.02, generator=generator)

    def suffix(self, state: torch.Tensor, actions: torch.Tensor, pad: torch.Tensor) -> list[torch.Tensor]:
        """The beginning and all tokens of each chunk but the last, which is only told."""
        chunks = self._targets(actions, pad)
        return [self._embed(row, chunk[:-1]) for row, chunk in zip(state, chunks, strict=True)]

    def loss(
        self,
        features: FeatureBatch,
        state: torch.Tensor,
        actions: torch.Tensor,
        pad: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Cross entropy, a mean over all tokens of chunks that are not wholly padding. The generator is not used.

        Raises:
            ValueError: the features were made without this head's suffix.
        """
        if features.suffix is None:
            raise ValueError("features.suffix: missing; ask the backbone with what `suffix` of the same actions gives")
        real = [row for row in range(len(actions)) if not bool(pad[row].all())]
        chunks = self._targets(actions, pad)
        hidden = [features.suffix[row, : len(chunks[row])] for row in real]
        if not hidden:
            return features.suffix.sum() * 0
        told = torch.cat([chunks[row] for row in real]).to(actions.device)
        return functional.cross_entropy(self._logits(torch.cat(hidden)), told)

    def predict(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Always raises NotImplementedError: there is no answer in one pass."""
        raise NotImplementedError("fast: the language model decodes its answer token by token; use `decode`")

    def decode(self, state: torch.Tensor, generator: torch.Generator) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Greedy. The generator is not used."""
        chosen: list[int] = []
        while len(chosen) < self.tokens.longest - 1:
            hidden = yield self._embed(state, torch.tensor(chosen, dtype=torch.long))
            token = int(self._logits(hidden[-1]).argmax())
            if token == self.tokens.end:
                break
            chosen.append(token)
        return self.tokens.decode(torch.tensor(chosen, dtype=torch.long))

    def _embed(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        begin = self.begin if self.state is None else self.begin + self.state(state)
        return torch.cat([begin.unsqueeze(0), self.embedding[tokens.to(self.embedding.device)]])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(hidden))

    def _targets(self, actions: torch.Tensor, pad: torch.Tensor) -> list[torch.Tensor]:
        """Tokens of every chunk; past an episode's end its last action is held."""
        return [self.tokens.encode(row) for row in hold_last(actions, pad)]
