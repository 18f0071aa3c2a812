"""Low-rank adapters (LoRA, Hu et al. 2021) of many tenants inside one forward: y = W x + (alpha / r)·B A x.

The shared weights stay as they are; a hook on each linear layer adds the deltas of the forward at hand. A tenant's tokens lie
side by side, and its products see them alone, so that neither an output nor a gradient depends on who else is there: peft's
mixed-adapter batches do the same for inference and refuse training.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nexus_bus.errors import BadJob, ContractError
from schemas.job import LoraSpec

Span = tuple[int, int, "Adapter"]  # first and one past the last token of an adapter, in the flattened group
PEFT = "base_model.model."  # what peft puts before a module's name


class Adapter(nn.Module):
    """One tenant's deltas: A [r, in] and B [out, r] for each adapted layer, in float32."""

    def __init__(self, spec: LoraSpec, places: Mapping[str, tuple[int, int]]) -> None:
        """`places`: full name of each adapted layer → its (in, out) sizes, as `Grafts.places` gives them."""
        super().__init__()
        self.spec = spec
        self.scale = spec.alpha / spec.rank
        self.places = list(places)
        self.down = nn.ParameterList(nn.Parameter(torch.zeros(spec.rank, size)) for size, _ in places.values())
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(size, spec.rank)) for _, size in places.values())
        self._index = {name: i for i, name in enumerate(self.places)}
        self.first = min((block_of(name) or 0 for name in self.places), default=0)  # the lowest adapted layer, counted from 0

    def initialise(self, seed: int) -> None:
        """A uniform within 1/√in, B zero: a fresh adapter changes nothing."""
        generator = torch.Generator().manual_seed(seed)
        for down, up in zip(self.down, self.up, strict=True):
            bound = 1 / math.sqrt(down.shape[1])
            nn.init.uniform_(down, -bound, bound, generator=generator)
            nn.init.zeros_(up)

    def delta(self, place: str, x: torch.Tensor) -> torch.Tensor | None:
        """What is added to that layer's output [tokens, out] for its input x [tokens, in]; None where nothing is adapted."""
        i = self._index.get(place)
        if i is None:
            return None
        return functional.linear(functional.linear(x.to(self.down[i].dtype), self.down[i]), self.up[i]) * self.scale

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights under peft's names."""
        out: dict[str, torch.Tensor] = {}
        for name, down, up in zip(self.places, self.down, self.up, strict=True):
            out[f"{PEFT}{name}.lora_A.weight"], out[f"{PEFT}{name}.lora_B.weight"] = down.detach(), up.detach()
        return out

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy weights from peft's names, in place.

        Raises:
            ContractError: names the first tensor that is missing, too many, of another shape, or not finite.
        """
        own = self.tensors()
        if odd := sorted(own.keys() ^ tensors.keys()):
            raise ContractError(f"adapter: {odd[0]!r} is in only one of the file and the contract ({len(odd)} such tensors)")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise ContractError(f"adapter: {name!r} is {list(tensor.shape)}, the contract says {list(own[name].shape)}")
            if not torch.isfinite(tensor).all():
                raise ContractError(f"adapter: {name!r} holds numbers that are not finite")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)


class Grafts:
    """Where adapters enter a language model."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        """`prefix`: the name of `model` within the whole model as transformers builds it, e.g. `model.language_model`."""
        self._spans: Sequence[Span] = ()
        self._linears: dict[str, nn.Linear] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                full = f"{prefix}.{name}"
                self._linears[full] = module
                module.register_forward_hook(partial(self._add, full))

    def places(self, spec: LoraSpec) -> dict[str, tuple[int, int]]:
        """The layers a specification adapts, with their (in, out) sizes.

        Raises:
            BadJob: a target that no layer is called; lists what there is.
        """
        blocks = sorted({number for name in self._linears if (number := block_of(name)) is not None})
        kept = set(blocks[-spec.last_layers :] if spec.last_layers else blocks)
        known = {name.rpartition(".")[2] for name in self._linears if block_of(name) is not None}
        if missing := [target for target in spec.targets if target not in known]:
            raise BadJob(f"lora.targets: no layer is called {missing[0]!r}; there are {', '.join(sorted(known))}")
        return {
            name: (linear.in_features, linear.out_features)
            for name, linear in self._linears.items()
            if block_of(name) in kept and name.rpartition(".")[2] in spec.targets
        }

    @contextmanager
    def on(self, spans: Sequence[Span]) -> Iterator[None]:
        """Deltas of a forward; spans ascend and do not overlap."""
        self._spans = spans
        try:
            yield
        finally:
            self._spans = ()

    def _add(self, place: str, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        if not self._spans:
            return None
        x = inputs[0].flatten(0, -2)
        parts: list[torch.Tensor] = []
        at = 0
        for start, stop, adapter in self._spans:
            delta = adapter.delta(place, x[start:stop])
            if delta is None:
                continue
            if start > at:
                parts.append(output.new_zeros(start - at, output.shape[-1]))
            parts.append(delta.to(output.dtype))
            at = stop
        if not parts:
            return None
        if at < len(x):
            parts.append(output.new_zeros(len(x) - at, output.shape[-1]))
        return output + (parts[0] if len(parts) == 1 else torch.cat(parts)).view_as(output)


def block_of(name: str) -> int | None:
    """Number of the transformer layer that a module lies in: `…layers.3.self_attn.q_proj` → 3."""
    _, found, rest = name.rpartition(".layers.")
    number = rest.partition(".")[0]
    return int(number) if found and number.isdecimal() else None
