"""The backbones there are, as their files describe them; known without torch. Master, plan and CLI read this."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexus_bus.errors import BadJob, NotFound
from nexus_bus.models.tensorfile import HEADER_LIMIT
from nexus_bus.nearest import nearest

SHIPPED = {"nexus-nano": Path(__file__).parent / "nano"}
QUERY_TOKENS = 8  # appended to every prompt of a backbone that does not say otherwise
IMAGE_SIZE = 224  # of a backbone that takes any size and does not say otherwise
PROMPT_TOKENS = 1024  # longest prompt served: a longer one would make everybody in its group wait
WORDS = 48  # tokens that a plan keeps free for chat template and instruction
_LAYER = re.compile(r"\.layers\.\d+\.(?:.+\.)?([^.]+)\.weight$")
_VISION = re.compile(r"vision|visual")  # as every family calls its other tower
PAIR = "pair"  # `kind` in nexus.json of a vision encoder beside a text encoder

Config = Mapping[str, Any]


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
    image_step: int  # nexus.json may set image_size to multiples of this; 0: the model takes one size only
    tokens_per_view: int  # image tokens of one view, without what a template puts around them
    max_tokens: int  # longest prompt
    query_tokens: int  # action-query tokens at the end of every prompt
    query_token: str  # empty: the tokenizer's end-of-sequence token
    prompt: str  # template with {instruction}
    tiers: tuple[str, ...]
    suffixes: bool  # whether heads may append tokens of their own
    targets: tuple[str, ...] = ()  # last names of the layers that an adapter may adapt; empty: its files do not tell
    options: dict[str, Any] = field(default_factory=dict)  # nexus.json as it stands


@dataclass(frozen=True)
class Kind:
    """What all checkpoints of one model type have in common."""

    text: str  # types of the two halves where config.json leaves them out
    vision: str
    tokens: Callable[[Config, Config, Config, int], int]  # of a view: (config, vision half, preprocessing, image size)
    resizes: bool = False  # takes images of any size that its patches divide
    suffixes: bool = False
    least_views: int = 0


def _side(vision: Config, size: int) -> int:
    """Patches along one edge."""
    return size // _edge(vision["patch_size"])


def _edge(value: Any) -> int:
    """A size that some files give as a number and others as [height, width]."""
    if isinstance(value, Sequence):
        if len(set(value)) != 1:
            raise ValueError(f"{value} is not square")
        return int(value[0])
    return int(value)


def _qwen_tokens(config: Config, vision: Config, preprocessing: Config, size: int) -> int:
    """As its image processor resizes: to whole merged patches, within the pixels that preprocessing allows."""
    unit = vision["patch_size"] * vision["spatial_merge_size"]
    limits = preprocessing.get("size") or {}
    least = preprocessing.get("min_pixels") or limits.get("shortest_edge") or 56 * 56
    most = preprocessing.get("max_pixels") or limits.get("longest_edge") or 28 * 28 * 1280
    side = round(size / unit)
    if (side * unit) ** 2 > most:
        side = max(1, math.floor(math.sqrt(most) / unit))
    elif (side * unit) ** 2 < least:
        side = math.ceil(math.sqrt(least) / unit)
    return side**2


def _shuffled_tokens(config: Config, vision: Config, preprocessing: Config, size: int) -> int:
    return _side(vision, size) ** 2 // int(config.get("scale_factor", 2)) ** 2


def _internvl_tokens(config: Config, vision: Config, preprocessing: Config, size: int) -> int:
    return int(_side(vision, size) ** 2 * float(config.get("downsample_ratio", 0.5)) ** 2)


def _gemma3_tokens(config: Config, vision: Config, preprocessing: Config, size: int) -> int:
    return int(config.get("mm_tokens_per_image", 256))


def _paligemma_tokens(config: Config, vision: Config, preprocessing: Config, size: int) -> int:
    return _side(vision, size) ** 2


def _llava_tokens(config: Config, vision: Config, preprocessing: Config, size: int) -> int:
    tower = vision.get("model_type")
    if tower not in LLAVA_TOWERS:
        raise BadJob(f"base: a llava with the vision tower {tower!r}; served are those with {', '.join(LLAVA_TOWERS)}")
    keeps_class = config.get("vision_feature_select_strategy", "default") == "full" and tower == "clip_vision_model"
    return _side(vision, size) ** 2 + keeps_class


LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")  # others show an image by a number of tokens that varies
KINDS = {
    "qwen3_vl": Kind("qwen3_vl_text", "qwen3_vl_vision", _qwen_tokens, resizes=True, suffixes=True),
    "qwen2_5_vl": Kind("qwen2_5_vl_text", "qwen2_5_vl_vision", _qwen_tokens, resizes=True, suffixes=True),
    "qwen2_vl": Kind("qwen2_vl_text", "qwen2_vl_vision", _qwen_tokens, resizes=True, suffixes=True),
    "idefics3": Kind("llama", "idefics3_vision", _shuffled_tokens),
    "smolvlm": Kind("llama", "smolvlm_vision", _shuffled_tokens),
    "paligemma": Kind("gemma", "siglip_vision_model", _paligemma_tokens, least_views=1),
    "gemma3": Kind("gemma3_text", "siglip_vision_model", _gemma3_tokens),
    "internvl": Kind("qwen2", "internvl_vision", _internvl_tokens),
    "llava": Kind("llama", "clip_vision_model", _llava_tokens),
}
PAIR_VISIONS = ("dinov2", "dinov2_with_registers")
PAIR_TEXTS = ("bert", "mpnet", "roberta")
_QWEN_VISION = {"patch_size": 14, "spatial_merge_size": 2}
# Files on the hub leave out what equals transformers' default of a half; a test holds these against transformers itself.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "max_position_embeddings": 2048},
    "mistral": {"hidden_size": 4096, "num_hidden_layers": 32, "max_position_embeddings": 131072},
    "gemma": {"hidden_size": 3072, "num_hidden_layers": 28, "max_position_embeddings": 8192},
    "gemma2": {"hidden_size": 2304, "num_hidden_layers": 26, "max_position_embeddings": 8192},
    "gemma3_text": {"hidden_size": 2304, "num_hidden_layers": 26, "max_position_embeddings": 131072},
    "qwen2": {"hidden_size": 4096, "num_hidden_layers": 32, "max_position_embeddings": 32768},
    "qwen3": {"hidden_size": 4096, "num_hidden_layers": 32, "max_position_embeddings": 32768},
    "qwen2_vl_text": {"hidden_size": 8192, "num_hidden_layers": 80, "max_position_embeddings": 32768},
    "qwen2_5_vl_text": {"hidden_size": 8192, "num_hidden_layers": 80, "max_position_embeddings": 32768},
    "qwen3_vl_text": {"hidden_size": 4096, "num_hidden_layers": 32, "max_position_embeddings": 128000},
    "qwen2_vl_vision": _QWEN_VISION,
    "qwen2_5_vl_vision": _QWEN_VISION,
    "qwen3_vl_vision": {"patch_size": 16, "spatial_merge_size": 2},
    "clip_vision_model": {"image_size": 224, "patch_size": 32},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16},
    "idefics3_vision": {"image_size": 224, "patch_size": 32},
    "smolvlm_vision": {"image_size": 224, "patch_size": 32},
    "internvl_vision": {"image_size": [448, 448], "patch_size": [14, 14]},
    "dinov2": {"hidden_size": 768, "num_hidden_layers": 12, "patch_size": 14},
    "dinov2_with_registers": {"hidden_size": 768, "num_hidden_layers": 12, "patch_size": 16},
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 512},
    "mpnet": {"hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 512},
    "roberta": {"hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 512},
}


def resolve_base(base: str) -> Path:
    """Find the directory of a base model: a shipped name, a directory, or a hub id already in the local hub cache.

    Raises:
        NotFound: none of these.
    """
    if base in SHIPPED:
        return SHIPPED[base]
    try:
        path = Path(base).expanduser()
        if (path / "config.json").is_file() or (path / "nexus.json").is_file():
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
        BadJob: the directory holds no model that we can read.
    """
    path = resolve_base(base)
    try:
        extra = json.loads((path / "nexus.json").read_text()) if (path / "nexus.json").is_file() else {}
        facts = _pair(path, extra) if extra.get("kind") == PAIR else _checkpoint(base, path, extra)
        info = BackboneInfo(
            path=path,
            name=str(extra.get("name", path.name)) if (Path(base) / "config.json").is_file() else base,
            query_tokens=int(extra.get("query_tokens", QUERY_TOKENS)),
            query_token=str(extra.get("query_token", "")),
            prompt=str(extra.get("prompt", "{instruction}")),
            options=extra,
            **facts,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadJob(f"base: {base!r} has no readable config.json of a vision-language model ({error!r})") from error
    if info.image_size < 1 or (info.image_step and info.image_size % info.image_step):
        raise BadJob(f"base: {base!r}: image_size {info.image_size} in nexus.json is no multiple of {info.image_step} pixels")
    return info


def check_backbone(info: BackboneInfo, *, tier: str, layers: Sequence[int], cameras: int, suffix: int) -> None:
    """Whether a job can have what it wants of a backbone.

    Args:
        layers: the hidden states that its head reads, counted as in transformers: 0 the embeddings, -1 the last.
        cameras: views of one observation.
        suffix: tokens of its own that its head appends to the prompt, at most.

    Raises:
        BadJob: it cannot; the text begins with the field.
    """
    if tier not in info.tiers:
        raise BadJob(f"tier: {tier!r} is not for {info.name!r} ({info.model_type}), which serves {', '.join(info.tiers)}")
    if suffix and not info.suffixes:
        able = ", ".join(name for name, kind in KINDS.items() if kind.suffixes)
        raise BadJob(
            f"head.type: it appends tokens to the prompt; {info.name!r} ({info.model_type}) takes none, these do: {able}"
        )
    known = {-1} if info.model_type == PAIR else set(range(-info.layers - 1, info.layers + 1))
    if odd := [layer for layer in layers if layer not in known]:
        there = "-1 alone" if known == {-1} else f"{min(known)} … {max(known)}"
        raise BadJob(f"head.type: it reads layer {odd[0]}; {info.name!r} ({info.model_type}) has {there}")
    least = KINDS[info.model_type].least_views if info.model_type in KINDS else 0
    if cameras < least:
        raise BadJob(f"observation.cameras: {cameras}; {info.name!r} ({info.model_type}) needs at least {least}")
    length = cameras * info.tokens_per_view + info.query_tokens + WORDS + suffix
    if length > info.max_tokens:
        more = f", words and up to {suffix} tokens of the head" if suffix else " and words"
        raise BadJob(
            f"observation.cameras: {cameras} views of {info.tokens_per_view} tokens, with queries{more}, make {length};"
            f" {info.name!r} takes {info.max_tokens}: show fewer views, or a base with fewer tokens a view"
        )


def check_targets(info: BackboneInfo, targets: Sequence[str]) -> None:
    """Whether layers of these names are there to be adapted.

    Raises:
        BadJob: one is not; lists what there is.
    """
    if info.targets and (odd := [target for target in targets if target not in info.targets]):
        raise BadJob(
            f"lora.targets: no layer of the language model of {info.name!r} is called {odd[0][:80]!r}"
            f"{nearest(odd[0][:80], info.targets)}"
        )


def require_weights(info: BackboneInfo) -> None:
    """Whether its weights are there in the one format that is read: others would be unpickled.

    Raises:
        BadJob: they are not, which would otherwise be found out by every worker, over and over.
    """
    places = pair_paths(info.path, info.options) if info.model_type == PAIR else (info.path,)
    for place in places:
        if not any(place.glob("*.safetensors")):
            raise BadJob(f"base: {info.name!r} has no weights as *.safetensors in {place}")


def _checkpoint(base: str, path: Path, extra: Config) -> dict[str, Any]:
    """A vision-language model as one checkpoint."""
    config = json.loads((path / "config.json").read_text())
    model_type = str(config["model_type"])
    kind = KINDS.get(model_type)
    if kind is None:
        raise BadJob(f"base: {base!r} is a {model_type!r}; served are {', '.join(KINDS)}, and a {PAIR!r} by its nexus.json")
    text = (
        _half(config["text_config"], kind.text, model_type) if "text_config" in config else config
    )  # Qwen2.5-VL's lie at the top
    vision = _half(config["vision_config"], kind.vision, model_type)
    size = int(extra.get("image_size", IMAGE_SIZE if kind.resizes else _edge(vision["image_size"])))
    if not kind.resizes and size != _edge(vision["image_size"]):
        raise BadJob(f"base: {base!r}: image_size {size} in nexus.json; this model takes {_edge(vision['image_size'])} alone")
    return {
        "fingerprint": _fingerprint(path),
        "model_type": model_type,
        "hidden": int(text["hidden_size"]),
        "layers": int(text["num_hidden_layers"]),
        "image_size": size,
        "image_step": vision["patch_size"] * vision["spatial_merge_size"] if kind.resizes else 0,
        "tokens_per_view": kind.tokens(config, vision, _preprocessing(path), size),
        "max_tokens": min(int(text["max_position_embeddings"]), PROMPT_TOKENS),
        "tiers": ("frozen", "lora"),
        "suffixes": kind.suffixes,
        "targets": _targets(path),
    }


def _pair(path: Path, extra: Config) -> dict[str, Any]:
    """A vision encoder and a text encoder, each in a directory that nexus.json names."""
    places = pair_paths(path, extra)
    halves: list[dict[str, Any]] = []
    for name, place, served in zip(("vision", "text"), places, (PAIR_VISIONS, PAIR_TEXTS), strict=True):
        if not (place / "config.json").is_file():
            raise BadJob(f"base: nexus.json, {name}: there is no model in {place}")
        config = json.loads((place / "config.json").read_text())
        if config["model_type"] not in served:
            raise BadJob(f"base: nexus.json, {name}: {place} is a {config['model_type']!r}; served are {', '.join(served)}")
        halves.append(_half(config, config["model_type"]))
    vision, text = halves
    width = int(extra.get("view_width", vision["hidden_size"]))
    if not vision["hidden_size"] <= width <= 3 * vision["hidden_size"]:
        raise BadJob(f"base: nexus.json, view_width: {width} is not one to three times {vision['hidden_size']}, the encoder's")
    size = int(extra.get("image_size", IMAGE_SIZE))
    own = hashlib.sha256((path / "nexus.json").read_bytes())
    for place in places:
        own.update(_fingerprint(place).encode())
    return {
        "fingerprint": own.hexdigest(),
        "model_type": PAIR,
        "hidden": width + int(text["hidden_size"]),
        "layers": 1,
        "image_size": size,
        "image_step": vision["patch_size"],
        "tokens_per_view": _side(vision, size) ** 2 + 1,
        "max_tokens": PROMPT_TOKENS,
        "tiers": ("frozen",),
        "suffixes": False,
    }


def pair_paths(path: Path, extra: Config) -> tuple[Path, Path]:
    """Directories of a pair's vision and text encoder; relative ones lie below the pair's own."""
    return path / Path(str(extra["vision"])), path / Path(str(extra["text"]))


def _half(config: Config, default: str, whole: str = "") -> dict[str, Any]:
    """A half's configuration over the defaults of its type; older files leave that out, or call it as the whole model."""
    own = config.get("model_type", default)
    return {"model_type": default, **DEFAULTS.get(default if own == whole else own, {}), **config}


def _preprocessing(path: Path) -> Config:
    """What the image processor is told, wherever this version of transformers saved it."""
    if (file := path / "preprocessor_config.json").is_file():
        return json.loads(file.read_text())
    if (file := path / "processor_config.json").is_file():
        return json.loads(file.read_text()).get("image_processor", {})
    return {}


def _targets(path: Path) -> tuple[str, ...]:
    """Last names of the language model's linear layers, as the headers of its weights have them."""
    found: set[str] = set()
    for file in path.glob("*.safetensors"):
        with file.open("rb") as weights:
            length = int.from_bytes(weights.read(8), "little")
            header = json.loads(weights.read(length)) if length <= HEADER_LIMIT else {}
        for name, tensor in header.items():
            layer = _LAYER.search(name)
            if layer and not _VISION.search(name) and len(tensor["shape"]) == 2:
                found.add(layer[1])
    return tuple(sorted(found))


_FINGERPRINTS: dict[tuple[tuple[str, int, int], ...], str] = {}


def _fingerprint(path: Path) -> str:
    """Sha256 over configuration, tokenizer, preprocessing and weights; remembered while no file changes."""
    kinds = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # the last two: vocabularies of older tokenizers
    names = sorted({name for kind in kinds for name in path.glob(kind)})
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
