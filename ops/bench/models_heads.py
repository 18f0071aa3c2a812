"""Heads of several tenants in one training step: stacked into batched products against one after the other.

`python -m ops.bench.models_heads` prints the ratios, under the numeric settings of the workers.
"""

import json
from functools import partial
from itertools import product

from nexus_bus.models import process

if __name__ == "__main__":
    process.settings(1)  # before torch

import torch
from torch.nn import functional

from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import FeatureShape, Oft, build_head
from ops.bench.timing import alternate
from schemas.job import HeadSpec

TENANTS, HORIZON, STATE, ACTION = 8, 8, 8, 7
SIZES = ((128, 256), (512, 1024))  # hidden, width
BATCHES = (1, 16)


def stacked_heads(device: str = "cpu", *, quick: bool = False) -> dict[str, float]:
    """Loss and backward of 8 tenants' `oft` heads of one shape: how many times faster stacked, and whether equal to the bit.

    The stack keeps its weights stacked, so no copying is counted. Equality counts losses and all gradients of the policy.
    """
    found: dict[str, float] = {}
    for (hidden, width), batch in product(SIZES, BATCHES):
        stack = Stack(hidden, width, batch, torch.device(device))
        name = f"hidden{hidden}_width{width}_batch{batch}"
        spent = alternate({"loop": stack.one_by_one, "stacked": stack.together}, torch.device(device), quick=quick)
        found[f"stacked_heads_x_{name}"] = spent["loop"] / spent["stacked"]
        found[f"stacked_heads_loop_ms_{name}"] = spent["loop"] * 1e3
        found[f"stacked_heads_equal_{name}"] = float(stack.equal())
        found[f"stacked_heads_gap_{name}"] = stack.gap()
    return found


class Stack:
    """Eight heads with their samples, as modules and as stacked weights [N, …]."""

    def __init__(self, hidden: int, width: int, batch: int, device: torch.device) -> None:
        spec = HeadSpec(type="oft", horizon=HORIZON, options={"width": width})
        self.heads = [build_head(spec, FeatureShape(hidden, 1), STATE, ACTION, n).to(device) for n in range(TENANTS)]
        g = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=g)
        self.queries = draw(TENANTS, batch, HORIZON, hidden).to(device)
        self.states = draw(TENANTS, batch, STATE).to(device)
        self.actions = draw(TENANTS, batch, HORIZON, ACTION).to(device)
        self.pad = torch.zeros(batch, HORIZON, dtype=torch.bool, device=device)
        self.names = [n for n, _ in self.heads[0].named_parameters() if not n.startswith(("value", "log_std"))]
        self.weights = {name: self._stacked(name).requires_grad_() for name in self.names}

    def one_by_one(self) -> torch.Tensor:
        """Losses [N]; gradients stay on the heads."""
        losses = []
        for n, head in enumerate(self.heads):
            head.zero_grad(set_to_none=True)
            features = FeatureBatch(self.queries[n], self.pad, self.queries[n])
            loss = head.loss(features, self.states[n], self.actions[n], self.pad, torch.Generator())
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def together(self) -> torch.Tensor:
        """Losses [N]; gradients stay on the stacked weights. The same formulas, tenants along the first axis."""
        for weight in self.weights.values():
            weight.grad = None
        head = self.heads[0]
        assert isinstance(head, Oft)
        x = self._linear(self._norm(self.queries.flatten(1, 2), "input_norm"), "input")
        x = x.unflatten(1, (-1, HORIZON)) + self.weights["place"].unsqueeze(1)
        x = x + torch.bmm(self.states, self.weights["state.weight"]).unsqueeze(2)
        x = torch.relu(x).flatten(1, 2)
        for i in range(len(head.blocks)):
            x = x + torch.relu(self._linear(self._norm(x, f"blocks.{i}.norm"), f"blocks.{i}.linear"))
        mean = self._linear(self._norm(x, "output_norm"), "output").view(self.actions.shape)
        losses = (mean - self.actions).abs().sum(dim=(1, 2, 3)) / self.actions[0].numel()
        losses.sum().backward()
        return losses.detach()

    def equal(self) -> bool:
        """Whether losses and gradients are the same to the bit."""
        return self.gap() == 0.0

    def gap(self) -> float:
        """The largest difference of a loss or gradient."""
        gaps = [(self.one_by_one() - self.together()).abs().max()]
        for name, weight in self.weights.items():
            assert weight.grad is not None
            gaps.append((self._stacked(name, grad=True) - weight.grad).abs().max())
        return float(torch.stack(gaps).max())

    def _stacked(self, name: str, *, grad: bool = False) -> torch.Tensor:
        """A weight of all heads, [N, …]; matrices as [N, in, out], so that no product or gradient is transposed."""
        parameters = [head.get_parameter(name) for head in self.heads]
        stack = torch.stack([p.grad if grad and p.grad is not None else p.detach() for p in parameters])
        return stack.transpose(1, 2).contiguous() if name.endswith("weight") and stack.ndim == 3 else stack

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return torch.baddbmm(bias.unsqueeze(1), x, weight)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:]) * weight.unsqueeze(1) + bias.unsqueeze(1)


if __name__ == "__main__":
    print(json.dumps(stacked_heads(), indent=2))
