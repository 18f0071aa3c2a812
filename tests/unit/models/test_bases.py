"""What the registry says about backbones it has only seen the files of, and what a plan may not ask of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.errors import BadJob
from nexus_bus.models.bases import (
    DEFAULTS,
    KINDS,
    PAIR,
    BackboneInfo,
    check_backbone,
    check_targets,
    describe_backbone,
    require_weights,
    resolve_base,
)

# As such checkpoints lie on the hub: what equals a default is left out, and older ones have a flat text half.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"hidden_size": 2048, "num_hidden_layers": 36, "max_position_embeddings": 128000, "vision_config": {"patch_size": 14}},
        {"min_pixels": 3136, "max_pixels": 12845056},
    ),
    "qwen3_vl": (
        {
            "text_config": {"hidden_size": 2560, "num_hidden_layers": 36, "model_type": "qwen3_vl_text"},
            "vision_config": {"patch_size": 16, "model_type": "qwen3_vl"},
        },
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}},
    ),
    "idefics3": (
        {
            "scale_factor": 2,
            "text_config": {"model_type": "llama", "hidden_size": 4096},
            "vision_config": {"image_size": 364, "patch_size": 14, "model_type": "idefics3"},
        },
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    ),
    "paligemma": (
        {
            "text_config": {"hidden_size": 2048, "num_hidden_layers": 18, "model_type": "gemma"},
            "vision_config": {"patch_size": 14, "projection_dim": 2048, "model_type": "siglip_vision_model"},
        },
        {},
    ),
    "gemma3": (
        {
            "mm_tokens_per_image": 256,
            "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "model_type": "gemma3_text"},
            "vision_config": {"image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model"},
        },
        {},
    ),
    "internvl": (
        {
            "downsample_ratio": 0.5,
            "text_config": {"hidden_size": 896, "num_hidden_layers": 24, "model_type": "qwen2"},
            "vision_config": {"image_size": [448, 448], "patch_size": [14, 14], "model_type": "internvl_vision"},
        },
        {},
    ),
    "llava": (
        {
            "vision_feature_select_strategy": "default",
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096},
            "vision_config": {"image_size": 336, "patch_size": 14, "model_type": "clip_vision_model"},
        },
        {},
    ),
}


def written(path: Path, model_type: str, extra: dict[str, Any] | None = None, /, **changes: Any) -> str:
    config, preprocessing = FILES[model_type]
    (path / "config.json").write_text(json.dumps({"model_type": model_type} | config | changes))
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    if extra is not None:
        (path / "nexus.json").write_text(json.dumps(extra))
    return str(path)


@pytest.mark.parametrize(
    ("model_type", "hidden", "layers", "size", "tokens"),
    [
        ("qwen2_5_vl", 2048, 36, 224, 64),
        ("qwen3_vl", 2560, 36, 224, 64),  # its preprocessing enlarges what has fewer than 256 × 256 pixels
        ("idefics3", 4096, 32, 364, 169),
        ("paligemma", 2048, 18, 224, 256),
        ("gemma3", 2560, 34, 896, 256),
        ("internvl", 896, 24, 448, 256),
        ("llava", 4096, 32, 336, 576),
    ],
)
def test_a_checkpoint_is_described_from_its_files(
    tmp_path: Path, model_type: str, hidden: int, layers: int, size: int, tokens: int
):
    info = describe_backbone(written(tmp_path, model_type))
    assert (info.hidden, info.layers, info.image_size, info.tokens_per_view) == (hidden, layers, size, tokens)
    assert info.tiers == ("frozen", "lora")
    assert info.suffixes == model_type.startswith("qwen")
    assert info.max_tokens == 1024


def test_the_defaults_are_those_of_transformers():
    from transformers import CONFIG_MAPPING

    for model_type, fields in DEFAULTS.items():
        config = CONFIG_MAPPING[model_type]()
        for name, value in fields.items():
            real = getattr(config, name)
            assert (list(real) if isinstance(real, tuple) else real) == value, f"{model_type}.{name}"
    for model_type, kind in KINDS.items():
        config = CONFIG_MAPPING[model_type]()
        assert (config.text_config.model_type, config.vision_config.model_type) == (kind.text, kind.vision)


def test_every_kind_has_a_family():
    from nexus_bus.models.families import FAMILIES

    assert set(FAMILIES) == {*KINDS, PAIR}


def test_an_image_size_follows_the_patches(tmp_path: Path):
    assert describe_backbone(written(tmp_path, "qwen2_5_vl", {"image_size": 112})).tokens_per_view == 16
    assert describe_backbone(written(tmp_path, "qwen3_vl", {"image_size": 320})).tokens_per_view == 100
    with pytest.raises(BadJob, match=r"image_size 100 in nexus\.json is no multiple of 28 pixels"):
        describe_backbone(written(tmp_path, "qwen2_5_vl", {"image_size": 100}))
    with pytest.raises(BadJob, match=r"image_size 224 in nexus\.json; this model takes 336 alone"):
        describe_backbone(written(tmp_path, "llava", {"image_size": 224}))


def test_a_model_of_no_family_is_refused_with_those_there_are(tmp_path: Path):
    with pytest.raises(BadJob, match=r"is a 'mllama'; served are qwen3_vl, .*gemma3, .*and a 'pair'"):
        describe_backbone(written(tmp_path, "llava", model_type="mllama"))
    tower = {"model_type": "pixtral", "image_size": 1024, "patch_size": 16}
    with pytest.raises(BadJob, match="vision tower 'pixtral'; served are those with clip_vision_model, siglip_vision_model"):
        describe_backbone(written(tmp_path, "llava", vision_config=tower))
    with pytest.raises(BadJob, match=r"no readable config\.json"):
        describe_backbone(written(tmp_path, "llava", text_config={"model_type": "phi"}))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tier": "full"}, "tier: 'full' is not for 'nexus-nano' (qwen3_vl), which serves frozen, lora"),
        ({"layers": (1, 5)}, "head.type: it reads layer 5; 'nexus-nano' (qwen3_vl) has -5 … 4"),
        (
            {"cameras": 120},
            "observation.cameras: 120 views of 9 tokens, with queries, words and up to 20 tokens of the head, make 1156",
        ),
    ],
)
def test_what_a_backbone_cannot_do_is_refused_with_the_field(asked: dict[str, Any], says: str):
    given: dict[str, Any] = {"tier": "lora", "layers": (0, 4, -1, -5), "cameras": 2, "suffix": 20}
    check_backbone(describe_backbone("nexus-nano"), **given)
    with pytest.raises(BadJob) as error:
        check_backbone(describe_backbone("nexus-nano"), **(given | asked))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "asked", "says"),
    [
        (
            "gemma3",
            {"suffix": 20},
            "head.type: it appends tokens to the prompt; 'mine' (gemma3) takes none, these do: qwen",
        ),
        ("llava", {"cameras": 2}, "2 views of 576 tokens, with queries and words, make 1208; 'mine' takes 1024"),
        ("paligemma", {"cameras": 0}, "observation.cameras: 0; 'mine' (paligemma) needs at least 1"),
    ],
)
def test_families_differ_in_what_they_can(tmp_path: Path, model_type: str, asked: dict[str, Any], says: str):
    given: dict[str, Any] = {"tier": "lora", "layers": (-1,), "cameras": 1, "suffix": 0}
    info = describe_backbone(written(tmp_path, model_type, {"name": "mine"}))
    check_backbone(info, **given)
    with pytest.raises(BadJob) as error:
        check_backbone(info, **(given | asked))
    assert says in str(error.value)


@pytest.mark.parametrize("target", [".*", "", "self_attn.q_proj", "qkv", "lm_head", "q_proj" * 10_000])
def test_an_adapter_names_layers_of_the_language_model(target: str):
    info = describe_backbone("nexus-nano")
    check_targets(info, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    with pytest.raises(BadJob, match=r"^lora\.targets: no layer .* there are down_proj, gate_proj, k_proj, o_proj") as error:
        check_targets(info, ("q_proj", target))
    assert len(str(error.value)) < 300
    check_targets(replace(info, targets=()), (target,))  # its files do not tell; the trainer does


def test_a_pair_has_one_layer_and_no_adapters():
    info: BackboneInfo = replace(describe_backbone("nexus-nano"), model_type=PAIR, layers=1, tiers=("frozen",))
    check_backbone(info, tier="frozen", layers=(-1,), cameras=0, suffix=0)
    with pytest.raises(BadJob, match="tier: 'lora' is not for"):
        check_backbone(info, tier="lora", layers=(-1,), cameras=1, suffix=0)
    with pytest.raises(BadJob, match=r"reads layer 1; .* has -1 alone"):
        check_backbone(info, tier="frozen", layers=(1,), cameras=1, suffix=0)


def test_weights_in_another_format_are_refused_before_anything_runs(tmp_path: Path):
    for path in resolve_base("nexus-nano").iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadJob, match=r"has no weights as \*\.safetensors in"):
        require_weights(describe_backbone(str(tmp_path)))
