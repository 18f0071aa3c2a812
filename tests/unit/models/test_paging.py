"""Slots as a cache: hundreds of versions over a few places, each answer the same to the bit wherever its weights had been."""

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.checkpoint import load_policy, weights_bytes
from nexus_bus.models.contract import build_contract
from nexus_bus.models.features import VLAFeature
from nexus_bus.models.heads import FeatureShape
from nexus_bus.models.paging import Pages, PolicySlots, slot_bytes
from nexus_bus.models.slots import PolicySlot, build_module
from schemas.base import BlobRef
from schemas.job import HeadSpec
from schemas.policy import ActionSpec, ObservationSpec, PolicyVersion

INFO = describe_backbone("nexus-nano")
SHAPE = FeatureShape(INFO.hidden, INFO.layers)
CONTRACT = build_contract(
    backbone=INFO,
    head=HeadSpec(type="oft", horizon=2, options={"width": 8, "blocks": 1, "value_width": 8}),
    action=ActionSpec(size=2, low=[-1.0, -1.0], high=[1.0, 1.0]),
    observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=1),
)
STATE = np.zeros(1, np.float32)


def ref(data: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def made(i: int) -> tuple[PolicyVersion, bytes]:
    """Version 0 of tenant i's job, with weights of its own."""
    weights = weights_bytes(build_module(CONTRACT, SHAPE, seed=i))
    version = PolicyVersion(
        id="pick@0", tenant=f"tenant{i}", job="pick", n=0, parent=None, contract=CONTRACT, weights=ref(weights), created=""
    )
    return version, weights


def build(version: PolicyVersion, weights: bytes, adapter: bytes | None) -> PolicySlot:
    return load_policy(version, weights, adapter, SHAPE)


def answer(slot: PolicySlot) -> bytes:
    hidden = torch.randn(20, INFO.hidden, generator=torch.Generator().manual_seed(1))
    feature = VLAFeature("", hidden, torch.zeros(20, dtype=torch.uint8), (12, 20))
    return slot.act(feature, STATE).sample.tobytes()


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def load(slots: PolicySlots, version: PolicyVersion, weights: bytes, adapter: bytes | None = None) -> PolicySlot:
    """Make a version ready, and keep its bytes."""
    slot = slots.load(version, weights, adapter)
    slots.store(version, weights, adapter)
    return slot


def fetched(slots: PolicySlots, version: PolicyVersion, bus: dict[str, bytes]) -> tuple[PolicySlot, str]:
    """What a worker does for a request, and where the slot came from."""
    if (slot := slots.get(version.tenant, version.id)) is not None:
        return slot, "ready"
    record = slots.known(version.tenant, version.id)
    if record is not None and (slot := slots.page_in(record)) is not None:
        return slot, "paged in"
    return load(slots, version, bus[version.weights.sha256]), "bus"


def test_three_hundred_tenants_share_eight_places(tmp_path: Path):
    everybody = [made(i) for i in range(300)]
    bus = {version.weights.sha256: weights for version, weights in everybody}
    expected = [answer(build(version, weights, None)) for version, weights in everybody]
    assert len(set(expected)) == 300
    each = len(everybody[0][1])
    pages = Pages(tmp_path, disk_bytes=200 * each)
    slots = PolicySlots(build, pages, slots=8)
    came: dict[str, int] = {}
    order = [*range(300), *np.random.default_rng(0).integers(0, 300, 600), *range(296, 300), *range(296, 300)]
    for number, i in enumerate(order):
        slot, source = fetched(slots, everybody[i][0], bus)
        came[source] = came.get(source, 0) + 1
        assert answer(slot) == expected[i]
        assert len(slots.versions()) <= 8
        assert slots.used == sum(slot_bytes(slots.get(*key)) for key in slots.versions())  # type: ignore[arg-type]
        if number % 20 == 0:
            assert pages.disk_used == on_disk(tmp_path) <= 200 * each
    assert came["ready"] >= 4
    assert came["paged in"] > 200
    assert came["bus"] > 300, "those that the disk had no room for come from the bus again"


def test_bytes_bound_what_is_ready_and_the_newest_always_is():
    everybody = [made(i) for i in range(4)]
    each = slot_bytes(build(*everybody[0], None))
    slots = PolicySlots(build, slot_bytes=2 * each)
    for version, weights in everybody:
        load(slots, version, weights)
    assert slots.versions() == [("tenant2", "pick@0"), ("tenant3", "pick@0")]
    assert slots.used == 2 * each
    tiny = PolicySlots(build, slot_bytes=1)
    for version, weights in everybody:
        assert tiny.load(version, weights) is tiny.get(version.tenant, version.id)
    assert len(tiny.versions()) == 1


def test_a_second_load_of_a_version_counts_once():
    version, weights = made(0)
    slots = PolicySlots(build)
    for _ in range(3):
        slot = load(slots, version, weights)
    assert slots.used == slot_bytes(slot)


def test_a_version_is_served_by_name_and_tenant_alone():
    version, weights = made(0)
    slots = PolicySlots(build)
    load(slots, version, weights)
    assert slots.get("tenant1", "pick@0") is None
    assert slots.get("tenant0", "pick@1") is None
    assert slots.known("tenant1", "pick@0") is None


@pytest.mark.parametrize("damage", [b"", b"not safetensors", None])
def test_a_damaged_file_is_dropped_and_loaded_again(tmp_path: Path, damage: bytes | None):
    version, weights = made(0)
    slots = PolicySlots(build, Pages(tmp_path), slots=1)
    good = answer(load(slots, version, weights))
    load(slots, *made(1))
    path = tmp_path / version.weights.sha256
    flipped = bytearray(weights)
    flipped[-1] ^= 1
    path.write_bytes(bytes(flipped) if damage is None else damage)
    assert slots.page_in(version) is None, "never an answer from other weights"
    assert not path.exists()
    assert answer(load(slots, version, weights)) == good
    assert path.read_bytes() == weights


def test_another_process_finds_the_files_and_counts_them(tmp_path: Path):
    version, weights = made(0)
    load(PolicySlots(build, Pages(tmp_path)), version, weights)
    (tmp_path / f".{version.weights.sha256}.1").write_bytes(bytes(100))  # half written
    pages = Pages(tmp_path)
    assert pages.disk_used == len(weights) + 100
    slots = PolicySlots(build, pages)
    assert slots.known("tenant0", "pick@0") is None, "what is offered is for the registry to say"
    assert slots.page_in(version) is not None


def test_a_directory_that_cannot_be_written_costs_speed_alone(tmp_path: Path):
    version, weights = made(0)
    pages = Pages(tmp_path / "pages")
    (tmp_path / "pages").rmdir()
    (tmp_path / "pages").touch()
    slots = PolicySlots(build, pages, slots=1)
    good = answer(load(slots, version, weights))
    load(slots, *made(1))
    assert slots.page_in(version) is None
    assert answer(load(slots, version, weights)) == good


def test_a_worker_starts_where_its_directory_cannot_be_made_and_mends_one_that_was_taken_away(tmp_path: Path):
    (tmp_path / "file").touch()
    version, weights = made(0)
    answer(load(PolicySlots(build, Pages(tmp_path / "file" / "pages")), version, weights))
    slots = PolicySlots(build, Pages(tmp_path / "pages"))
    (tmp_path / "pages").rmdir()
    load(slots, version, weights)
    assert slots.page_in(version) is not None


def test_files_of_others_are_neither_counted_nor_deleted(tmp_path: Path):
    (tmp_path / "thesis.tex").write_bytes(bytes(10_000))
    pages = Pages(tmp_path, disk_bytes=100)
    assert pages.disk_used == 0
    load(PolicySlots(build, pages), *made(0))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_retired_versions_leave_nothing_behind(tmp_path: Path):
    pages = Pages(tmp_path, memory_bytes=1 << 20)
    slots = PolicySlots(build, pages)
    version, weights = made(0)
    load(slots, version, weights)
    assert pages.memory_used == pages.disk_used == len(weights)
    slots.drop("tenant0", "pick@0")
    slots.drop("tenant0", "pick@0")
    assert slots.get("tenant0", "pick@0") is slots.known("tenant0", "pick@0") is None
    slots.store(version, weights)  # whose turn came late
    assert (slots.used, pages.memory_used, pages.disk_used, list(tmp_path.iterdir())) == (0, 0, 0, [])


def test_host_memory_holds_what_it_may_and_spares_the_disk(tmp_path: Path):
    everybody = [made(i) for i in range(4)]
    each = len(everybody[0][1])
    pages = Pages(tmp_path, memory_bytes=2 * each)
    slots = PolicySlots(build, pages, slots=1)
    for version, weights in everybody:
        load(slots, version, weights)
    assert pages.memory_used == 2 * each
    for path in tmp_path.iterdir():
        path.unlink()
    assert [slots.page_in(version) is not None for version, _ in everybody] == [False, False, True, True]


def test_a_version_that_came_out_of_use_still_answers_whoever_holds_it():
    slots = PolicySlots(build, slots=1)
    version, weights = made(0)
    held = load(slots, version, weights)
    before = answer(held)
    load(slots, *made(1))
    assert slots.get("tenant0", "pick@0") is None
    assert answer(held) == before


def test_loading_and_acting_threads_do_not_disturb_each_other(tmp_path: Path):
    everybody = [made(i) for i in range(12)]
    expected = {version.tenant: answer(build(version, weights, None)) for version, weights in everybody}
    slots = PolicySlots(build, Pages(tmp_path), slots=3)
    wrong: list[str] = []
    done = threading.Event()

    def act() -> None:
        while not done.is_set():
            for tenant, version in slots.versions():
                slot = slots.get(tenant, version)
                if slot is not None and answer(slot) != expected[tenant]:
                    wrong.append(tenant)

    acting = threading.Thread(target=act)
    acting.start()
    loading = [threading.Thread(target=lambda: [load(slots, *one) for one in everybody * 4]) for _ in range(2)]
    for thread in loading:
        thread.start()
    for thread in loading:
        thread.join()
    done.set()
    acting.join()
    assert wrong == []
    assert slots.used == sum(slot_bytes(slots.get(*key)) for key in slots.versions())  # type: ignore[arg-type]


def test_an_adapter_counts_and_is_paged_like_the_head(tmp_path: Path):
    adapter = save({"a": torch.zeros(10)})
    version, weights = made(0)
    version = PolicyVersion(**{f: getattr(version, f) for f in version.__struct_fields__} | {"adapter": ref(adapter)})
    seen: list[bytes | None] = []

    def build_both(version: PolicyVersion, weights: bytes, adapter: bytes | None) -> PolicySlot:
        seen.append(adapter)
        module = build_module(CONTRACT, SHAPE)
        return PolicySlot.load(version.id, CONTRACT, module, torch.nn.Linear(3, 5))  # type: ignore[arg-type]

    slots = PolicySlots(build_both, Pages(tmp_path), slots=1)
    slot = load(slots, version, weights, adapter)
    assert slot_bytes(slot) == 4 * (sum(p.numel() for p in slot.module.parameters()) + 20)
    assert slots.page_in(version) is not None
    assert seen == [adapter, adapter]
    (tmp_path / ref(adapter).sha256).unlink()
    assert slots.page_in(version) is None, "a head without its adapter is no policy"
