"""Action chunks as tokens, after FAST: cosine transform over time, rounding, low frequencies first.

A normalised chunk [T, D] goes through an orthonormal DCT-II over time, one dimension by itself; coefficients are scaled,
rounded to whole levels and clipped to ±limit; they stand frequency by frequency (all dimensions of frequency 0, then of 1, …);
trailing zeros are cut, and one end token says so. FAST compresses what is left by byte-pair encoding trained on data. Cutting
the zeros takes its place here: it is lossless, needs no data, and smooth motion, whose high frequencies round to zero, still
becomes short.

Rounding moves a coefficient by at most 0.5 / scale, so an action by at most 0.5·sqrt(T) / scale, and by 0.29 / scale in the
root mean square.
"""

import math

import torch


class DctTokens:
    """Chunks of T actions of size D to tokens and back. Token k < end means level k - limit."""

    def __init__(self, horizon: int, size: int, scale: float, limit: int) -> None:
        """`limit`: the largest level; coefficients beyond limit / scale are clipped."""
        self.horizon, self.size, self.scale, self.limit = horizon, size, scale, limit
        self.end = 2 * limit + 1
        self.vocabulary = 2 * limit + 2
        self.longest = horizon * size + 1  # tokens of a chunk at most, the end included
        place = torch.arange(horizon, dtype=torch.float64, device="cpu")
        basis = torch.cos(math.pi / horizon * torch.outer(place, place + 0.5)) * math.sqrt(2 / horizon)
        basis[0] /= math.sqrt(2)
        self._basis = basis  # [frequency, time]; its transpose is its inverse

    def encode(self, actions: torch.Tensor) -> torch.Tensor:
        """Tokens [n] (whole numbers, the end last) of actions [T, D]. Computed in float64 on the CPU: the same everywhere."""
        coefficients = self._basis @ actions.detach().to("cpu", torch.float64)
        levels = (coefficients * self.scale).round().clamp(-self.limit, self.limit).long().flatten()
        used = levels.nonzero()
        kept = int(used[-1]) + 1 if len(used) else 0
        return torch.cat([levels[:kept] + self.limit, torch.tensor([self.end])])

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Actions [T, D] float32 of tokens [n]; what follows an end token, or T·D levels, is not read."""
        ends = (tokens == self.end).nonzero()
        kept = tokens[: int(ends[0]) if len(ends) else None][: self.longest - 1]
        levels = torch.zeros(self.longest - 1, dtype=torch.float64)
        levels[: len(kept)] = kept.to("cpu", torch.float64) - self.limit
        return (self._basis.T @ (levels.view(self.horizon, self.size) / self.scale)).float()
