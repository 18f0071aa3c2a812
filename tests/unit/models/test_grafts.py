"""The lora tier: everybody's own deltas in one forward and one backward, and a plain peft adapter to leave with."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nexus_bus.errors import BadJob, ContractError
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import resolve_base
from nexus_bus.models.features import Look
from nexus_bus.models.grafts import Adapter
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.tensorfile import adapter_config, read_header
from schemas.job import LoraSpec

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# ranks, targets and depths differ within one batch
SPECS = (
    LoraSpec(rank=8, alpha=16.0),
    LoraSpec(rank=4, alpha=4.0, targets=ALL),
    LoraSpec(rank=16, alpha=8.0, targets=("up_proj", "o_proj"), last_layers=2),
)
TEXTS = ("touch the red block", "push the blue block slowly to the left side", "stop", "open the drawer now")


def trained(backbone: Backbone, spec: LoraSpec, seed: int) -> Adapter:
    """An adapter as after training: B is not zero."""
    adapter = backbone.adapter(spec, seed)
    generator = torch.Generator().manual_seed(seed)
    for up in adapter.up:
        up.data = torch.randn(up.shape, generator=generator) * 0.05
    return adapter


def looks(adapter: Adapter | None, count: int, seed: int) -> list[Look]:
    rng = np.random.default_rng(seed)
    return [
        Look(
            Prompt([rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)] * (1 + (seed + i) % 2), TEXTS[(seed + i) % 4]),
            adapter=adapter,
        )
        for i in range(count)
    ]


def gradients(backbone: Backbone, groups: list[list[Look]], only: int | None = None) -> list[list[torch.Tensor]]:
    """Of each group's adapter for a loss of its own, all in one forward and backward, or of one group alone."""
    kept = groups if only is None else [groups[only]]
    features = backbone.encode([look for group in kept for look in group])
    start, losses = 0, []
    for group in kept:
        weights = [torch.linspace(-1, 1, len(feature.hidden)) for feature in features[start : start + len(group)]]
        losses.append(
            sum(
                (f.hidden.square().mean(-1) * w).sum()
                for f, w in zip(features[start : start + len(group)], weights, strict=True)
            )
        )
        start += len(group)
    torch.stack(losses).sum().backward()  # type: ignore[arg-type]
    found = []
    for group in kept:
        assert group[0].adapter is not None
        found.append([parameter.grad.clone() for parameter in group[0].adapter.parameters() if parameter.grad is not None])
        group[0].adapter.zero_grad()
    return found


def test_a_fresh_adapter_changes_nothing(backbone: Backbone):
    plain, adapted = looks(None, 3, 0), looks(backbone.adapter(SPECS[0], 1), 3, 0)
    with torch.no_grad():
        for a, b in zip(backbone.encode(plain), backbone.encode(adapted), strict=True):
            assert torch.equal(a.hidden, b.hidden)


def test_adapted_rows_do_not_feel_their_neighbours_nor_each_others_adapters(backbone: Backbone):
    mixed = [look for i, spec in enumerate(SPECS) for look in looks(trained(backbone, spec, i), 3, i)] + looks(None, 4, 9)
    with torch.no_grad():
        together = backbone.encode(mixed)
        for look, feature in zip(mixed, together, strict=True):
            assert torch.equal(backbone.encode([look])[0].hidden, feature.hidden)
        shuffled = [mixed[i] for i in (12, 0, 5, 8, 2, 3, 11, 1, 9, 10, 4, 6, 7)]
        by_look = {id(look): feature for look, feature in zip(shuffled, backbone.encode(shuffled), strict=True)}
        assert all(torch.equal(by_look[id(look)].hidden, f.hidden) for look, f in zip(mixed, together, strict=True))
        bare = backbone.encode([Look(look.prompt) for look in mixed])
    changed = [not torch.equal(a.hidden, b.hidden) for a, b in zip(together, bare, strict=True)]
    assert changed == [True] * 9 + [False] * 4


@pytest.mark.parametrize("count", [1, 3, 20])
def test_gradients_are_those_of_training_alone(backbone: Backbone, count: int):
    """To the bit, also where a tenant's samples fill more than a tile."""
    groups = [looks(trained(backbone, spec, i), count + i, i) for i, spec in enumerate(SPECS)]
    together = gradients(backbone, groups)
    for i, group in enumerate(together):
        alone = gradients(backbone, groups, only=i)[0]
        assert len(group) == len(alone) == len(list(groups[i][0].adapter.parameters()))  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(group, alone, strict=True))


def test_the_backbone_itself_stays_as_it_is(backbone: Backbone):
    before = {name: weight.clone() for name, weight in backbone.family.model.state_dict().items()}  # type: ignore[attr-defined]
    gradients(backbone, [looks(trained(backbone, SPECS[1], 3), 2, 0)])
    after = backbone.family.model.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in backbone.family.model.parameters())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")  # peft asks for a name that transformers is leaving behind
@pytest.mark.filterwarnings("ignore::FutureWarning:peft.*")
@pytest.mark.parametrize("spec", SPECS)
def test_peft_loads_it_to_the_same_outputs(backbone: Backbone, spec: LoraSpec, tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    adapter = trained(backbone, spec, 5)
    save_file(adapter.tensors(), tmp_path / "adapter_model.safetensors")
    layers = read_header((tmp_path / "adapter_model.safetensors").read_bytes(), "adapter")
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(spec, layers, "nexus-nano")))
    base = AutoModelForImageTextToText.from_pretrained(
        resolve_base("nexus-nano"), dtype=torch.float32, attn_implementation="eager"
    )
    whole = PeftModel.from_pretrained(base, tmp_path).eval()
    look = looks(adapter, 1, 0)[0]
    family = backbone.family
    text = family.text(look.prompt.instruction, 1)
    with torch.no_grad():
        out = whole.base_model.model.model(
            input_ids=text.ids[None],
            mm_token_type_ids=(text.token_type == 1).int()[None],
            pixel_values=torch.from_numpy(family.patches(list(look.prompt.images))),  # type: ignore[attr-defined]
            image_grid_thw=text.extra["grids"],
            use_cache=False,
        ).last_hidden_state[0]
        ours = backbone.encode([look])[0].hidden
        bare = backbone.encode([Look(look.prompt)])[0].hidden
    # pictures enter by a matrix product where the stock model has a convolution: the last bits differ
    assert torch.allclose(ours, out, atol=2e-5)
    assert (ours - bare).abs().max() > 1e-2


def test_a_file_that_does_not_fit_is_refused(backbone: Backbone):
    adapter = backbone.adapter(SPECS[0])
    good = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    first = next(iter(good))
    with pytest.raises(ContractError, match="is in only one of the file and the contract"):
        adapter.load({name: tensor for name, tensor in good.items() if name != first})
    with pytest.raises(ContractError, match=r"is \[4, 128\], the contract says \[8, 128\]"):
        adapter.load(good | {first: torch.zeros(4, 128)})
    with pytest.raises(ContractError, match="not finite"):
        adapter.load(good | {first: torch.full_like(good[first], float("nan"))})
    with pytest.raises(BadJob, match=r"lora.targets: no layer is called 'qkv'; there are down_proj, gate_proj"):
        backbone.adapter(LoraSpec(targets=("qkv",)))


def test_pictures_met_again_are_not_looked_at_again_and_give_the_same_bits(backbone: Backbone, monkeypatch: pytest.MonkeyPatch):
    family = backbone.family
    adapter = trained(backbone, SPECS[0], 3)
    mine = [Look(look.prompt, adapter=adapter, scope="acme") for look in looks(adapter, 3, 5)]
    seen: list[int] = []
    stock = family.patches.__class__.__call__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        family.patches.__class__,
        "__call__",
        lambda self, images: seen.append(len(images)) or stock(self, images),  # type: ignore[attr-defined]
    )
    with torch.no_grad():
        first, second = backbone.encode(mine), backbone.encode(mine[::-1])[::-1]
        theirs = backbone.encode([Look(look.prompt, adapter=adapter, scope="zeta") for look in mine])
    pictures = sum(len(look.prompt.images) for look in mine)
    assert seen == [pictures, pictures]  # zeta has not shown them yet: a hash is no permission
    for a, b, c in zip(first, second, theirs, strict=True):
        assert torch.equal(a.hidden, b.hidden)
        assert torch.equal(a.hidden, c.hidden)


def test_layers_below_the_first_adapter_are_computed_once_and_give_the_same_bits(backbone: Backbone):
    adapter = trained(backbone, LoraSpec(rank=4, targets=("o_proj", "up_proj"), last_layers=1), 7)
    mine = [
        Look(look.prompt, layers, adapter, scope="acme")
        for look, layers in zip(looks(adapter, 3, 2), [(-1,), (3, 4), (-1,)], strict=True)
    ]
    below = [backbone.prefix_of(look) for look in mine]
    assert adapter.first == 3
    assert [look.layers for look in below if look is not None] == [(3,)] * 3
    known = backbone.encode([look for look in below if look is not None])
    resumed = [replace(look, prefix=(3, feature.hidden)) for look, feature in zip(mine, known, strict=True)]
    strangers = looks(trained(backbone, SPECS[1], 1), 2, 8)
    for whole, again in zip(backbone.encode([*mine, *strangers]), backbone.encode([*resumed, *strangers]), strict=True):
        assert torch.equal(whole.hidden, again.hidden)
    assert backbone.prefix_of(Look(mine[0].prompt, (1, -1), adapter)) is None, "it reads a layer below"
    assert backbone.prefix_of(Look(mine[0].prompt, adapter=trained(backbone, SPECS[0], 1))) is None
    assert backbone.prefix_of(Look(mine[0].prompt)) is None
