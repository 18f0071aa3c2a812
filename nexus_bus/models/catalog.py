"""What exists on the model side, known without torch: heads with their options, and backbones. Master and CLI read this."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from nexus_bus.errors import BadJob, NotFound
from schemas.job import HeadSpec, Scalar

SHIPPED = {"nexus-nano": Path(__file__).parent / "nano"}
QUERY_TOKENS = 8  # appended to every prompt of a backbone that does not say otherwise
IMAGE_SIZE = 224  # of a backbone that does not say otherwise


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
    tiers: tuple[str, ...] = ("frozen",)


HEADS: dict[str, HeadEntry] = {
    "oft": HeadEntry(
        summary="L1 regression of the whole chunk in one pass, from one query token per action; a Gaussian around it for RL.",
        rl=True,
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
            "heads": Option(4, 1, 64, "attention heads; must divide the width"),
            "mlp_ratio": Option(2, 1, 8, "feed-forward width over transformer width"),
            "tokens": Option(8, 0, 256, "learned tokens beside state and actions"),
            "repeats": Option(8, 1, 64, "noise draws per sample and step"),
            "steps": Option(4, 1, 100, "Euler steps at inference"),
            "buckets": Option(1000, 2, 100_000, "time buckets"),
            "noise_alpha": Option(1.5, 0.1, 10.0, "alpha of the Beta(alpha, 1) that times are drawn from"),
            "noise_s": Option(0.999, 0.5, 1.0, "largest time drawn"),
        },
    ),
}


def check_head(spec: HeadSpec) -> HeadSpec:
    """Fill in the defaults of a head.

    Raises:
        BadJob: no such head or option, or a value of the wrong type or out of bounds; the text lists what exists.
    """
    entry = HEADS.get(spec.type)
    if entry is None:
        raise BadJob(f"head.type: {spec.type!r} does not exist; there are {', '.join(sorted(HEADS))}")
    options: dict[str, Scalar] = {name: option.default for name, option in entry.options.items()}
    for name, value in spec.options.items():
        option = entry.options.get(name)
        if option is None:
            raise BadJob(f"head.options.{name}: {spec.type!r} has no such option; it has {', '.join(entry.options)}")
        options[name] = _checked(f"head.options.{name}", option, value)
    if spec.type == "gr00t" and int(options["width"]) % int(options["heads"]):
        raise BadJob(f"head.options.heads: {options['heads']} does not divide the width {options['width']}")
    return msgspec.structs.replace(spec, options=options)


def _checked(name: str, option: Option, value: Scalar) -> Scalar:
    kinds = (int, float) if isinstance(option.default, float) else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise BadJob(f"{name}: {value!r} is not a {'number' if float in kinds else 'whole number'}")
    if not option.low <= value <= option.high:
        raise BadJob(f"{name}: {value} is outside [{option.low:g}, {option.high:g}]")
    return float(value) if float in kinds else value


@dataclass(frozen=True)
class BackboneInfo:
    """A backbone as its files describe it."""

    path: Path
    name: str
    fingerprint: str  # sha256 over everything that a feature depends on
    model_type: str
    hidden: int
    layers: int
    image_size: int  # images are shown as squares of this many pixels
    query_tokens: int  # action-query tokens at the end of every prompt
    query_token: str  # empty: the tokenizer's end-of-sequence token
    prompt: str  # template with {instruction}
    options: dict[str, Any] = field(default_factory=dict)  # nexus.json as it stands


def resolve_base(base: str) -> Path:
    """Find the directory of a base model: a shipped name, a directory, or a hub id already in the local hub cache.

    Raises:
        NotFound: none of these.
    """
    if base in SHIPPED:
        return SHIPPED[base]
    try:
        path = Path(base).expanduser()
        if (path / "config.json").is_file():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown user's home, a zero byte
        raise NotFound(f"base: {base[:80]!r} is not a directory's name: {error}") from None
    if base.count("/") == 1 and not path.is_absolute():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(base, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            raise NotFound(
                f"base: {base!r} is not in the local hub cache; the provider downloads it with `hf download {base}`"
            ) from None
    shipped = ", ".join(sorted(SHIPPED))
    raise NotFound(f"base: {base!r} is neither a shipped backbone ({shipped}), a checkpoint directory nor a hub id")


def describe_backbone(base: str) -> BackboneInfo:
    """Read what a backbone is from config.json and nexus.json, without loading it.

    Raises:
        NotFound: there is no such backbone.
        BadJob: the directory holds no vision-language model that we can read.
    """
    path = resolve_base(base)
    try:
        config = json.loads((path / "config.json").read_text())
        extra = json.loads((path / "nexus.json").read_text()) if (path / "nexus.json").is_file() else {}
        text = config.get("text_config", config)
        hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        model_type = str(config["model_type"])
    except (OSError, ValueError, KeyError) as error:
        raise BadJob(f"base: {base!r} has no readable config.json of a vision-language model ({error!r})") from error
    return BackboneInfo(
        path=path,
        name=base if base in SHIPPED else str(extra.get("name", path.name)),
        fingerprint=_fingerprint(path),
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        image_size=int(extra.get("image_size", IMAGE_SIZE)),
        query_tokens=int(extra.get("query_tokens", QUERY_TOKENS)),
        query_token=str(extra.get("query_token", "")),
        prompt=str(extra.get("prompt", "{instruction}")),
        options=extra,
    )


_FINGERPRINTS: dict[tuple[tuple[str, int, int], ...], str] = {}


def _fingerprint(path: Path) -> str:
    """Sha256 over configuration, tokenizer, preprocessing and weights; remembered while no file changes."""
    names = sorted({*path.glob("*.json"), *path.glob("*.safetensors"), *path.glob("*.jinja")})
    stats = [(name, name.stat()) for name in names]
    key = tuple((str(name), stat.st_mtime_ns, stat.st_size) for name, stat in stats)
    if key not in _FINGERPRINTS:
        digest = hashlib.sha256()
        for name, stat in stats:
            digest.update(f"{name.name}:{stat.st_size}\n".encode())
            with name.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        _FINGERPRINTS[key] = digest.hexdigest()
    return _FINGERPRINTS[key]
