"""`VLAFeature`: what the backbone says about one sample, and batches of them. Between the backbone and every head."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class VLAFeature:
    """Hidden states of one sample, unpadded, in the backbone's dtype."""

    feature_id: str
    hidden: torch.Tensor  # [L, n_layers · H]
    token_type: torch.Tensor  # [L] uint8: 0 text, 1 image, 2 query
    query_span: tuple[int, int]  # first and one past the last query token

    @property
    def nbytes(self) -> int:
        """Memory the feature holds."""
        return self.hidden.nbytes + self.token_type.nbytes


def feature_id(fingerprint: str, profile: str, layers: Sequence[int], text: bytes, pixels: bytes) -> str:
    """Name of a feature by what it was computed from: equal names hold equal numbers."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(f"{fingerprint}|{profile}|{','.join(map(str, layers))}|".encode())
    digest.update(text)
    digest.update(pixels)
    return digest.hexdigest()


def group_key(fingerprint: str, profile: str, layers: Sequence[int], tier: str = "frozen") -> tuple[str, str, str, str]:
    """What must agree for samples to share a forward. Horizon, state, actions, head, optimizer and wording need not."""
    return fingerprint, profile, ",".join(map(str, layers)), tier


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """Features side by side, as heads read them, in float32."""

    hidden: torch.Tensor  # [B, Lmax, D], zero where padded
    mask: torch.Tensor  # [B, Lmax] bool, True on real tokens
    query: torch.Tensor  # [B, Q, D]

    def __len__(self) -> int:
        return len(self.hidden)

    @classmethod
    def collate(cls, features: Sequence[VLAFeature]) -> "FeatureBatch":
        """Pad on the right to the longest; the number of query tokens is the backbone's, hence the same for all."""
        longest = max(len(feature.hidden) for feature in features)
        first = features[0].hidden
        hidden = first.new_zeros((len(features), longest, first.shape[1]), dtype=torch.float32)
        mask = torch.zeros((len(features), longest), dtype=torch.bool, device=first.device)
        for row, feature in enumerate(features):
            hidden[row, : len(feature.hidden)] = feature.hidden
            mask[row, : len(feature.hidden)] = True
        query = torch.stack([feature.hidden[slice(*feature.query_span)] for feature in features]).float()
        return cls(hidden=hidden, mask=mask, query=query)

    def rows(self, index: torch.Tensor) -> "FeatureBatch":
        """Some of the rows."""
        return FeatureBatch(hidden=self.hidden[index], mask=self.mask[index], query=self.query[index])

    def to(self, device: torch.device) -> "FeatureBatch":
        """On another device."""
        return FeatureBatch(hidden=self.hidden.to(device), mask=self.mask.to(device), query=self.query.to(device))
