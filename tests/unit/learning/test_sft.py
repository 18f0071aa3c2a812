"""Supervised steps: what they refuse, what they count, that they resume to the bit and learn."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nexus_bus.errors import BadMessage
from nexus_bus.learning.algorithms import ALGORITHMS, Diverged, PpoWork, Sft, SftWork, base, make_algorithm
from nexus_bus.learning.algorithms.base import observation_prompt
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.checkpoint import restore_training_state, training_state_bytes
from nexus_bus.models.heads import FeatureShape
from nexus_bus.models.slots import Slot, build_module
from nexus_bus.tensors import decode_image, to_tensor
from schemas import job
from schemas.base import Image
from schemas.policy import PolicyContract

SPEC = job.Sft(learning_rate=2e-3, warmup_steps=3, steps=40)


def fresh(contract: PolicyContract, spec: job.Sft = SPEC) -> tuple[Sft, Slot]:
    algorithm = Sft(spec, slot_seed=11)
    return algorithm, algorithm.make_slot("acme", "pick", contract, build_module(contract, FeatureShape(128, 4), seed=5))


def run(algorithm: Sft, slot: Slot, backbone: Backbone, cache: FeatureCache, make: Any, numbers: range) -> list[float]:
    losses: list[float] = []
    for number in numbers:
        work = SftWork.from_message(make.batch(slot.contract, number), slot.contract)
        losses.append(make.learn(backbone, algorithm, slot, work, cache).loss)
    return losses


@pytest.mark.parametrize(("head", "options"), [("oft", {}), ("gr00t", {"width": 32, "layers": 2})])
def test_twenty_steps_are_ten_a_commit_and_ten_more(backbone: Backbone, make: Any, head: str, options: dict[str, Any]):
    contract, cache = make.contract(head, **options), FeatureCache()
    algorithm, straight = fresh(contract)
    whole = run(algorithm, straight, backbone, cache, make, range(20))
    _, first = fresh(contract)
    losses = run(algorithm, first, backbone, cache, make, range(10))
    _, second = fresh(contract)
    restore_training_state(second, training_state_bytes(first))
    losses += run(algorithm, second, backbone, cache, make, range(10, 20))
    assert losses == whole
    assert training_state_bytes(second) == training_state_bytes(straight)
    assert (second.step, second.batches, second.records) == (20, 20, 80)


def test_it_learns_what_it_is_shown(backbone: Backbone, make: Any):
    contract, cache = make.contract(), FeatureCache()
    algorithm, slot = fresh(contract, job.Sft(learning_rate=3e-3, steps=200, warmup_steps=5))
    work = SftWork.from_message(make.batch(contract, 0, count=8), contract)
    losses = [make.learn(backbone, algorithm, slot, work, cache).loss for _ in range(200)]
    assert losses[-1] < 0.05 * losses[0]
    result = make.learn(backbone, algorithm, slot, work)
    assert (result.samples, result.steps) == (8, 1)
    assert result.metrics["learning_rate"] == pytest.approx(1e-6)


def test_actions_are_learned_in_the_contracts_normalised_units(backbone: Backbone, make: Any):
    """A head of zeros under min_max over [-1, 1] has the mean absolute raw action as its loss."""
    contract = make.contract()
    algorithm, slot = fresh(contract)
    slot.module.output.weight.data.zero_()  # type: ignore[union-attr]
    work = SftWork.from_message(make.batch(contract, 0), contract)
    expected = float(work.actions[~work.pad].abs().mean())
    assert make.learn(backbone, algorithm, slot, work).loss == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_not_finite_touches_nothing(backbone: Backbone, make: Any):
    contract = make.contract()
    algorithm, slot = fresh(contract)
    work = SftWork.from_message(make.batch(contract, 0), contract)
    broken = SftWork(work.observations, work.prompts, work.actions * float("inf"), work.pad)
    before = training_state_bytes(slot)
    with pytest.raises(Diverged, match="step 0: loss"):
        make.learn(backbone, algorithm, slot, broken)
    assert training_state_bytes(slot) == before


def test_batches_that_do_not_fit_are_refused_by_field(make: Any):
    contract = make.contract()
    good = make.batch(contract, 0)
    sample = good.samples[1]

    def refused(says: str, **changes: Any) -> None:
        samples = [good.samples[0], msgspec.structs.replace(sample, **changes)]
        with pytest.raises(BadMessage, match=says):
            SftWork.from_message(msgspec.structs.replace(good, samples=samples), contract)

    nan = np.full((4, 2), np.nan, np.float32)
    refused(r"samples\[1\]\.actions: shape \[3, 2\], expected \[4, 2\]", actions=to_tensor(np.zeros((3, 2), np.float32)))
    refused(r"samples\[1\]\.actions: holds numbers that are not finite", actions=to_tensor(nan))
    refused(r"samples\[1\]\.action_is_pad: bool\[3\] is not bool\[4\]", action_is_pad=to_tensor(np.zeros(3, bool)))
    refused("no camera 'front'", observation=msgspec.structs.replace(sample.observation, images={}))
    with pytest.raises(BadMessage, match="batch pick/0 is empty"):
        SftWork.from_message(msgspec.structs.replace(good, samples=[]), contract)


def test_cameras_of_any_name_are_not_quoted_at_any_length(make: Any):
    contract = make.contract()
    sample = make.batch(contract, 0).samples[0]
    images = {f"{n}" + "x" * 900_000: sample.observation.images["front"] for n in range(20)}
    with pytest.raises(BadMessage, match="no camera 'front'; there is 0x") as refused:
        observation_prompt(msgspec.structs.replace(sample.observation, images=images), contract)
    assert len(str(refused.value)) < 500


def test_a_batch_that_unfolds_to_more_than_there_is_room_for_is_refused_before(make: Any, monkeypatch: pytest.MonkeyPatch):
    """A picture of one colour takes a few KB, and 12 MB unfolded: bytes that travel bound nothing."""
    contract = make.contract()
    unfolded: list[Image] = []
    monkeypatch.setattr(base, "decode_image", lambda image: unfolded.append(image) or decode_image(image))
    monkeypatch.setattr(base, "UNIT", 4 * 96 * 96)
    assert len(SftWork.from_message(make.batch(contract, 0, count=4), contract).prompts) == len(unfolded) == 4
    said = "5 observations at once unfold to 46080 pixels; at most 36864: take fewer episodes an update or samples a batch"
    with pytest.raises(BadMessage, match=said):
        SftWork.from_message(make.batch(contract, 0, count=5), contract)
    with pytest.raises(BadMessage, match="6 observations at once"):
        PpoWork.from_messages([make.record(contract, i) for i in range(2)], contract)
    assert len(PpoWork.from_messages([make.record(contract, 0)], contract).prompts) == 3, "one of them fits"
    assert len(unfolded) == 4 + 3


def test_the_specification_names_its_algorithm():
    assert set(ALGORITHMS) == {"sft", "ppo"}
    assert isinstance(make_algorithm(job.Sft(), 0), Sft)
    assert type(make_algorithm(job.Ppo(), 0)).__name__ == "Ppo"
    assert torch.is_grad_enabled()
