"""The catalogue is read by processes without torch, so it is tested in one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nexus_bus.errors import BadJob, NotFound
from nexus_bus.models.bases import describe_backbone, resolve_base
from nexus_bus.models.catalog import HEADS, check_head, check_size, head_weights, suffix_tokens
from schemas.job import HeadSpec


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that somebody installed beside the project are not what these tests are about."""
    monkeypatch.setattr("nexus_bus.models.catalog.installed", dict)


def test_the_catalogue_needs_no_torch():
    code = (
        "import sys\n"
        "from nexus_bus.models import bases, catalog\n"
        "bases.describe_backbone('nexus-nano')\n"
        "catalog.check_head(catalog.HeadSpec(type='pi'))\n"
        "catalog.installed()\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_process_settings_refuse_to_come_too_late():
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "from nexus_bus.models import process\n"
        "process.settings()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "after torch was imported" in done.stderr


def test_defaults_are_filled_in():
    assert check_head(HeadSpec(type="oft", options={"blocks": 3})).options == {"width": 0, "blocks": 3, "value_width": 128}
    assert check_head(HeadSpec(type="gr00t")).options["steps"] == 4
    assert (check_head(HeadSpec(type="pi")).options["repeats"], check_head(HeadSpec(type="gr00t")).options["repeats"]) == (2, 8)
    assert {name for name, entry in HEADS.items() if entry.rl} == {"oft"}
    assert {name: entry.tiers for name, entry in HEADS.items()} == {
        "oft": ("frozen", "lora"),
        "gr00t": ("frozen", "lora"),
        "pi": ("frozen", "lora"),
        "fast": ("lora",),
    }


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (HeadSpec(type="diffusion"), "head.type: 'diffusion' does not exist; there are fast, gr00t, oft, pi"),
        (HeadSpec(options={"depth": 3}), "head.options.depth: 'oft' has no such option; did you mean 'width'"),
        (HeadSpec(options={"blocks": "two"}), "head.options.blocks: 'two' is not a whole number"),
        (HeadSpec(options={"blocks": True}), "head.options.blocks: True is not a whole number"),
        (HeadSpec(options={"blocks": 99}), r"head.options.blocks: 99 is outside \[1, 16\]"),
        (HeadSpec(type="gr00t", options={"heads": 5}), "head.options.heads: 5 does not divide the width 96"),
        (HeadSpec(type="pi", options={"heads": 5}), "head.options.heads: 5 does not divide the width 64"),
    ],
)
def test_a_wrong_head_is_refused_with_the_field(spec: HeadSpec, says: str):
    with pytest.raises(BadJob, match=says):
        check_head(spec)


def test_the_shipped_backbone_describes_itself():
    info = describe_backbone("nexus-nano")
    assert (info.name, info.hidden, info.layers, info.image_size, info.query_tokens) == ("nexus-nano", 128, 4, 96, 8)
    assert "{instruction}" in info.prompt
    assert len(info.fingerprint) == 64


def test_the_fingerprint_follows_the_weights(tmp_path: Path):
    shutil.copytree(resolve_base("nexus-nano"), tmp_path / "copy")
    same = describe_backbone(str(tmp_path / "copy")).fingerprint
    assert same == describe_backbone("nexus-nano").fingerprint
    weights = tmp_path / "copy" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert describe_backbone(str(tmp_path / "copy")).fingerprint != same


def test_an_unknown_base_is_refused(tmp_path: Path):
    with pytest.raises(NotFound, match="neither a shipped backbone"):
        describe_backbone("nexus-giant")
    with pytest.raises(NotFound, match="not in the local hub cache"):
        describe_backbone("nobody/no-such-model")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(BadJob, match=r"no readable config\.json"):
        describe_backbone(str(tmp_path))


@pytest.mark.parametrize("base", ["a" * 5000, "~no-such-user-here", "a\0b"])
def test_a_base_that_cannot_be_a_path_is_refused(base: str):
    with pytest.raises(NotFound, match=r"^base: "):
        describe_backbone(base)


@pytest.mark.parametrize(
    "head",
    [
        HeadSpec(type="oft", options={"width": 512, "blocks": 4}),
        HeadSpec(type="gr00t", options={"width": 256, "layers": 6}),
        HeadSpec(type="pi", options={"width": 256, "mlp_ratio": 4}),
        HeadSpec(type="fast", options={"levels": 500}),
    ],
)
def test_the_estimated_size_of_a_head_is_near_its_real_one(head: HeadSpec):
    from nexus_bus.models.heads import FeatureShape, build_head

    real = sum(weight.numel() for weight in build_head(head, FeatureShape(128, 4), 8, 4, None).parameters())
    assert head_weights(check_head(head), 128, 4) == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize(
    "head",
    [
        HeadSpec(type="oft", options={"width": 8192, "blocks": 16}),
        HeadSpec(type="gr00t", options={"width": 4096, "layers": 48}),
        HeadSpec(type="pi", options={"width": 4096, "mlp_ratio": 8}),
    ],
)
def test_a_head_that_would_fill_the_machine_is_refused(head: HeadSpec):
    with pytest.raises(BadJob, match=r"head\.options: the weights of this '\w+' take about [\d.]+ GB, at most 2\.1 are served"):
        check_size(check_head(head), 128, 4)
    check_size(check_head(HeadSpec(type="gr00t", options={"width": 1536, "layers": 16, "heads": 32})), 2048, 28)


def test_an_answer_decoded_token_by_token_is_bounded():
    assert suffix_tokens(HeadSpec(type="fast", horizon=64), 4) == 257
    assert suffix_tokens(HeadSpec(type="oft", horizon=8), 100) == 0
    with pytest.raises(BadJob, match=r"head\.horizon: 64 actions of 7 numbers are up to 448 tokens.*at most 36"):
        suffix_tokens(HeadSpec(type="fast", horizon=64), 7)
