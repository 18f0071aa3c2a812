"""The frozen backbone: reads prompts as the checkpoint's own processor does, and no sample feels its neighbours."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from nexus_bus.errors import BadJob, BadMessage
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import resolve_base
from nexus_bus.models.families.qwen import PatchMaker, Qwen
from nexus_bus.models.features import Look
from nexus_bus.models.past import Past
from nexus_bus.models.prompt import Prompt

WORDS = ["touch", "push", "the", "red", "blue", "green", "block", "to", "left", "right", "open", "drawer", "slowly", "stop"]


def looks(count: int, seed: int = 0, size: int = 96, layers: tuple[int, ...] = (-1,)) -> list[Look]:
    """Of ragged prompts."""
    return [Look(prompt, layers) for prompt in prompts(count, seed, size)]


def prompts(count: int, seed: int = 0, size: int = 96) -> list[Prompt]:
    """Ragged ones: other wordings, every fifth with two images."""
    rng = np.random.default_rng(seed)
    return [
        Prompt(
            [rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(2 if i % 5 == 4 else 1)],
            " ".join(rng.choice(WORDS, 2 + 3 * (i % 4))),
        )
        for i in range(count)
    ]


def qwen(backbone: Backbone) -> Qwen:
    assert isinstance(backbone.family, Qwen)
    return backbone.family


def test_a_feature_is_the_same_to_the_bit_in_every_group(backbone: Backbone):
    samples = looks(16)
    alone = [backbone.encode([sample])[0] for sample in samples]
    assert len({len(feature.hidden) for feature in alone}) > 3
    for group in range(2, 17):
        for start in (0, 5):
            rows = [(start + i) % 16 for i in range(group)]
            for row, feature in zip(rows, backbone.encode([samples[i] for i in rows]), strict=True):
                assert torch.equal(feature.hidden, alone[row].hidden), (group, row)
                assert feature.feature_id == alone[row].feature_id


def test_the_exact_profile_groups_only_where_that_holds():
    """Without the library's setting groups differ in the last bits: then samples go one by one, and the promise stands."""
    code = (
        "import os; os.environ.pop('MKL_CBWR', None)\n"
        "from nexus_bus.models.backbone import Backbone\n"
        "import numpy as np, torch\n"
        "from nexus_bus.models.features import Look\n"
        "from nexus_bus.models.prompt import Prompt\n"
        "b = Backbone.load('nexus-nano', device='cpu')\n"
        "r = np.random.default_rng(0)\n"
        "ps = [Look(Prompt([r.integers(0, 256, (96, 96, 3), dtype=np.uint8)], 'go ' * i)) for i in range(1, 9)]\n"
        "assert all(torch.equal(f.hidden, b.encode([p])[0].hidden) for f, p in zip(b.encode(ps), ps))\n"
        "print('tile', b.tile)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:1] == ["tile"]


def test_tokens_and_patches_are_the_processors_own(backbone: Backbone):
    reader = qwen(backbone)
    for images in (1, 2):
        sample = Prompt(prompts(1, seed=images)[0].images * images, "push the red block to the left")
        content = [{"type": "image"}] * images + [{"type": "text", "text": sample.instruction}]
        chat = reader.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        queries = backbone.info.query_token * backbone.info.query_tokens
        stock = reader.processor(text=[chat + queries], images=list(sample.images), return_tensors="pt")
        text = reader.text(sample.instruction, images)
        assert torch.equal(text.ids, stock["input_ids"][0])
        assert torch.equal((text.token_type == 1).long(), stock["mm_token_type_ids"][0].long())
        assert torch.equal(text.extra["grids"], stock["image_grid_thw"])
        assert torch.equal(torch.from_numpy(reader.patches(sample.images)), stock["pixel_values"].float())
        assert text.query_span == (len(text.ids) - 8, len(text.ids))


def test_features_are_those_of_a_plain_forward(backbone: Backbone):
    """Against the model called as its documentation says, without our positions, packing or attention."""
    family, sample = qwen(backbone), looks(1)[0]
    text = family.text(sample.prompt.instruction, 1)
    stock = AutoModelForImageTextToText.from_pretrained(
        resolve_base("nexus-nano"), dtype=torch.float32, attn_implementation="eager"
    ).model.eval()
    with torch.no_grad():
        out = stock(
            input_ids=text.ids[None],
            mm_token_type_ids=(text.token_type == 1).int()[None],
            pixel_values=torch.from_numpy(family.patches(sample.prompt.images)),
            image_grid_thw=text.extra["grids"],
            use_cache=False,
            output_hidden_states=True,
        )
    last, both = backbone.encode([sample])[0], backbone.encode([Look(sample.prompt, layers=(2, -1))])[0]
    # patches are embedded by a matrix product where the stock model has a convolution: the last bits differ
    assert torch.allclose(last.hidden, out.last_hidden_state[0], atol=2e-5)
    assert torch.allclose(both.hidden, torch.cat([out.hidden_states[2][0], out.last_hidden_state[0]], dim=-1), atol=2e-5)
    assert last.feature_id != both.feature_id


def test_looks_of_other_layers_share_a_forward(backbone: Backbone):
    mixed = [*looks(2), *looks(2, seed=1, layers=(1, 3)), *looks(2, seed=2, layers=(4,))]
    for look, feature in zip(mixed, backbone.encode(mixed), strict=True):
        assert feature.hidden.shape[1] == 128 * len(look.layers)
        assert torch.equal(feature.hidden, backbone.encode([look])[0].hidden)


def test_a_suffix_continues_the_prompt_and_changes_nothing_before_it(backbone: Backbone):
    bare = looks(3)
    ends = [torch.randn(n, 128, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in (1, 4, 2)]
    mixed = [Look(look.prompt, suffix=end) for look, end in zip(bare, ends, strict=True)] + looks(2, seed=3)
    features = backbone.encode(mixed)
    for look, feature, plain, end in zip(mixed, features, backbone.encode(bare), ends, strict=False):
        assert len(feature.hidden) == plain.length + len(end)
        assert torch.allclose(feature.hidden[: plain.length], plain.hidden, atol=1e-5)
        assert torch.equal(backbone.encode([look])[0].hidden, feature.hidden)
        feature.hidden[-1].sum().backward(retain_graph=True)
        assert end.grad is not None
        assert bool((end.grad != 0).any())
    tail = backbone.encode([Look(bare[1].prompt, suffix=ends[1].detach()[:2])])[0]  # causal: what comes later changes nothing
    assert torch.allclose(tail.hidden, features[1].hidden[: len(tail.hidden)], atol=1e-5)


def test_the_pixels_take_the_short_path(backbone: Backbone):
    assert qwen(backbone).patches.fast


def test_a_processor_that_resizes_does_its_own_work(backbone: Backbone):
    processor = qwen(backbone).processor.image_processor
    maker = PatchMaker(processor, 80)  # the checkpoint's processor brings everything to 96 pixels
    picture = prompts(1, size=80)[0].images[0]
    assert not maker.fast
    assert np.array_equal(maker([picture]), processor(images=[picture], return_tensors="np")["pixel_values"])


def test_images_of_another_size_are_brought_to_the_backbones(backbone: Backbone):
    feature = backbone.encode(looks(1, size=200))[0]
    assert int((feature.token_type == 1).sum()) == 9


def test_an_empty_group_is_nothing(backbone: Backbone):
    assert backbone.encode([]) == []


def test_instructions_cannot_forge_tokens(backbone: Backbone):
    with pytest.raises(BadMessage, match=r"observation.instruction: holds the reserved token '<\|image_pad\|>'"):
        backbone.ids([Look(Prompt(prompts(1)[0].images, "touch <|image_pad|> now"))])
    with pytest.raises(BadMessage, match="more than 1024"):
        backbone.ids([Look(Prompt(prompts(1)[0].images, "touch the block " * 1000))])
    with pytest.raises(BadMessage, match=r"observation.instruction: 1000000 characters, more than 16384"):
        backbone.ids([Look(Prompt(prompts(1)[0].images, "z" * 1_000_000))])  # not even tokenised: that takes a second
    with pytest.raises(BadMessage, match=r"observation.images: float32\[4, 4\] is not uint8\[H, W, 3\]"):
        Prompt([np.zeros((4, 4), np.float32)], "touch")  # type: ignore[list-item]


def test_a_checkpoint_without_our_file_gets_defaults(tmp_path: Path):
    """As one from the hub: the query token is one its tokenizer already has."""
    shutil.copytree(resolve_base("nexus-nano"), tmp_path / "hub")
    (tmp_path / "hub" / "nexus.json").unlink()
    config = json.loads((tmp_path / "hub" / "preprocessor_config.json").read_text())
    config["size"] = {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(config))
    loaded = Backbone.load(str(tmp_path / "hub"), device="cpu")
    feature = loaded.encode(looks(1))[0]
    assert loaded.info.image_size == 224
    assert int((feature.token_type == 1).sum()) == 49
    assert feature.query_span[1] - feature.query_span[0] == 8


def test_other_families_and_torn_checkpoints_are_refused(tmp_path: Path):
    shutil.copytree(resolve_base("nexus-nano"), tmp_path / "odd")
    path = tmp_path / "odd" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "mllama"}))
    with pytest.raises(BadJob, match="is a 'mllama'; served are"):
        Backbone.load(str(tmp_path / "odd"))
    config["text_config"]["num_hidden_layers"] = 5
    path.write_text(json.dumps(config))
    with pytest.raises(BadJob, match="lacks weights"):
        Backbone.load(str(tmp_path / "odd"))


def test_the_fast_profile_stays_within_its_tolerance(backbone: Backbone):
    quick = Backbone.load("nexus-nano", device="cpu", profile="fast")
    samples = looks(3)
    for exact, rough in zip(backbone.encode(samples), quick.encode(samples), strict=True):
        assert rough.hidden.dtype == torch.bfloat16
        assert exact.feature_id != rough.feature_id
        error = (exact.hidden - rough.hidden.float()).norm() / exact.hidden.norm()
        assert error < 0.05


def test_a_prompt_continued_token_by_token_is_the_whole_at_once(backbone: Backbone):
    bare = looks(3)
    ends = [torch.randn(5, 128, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    whole = backbone.encode([Look(look.prompt, suffix=end) for look, end in zip(bare, ends, strict=True)])

    def steps(rows: list[int]) -> list[list[torch.Tensor]]:
        pasts: list[Past] = [Past() for _ in rows]
        seen: list[list[torch.Tensor]] = [[] for _ in rows]
        for start, stop in ((0, 2), (2, 3), (3, 4), (4, 5)):
            asks = [Look(bare[i].prompt, suffix=ends[i][start:stop], past=past) for i, past in zip(rows, pasts, strict=True)]
            for states, feature in zip(seen, backbone.encode(asks), strict=True):
                states.append(feature.hidden[feature.length :])
        return seen

    together = steps([0, 1, 2])
    for i, states in enumerate(together):
        assert torch.allclose(torch.cat(states), whole[i].hidden[whole[i].length :], atol=1e-5)
        alone = steps([i])[0]
        assert all(torch.equal(a, b) for a, b in zip(states, alone, strict=True))
