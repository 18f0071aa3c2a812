"""Promise 2: alone or together, the same numbers. Promise 5: one bad thing stays one. Promise 8: every second has an owner."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nexus_bus.errors import BadMessage
from nexus_bus.learning import group as module
from nexus_bus.learning.algorithms import Diverged, Ppo, PpoWork, Sft, SftWork, base
from nexus_bus.learning.canary import Canary
from nexus_bus.learning.group import GroupTrainer, Member
from nexus_bus.models import cache
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.checkpoint import training_state_bytes
from nexus_bus.models.heads import FeatureShape
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import build_module
from nexus_bus.tensors import decode_image
from schemas import job
from workers import trainer as worker

# head, horizon, state size, action size, local batch, options
TENANTS = [
    ("oft", 8, 3, 4, 3, {}),
    ("oft", 4, 7, 2, 2, {"blocks": 1}),
    ("oft", 1, 0, 3, 4, {}),
    ("gr00t", 6, 3, 2, 2, {"width": 32, "layers": 2, "repeats": 4}),
]


def team(make: Any) -> list[tuple[Any, Any]]:
    """Four tenants at their beginning: own head, sizes, learning rate, clip and generator."""
    made = []
    for i, (head, horizon, state_size, size, _, options) in enumerate(TENANTS):
        contract = make.contract(head, horizon, state_size, size, **options)
        algorithm = Sft(job.Sft(learning_rate=1e-3 * (1 + i), grad_clip=0.5 + 0.2 * i, steps=30, warmup_steps=i), slot_seed=i)
        made.append(
            (algorithm, algorithm.make_slot(f"t{i}", "pick", contract, build_module(contract, FeatureShape(128, 4), seed=i)))
        )
    return made


def work(make: Any, slot: Any, tenant: int, number: int) -> SftWork:
    # every second batch shows frames that other tenants see too
    seed = 0 if number % 2 else 100 * tenant
    return SftWork.from_message(make.batch(slot.contract, number, count=TENANTS[tenant][4], seed=seed), slot.contract)


def test_grouped_and_solo_are_equal_to_the_bit(backbone: Backbone, make: Any):
    together, alone = team(make), team(make)
    grouped, solo = GroupTrainer(backbone, FeatureCache()), GroupTrainer(backbone)
    curves: tuple[list[float], list[float]] = ([], [])
    for number in range(30):
        members = [Member(slot, algorithm, work(make, slot, i, number)) for i, (algorithm, slot) in enumerate(together)]
        for result in grouped.run(members):
            assert result.error is None
            assert result.result is not None
            curves[0].append(result.result.loss)
        for i, (algorithm, slot) in enumerate(alone):
            only = solo.run([Member(slot, algorithm, work(make, slot, i, number))])[0]
            assert only.result is not None
            curves[1].append(only.result.loss)
    assert curves[0] == curves[1]
    for (_, a), (_, b) in zip(together, alone, strict=True):
        assert training_state_bytes(a) == training_state_bytes(b)
        assert a.step == 30


def test_a_member_that_fails_fails_alone(backbone: Backbone, make: Any):
    members, twins = team(make), team(make)
    first = [Member(slot, algorithm, work(make, slot, i, 0)) for i, (algorithm, slot) in enumerate(members)]
    bad = first[1].work
    first[1] = Member(first[1].slot, first[1].algorithm, SftWork(bad.observations, bad.prompts, bad.actions / 0, bad.pad))
    forged = [Prompt(prompt.images, "touch <|image_pad|>") for prompt in first[2].work.prompts]
    old = first[2].work
    first[2] = Member(first[2].slot, first[2].algorithm, SftWork(old.observations, forged, old.actions, old.pad))
    results = GroupTrainer(backbone).run(first)
    assert isinstance(results[1].error, Diverged)
    assert isinstance(results[2].error, BadMessage)
    for i in (0, 3):
        twin = GroupTrainer(backbone).run([Member(twins[i][1], twins[i][0], work(make, twins[i][1], i, 0))])[0]
        assert results[i].result == twin.result
    for i in (1, 2):
        assert results[i].result is None
        assert training_state_bytes(members[i][1]) == training_state_bytes(twins[i][1])


def test_a_failure_halfway_is_rolled_back(backbone: Backbone, make: Any):
    contract = make.contract()
    algorithm = Ppo(job.Ppo(minibatch=2, target_kl=None), slot_seed=1)  # else it may be over before it comes to the fault
    slot = algorithm.make_slot("acme", "pick", contract, build_module(contract, FeatureShape(128, 4), seed=1))
    before = training_state_bytes(slot)
    decoded = PpoWork.from_messages([make.record(contract, i) for i in range(2)], contract)
    decoded.log_prob[3] = float("nan")
    result = GroupTrainer(backbone).run([Member(slot, algorithm, decoded)])[0]
    assert isinstance(result.error, Diverged)
    assert training_state_bytes(slot) == before


def test_an_unforeseen_fault_stays_with_its_member(backbone: Backbone, make: Any):
    class Faulty(Sft):
        def learn(self, slot: Any, work: Any) -> Any:
            yield from super().learn(slot, work)
            raise MemoryError("no room")

    (algorithm, slot), *_ = team(make)
    before = training_state_bytes(slot)
    result = GroupTrainer(backbone).run([Member(slot, Faulty(algorithm.spec, 0), work(make, slot, 0, 0))])[0]
    assert isinstance(result.error, MemoryError)
    assert training_state_bytes(slot) == before


def test_the_forward_is_paid_by_those_who_needed_it(backbone: Backbone, make: Any):
    members = team(make)
    trainer = GroupTrainer(backbone, FeatureCache())
    # batch 1 shows frames 3.., 2.., 4.., 2.. of the shared sixteen: some are asked for by several
    results = trainer.run([Member(slot, algorithm, work(make, slot, i, 1)) for i, (algorithm, slot) in enumerate(members)])
    assert sum(result.forward_s for result in results) == pytest.approx(results[0].stats.forward_s)
    assert all(result.private_s > 0 and result.device_s > result.forward_s > 0 for result in results)
    assert {(result.group, result.tenants) for result in results} == {(11, 4)}
    again = trainer.run([Member(members[0][1], members[0][0], work(make, members[0][1], 0, 1))])[0]
    assert again.forward_s == 0.0
    assert again.stats.hits == again.stats.unique == 3


@pytest.mark.parametrize("fails", [True, False])
def test_pictures_are_paid_by_whose_records_hold_them_whatever_comes_of_it(
    backbone: Backbone, make: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    clock = SimpleNamespace(now=0.0)

    def look() -> float:
        clock.now += 0.001
        return clock.now

    def decode(image: Any) -> Any:
        if decoding == large:
            clock.now += 1.0
            if fails:
                raise BadMessage("image.data: not a readable png")
        return decode_image(image)

    for one in (worker, module, cache):
        monkeypatch.setattr(one, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(base, "decode_image", decode)
    large, decoding = 1, -1

    def seat(number: int) -> Any:
        algorithm, slot = team(make)[number]

        def next_work() -> Member:
            nonlocal decoding
            decoding = number
            return Member(slot, algorithm, work(make, slot, number, 0))

        return SimpleNamespace(slot=slot, next_work=next_work)

    used = SimpleNamespace(add=lambda *_: None)
    group, parking = GroupTrainer(backbone, canary=Canary(0)), SimpleNamespace(use=lambda _: {})
    holder: Any = SimpleNamespace(group=group, parking=parking, used=used)
    results = worker.Trainer.learn(holder, [seat(0), seat(large), seat(2)])
    assert [result.error is not None for result in results] == [False, fails, False]
    assert results[large].device_s > 0.9
    assert all(0 < results[i].device_s < 0.1 for i in (0, 2)), "and not by their neighbours"


def test_an_empty_group_is_nothing(backbone: Backbone):
    assert GroupTrainer(backbone).run([]) == []
    assert torch.is_grad_enabled()


def test_interleaved_adapters_keep_their_steps_to_themselves(backbone: Backbone, make: Any):
    """A known fault of multi-adapter trainers: one tenant's optimizer step moves, or its zeroed gradients wipe, another's."""
    lora = job.LoraSpec(rank=4, learning_rate=1e-2)
    seats = []
    for i in range(2):
        contract = make.contract("oft", 4, 3, 2, lora=lora)
        algorithm = Sft(job.Sft(steps=30, warmup_steps=0), slot_seed=i)
        adapter = backbone.adapter(lora, seed=7)  # the same beginning, so that a mix-up would not show in the shapes
        slot = algorithm.make_slot(f"t{i}", "pick", contract, build_module(contract, FeatureShape(128, 4), seed=7), adapter)
        seats.append((algorithm, slot))
    trainer = GroupTrainer(backbone)

    def step(*who: int, number: int) -> None:
        for result in trainer.run([Member(seats[i][1], seats[i][0], work(make, seats[i][1], i, number)) for i in who]):
            assert result.error is None

    step(0, 1, number=0)
    mine = training_state_bytes(seats[1][1])
    assert mine != training_state_bytes(seats[0][1])
    step(0, number=1)
    step(0, number=2)
    assert training_state_bytes(seats[1][1]) == mine
    step(1, 0, number=3)
    assert training_state_bytes(seats[1][1]) != mine
