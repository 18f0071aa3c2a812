"""A slot is a cache entry: hundreds of them, a few resident, and nobody can tell from the numbers."""

from pathlib import Path
from typing import Any

import pytest

from nexus_bus.errors import Unreadable
from nexus_bus.learning.algorithms import Sft, SftWork
from nexus_bus.learning.parking import Parking
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.checkpoint import training_state_bytes
from nexus_bus.models.slots import Slot, build_module
from schemas import job
from schemas.job import LoraSpec


def begin(backbone: Backbone, make: Any, i: int) -> tuple[Sft, Slot]:
    lora = LoraSpec(rank=2) if i % 3 == 2 else None
    contract = make.contract("oft", 2, 3, 2, lora=lora, width=32, blocks=1, value_width=8)
    adapter = backbone.adapter(lora, i) if lora is not None else None
    algorithm = Sft(job.Sft(steps=50, warmup_steps=1), i)
    return algorithm, algorithm.make_slot(f"t{i}", "pick", contract, build_module(contract, backbone.shape, i), adapter)


def learn(backbone: Backbone, make: Any, seat: tuple[Sft, Slot], number: int) -> float:
    algorithm, slot = seat
    return make.learn(
        backbone, algorithm, slot, SftWork.from_message(make.batch(slot.contract, number, count=1), slot.contract)
    ).loss


def test_three_hundred_slots_over_room_for_eight(backbone: Backbone, make: Any, tmp_path: Path):
    seats = [begin(backbone, make, i) for i in range(300)]
    learn(backbone, make, seats[1], 0)
    size = seats[1][1].nbytes  # with its optimizer's state, which comes at the first step
    parking = Parking(resident_bytes=8 * size, host_bytes=20 * size, directory=tmp_path)
    for start in range(0, 300, 4):
        assert parking.use([slot for _, slot in seats[start : start + 4]]) == {}
        assert parking.used <= 8 * size
    assert parking.parked > 250
    assert 0 < len(list(tmp_path.iterdir())) < 300  # some in host memory, the others on disk
    for i in (2, 0, 299, 4, 2, 150, 0, 5, 2):
        assert parking.use([seats[i][1]]) == {}
        twin = begin(backbone, make, i)
        for number in range(seats[i][1].batches):
            learn(backbone, make, twin, number)
        assert training_state_bytes(seats[i][1]) == training_state_bytes(twin[1])
        number = seats[i][1].batches
        assert learn(backbone, make, seats[i], number) == learn(backbone, make, twin, number)
    for _, slot in seats:
        parking.drop(slot)
    assert (parking.used, parking.parked, list(tmp_path.iterdir())) == (0, 0, [])


def test_one_that_cannot_be_read_back_is_named_and_the_others_go_on(backbone: Backbone, make: Any, tmp_path: Path):
    seats = [begin(backbone, make, i) for i in range(3)]
    parking = Parking(resident_bytes=0, directory=tmp_path)
    for _, slot in seats:
        parking.use([slot])
    parking.use([])
    assert parking.parked == 3
    sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)[1].write_bytes(b"torn")
    lost = parking.use([slot for _, slot in seats])
    assert len(lost) == 1
    (position, error), *_ = lost.items()
    assert isinstance(error, Unreadable)
    assert f"t{position}/pick: its parked slot cannot be read back" in str(error)
    for i, seat in enumerate(seats):
        if i != position:
            assert learn(backbone, make, seat, 0) == pytest.approx(learn(backbone, make, begin(backbone, make, i), 0), abs=0)


def test_what_a_killed_trainer_left_goes_and_a_bad_directory_is_no_reason_to_stop(
    backbone: Backbone, make: Any, tmp_path: Path
):
    gone, mine = tmp_path / "4194304-dead.safetensors", tmp_path / "notes.txt"  # above the highest pid there can be
    gone.write_bytes(b"x")
    mine.write_text("keep")
    Parking(resident_bytes=0, directory=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]
    parking = Parking(resident_bytes=0, directory=mine)
    seats = [begin(backbone, make, i) for i in range(2)]
    assert parking.use([seats[0][1]]) == parking.use([seats[1][1]]) == {}
    assert parking.parked == 1, "in memory"
