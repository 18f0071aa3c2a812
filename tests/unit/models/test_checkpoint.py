"""Checkpoints: weights and training states as bytes that go on to the bit, and are refused by name where they do not fit."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from nexus_bus import exported
from nexus_bus.errors import BadMessage, ContractError
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.checkpoint import (
    adapter_bytes,
    load_adapter,
    load_policy,
    load_weights,
    restore_training_state,
    training_state_bytes,
    weights_bytes,
)
from nexus_bus.models.contract import build_contract
from nexus_bus.models.features import FeatureBatch, VLAFeature
from nexus_bus.models.grafts import Adapter
from nexus_bus.models.heads import FeatureShape
from nexus_bus.models.slots import PolicySlot, Slot, build_module
from schemas.base import BlobRef
from schemas.job import HeadSpec, LoraSpec
from schemas.policy import ActionSpec, ObservationSpec, PolicyContract, PolicyVersion

INFO = describe_backbone("nexus-nano")
SHAPE = FeatureShape(INFO.hidden, INFO.layers)
LORA = LoraSpec(rank=2, targets=("q_proj", "v_proj"), last_layers=2)
PLACES = {f"model.language_model.layers.{n}.self_attn.{name}": (128, 64) for n in (2, 3) for name in LORA.targets}


def contract(head: str = "oft", horizon: int = 4, lora: LoraSpec | None = None) -> PolicyContract:
    return build_contract(
        backbone=INFO,
        head=HeadSpec(type=head, horizon=horizon, options={"width": 32, "layers": 2} if head == "gr00t" else {}),
        action=ActionSpec(size=2, low=[-0.1, -0.5], high=[0.1, 0.5]),
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3),
        lora=lora,
    )


def adapter(spec: LoraSpec = LORA, places: dict[str, tuple[int, int]] = PLACES, seed: int = 1) -> Adapter:
    made = Adapter(spec, places)
    made.initialise(seed)
    torch.nn.init.normal_(made.up[0], generator=torch.Generator().manual_seed(seed))
    return made


def ref(data: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def version(of: PolicyContract, weights: bytes = b"", low_rank: bytes | None = None) -> PolicyVersion:
    return PolicyVersion(
        id="pick@3", tenant="acme", job="pick", n=3, parent="pick@2", contract=of, created="2026-01-01T00:00:00+00:00",
        weights=ref(weights), adapter=ref(low_rank) if low_rank is not None else None,
    )  # fmt: skip


def feature(seed: int = 0, length: int = 40) -> VLAFeature:
    hidden = torch.randn(length, 128, generator=torch.Generator().manual_seed(seed))
    return VLAFeature(f"{seed}", hidden, torch.zeros(length, dtype=torch.uint8), (length - 8, length))


def slot(head: str = "oft", low_rank: Adapter | None = None) -> Slot:
    made = contract(head, lora=LORA if low_rank is not None else None)
    module = build_module(made, SHAPE, seed=1)
    parameters = [*module.parameters(), *(low_rank.parameters() if low_rank is not None else ())]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return Slot("acme", "pick", made, module, optimizer, torch.Generator().manual_seed(3), low_rank)


def train(held: Slot, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        batch = FeatureBatch.collate([feature(held.step * 10 + i, 36 + i) for i in range(4)])
        goal = torch.rand(4, 4, 2, generator=held.generator)
        held.optimizer.zero_grad()
        loss = held.module.loss(batch, torch.zeros(4, 3), goal, torch.zeros(4, 4, dtype=torch.bool), held.generator)
        if held.adapter is not None:  # any use of it will do: what counts is that its weights and moments are kept
            loss = loss + sum(parameter.square().sum() for parameter in held.adapter.parameters())
        loss.backward()
        held.optimizer.step()
        held.step += 1
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("head", ["oft", "gr00t"])
def test_weights_round_trip(head: str):
    source = build_module(contract(head), SHAPE, seed=4)
    loaded = load_policy(version(contract(head)), weights_bytes(source), None, SHAPE)
    assert loaded.version == "pick@3"
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), loaded.module.parameters(), strict=True))
    assert weights_bytes(loaded.module) == weights_bytes(source)


def test_what_is_published_is_what_is_trained_and_no_more():
    held = slot(low_rank=adapter())
    assert load(weights_bytes(held.module)).keys() == held.module.state_dict().keys()
    assert held.adapter is not None
    assert load(adapter_bytes(held.adapter)).keys() == {
        f"base_model.model.{place}.lora_{half}.weight" for place in PLACES for half in "AB"
    }


def test_foreign_weights_are_refused_and_nothing_is_touched():
    module = build_module(contract(), SHAPE, seed=4)
    before = weights_bytes(module)
    wrong_head = weights_bytes(build_module(contract("gr00t"), SHAPE))
    wrong_shape = weights_bytes(build_module(contract(horizon=5), SHAPE))
    poisoned = build_module(contract(), SHAPE)
    poisoned.output.bias.data.fill_(float("inf"))  # type: ignore[union-attr]
    missing = {name: tensor for name, tensor in module.state_dict().items() if name != "output.bias"}
    for data, error, says in [
        (b"no such format", BadMessage, "weights: not a safetensors file"),
        (wrong_head, ContractError, "is in only one of the file and the head"),
        (wrong_shape, ContractError, r"weights: 'place' is torch.float32\[5, 256\], the head has torch.float32\[4, 256\]"),
        (weights_bytes(poisoned), ContractError, "weights: 'output.bias' holds numbers that are not finite"),
        (save(missing), ContractError, "weights: 'output.bias' is in only one"),
        (save(module.state_dict() | {"more": torch.zeros(1)}), ContractError, "weights: 'more' is in only one"),
        (save({n: t.half() for n, t in module.state_dict().items()}), ContractError, "is torch.float16.*has torch.float32"),
    ]:
        with pytest.raises(error, match=says):
            load_weights(module, data)
    assert weights_bytes(module) == before


def test_an_adapter_round_trips():
    low_rank = adapter()
    weights = weights_bytes(build_module(contract(lora=LORA), SHAPE, seed=4))
    for places in (PLACES, None):
        loaded = load_policy(version(contract(lora=LORA)), weights, adapter_bytes(low_rank), SHAPE, places)
        assert loaded.adapter is not None
        assert adapter_bytes(loaded.adapter) == adapter_bytes(low_rank)
        assert not any(parameter.requires_grad for parameter in loaded.adapter.parameters())


def test_a_foreign_adapter_is_refused_and_nothing_is_touched():
    low_rank = adapter()
    before = adapter_bytes(low_rank)
    narrow = {place: (64, 64) for place in PLACES}
    elsewhere = {place.replace("language_model", "visual"): sizes for place, sizes in PLACES.items()}
    poisoned = adapter()
    poisoned.up[1].data[0, 0] = float("nan")
    for data, error, says in [
        (b"no such format", BadMessage, "adapter: not a safetensors file"),
        (adapter_bytes(adapter(LoraSpec(rank=3, last_layers=2))), ContractError, r"rank 3, contract\.lora\.rank is 2"),
        (adapter_bytes(adapter(places=narrow)), ContractError, r"is \[2, 64\], the contract says \[2, 128\]"),
        (adapter_bytes(adapter(places=elsewhere)), ContractError, "is in only one of the file and the contract"),
        (adapter_bytes(poisoned), ContractError, "holds numbers that are not finite"),
    ]:
        with pytest.raises(error, match=says):
            load_adapter(low_rank, data)
    assert adapter_bytes(low_rank) == before


def test_an_adapter_comes_exactly_where_the_contract_has_one():
    weights = weights_bytes(build_module(contract(), SHAPE))
    with pytest.raises(ContractError, match=r"adapter: none came with pick@3, its contract\.lora has one"):
        load_policy(version(contract(lora=LORA)), weights, None, SHAPE)
    with pytest.raises(ContractError, match=r"adapter: one came with pick@3, its contract\.lora has none"):
        load_policy(version(contract()), weights, adapter_bytes(adapter()), SHAPE)


@pytest.mark.parametrize("tier", ["frozen", "lora"])
@pytest.mark.parametrize("head", ["oft", "gr00t"])
def test_training_goes_on_to_the_bit(head: str, tier: str):
    def fresh() -> Slot:
        return slot(head, adapter() if tier == "lora" else None)

    straight = fresh()
    whole = train(straight, 20)
    first = fresh()
    losses = train(first, 10)
    saved = training_state_bytes(first)
    second = fresh()
    restore_training_state(second, saved)
    assert second.step == 10
    assert losses + train(second, 10) == whole
    assert training_state_bytes(second) == training_state_bytes(straight)


def test_a_state_before_the_first_step_restores_too():
    fresh = slot()
    saved = training_state_bytes(fresh)
    train(fresh, 2)
    restore_training_state(fresh, saved)
    assert training_state_bytes(fresh) == saved


def test_a_wrong_state_is_refused():
    with pytest.raises(BadMessage, match="training state: not a safetensors file"):
        restore_training_state(slot(), b"\x00" * 20)
    with pytest.raises(ContractError, match="in only one of the file and the head"):
        restore_training_state(slot(), training_state_bytes(slot("gr00t")))
    with pytest.raises(ContractError, match="in only one of the file and the head"):
        restore_training_state(slot(low_rank=adapter()), training_state_bytes(slot()))
    with pytest.raises(BadMessage, match="training state"):
        restore_training_state(slot(), weights_bytes(slot().module))


def test_a_tenant_leaves_with_its_policy_and_it_acts_as_before(tmp_path: Path):
    module = build_module(contract(), SHAPE, seed=4)
    weights = weights_bytes(module)
    exported.write(tmp_path / "mine", exported.files_of(version(contract(), weights), weights, None, ["pick@2"]))
    taken = exported.read(tmp_path / "mine")
    mine = load_policy(version(taken.contract, taken.weights), taken.weights, None, SHAPE)
    state = np.zeros(3, np.float32)
    there = PolicySlot.load("pick@0", contract(), module).act(feature(), state)
    assert np.array_equal(mine.act(feature(), state).actions, there.actions)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by the old name
def test_an_exported_adapter_loads_in_peft(backbone: Backbone, tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    low_rank = backbone.adapter(LORA, seed=1)
    for up in low_rank.up:
        torch.nn.init.normal_(up, std=0.02, generator=torch.Generator().manual_seed(2))
    made = contract(lora=LORA)
    weights, data = weights_bytes(build_module(made, SHAPE)), adapter_bytes(low_rank)
    exported.write(tmp_path / "mine", exported.files_of(version(made, weights, data), weights, data, []))
    model = AutoModelForImageTextToText.from_pretrained(INFO.path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.arange(10, 26)[None]
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(model, tmp_path / "mine")
        loaded = {name.replace(".default", ""): tensor for name, tensor in adapted.named_parameters() if "lora_" in name}
        assert loaded.keys() == low_rank.tensors().keys()
        assert all(torch.equal(tensor, low_rank.tensors()[name].cpu()) for name, tensor in loaded.items())
        assert not torch.equal(adapted(input_ids=ids).logits, plain), "and they act"


@pytest.mark.parametrize("head", ["oft", "gr00t", "pi", "fast"])
def test_a_loaded_head_acts_as_the_one_that_was_saved(head: str):
    """It is built as a shell without numbers: nothing that its constructor computes may be missing."""
    spec = LORA if head == "fast" else None
    source = build_module(contract(head, lora=spec), SHAPE, seed=4).eval()
    low_rank = adapter_bytes(adapter()) if spec is not None else None
    loaded = load_policy(version(contract(head, lora=spec)), weights_bytes(source), low_rank, SHAPE).module
    state, noise = torch.linspace(-1, 1, 3), torch.Generator().manual_seed(0)
    answers = []
    for module in (source, loaded):
        with torch.no_grad():
            if module.needs.decodes:
                decoding = module.decode(state, noise)
                suffix = next(decoding)
                while True:
                    try:
                        suffix = decoding.send(suffix.cos())  # any hidden states will do
                    except StopIteration as done:
                        answers.append(done.value)
                        break
            else:
                sight = feature()
                wide = VLAFeature("", sight.hidden.repeat(1, len(module.needs.layers)), sight.token_type, sight.query_span)
                answers.append(module.predict(FeatureBatch.collate([wide]), state[None], noise.manual_seed(1)))
    assert torch.equal(answers[0], answers[1])
