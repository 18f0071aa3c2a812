"""`Look` and `VLAFeature`: what a sample asks of the backbone, and what it gets. Between the backbone and every head."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nexus_bus.models.grafts import Adapter
from nexus_bus.models.past import Past
from nexus_bus.models.prompt import Prompt
from schemas.base import PUBLIC

__all__ = ["PUBLIC", "FeatureBatch", "Look", "VLAFeature", "feature_id"]

REVISION = 2  # of the way features are computed: raised when their last bits change, so that no cache mixes two


@dataclass(frozen=True, eq=False)
class Look:
    """What one sample asks of the backbone."""

    prompt: Prompt
    layers: tuple[int, ...] = (-1,)  # as in `hidden_states`: 0 the embeddings, -1 the last, after its norm
    adapter: Adapter | None = None  # the tenant's deltas; such a feature has gradients and is never cached
    suffix: torch.Tensor | None = None  # [n, H] embeddings that follow the prompt; never cached either
    scope: str = ""  # whose cached features it may share: a tenant, or PUBLIC
    prefix: tuple[int, torch.Tensor] | None = (
        None  # (k, its hidden states at layer k [L, H]): known, and unchanged by its adapter
    )
    past: Past | None = None  # of a prompt that is continued: filled by its first forward; then the suffix holds what is new

    @property
    def frozen(self) -> bool:
        """Whether its feature depends on the shared weights and its prompt alone, so that it may be kept."""
        return self.adapter is None and self.suffix is None


@dataclass(frozen=True, eq=False)
class VLAFeature:
    """Hidden states of one sample, unpadded, in the backbone's dtype."""

    feature_id: str
    hidden: torch.Tensor  # [L (+ n of the suffix), n_layers · H]
    token_type: torch.Tensor  # [L] uint8: 0 text, 1 image, 2 query
    query_span: tuple[int, int]  # first and one past the last query token

    @property
    def length(self) -> int:
        """L: tokens of the prompt, queries included; a suffix comes after them."""
        return len(self.token_type)

    @property
    def nbytes(self) -> int:
        """Memory the feature holds."""
        return self.hidden.nbytes + self.token_type.nbytes


def feature_id(fingerprint: str, profile: str, layers: Sequence[int], text: bytes, pixels: bytes) -> str:
    """Name of a feature by what it was computed from: equal names hold equal numbers."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(f"{REVISION}|{fingerprint}|{profile}|{','.join(map(str, layers))}|".encode())
    digest.update(text)
    digest.update(pixels)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """Features side by side, as heads read them, in float32."""

    hidden: torch.Tensor  # [B, Lmax, D], zero where padded
    mask: torch.Tensor  # [B, Lmax] bool, True on real tokens
    query: torch.Tensor  # [B, Q, D]
    suffix: torch.Tensor | None = None  # [B, nmax, D] at the tokens that the head appended, zero where padded

    def __len__(self) -> int:
        return len(self.hidden)

    @classmethod
    def collate(cls, features: Sequence[VLAFeature], device: torch.device | None = None) -> "FeatureBatch":
        """Pad on the right to the longest; the number of query tokens is the backbone's, hence the same for all."""
        lengths = [feature.length for feature in features]
        whole = [feature.hidden.to(device or feature.hidden.device).float() for feature in features]
        hidden = _stack([states[:length] for states, length in zip(whole, lengths, strict=True)])
        mask = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        for row, length in enumerate(lengths):
            mask[row, :length] = True
        query = torch.stack([states[slice(*f.query_span)] for states, f in zip(whole, features, strict=True)])
        rest = [states[length:] for states, length in zip(whole, lengths, strict=True)]
        return cls(hidden, mask, query, _stack(rest) if any(len(part) for part in rest) else None)

    def rows(self, index: torch.Tensor) -> "FeatureBatch":
        """Some of the rows."""
        suffix = None if self.suffix is None else self.suffix[index]
        return FeatureBatch(self.hidden[index], self.mask[index], self.query[index], suffix)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n_i, D] … → [B, max n, D], zeros behind the shorter ones."""
    if len({len(part) for part in parts}) == 1:
        return torch.stack(list(parts))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
