"""The heads there are, with their options; known without torch. Master and CLI read this.

Beside the shipped heads stand installed ones: the provider installs a package that names a class, derived from `ActionModule`,
in the entry point group `nexus_bus.heads`. Names are read from package metadata; the class, and torch with it, is imported
when a job or `nexus catalog NAME` asks for it. Nothing is ever taken from a tenant over the wire.
"""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from nexus_bus.errors import BadJob
from nexus_bus.nearest import nearest
from schemas.job import HeadSpec, Scalar

GROUP = "nexus_bus.heads"
LARGEST = 2 << 30  # bytes of a head's weights: with gradients and moments a slot takes four times as much
DECODED = 256  # tokens of an answer: each one is a forward that others wait for


@dataclass(frozen=True)
class Option:
    """One head option: its default, its bounds, and what it does."""

    default: Scalar
    low: float
    high: float
    meaning: str


@dataclass(frozen=True)
class HeadEntry:
    """One head of the catalogue."""

    summary: str
    options: dict[str, Option]
    rl: bool  # has a log-prob and a value, so reinforcement learning can train it
    tiers: tuple[str, ...] = ("frozen", "lora")
    queries: bool = False  # reads one query token per action, so that its horizon is the backbone's at most
    suffix: bool = False  # appends tokens of its own to the prompt


_FLOW: dict[str, Option] = {
    "heads": Option(4, 1, 64, "attention heads; must divide the width"),
    "mlp_ratio": Option(2, 1, 8, "feed-forward width over transformer width"),
    "tokens": Option(8, 0, 256, "learned tokens beside state and actions"),
    "repeats": Option(8, 1, 64, "noise draws per sample and step"),
    "steps": Option(4, 1, 100, "Euler steps at inference"),
    "buckets": Option(1000, 2, 100_000, "time buckets"),
    "noise_alpha": Option(1.5, 0.1, 10.0, "alpha of the Beta(alpha, 1) that times are drawn from"),
    "noise_s": Option(0.999, 0.5, 1.0, "largest time drawn"),
}

HEADS: dict[str, HeadEntry] = {
    "oft": HeadEntry(
        summary="L1 regression of the whole chunk in one pass, from one query token per action; a Gaussian around it for RL.",
        rl=True,
        queries=True,
        options={
            "width": Option(0, 0, 8192, "width of the MLP; 0 means twice the backbone's"),
            "blocks": Option(2, 1, 16, "residual MLP blocks"),
            "value_width": Option(128, 8, 4096, "width of the value MLP"),
        },
    ),
    "gr00t": HeadEntry(
        summary="Flow matching: a diffusion transformer, attending in turn to the backbone's tokens and to its own.",
        rl=False,
        options={
            "width": Option(96, 16, 4096, "width of the transformer"),
            "layers": Option(4, 2, 48, "transformer layers, cross and self attention in turn"),
            **_FLOW,
        },
    ),
    "pi": HeadEntry(
        summary="Flow matching: a diffusion transformer with one block per backbone layer, each reading its layer.",
        rl=False,
        options={
            "width": Option(64, 16, 4096, "width of the transformer"),
            "layers": Option(0, 0, 128, "read the last so many layers of the backbone, one block each; 0 means all"),
            **_FLOW,
            "repeats": Option(2, 1, 64, "noise draws per sample and step"),
        },
    ),
    "fast": HeadEntry(
        summary="The language model itself decodes actions as tokens of a cosine transform.",
        rl=False,
        tiers=("lora",),
        suffix=True,
        options={
            "scale": Option(10.0, 0.1, 1000.0, "levels per unit of a coefficient: more is finer, and more tokens"),
            "levels": Option(127, 1, 4096, "largest level; the vocabulary holds twice as many, zero and the end"),
        },
    ),
}


def installed() -> dict[str, EntryPoint]:
    """Heads installed beside the shipped ones, by name, none of them imported. A shipped name cannot be taken."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in HEADS}


def head_class(name: str) -> Any:
    """The class of an installed head, imported.

    Raises:
        BadJob: there is none of this name, or what its package names is no head.
    """
    points = installed()
    if name not in points:
        raise BadJob(f"head.type: {name!r} does not exist{nearest(name, sorted({*HEADS, *points}))}")
    from nexus_bus.models.heads.base import ActionModule

    try:
        found = points[name].load()
    except Exception as error:
        raise BadJob(f"head.type: {name!r}: its package's {points[name].value!r} cannot be imported: {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, ActionModule)):
        raise BadJob(f"head.type: {name!r}: its package's {points[name].value!r} is no class derived from ActionModule")
    return found


def head_entry(name: str) -> HeadEntry:
    """What a head is; an installed one is imported.

    Raises:
        BadJob: no such head, or its package cannot be imported.
    """
    return HEADS[name] if name in HEADS else entry_of(head_class(name))


def entry_of(head: Any) -> HeadEntry:
    """What an installed head's class says of itself."""
    from nexus_bus.models.heads.base import PolicyModule

    rl = issubclass(head, PolicyModule)
    return HeadEntry(head.summary, dict(head.options), rl, head.tiers, head.queries, head.needs.decodes)


def head_layers(spec: HeadSpec, layers: int) -> tuple[int, ...]:
    """Hidden states that a head reads of a backbone with so many layers, counted as in transformers.

    Raises:
        BadJob: more than there are.
    """
    if spec.type != "pi":
        return (-1,)
    wanted = int(spec.options["layers"]) or layers
    if wanted > layers:
        raise BadJob(f"head.options.layers: {wanted}, but the backbone has {layers}")
    return (*range(layers - wanted + 1, layers), -1)


def check_size(spec: HeadSpec, hidden: int, layers: int) -> None:
    """Whether the weights of a shipped head can be served at all; an installed one is its provider's to bound.

    Args:
        spec: its options complete.
        hidden, layers: of the backbone.

    Raises:
        BadJob: they cannot.
    """
    size = 4 * head_weights(spec, hidden, layers)
    if size > LARGEST:
        raise BadJob(
            f"head.options: the weights of this {spec.type!r} take about {size / 1e9:.1f} GB, at most {LARGEST / 1e9:.1f} are "
            "served; choose a smaller width or fewer layers"
        )


def head_weights(spec: HeadSpec, hidden: int, layers: int) -> int:
    """Roughly how many weights a shipped head has: its matrices alone. 0 for an installed one."""
    has = {name: int(value) for name, value in spec.options.items()} if spec.type in HEADS else {}
    match spec.type:
        case "oft":
            width = has["width"] or 2 * hidden
            return has["blocks"] * width**2 + hidden * width + has["value_width"] ** 2 + hidden * has["value_width"]
        case "gr00t" | "pi":
            width = has["width"]
            count = has["layers"] if spec.type == "gr00t" else len(head_layers(spec, layers))
            context = width + hidden if spec.type == "gr00t" else 2 * (width + hidden)  # half of gr00t's read the backbone
            return count * width * ((4 + 2 * has["mlp_ratio"]) * width + context) + 8 * width**2
        case "fast":
            return 4 * (has["levels"] + 1) * hidden
        case _:
            return 0


def suffix_tokens(spec: HeadSpec, action_size: int) -> int:
    """Tokens that a head appends to the prompt at most, and decodes one by one.

    Raises:
        BadJob: more than are decoded.
    """
    if not head_entry(spec.type).suffix:
        return 0
    tokens = spec.horizon * action_size + 1
    if tokens > DECODED + 1:
        raise BadJob(
            f"head.horizon: {spec.horizon} actions of {action_size} numbers are up to {tokens - 1} tokens, decoded one by one; "
            f"at most {DECODED} are: choose a horizon of at most {DECODED // action_size}"
        )
    return tokens


def check_head(spec: HeadSpec) -> HeadSpec:
    """Fill in the defaults of a head.

    Raises:
        BadJob: no such head or option, or a value of the wrong type or out of bounds; the text lists what exists.
    """
    return fill_options(spec, head_entry(spec.type))


def fill_options(spec: HeadSpec, entry: HeadEntry) -> HeadSpec:
    """`check_head` by a given entry.

    Raises:
        BadJob: as `check_head`.
    """
    options: dict[str, Scalar] = {name: option.default for name, option in entry.options.items()}
    for name, value in spec.options.items():
        option = entry.options.get(name)
        if option is None:
            raise BadJob(f"head.options.{name}: {spec.type!r} has no such option{nearest(name, entry.options)}")
        options[name] = _checked(f"head.options.{name}", option, value)
    if spec.type in ("gr00t", "pi") and int(options["width"]) % int(options["heads"]):
        raise BadJob(f"head.options.heads: {options['heads']} does not divide the width {options['width']}")
    return msgspec.structs.replace(spec, options=options)


def _checked(name: str, option: Option, value: Scalar) -> Scalar:
    kinds = (int, float) if isinstance(option.default, float) else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise BadJob(f"{name}: {value!r} is not a {'number' if float in kinds else 'whole number'}")
    if not option.low <= value <= option.high:
        raise BadJob(f"{name}: {value} is outside [{option.low:g}, {option.high:g}]")
    return float(value) if float in kinds else value
