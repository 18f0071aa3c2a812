"""Whether a head keeps what the service promises of it. For whoever writes one:

    python -m nexus_bus.models.heads.conformance NAME

NAME is a shipped or installed head, or `package.module:Class`. Findings are printed, one a line; the exit status is 1 if there
are any.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from nexus_bus.errors import NexusError
from nexus_bus.models.catalog import entry_of, fill_options, head_entry
from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import CLASSES, head_type
from nexus_bus.models.heads.base import ActionModule, FeatureShape, PolicyModule
from schemas.job import HeadSpec

SHAPE = FeatureShape(hidden=32, layers=4)
SETTINGS = tuple(product((0, 8), (1, 8)))  # state sizes and horizons
ROWS, TOKENS, ACTION_SIZE = 3, 6, 3
LONGEST = 10_000  # suffixes that a decoding head may ask about before it is said not to end
TOLERANCE = 1e-5


def check(head: str | type[ActionModule], shape: FeatureShape = SHAPE) -> list[str]:
    """What a head breaks, as sentences; empty if nothing. It is built with its default options.

    Raises:
        BadJob: no head of this name.
    """
    name = head if isinstance(head, str) else next((name for name, kind in CLASSES.items() if kind is head), "")
    kind = head_type(head) if isinstance(head, str) else head
    entry = head_entry(name) if name else entry_of(kind)
    found: dict[str, str] = {}
    for state_size, horizon in SETTINGS:
        case = Case(kind, fill_options(HeadSpec(type=name or kind.__name__, horizon=horizon), entry), shape, state_size)
        for part in CHECKS:
            with torch.random.fork_rng(devices=[]):
                for finding in _tried(part, case):
                    found.setdefault(finding, f"state_size {state_size}, horizon {horizon}")
    return [f"{finding} (first seen with {setting})" for finding, setting in found.items()]


@dataclass(frozen=True, eq=False)
class Case:
    """A head in one setting, and what it is shown: numbers drawn from a seed."""

    kind: type[ActionModule]
    spec: HeadSpec
    shape: FeatureShape
    state_size: int

    def build(self, seed: int = 0) -> ActionModule:
        """A fresh head."""
        head = self.kind(self.spec, self.shape, self.state_size, ACTION_SIZE)
        head.initialise(seed)
        return head

    def features(self, head: ActionModule, seed: int = 1) -> FeatureBatch:
        """Rows of unequal lengths, as wide as the head's layers are together."""
        size, g = self.shape.hidden * len(head.needs.layers), generator(seed)
        mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
        mask[1, -2:] = False
        hidden = torch.randn(ROWS, TOKENS, size, generator=g) * mask.unsqueeze(-1)
        return FeatureBatch(hidden, mask, torch.randn(ROWS, max(8, head.needs.query_tokens), size, generator=g))

    def state(self, seed: int = 2) -> torch.Tensor:
        """[B, S]."""
        return torch.randn(ROWS, self.state_size, generator=generator(seed))

    def actions(self, seed: int = 3) -> torch.Tensor:
        """[B, T, D] in [-1, 1]."""
        return torch.rand(ROWS, self.spec.horizon, ACTION_SIZE, generator=generator(seed)) * 2 - 1

    def pad(self) -> torch.Tensor:
        """[B, T]; row 0 ends half-way, at horizon 1 before it began."""
        pad = torch.zeros(ROWS, self.spec.horizon, dtype=torch.bool)
        pad[0, self.spec.horizon // 2 :] = True
        return pad

    def loss(
        self, head: ActionModule, features: FeatureBatch | None = None, actions: torch.Tensor | None = None, seed: int = 5
    ) -> torch.Tensor:
        """The head's loss on rows of this case; what it appends goes through a stand-in for a language model."""
        features = self.features(head) if features is None else features
        actions = self.actions() if actions is None else actions
        suffixes = head.suffix(self.state(), actions, self.pad())
        if suffixes is not None:
            told = [_speak(features, row, suffix) for row, suffix in enumerate(suffixes)]
            features = replace(features, suffix=torch.nn.utils.rnn.pad_sequence(told, batch_first=True))
        return head.loss(features, self.state(), actions, self.pad(), generator(seed))

    @torch.no_grad()
    def answer(self, head: ActionModule, features: FeatureBatch | None = None, seed: int = 6) -> torch.Tensor:
        """The head's greedy answer [B, T, D]."""
        features = self.features(head) if features is None else features
        state = self.state()[: len(features)]
        if not head.needs.decodes:
            return head.predict(features, state, generator(seed))
        return torch.stack([_decoded(head, features, row, state[row], generator(seed)) for row in range(len(features))])


def generator(seed: int) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(seed)


def weights_from_the_seed(case: Case) -> Iterator[str]:
    """Two builds from one seed are equal, whatever torch's global generator holds; another seed gives others."""
    torch.manual_seed(1)
    first = case.build().state_dict()
    torch.manual_seed(2)
    second, other = case.build().state_dict(), case.build(seed=1).state_dict()
    for name, tensor in first.items():
        if not torch.equal(tensor, second[name]):
            yield f"weights: {name!r} differs between two builds from one seed; draw it in `draw` from the given generator"
    if all(torch.equal(tensor, other[name]) for name, tensor in first.items()):
        yield "weights: they are the same for every seed"


def weights_reload(case: Case) -> Iterator[str]:
    """Weights are finite numbers, and with them another build gives the same answers."""
    head, other = case.build(), case.build(seed=1)
    for name, tensor in head.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            yield f"weights: {name!r} holds numbers that are not finite"
    other.load_state_dict(head.state_dict())
    if not torch.equal(case.answer(head), case.answer(other)):
        yield "weights: with the weights of another build it answers differently; all that matters must be in the state_dict"


def loss_trains(case: Case) -> Iterator[str]:
    """The loss is a finite scalar, and gradients reach every trained parameter."""
    head = case.build()
    loss = case.loss(head)
    if loss.shape != ():
        yield f"loss: shape {list(loss.shape)}, expected a scalar"
    elif not bool(torch.isfinite(loss)):
        yield f"loss: {float(loss)} is not finite"
    else:
        if isinstance(head, PolicyModule):
            loss = loss + sum(part.sum() for part in head.evaluate(case.features(head), case.state(), case.actions()))
        loss.backward()
        for name, parameter in head.named_parameters():
            if parameter.requires_grad and (parameter.grad is None or not bool(torch.isfinite(parameter.grad).all())):
                yield f"loss: no finite gradient reaches {name!r}; a parameter that is not trained needs requires_grad=False"


def shapes(case: Case) -> Iterator[str]:
    """Answers are [B, T, D], densities [B, T], values [B]."""
    head = case.build()
    sizes = {"B": ROWS, "T": case.spec.horizon, "D": ACTION_SIZE}
    seen = {"decode" if head.needs.decodes else "predict": ("BTD", case.answer(head))}
    if isinstance(head, PolicyModule):
        drawn = head.sample(case.features(head), case.state(), generator(6))
        log_prob, entropy, value = head.evaluate(case.features(head), case.state(), case.actions())
        seen |= {"sample.actions": ("BTD", drawn.actions), "sample.log_prob": ("BT", drawn.log_prob)}
        seen |= {"sample.value": ("B", drawn.value), "evaluate.log_prob": ("BT", log_prob)}
        seen |= {"evaluate.entropy": ("BT", entropy), "evaluate.value": ("B", value)}
    for name, (axes, tensor) in seen.items():
        if tuple(tensor.shape) != tuple(sizes[axis] for axis in axes):
            yield f"{name}: its shape is not [{', '.join(axes)}]"
        elif not bool(torch.isfinite(tensor).all()):
            yield f"{name}: holds numbers that are not finite"


def noise_is_given(case: Case) -> Iterator[str]:
    """The caller's generator is the only randomness, in training mode too."""
    head = case.build()
    for name, call in _calls(case, head).items():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = call()
        if not torch.equal(before, torch.get_rng_state()):
            yield f"{name}: draws from torch's global generator"
        torch.manual_seed(2)
        if not torch.equal(first, call()):
            yield f"{name}: the same call with the same generator gives other numbers"


def padding_of_features(case: Case) -> Iterator[str]:
    """Neither what stands behind the mask nor how much of it matters."""
    head = case.build()
    plain = case.features(head)
    pad = torch.nn.functional.pad
    hidden, mask = pad(plain.hidden, (0, 0, 0, 3)), pad(plain.mask, (0, 3))
    spoilt = hidden + torch.randn(hidden.shape, generator=generator(9)) * 100 * ~mask.unsqueeze(-1)
    for name, call in _calls(case, head).items():
        if not _close(call(), call(FeatureBatch(spoilt, mask, plain.query))):
            yield f"{name}: reads tokens behind features.mask"


def padding_of_actions(case: Case) -> Iterator[str]:
    """Steps past an episode's end do not count."""
    head = case.build()
    spoilt = case.actions().masked_fill(case.pad().unsqueeze(-1), 50.0)
    if not _close(case.loss(head), case.loss(head, actions=spoilt)):
        yield "loss: reads actions where pad is True"


def rows_are_alone(case: Case) -> Iterator[str]:
    """A row's answer does not depend on its neighbours."""
    head = case.build()
    features, others = case.features(head), case.features(head, seed=8)
    mixed = FeatureBatch(*(torch.cat([a[:1], b[1:]]) for a, b in zip(_parts(features), _parts(others), strict=True)))
    calls = _calls(case, head)
    calls.pop("loss")  # a mean over the rows
    for name, call in calls.items():
        if not _close(call(features)[:1], call(mixed)[:1]):
            yield f"{name}: a row's answer depends on its neighbours"
    if torch.equal(case.answer(head), case.answer(head, seed=7)):  # without noise, also against the row by itself
        alone = case.answer(head, features.rows(torch.tensor([0])))
        if not _close(case.answer(head)[:1], alone):
            yield "predict: a row's answer depends on whether it has neighbours"


def nothing_is_remembered(case: Case) -> Iterator[str]:
    """No weight or buffer changes by use."""
    for mode in (True, False):
        head = case.build().train(mode)
        before = {name: tensor.clone() for name, tensor in _tensors(head).items()}
        for name, call in _calls(case, head).items():
            call()
            after = _tensors(head)
            for changed in [key for key, tensor in after.items() if key not in before or not torch.equal(tensor, before[key])]:
                before[changed] = after[changed].clone()
                yield f"{name}: changes {changed!r}; only the optimizer may change what a head holds"


def density(case: Case) -> Iterator[str]:
    """What `sample` says of its draw, `evaluate` says too; the value shares nothing with the policy."""
    head = case.build()
    if not isinstance(head, PolicyModule):
        return
    features, state = case.features(head), case.state()
    drawn = head.sample(features, state, generator(6))
    if torch.equal(drawn.actions, head.sample(features, state, generator(7)).actions):
        yield "sample: the generator changes nothing"
    log_prob, _, value = head.evaluate(features, state, drawn.actions.detach())
    if not _close(log_prob, drawn.log_prob):
        yield "evaluate: log_prob of drawn actions differs from what sample says of them"
    if not _close(value, drawn.value):
        yield "evaluate: the value differs from what sample says"
    own = {id(parameter) for parameter in head.value_parameters()}
    log_prob.sum().backward()
    if any(id(p) in own and p.grad is not None for p in head.parameters()):
        yield "evaluate: log_prob depends on the value's parameters"
    head.zero_grad()
    head.evaluate(features, state, drawn.actions.detach())[2].sum().backward()
    if any(id(p) not in own and p.grad is not None for p in head.parameters()):
        yield "evaluate: the value depends on more than value_parameters"


CHECKS: tuple[Callable[[Case], Iterator[str]], ...] = (
    shapes,
    loss_trains,
    weights_from_the_seed,
    weights_reload,
    noise_is_given,
    padding_of_features,
    padding_of_actions,
    rows_are_alone,
    nothing_is_remembered,
    density,
)


def _tried(part: Callable[[Case], Iterator[str]], case: Case) -> Iterator[str]:
    """A check's findings; an error is one too, for a foreign head may raise anything."""
    try:
        yield from part(case)
    except Exception as error:  # noqa: BLE001
        yield f"{part.__name__}: raises {error!r}"


def _calls(case: Case, head: ActionModule) -> dict[str, Callable[..., torch.Tensor]]:
    """All that a head is asked, by name; each takes other features than the case's. Noise is the same in every call."""

    calls: dict[str, Callable[..., torch.Tensor]] = {
        "loss": lambda features=None: case.loss(head, features).detach(),
        "decode" if head.needs.decodes else "predict": lambda features=None: case.answer(head, features),
    }
    if isinstance(head, PolicyModule):
        policy, plain = head, case.features(head)

        def sample(features: FeatureBatch = plain) -> torch.Tensor:
            drawn = policy.sample(features, case.state(), generator(6))
            return torch.cat([drawn.actions.flatten(1), drawn.log_prob, drawn.value.unsqueeze(1)], dim=1).detach()

        def evaluate(features: FeatureBatch = plain) -> torch.Tensor:
            log_prob, entropy, value = policy.evaluate(features, case.state(), case.actions())
            return torch.cat([log_prob, entropy, value.unsqueeze(1)], dim=1).detach()

        calls |= {"sample": sample, "evaluate": evaluate}
    return calls


def _speak(features: FeatureBatch, row: int, suffix: torch.Tensor) -> torch.Tensor:
    """A causal stand-in for the language model: hidden states [n, layers · H] at a suffix [n, H] after a row's tokens."""
    real = features.hidden[row][features.mask[row]].mean(dim=0).view(-1, suffix.shape[1])
    return torch.tanh(suffix.cumsum(dim=0).unsqueeze(1) + real).flatten(1)


def _decoded(head: ActionModule, features: FeatureBatch, row: int, state: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    talk = head.decode(state, noise)
    try:
        suffix = next(talk)
        for _ in range(LONGEST):
            suffix = talk.send(_speak(features, row, suffix))
    except StopIteration as done:
        return done.value
    raise RuntimeError(f"decode: does not end within {LONGEST} tokens")


def _parts(features: FeatureBatch) -> tuple[torch.Tensor, ...]:
    return features.hidden, features.mask, features.query


def _tensors(head: ActionModule) -> dict[str, torch.Tensor]:
    return {**dict(head.named_parameters()), **dict(head.named_buffers())}


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def main(name: str) -> int:
    """Print what is found of a head; 1 if anything is."""
    head: str | type[ActionModule] = name
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            head = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            sys.stdout.write(f"{name}: {error}\n")
            return 2
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    findings = check(head)
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    sys.stdout.write(f"{name}: {len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}\n")
    return 1 if findings else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        sys.exit(main(sys.argv[1]))
    except NexusError as error:
        sys.exit(str(error))
