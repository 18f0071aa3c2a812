"""Every family through the real loading path, on a tiny checkpoint: what a checkpoint from the hub goes through, too."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.families.padded import MANNERS
from nexus_bus.models.features import Look
from nexus_bus.models.prompt import Prompt, load_processor
from schemas.job import LoraSpec
from tests.unit.models import tiny

SAID = ["go", "touch the blue block", "push the red block to the left and stop there", "open the drawer"]
Loaded = Callable[[str], Backbone]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A family's tiny checkpoint, written and loaded once."""
    known: dict[str, Backbone] = {}

    def load(name: str) -> Backbone:
        if name not in known:
            path = tmp_path_factory.mktemp(name)
            tiny.FAMILIES[name](path)
            known[name] = Backbone.load(str(path), device="cpu")
        return known[name]

    return load


@pytest.fixture(params=tiny.FAMILIES)
def base(request: pytest.FixtureRequest, loaded: Loaded) -> Backbone:
    return loaded(request.param)


def pictures(count: int, size: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8))


def ragged(base: Backbone, count: int = 7) -> list[Look]:
    """Other words, one image or two, and not all of the backbone's size."""
    return [
        Look(
            Prompt(pictures(1 + i % 2, base.info.image_size + 24 * (i % 3), seed=i), SAID[i % 4]),
            layers=((-1,), (1, -1))[i % 2],
        )
        for i in range(count)
    ]


def test_a_feature_is_the_same_to_the_bit_alone_and_among_others(base: Backbone):
    assert base.tile > 1  # it found so itself when it was loaded
    looks = ragged(base)
    for look, together in zip(looks, base.encode(looks), strict=True):
        alone = base.encode([look])[0]
        assert torch.equal(alone.hidden, together.hidden)
        assert alone.feature_id == together.feature_id
        assert not alone.hidden.is_inference()


def test_the_files_name_the_layers_that_an_adapter_may_adapt(base: Backbone):
    """So that a plan refuses others, without torch."""
    grafts = getattr(base.family, "grafts", None)
    known = {name.rpartition(".")[2] for name in grafts.places(LoraSpec(targets=base.info.targets))} if grafts else set()
    assert set(base.info.targets) == known
    if grafts is not None:
        with pytest.raises(BadJob, match=f"there are {', '.join(base.info.targets)}$"):
            grafts.places(LoraSpec(targets=("none",)))


def stock(base: Backbone, prompt: Prompt) -> Mapping[str, torch.Tensor]:
    """What the checkpoint's own processor makes of a prompt, tiles switched off."""
    processor = load_processor(base.info.path)
    given = dict(MANNERS[base.info.model_type].whole) if base.info.model_type in MANNERS else {}
    if processor.chat_template is None:
        text = processor.image_token * len(prompt.images) + prompt.instruction
        return processor(text=text, images=list(prompt.images), return_tensors="pt", **given)
    content: list[Any] = [{"type": "image", "image": image} for image in prompt.images]
    return processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": prompt.instruction}]}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=given,
    )  # fmt: skip


@pytest.mark.parametrize("views", [1, 2])
def test_tokens_and_features_are_those_of_the_stock_processor_and_model(base: Backbone, views: int):
    prompt = Prompt(pictures(views, base.info.image_size, seed=9), SAID[2])
    inputs = dict(stock(base, prompt))
    text = base.family.text(prompt.instruction, views)
    assert torch.equal(text.ids[: text.query_span[0]], inputs["input_ids"][0])

    queries = text.ids[None, text.query_span[0] :]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], queries], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name, value in {
        "mm_token_type_ids": 0,
        "token_type_ids": MANNERS["paligemma"].query_type if "labels" in inputs else 0,
    }.items():
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.full_like(queries, value)], dim=1)
    inputs.pop("labels", None)
    model = AutoModelForImageTextToText.from_pretrained(base.info.path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model.model(**inputs, use_cache=False, output_hidden_states=True)
    feature = base.encode([Look(prompt, layers=(0, 2, -1))])[0]
    wanted = torch.cat([out.hidden_states[0][0], out.hidden_states[2][0], out.last_hidden_state[0]], dim=-1)
    torch.testing.assert_close(feature.hidden, wanted, rtol=0, atol=2e-5)


def test_a_view_has_the_tokens_that_the_registry_says(base: Backbone):
    for views, size in ((1, base.info.image_size), (2, 97), (1, 300)):
        feature = base.encode([Look(Prompt(pictures(views, size), SAID[1]))])[0]
        assert int((feature.token_type == 1).sum()) == views * base.info.tokens_per_view
        assert feature.hidden.shape == (feature.length, base.info.hidden)
        assert feature.query_span == (feature.length - 8, feature.length)
        assert int((feature.token_type == 2).sum()) == 8


def test_the_queries_see_the_pictures_in_order_and_the_words(base: Backbone):
    first, second = pictures(2, base.info.image_size)
    said = [Prompt([first, second], SAID[1]), Prompt([second, first], SAID[1]), Prompt([first, second], SAID[0])]
    queries = [feature.hidden[slice(*feature.query_span)] for feature in base.encode([Look(prompt) for prompt in said])]
    assert all((queries[0] - other).abs().max() > 1e-3 for other in queries[1:])


def test_an_adapter_changes_its_own_rows_and_learns_the_same_from_them(base: Backbone):
    adapter = base.adapter(LoraSpec(rank=2, targets=("q_proj", "down_proj"), last_layers=2), seed=1)
    with torch.no_grad():
        for up in adapter.up:
            up.normal_(0, 0.2, generator=torch.Generator().manual_seed(2))
    looks = ragged(base, 5)
    plain = base.encode(looks)
    tuned = [Look(look.prompt, look.layers, adapter) if i in {0, 1, 3} else look for i, look in enumerate(looks)]

    def learn(wanted: list[Look]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        adapter.zero_grad()
        made = [feature.hidden for look, feature in zip(wanted, base.encode(wanted), strict=True) if look.adapter]
        torch.stack([hidden[-8:, -base.info.hidden :].square().mean() for hidden in made]).sum().backward()
        return [hidden.detach() for hidden in made], [
            weight.grad.clone() for weight in adapter.parameters() if weight.grad is not None
        ]

    together = base.encode(tuned)
    for i in (2, 4):
        assert torch.equal(together[i].hidden, plain[i].hidden)
    assert all((together[i].hidden - plain[i].hidden).abs().max() > 1e-3 for i in (0, 1, 3))
    (among, slopes), (alone, own) = learn(tuned), learn([tuned[i] for i in (0, 1, 3)])
    assert all(torch.equal(a, b) for a, b in zip(among, alone, strict=True))
    assert len(own) == len(list(adapter.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(slopes, own, strict=True))


def test_the_fast_profile_is_close(base: Backbone):
    quick = Backbone.load(str(base.info.path), device="cpu", profile="fast")
    looks = ragged(base, 3)
    for exact, rough in zip(base.encode(looks), quick.encode(looks), strict=True):
        assert rough.hidden.dtype == torch.bfloat16
        assert (exact.hidden - rough.hidden.float()).norm() / exact.hidden.norm() < 0.1


def test_no_instruction_forges_an_image(base: Backbone):
    text, tokenizer = base.family.text("go", 1), load_processor(base.info.path).tokenizer
    mark = tokenizer.decode(text.ids[text.token_type == 1][:1])
    with pytest.raises(BadMessage, match=r"observation.instruction: holds the reserved token '<"):
        base.ids([Look(Prompt(pictures(1, 56), f"go {mark} now"))])


def test_a_prompt_needs_no_picture_unless_the_model_says_so(base: Backbone):
    if base.info.model_type != "paligemma":
        blind, seeing = Look(Prompt([], "go")), Look(Prompt(pictures(1, 56), "go"))
        assert torch.equal(base.encode([blind])[0].hidden, base.encode([seeing, blind])[1].hidden)
        return
    with pytest.raises(BadMessage, match=r"observation\.images: 0 images; a paligemma needs at least 1"):
        base.ids([Look(Prompt([], "go"))])


def test_smolvlm_says_which_package_it_misses(tmp_path: Path):
    tiny.idefics3(tmp_path, kind="SmolVLM")
    if importlib.util.find_spec("num2words") is None:
        with pytest.raises(BadJob, match="install num2words"):
            Backbone.load(str(tmp_path), device="cpu")
    else:
        assert Backbone.load(str(tmp_path), device="cpu").encode([Look(Prompt(pictures(2, 56), "go"))])
