"""An exported directory: whole or not there, read back only if nobody changed it. Files alone, no server."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from nexus_bus import exported
from nexus_bus.errors import BadJob, BadMessage, ContractError, NotFound, Refused, Unavailable
from nexus_bus.exported import ADAPTER, ADAPTER_CONFIG, CONTRACT, CURSOR, HEAD, README, STATE, VERSION, files_of, read, write
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from schemas.base import BlobRef
from schemas.job import HeadSpec, LoraSpec
from schemas.policy import ActionSpec, ObservationSpec, PolicyVersion, TrainingState

LAYER = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
WEIGHTS = save({"head.weight": np.arange(6, dtype=np.float32).reshape(2, 3)})
LOW_RANK = save({f"{LAYER}.lora_A.weight": np.ones((2, 8), np.float32), f"{LAYER}.lora_B.weight": np.ones((4, 2), np.float32)})


def ref(data: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data), media_type="application/x-safetensors")


def version(weights: bytes = WEIGHTS, adapter: bytes | None = None) -> PolicyVersion:
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"),
        head=HeadSpec(horizon=4),
        action=ActionSpec(size=2, low=[-1.0, -0.5], high=[1.0, 0.5]),
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3),
        lora=LoraSpec(rank=2, targets=("q_proj",)) if adapter is not None else None,
    )
    return PolicyVersion(
        id="pick@3", tenant="acme", job="pick", n=3, parent="pick@2", contract=contract, weights=ref(weights),
        adapter=ref(adapter) if adapter is not None else None, created="2026-01-01T00:00:00+00:00", step=30, seed=5,
    )  # fmt: skip


def made(adapter: bytes | None = LOW_RANK, weights: bytes = WEIGHTS, **more: Any) -> dict[str, bytes]:
    return files_of(version(weights, adapter), weights, adapter, ["pick@2", "warm@0"], **more)


def test_of_two_that_replace_an_export_at_once_one_is_there_whole(tmp_path: Path):
    both = [made(), made(weights=save({"head.weight": np.zeros((2, 3), np.float32)}))]
    write(tmp_path, both[0])
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            list(threads.map(lambda files: write(tmp_path, files, force=True), both))
            assert read(tmp_path).weights in {files[HEAD] for files in both}


@pytest.mark.parametrize("name", ["a" * 300, "nul\0byte", "file/below"])
def test_a_place_that_cannot_be_is_said(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="the export was not written"):
        write(tmp_path / name, made())
    with pytest.raises(NotFound, match="is no directory"):
        read(tmp_path / name)


def test_a_pipe_in_the_place_of_a_file_is_not_read(tmp_path: Path):
    write(tmp_path, made())
    (tmp_path / HEAD).unlink()
    os.mkfifo(tmp_path / HEAD)
    with pytest.raises(BadMessage, match=f"{HEAD}: is no regular file"):
        read(tmp_path)


def test_a_directory_is_read_as_it_was_written(tmp_path: Path):
    paths = write(tmp_path / "a" / ".." / "mine", made())
    assert {path.name for path in paths} == {ADAPTER_CONFIG, ADAPTER, HEAD, CONTRACT, VERSION, README}
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}, "nothing is left beside it"
    found = read(tmp_path / "mine")
    assert (found.weights, found.adapter, found.contract) == (WEIGHTS, LOW_RANK, version(adapter=LOW_RANK).contract)
    assert (found.card.id, found.card.tenant, found.card.ancestors) == ("pick@3", "acme", ["pick@2", "warm@0"])
    assert "pick@3" in (tmp_path / "mine" / README).read_text()


def test_without_an_adapter_there_are_no_adapter_files(tmp_path: Path):
    write(tmp_path / "mine", made(adapter=None))
    assert not (tmp_path / "mine" / ADAPTER).exists()
    assert not (tmp_path / "mine" / ADAPTER_CONFIG).exists()
    assert read(tmp_path / "mine").adapter is None


def test_a_replaced_export_leaves_nothing_of_the_one_before_and_everything_else(tmp_path: Path):
    state = TrainingState(tenant="acme", job="pick", step=1, batches=1, records=1, version=3, state=ref(b"s"), epoch=1)
    write(tmp_path / "mine", made(training=(state, b"s")))
    assert (tmp_path / "mine" / STATE).read_bytes() == b"s"
    assert json.loads((tmp_path / "mine" / CURSOR).read_bytes())["step"] == 1
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(BadJob, match="is not empty"):
        write(tmp_path / "mine", made(adapter=None))
    write(tmp_path / "mine", made(adapter=None), force=True)
    left = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert left == {HEAD, CONTRACT, VERSION, README, "notes.txt"}


def test_an_empty_directory_and_a_link_to_one_are_filled(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", made())
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "real").card.id == "pick@3"


def test_what_is_in_the_way_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(BadJob, match="is no directory"):
            write(tmp_path / name, made(), force=True)
    with pytest.raises(Unavailable, match="Not a directory; the export was not written"):
        write(tmp_path / "file" / "below", made())


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool):
    if there:
        write(tmp_path / "mine", made(adapter=None))
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    whole = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == VERSION:
            raise OSError(28, os.strerror(28))
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(Unavailable, match="No space left on device; the export was not written"):
        write(tmp_path / "mine", made(), force=True)
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def apply(directory: Path) -> None:
        path = directory / name
        path.write_bytes(msgspec.json.encode(change(msgspec.json.decode(path.read_bytes()))))

    return apply


@pytest.mark.parametrize(
    ("harm", "error", "says"),
    [
        (
            lambda d: (d / VERSION).unlink(),
            BadMessage,
            r"has no policy_version\.json; it is no export, or one",
        ),
        (lambda d: (d / CONTRACT).unlink(), BadMessage, r"has no policy_contract\.json"),
        (lambda d: (d / ADAPTER).unlink(), BadMessage, r"has no adapter_model\.safetensors"),
        (lambda d: (d / HEAD).rename(d / "model.bin"), BadMessage, r"holds model\.bin, which runs code .* only safetensors"),
        (lambda d: (d / HEAD).write_bytes(WEIGHTS[:-1]), BadMessage, r"action_head\.safetensors: was changed or cut off"),
        (lambda d: (d / ADAPTER).write_bytes(WEIGHTS), BadMessage, r"adapter_model\.safetensors: was changed or cut off"),
        (lambda d: (d / CONTRACT).write_bytes(b"{"), BadMessage, r"policy_contract\.json"),
        (edit(CONTRACT, lambda c: c | {"horizon": 0}), BadMessage, r"policy_contract\.json: .*horizon"),
        (edit(CONTRACT, lambda c: c | {"prompt": "do {instruction}"}), ContractError, r"policy_contract\.json: was changed"),
        (edit(CONTRACT, lambda c: {k: v for k, v in c.items() if k != "lora"}), ContractError, r"contract\.json: was changed"),
        (edit(VERSION, lambda c: c | {"statistics_hash": "0"}), ContractError, "statistics_hash"),
        (edit(VERSION, lambda c: c | {"format": "nexus-policy-9"}), BadMessage, r"policy_version\.json: .*format"),
        (edit(VERSION, lambda c: c | {"id": "../pick@3"}), BadMessage, r"policy_version\.json: .*id"),
        (edit(VERSION, lambda c: c | {"adapter": None}), BadMessage, r"adapter_model\.safetensors: was changed"),
        (edit(ADAPTER_CONFIG, lambda c: c | {"r": 4}), ContractError, r"adapter_config\.json: r is 4, contract\.lora says 2"),
        (edit(ADAPTER_CONFIG, lambda c: c | {"lora_alpha": 1}), ContractError, r"adapter_config\.json: lora_alpha is 1"),
        (lambda d: (d / HEAD).unlink() or (d / HEAD).mkdir(), BadMessage, "is no regular file"),
        (shutil.rmtree, NotFound, "is no directory"),
    ],
)
def test_a_directory_that_was_changed_is_refused_by_the_files_name(
    harm: Callable[[Path], Any], error: type[Refused], says: str, tmp_path: Path
):
    write(tmp_path / "mine", made())
    harm(tmp_path / "mine")
    with pytest.raises(error, match=says):
        read(tmp_path / "mine")


@pytest.mark.parametrize(
    ("weights", "adapter", "says"),
    [
        (
            save({"head.weight": np.array([np.nan], np.float32)}),
            None,
            r"action_head\.safetensors: .head\.weight. holds",
        ),
        (WEIGHTS, save({"x": np.ones((2, 2), np.float32)}), r"adapter_model\.safetensors: 'x' is"),
    ],
)
def test_weights_that_cannot_serve_are_refused_though_their_hash_is_right(
    weights: bytes, adapter: bytes | None, says: str, tmp_path: Path
):
    files = made(None, weights)
    if adapter is not None:
        card = msgspec.json.decode(files[VERSION])
        contract = version(weights, adapter).contract
        card |= {"adapter": msgspec.to_builtins(ref(adapter)), "contract_sha256": exported.contract_hash(contract)}
        files |= {ADAPTER: adapter, CONTRACT: msgspec.json.encode(contract), VERSION: msgspec.json.encode(card)}
    write(tmp_path / "mine", files)
    with pytest.raises(ContractError, match=says):
        read(tmp_path / "mine")


def test_a_contract_laid_out_differently_is_the_same_contract(tmp_path: Path):
    write(tmp_path / "mine", made())
    before = read(tmp_path / "mine").contract
    path = tmp_path / "mine" / CONTRACT
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_bytes()).items())), indent=7))
    assert read(tmp_path / "mine").contract == before
