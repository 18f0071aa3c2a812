"""Raw numbers to the head's numbers and back, as the contract says. Around every head, in training and in inference."""

import hashlib
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from nexus_bus.errors import ContractError
from schemas.policy import Normalizer

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[np.float32], "torch.Tensor")

DEGENERATE = 1e-6  # a range or deviation below this is none: such a dimension is centred and keeps its scale


class Normalize:
    """One normalizer, ready to use. Works on numpy arrays and on tensors of the CPU, over the last axis.

    mean_std: (x - mean)/(std + 1e-8), inverse x·std + mean. min_max and quantile (q01, q99): 2(x - low)/(high - low) - 1,
    without clamp.
    A dimension that the mask leaves out passes unchanged (specs of the field: a gripper).
    """

    def __init__(self, normalizer: Normalizer, size: int, field: str) -> None:
        """Check that the statistics fit `size` dimensions; `field` is the contract's, named in errors.

        Raises:
            ContractError: statistics missing, of another size, or not finite.
        """
        self._shift = np.zeros(size, np.float32)
        self._scale = np.ones(size, np.float32)
        epsilon = 0.0
        if normalizer.mode != "identity":
            shift, scale = _affine(normalizer, size, field)
            whole = scale >= DEGENERATE
            self._shift = shift.astype(np.float32)
            self._scale = np.where(whole, scale, 1.0).astype(np.float32)
            epsilon = 1e-8 if normalizer.mode == "mean_std" else 0.0
        if normalizer.mask is not None:
            if len(normalizer.mask) != size:
                raise ContractError(f"{field}.mask: {len(normalizer.mask)} entries for {size} dimensions")
            kept = np.asarray(normalizer.mask)
            self._shift, self._scale = np.where(kept, self._shift, 0), np.where(kept, self._scale, 1)
        self._divisor = self._scale + np.float32(epsilon)

    def forward(self, x: Array) -> Array:
        """Raw → head."""
        shift, divisor = _like(x, self._shift), _like(x, self._divisor)
        return (x - shift) / divisor

    def inverse(self, x: Array) -> Array:
        """Head → raw."""
        shift, scale = _like(x, self._shift), _like(x, self._scale)
        return x * scale + shift


def _like(x: Array, value: NDArray[np.float32]) -> Array:
    if isinstance(x, np.ndarray):
        return value
    import torch  # here: the master checks contracts, and does without it

    return torch.from_numpy(value)


def _affine(normalizer: Normalizer, size: int, field: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shift and scale of a mode that needs statistics."""
    statistics = normalizer.statistics
    if statistics is None:
        raise ContractError(f"{field}.statistics: missing, and the mode {normalizer.mode!r} cannot do without")

    def key(name: str) -> NDArray[np.float64]:
        values = np.asarray(getattr(statistics, name), np.float64)
        if values.shape != (size,):
            raise ContractError(f"{field}.statistics.{name}: {values.size} numbers for {size} dimensions")
        if not np.isfinite(values).all():
            raise ContractError(f"{field}.statistics.{name}: not finite")
        return values

    if normalizer.mode == "mean_std":
        return key("mean"), key("std")
    low, high = (key("min"), key("max")) if normalizer.mode == "min_max" else (key("q01"), key("q99"))
    return (low + high) / 2, (high - low) / 2


def statistics_hash(action: Normalizer, state: Normalizer) -> str:
    """Sha256 over both normalizers, so that swapped or edited statistics are seen."""
    return hashlib.sha256(msgspec.json.encode([action, state], order="deterministic")).hexdigest()
