"""Promise 5: one bad record stays one. Who is to blame is found by trials, and the numbers are those without it, to the bit."""

import random
from typing import Any

import msgspec
import pytest
import torch

from nexus_bus.errors import BadMessage
from nexus_bus.learning.algorithms import Diverged, Ppo, PpoWork, Sft, SftWork
from nexus_bus.learning.group import GroupTrainer, Member
from nexus_bus.learning.poison import DIED, MOST, Doubts, Search, bisect, one_by_one
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.checkpoint import training_state_bytes
from nexus_bus.models.heads import FeatureShape
from nexus_bus.models.slots import Slot, build_module
from schemas import job

FULL = torch.OutOfMemoryError("CUDA out of memory")
LORA = job.LoraSpec(rank=4, learning_rate=1e-2)


def found(search: Search, fails: Any) -> tuple[dict[int, Exception], list[list[int]]]:
    """Run a search against a test of record sets; the guilty ones, and what was tried."""
    tried = [next(search)]
    while True:
        error = ValueError("bad") if fails(set(tried[-1])) else None
        try:
            tried.append(search.send(error))
        except StopIteration as done:
            return done.value, tried


def test_bisection_finds_whoever_is_guilty_in_few_trials():
    draw = random.Random(0)  # noqa: S311 - no secret
    for size in range(1, 40):
        guilty = set(draw.sample(range(size), draw.randint(0, min(3, size))))
        named, tried = found(bisect(range(size)), lambda records: records & guilty)  # noqa: B023 - used up at once
        assert set(named) == guilty
        assert len(tried) <= 1 + 2 * len(guilty) * (size.bit_length() + 1)
        assert all(records == sorted(records) for records in tried), "the order of records is that of their batch"


def test_records_that_fail_only_together_are_parted_and_a_batch_too_large_shrinks_to_what_fits():
    named, _ = found(bisect(range(8)), lambda records: {2, 5} <= records)
    assert len(named) == 1
    assert set(named) <= {2, 5}
    named, _ = found(bisect(range(8)), lambda records: len(records) > 5)
    assert len(named) == 3, "no more of them than must be"


def test_one_by_one_tries_each_alone():
    named, tried = found(one_by_one([3, 4, 7]), lambda records: 4 in records)
    assert set(named) == {4}
    assert tried == [[3], [4], [7]]


def test_numbers_and_memory_are_searched_at_once_other_failures_after_three_attempts():
    for error in (Diverged("nan"), FULL, BadMessage("steps[0]")):
        doubts = Doubts()
        assert doubts.begin(5, [0, 1]) == ([0, 1], False)
        doubts.ended(error)
        assert doubts.suspects(5)
        trials = []
        while not (guilty := doubts.ended(error if 1 in trials[-1] else None)) if trials else True:
            records, trial = doubts.begin(5, [0, 1])
            assert trial
            trials.append(records)
        assert list(guilty) == [1]
        assert trials[0] == [0, 1]
    doubts = Doubts()
    for _ in range(MOST - 1):
        assert doubts.begin(5, [0]) == ([0], False)
        assert doubts.ended(ValueError("a bug")) == {}
    assert doubts.begin(5, [0]) == ([0], False)
    doubts.ended(ValueError("a bug"))
    assert doubts.begin(5, [0]) == ([0], True)
    (why,) = doubts.ended(ValueError("secret /path")).values()
    assert "secret" not in why, "a tenant sees no traceback of ours"


def test_what_fails_in_earnest_and_never_on_trial_is_given_up_after_three_attempts():
    doubts, guilty, earnest = Doubts(), {}, 0
    while not guilty:
        _, trial = doubts.begin(0, [0, 1])
        earnest += not trial
        guilty = doubts.ended(None if trial else FULL)
    assert set(guilty) == {0, 1}
    assert earnest == MOST
    assert "3 times" in guilty[0]


def test_what_works_again_leaves_no_trace():
    doubts = Doubts()
    doubts.begin(0, [0])
    doubts.ended(ValueError("once"))
    assert [attempt.tries for attempt in doubts.attempts()] == [1]
    doubts.begin(0, [0])
    doubts.ended(None)
    assert doubts.attempts() == []
    assert not doubts.suspects(0)


def died(doubts: Doubts) -> Doubts:
    """The next trainer, which finds what stood in the lease."""
    return Doubts(doubts.attempts())


def test_a_batch_that_ends_the_process_three_times_is_given_up_at_the_fourth_start():
    doubts = Doubts()
    for _ in range(MOST):
        assert doubts.condemned(7, [0]) == {}
        assert doubts.begin(7, [0]) == ([0], False)
        doubts = died(doubts)
    assert doubts.condemned(7, [0]) == {0: DIED}
    doubts.fresh(7)
    assert doubts.attempts() == []


def test_of_a_batch_of_many_only_the_record_that_was_tried_last():
    doubts = Doubts()
    for _ in range(MOST - 1):
        assert doubts.begin(7, [0, 1, 2])[1] is False
        doubts = died(doubts)
    assert doubts.begin(7, [0, 1, 2]) == ([0], True)
    assert doubts.ended(None) == {}
    assert doubts.begin(7, [0, 1, 2]) == ([1], True)
    doubts = died(doubts)
    assert doubts.condemned(7, [0, 1, 2]) == {1: DIED}
    doubts.fresh(7)
    assert doubts.begin(7, [0, 2]) == ([0, 2], False)
    doubts.ended(None)
    assert doubts.attempts() == []


def test_if_none_of_them_alone_ends_it_the_whole_batch_goes():
    doubts = Doubts()
    for _ in range(MOST - 1):
        doubts.begin(7, [0, 1])
        doubts = died(doubts)
    for record in (0, 1):
        assert doubts.begin(7, [0, 1]) == ([record], True)
        doubts.ended(None)
    assert doubts.begin(7, [0, 1]) == ([0, 1], False)
    assert set(died(doubts).condemned(7, [0, 1])) == {0, 1}


def test_a_stop_is_no_failure():
    doubts = Doubts()
    for _ in range(10):
        doubts.begin(7, [0, 1])
        doubts = Doubts(doubts.attempts(orderly=True))
    assert doubts.attempts() == []
    for _ in range(10):  # nor does a seat that is given up in the middle of a search condemn anybody
        doubts.begin(7, [0, 1])
        doubts.ended(ValueError("a bug"))
        doubts = Doubts(doubts.attempts(orderly=True))
        assert doubts.condemned(7, [0, 1]) == {}


# In a group


def seats(make: Any, backbone: Backbone, count: int, lora: job.LoraSpec | None) -> list[tuple[Sft, Slot]]:
    made = []
    for i in range(count):
        contract = make.contract("oft", 4, 3, 2, lora=lora)
        algorithm = Sft(job.Sft(learning_rate=1e-3 * (1 + i), warmup_steps=0, steps=30), slot_seed=i)
        adapter = backbone.adapter(lora, seed=i) if lora else None
        module = build_module(contract, FeatureShape(128, 4), seed=i)
        made.append((algorithm, algorithm.make_slot(f"t{i}", "pick", contract, module, adapter)))
    return made


def work(make: Any, slot: Slot, i: int, number: int = 0) -> SftWork:
    return SftWork.from_message(make.batch(slot.contract, number, count=2, seed=100 * i), slot.contract)


def members(make: Any, team: list[tuple[Sft, Slot]], number: int = 0) -> list[Member]:
    return [Member(slot, algorithm, work(make, slot, i, number)) for i, (algorithm, slot) in enumerate(team)]


class Small:
    """A device that has no room for some looks, or for more than so many at once."""

    def __init__(self, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, error: Exception = FULL) -> None:
        self.huge: set[bytes] = set()
        self.most = 1000
        self.sizes: list[int] = []
        encode = backbone.encode

        def bounded(looks: Any) -> Any:
            self.sizes.append(len(looks))
            if len(looks) > self.most or any(look.prompt.pixels in self.huge for look in looks):
                raise error
            return encode(looks)

        monkeypatch.setattr(backbone, "encode", bounded)


@pytest.mark.parametrize("lora", [None, LORA], ids=["frozen", "lora"])
@pytest.mark.parametrize("error", [FULL, ValueError("a shape that nobody foresaw")], ids=["memory", "other"])
def test_who_breaks_a_shared_forward_fails_alone(
    backbone: Backbone, make: Any, monkeypatch: pytest.MonkeyPatch, lora: job.LoraSpec | None, error: Exception
):
    team, twins = seats(make, backbone, 8, lora), seats(make, backbone, 8, lora)
    calm = GroupTrainer(backbone).run([member for i, member in enumerate(members(make, twins)) if i != 5])
    device = Small(backbone, monkeypatch, error)
    group = members(make, team)
    device.huge = {prompt.pixels for prompt in group[5].work.prompts}
    results = GroupTrainer(backbone).run(group)
    assert results[5].error is error
    assert [r.result for i, r in enumerate(results) if i != 5] == [r.result for r in calm]
    for i in range(8):
        assert training_state_bytes(team[i][1]) == training_state_bytes(twins[i][1]), i
    assert len(device.sizes) == 7, "halves: of eight, then of four, two, one"


@pytest.mark.parametrize("lora", [None, LORA], ids=["frozen", "lora"])
def test_a_group_that_is_too_large_as_a_whole_fails_nobody(
    backbone: Backbone, make: Any, monkeypatch: pytest.MonkeyPatch, lora: job.LoraSpec | None
):
    team, twins = seats(make, backbone, 5, lora), seats(make, backbone, 5, lora)
    calm = GroupTrainer(backbone).run(members(make, twins))
    Small(backbone, monkeypatch).most = 4
    results = GroupTrainer(backbone, FeatureCache()).run(members(make, team))
    assert [r.result for r in results] == [r.result for r in calm]
    assert [training_state_bytes(slot) for _, slot in team] == [training_state_bytes(slot) for _, slot in twins]


def test_a_loss_that_finds_no_memory_beside_the_others_has_it_alone(backbone: Backbone, make: Any):
    class Tight(Sft):
        crowded = True

        def learn(self, slot: Any, work: Any) -> Any:
            crowded, Tight.crowded = Tight.crowded, False
            if crowded:
                raise FULL
            return (yield from super().learn(slot, work))

    team, twins = seats(make, backbone, 3, None), seats(make, backbone, 3, None)
    group = members(make, team)
    group[1] = Member(group[1].slot, Tight(team[1][0].spec, 1), group[1].work)
    results = GroupTrainer(backbone).run(group)
    assert [r.result for r in results] == [r.result for r in GroupTrainer(backbone).run(members(make, twins))]


def test_numbers_that_are_not_finite_reach_nobody_through_a_shared_backward(backbone: Backbone, make: Any):
    team, twins = seats(make, backbone, 3, LORA), seats(make, backbone, 3, LORA)
    group = members(make, team)
    old = group[1].work
    group[1] = Member(group[1].slot, group[1].algorithm, SftWork(old.observations, old.prompts, old.actions / 0, old.pad))
    results = GroupTrainer(backbone).run(group)
    assert isinstance(results[1].error, Diverged)
    assert "loss" in str(results[1].error)
    calm = GroupTrainer(backbone).run([m for i, m in enumerate(members(make, twins)) if i != 1])
    assert [results[0].result, results[2].result] == [r.result for r in calm]
    assert [training_state_bytes(slot) for _, slot in team] == [training_state_bytes(slot) for _, slot in twins]


# Within one member


def ppo(make: Any, backbone: Backbone, lora: job.LoraSpec | None = None) -> tuple[Ppo, Slot]:
    contract = make.contract(lora=lora)
    algorithm = Ppo(job.Ppo(minibatch=4, epochs=2), slot_seed=1)
    adapter = backbone.adapter(lora, seed=1) if lora else None
    slot = algorithm.make_slot("acme", "pick", contract, build_module(contract, FeatureShape(128, 4), seed=1), adapter)
    slot.version = 0
    return algorithm, slot


@pytest.mark.parametrize("lora", [None, LORA], ids=["frozen", "lora"])
def test_a_trial_changes_nothing(backbone: Backbone, make: Any, lora: job.LoraSpec | None):
    algorithm, slot = ppo(make, backbone, lora)
    (sft, other), *_ = seats(make, backbone, 1, lora)
    trainer = GroupTrainer(backbone)
    for number in range(2):  # the second time the optimizers hold something
        before = [training_state_bytes(slot), training_state_bytes(other)]
        records = [make.record(slot.contract, 10 * number + i) for i in range(4)]
        both = [
            Member(slot, algorithm, PpoWork.from_messages(records, slot.contract)),
            Member(other, sft, work(make, other, 0, number)),
        ]
        tried = trainer.run([Member(m.slot, m.algorithm, m.work, trial=True) for m in both])
        assert [training_state_bytes(slot), training_state_bytes(other)] == before
        done = trainer.run(both)
        assert [r.result for r in tried] == [r.result for r in done], "and says what would have come of it"


def test_an_update_without_its_poison_is_as_if_that_had_never_been_published(backbone: Backbone, make: Any):
    algorithm, slot = ppo(make, backbone)
    _, twin = ppo(make, backbone)
    records = {i: make.record(slot.contract, i) for i in range(6)}
    steps = [msgspec.structs.replace(step, value=3e38, rewards=[3e38] * len(step.rewards)) for step in records[4].steps]
    records[4] = msgspec.structs.replace(records[4], steps=steps)
    trainer, doubts = GroupTrainer(backbone), Doubts()

    def turn(left: list[int]) -> tuple[dict[int, str], bool]:
        chosen, trial = doubts.begin(0, left)
        decoded = PpoWork.from_messages([records[i] for i in chosen], slot.contract)
        result = trainer.run([Member(slot, algorithm, decoded, trial=trial)])[0]
        return doubts.ended(result.error), result.error is None and not trial

    guilty: dict[int, str] = {}
    while not guilty:
        guilty, learned = turn(sorted(records))
        assert not learned
    assert list(guilty) == [4]
    assert "loss" in guilty[4]
    doubts.fresh(0)
    assert turn([0, 1, 2, 3, 5]) == ({}, True)
    decoded = PpoWork.from_messages([records[i] for i in (0, 1, 2, 3, 5)], slot.contract)
    make.learn(backbone, algorithm, twin, decoded)
    assert training_state_bytes(slot) == training_state_bytes(twin)
