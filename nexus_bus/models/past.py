"""Keys and values of a prompt that is being continued token by token, so that each token costs one token."""

import torch


class Past:
    """What one sequence has left behind in every layer. Filled and read by the attention of a family that takes suffixes."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.position = 0  # of the next token

    @property
    def empty(self) -> bool:
        """Whether nothing has been seen yet."""
        return not self._layers

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [tokens, heads, d] of new tokens; the keys and values of all."""
        if layer in self._layers:
            before = self._layers[layer]
            key, value = torch.cat([before[0], key]), torch.cat([before[1], value])
        self._layers[layer] = key, value
        return key, value
