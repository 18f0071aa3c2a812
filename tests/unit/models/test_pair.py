"""A vision encoder beside a text encoder: each as its own library loads it, joined so that a query token shows all."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.features import Look, VLAFeature
from nexus_bus.models.prompt import Prompt
from schemas.job import LoraSpec
from tests.unit.models import tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    path = tmp_path_factory.mktemp("pair")
    tiny.pair(path)
    return Backbone.load(str(path), device="cpu")


def pictures(count: int, size: int = 56, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8))


def query(feature: VLAFeature) -> torch.Tensor:
    return feature.hidden[feature.query_span[0]]


def test_a_feature_is_the_same_to_the_bit_alone_and_among_others(pair: Backbone):
    assert pair.tile > 1
    said = ["touch the blue block", "stop", "push the red block to the left"]
    looks = [Look(Prompt(pictures(i % 3, 56 + 20 * (i % 2), seed=i), said[i % 3])) for i in range(9)]
    for look, together in zip(looks, pair.encode(looks), strict=True):
        alone = pair.encode([look])[0]
        assert torch.equal(alone.hidden, together.hidden)
        assert alone.feature_id == together.feature_id


def test_tokens_are_the_encoders_own_states(pair: Backbone):
    views = pictures(2)
    feature = pair.encode([Look(Prompt(views, "touch the blue block"))])[0]
    eye, reader = pair.info.path / "eye", pair.info.path / "reader"
    pixels = AutoImageProcessor.from_pretrained(eye)(images=views, return_tensors="pt", do_resize=False, do_center_crop=False)
    words = AutoTokenizer.from_pretrained(reader)("touch the blue block", return_tensors="pt")
    with torch.no_grad():
        seen = AutoModel.from_pretrained(eye, attn_implementation="eager").eval()(pixels["pixel_values"]).last_hidden_state
        said = AutoModel.from_pretrained(reader, attn_implementation="eager").eval()(**words).last_hidden_state
    kinds = feature.token_type
    assert kinds.tolist() == [1] * 34 + [0] * 6 + [2] * 4
    assert feature.query_span == (40, 44)
    assert feature.hidden.shape == (44, 32 + 16)
    torch.testing.assert_close(feature.hidden[kinds == 1, :32], seen.flatten(0, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(feature.hidden[kinds == 0, 32:], said[0], rtol=0, atol=1e-5)
    assert not feature.hidden[kinds == 1, 32:].any()
    assert not feature.hidden[kinds == 0, :32].any()
    torch.testing.assert_close(query(feature)[32:], said[0].mean(0), rtol=0, atol=1e-5)


def test_a_query_shows_where_things_are_in_which_view_and_what_was_said(pair: Backbone):
    """One bright corner: moved, or in the other view, or under other words, it gives another query."""
    still, corner, other = np.zeros((3, 56, 56, 3), np.uint8)
    corner[:14, :14], other[42:, 42:] = 255, 255
    base = query(pair.encode([Look(Prompt([corner, still], "go"))])[0])
    for views, said in (([other, still], "go"), ([still, corner], "go"), ([corner, still], "stop"), ([corner], "go")):
        assert (query(pair.encode([Look(Prompt(views, said))])[0]) - base).abs().max() > 0.01


def test_a_place_can_be_read_off_a_query_by_a_linear_map(pair: Backbone):
    """From 80 pictures of one square, to within three pixels in 20 others (guessing would miss by ten)."""
    rng = np.random.default_rng(0)
    places = rng.integers(0, 43, (100, 2))
    views = np.full((100, 56, 56, 3), 90, np.uint8)
    for view, (x, y) in zip(views, places, strict=True):
        view[y : y + 14, x : x + 14] = (250, 30, 30)
    queries = torch.stack([query(feature) for feature in pair.encode([Look(Prompt([view], "go")) for view in views])])
    given = torch.cat([queries, torch.ones(100, 1)], dim=1).double()
    wanted = torch.from_numpy(places).double()
    found = torch.linalg.lstsq(given[:80].T @ given[:80] + 1e-4 * torch.eye(49).double(), given[:80].T @ wanted[:80]).solution
    assert float((given[80:] @ found - wanted[80:]).abs().mean()) < 3


def test_the_matrix_is_always_the_same(pair: Backbone):
    look = Look(Prompt(pictures(2), "go"))
    again = Backbone.load(str(pair.info.path), device="cpu")
    assert torch.equal(pair.encode([look])[0].hidden, again.encode([look])[0].hidden)


def test_a_pair_is_known_by_both_of_its_parts(tmp_path: Path):
    tiny.pair(tmp_path)
    info = describe_backbone(str(tmp_path))
    assert (info.model_type, info.hidden, info.tokens_per_view, info.query_tokens, info.tiers) == (
        "pair",
        48,
        17,
        4,
        ("frozen",),
    )
    for part in ("eye", "reader"):
        weights = tmp_path / part / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        changed = describe_backbone(str(tmp_path)).fingerprint
        assert changed != info.fingerprint
    (tmp_path / "nexus.json").write_text(json.dumps(info.options | {"vision": str(tmp_path / "eye"), "view_width": 64}))
    wide = describe_backbone(str(tmp_path))
    assert wide.hidden == 80
    feature = Backbone.load(str(tmp_path), device="cpu").encode([Look(Prompt(pictures(1), "go"))])[0]
    assert feature.hidden.shape[1] == 80


def test_what_a_pair_cannot_do_is_refused(tmp_path: Path, pair: Backbone):
    with pytest.raises(BadJob, match=r"takes no adapters; use 'frozen'"):
        pair.adapter(LoraSpec())
    with pytest.raises(BadJob, match=r"reads layers \[1\]"):
        pair.encode([Look(Prompt(pictures(1), "go"), layers=(1,))])
    with pytest.raises(BadMessage, match=r"observation.instruction: 51 tokens; the text encoder takes 40"):
        pair.ids([Look(Prompt(pictures(1), "go " * 49))])
    with pytest.raises(BadMessage, match="reserved token"):
        pair.ids([Look(Prompt(pictures(1), "go [SEP] stop"))])
    tiny.pair(tmp_path)
    options = json.loads((tmp_path / "nexus.json").read_text())
    for change, says in (
        ({"vision": "reader"}, r"nexus.json, vision: .*reader is a 'bert'; served are dinov2"),
        ({"text": "nowhere"}, "there is no model in"),
        ({"image_size": 60}, "image_size 60 in nexus.json is no multiple of 14 pixels"),
        ({"view_width": 16}, "view_width"),
    ):
        (tmp_path / "nexus.json").write_text(json.dumps(options | change))
        with pytest.raises(BadJob, match=says):
            describe_backbone(str(tmp_path))
