"""The backbone that ships: it opens offline as any checkpoint does, and its query tokens know where the named block is."""

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from nexus_bus.models.bases import SHIPPED

FOLDER = SHIPPED["nexus-nano"]
SEED, COUNT = 20, 24
ALLOWED_CM = 3.0  # little more than half a block; the card gives a median of 1.2


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(FOLDER).eval()


def test_it_stays_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 6.6e6


@pytest.mark.parametrize("size", [64, 96, 224])
def test_a_square_picture_is_nine_tokens_whatever_its_size(size: int) -> None:
    processor = AutoImageProcessor.from_pretrained(FOLDER)
    grid = processor(np.zeros((size, size, 3), np.uint8), return_tensors="np")["image_grid_thw"]
    assert int(grid.prod()) // processor.merge_size**2 == 9


def test_the_tokenizer_knows_the_query_token_and_the_layout() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    card = json.loads((FOLDER / "nexus.json").read_text())
    assert card["name"] == "nexus-nano"
    assert tokenizer.tokenize(card["query_token"] * card["query_tokens"]) == [card["query_token"]] * card["query_tokens"]
    content = [{"type": "image"}, {"type": "text", "text": "touch the red block"}]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    assert chat == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>touch the red block<|im_end|>\n<|im_start|>assistant\n"
    )


def test_features_are_finite_and_depend_on_picture_and_sentence(model: Any) -> None:
    tokenizer, processor = AutoTokenizer.from_pretrained(FOLDER), AutoImageProcessor.from_pretrained(FOLDER)
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)

    def features(picture: np.ndarray, sentence: str) -> torch.Tensor:
        content = [{"type": "image"}, {"type": "text", "text": sentence}]
        chat = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        text = chat.replace("<|image_pad|>", "<|image_pad|>" * 9) + "<|action_query|>" * 8
        ids = tokenizer(text, return_tensors="pt").input_ids
        kinds = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            seen = processor(picture, return_tensors="pt")
            hidden = model.model(input_ids=ids, mm_token_type_ids=kinds, **seen).last_hidden_state
        return hidden[0, -8:]

    first = features(noise, "touch the red block")
    assert first.shape == (8, model.config.text_config.hidden_size)
    assert bool(torch.isfinite(first).all())
    assert not torch.allclose(first, features(noise // 2, "touch the red block"))
    assert not torch.allclose(first, features(noise, "touch the blue block"))


@pytest.mark.gl
def test_the_named_block_is_found_on_the_table() -> None:
    from ops.pretrain.probe import HOME, Frozen, touch_scenes

    images, sentences, truths = touch_scenes(SEED, COUNT, HOME)
    frozen = Frozen(FOLDER)
    features = frozen.features(images, sentences)
    gaps = [frozen.read(features, name) - np.array([truth[name] for truth in truths]) for name in ("tx", "ty")]
    off = np.hypot(*gaps) * 100
    assert np.mean(off < ALLOWED_CM) >= 0.75, f"errors in cm: {np.sort(off).round(1)}"
