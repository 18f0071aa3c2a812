"""A policy version as a directory that its owner takes home, and back again. Pure files: no bus, no torch.

action_head.safetensors     the action module
adapter_model.safetensors   its LoRA adapter under peft's names, and adapter_config.json; only where there is one
policy_contract.json        everything that must fit before it may act
policy_version.json         what it is, its ancestors, hashes of the files above; written last, so without it
                            the directory is no export
training_state/             optional: optimizer and generator (state.safetensors), and how far it came (cursor.json)
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nexus_bus.errors import BadJob, BadMessage, ContractError, NotFound, Unavailable
from nexus_bus.models.tensorfile import adapter_config, check_adapter, check_tensors, read_header
from schemas.policy import ExportedPolicy, PolicyContract, PolicyVersion, TrainingState

T = TypeVar("T")

HEAD, ADAPTER, ADAPTER_CONFIG = "action_head.safetensors", "adapter_model.safetensors", "adapter_config.json"
CONTRACT, VERSION, README = "policy_contract.json", "policy_version.json", "README.md"
STATE, CURSOR = "training_state/state.safetensors", "training_state/cursor.json"
FILES = (HEAD, ADAPTER, ADAPTER_CONFIG, CONTRACT, README, STATE, CURSOR, VERSION)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LARGEST = 1 << 30  # bytes of one file


@dataclass(frozen=True)
class Exported:
    """What a directory holds, read and checked."""

    card: ExportedPolicy
    contract: PolicyContract
    weights: bytes
    adapter: bytes | None


def contract_hash(contract: PolicyContract) -> str:
    """Sha256 over a contract, however its JSON is laid out."""
    return hashlib.sha256(msgspec.json.encode(contract, order="sorted")).hexdigest()


def files_of(
    version: PolicyVersion,
    weights: bytes,
    adapter: bytes | None,
    ancestors: Sequence[str],
    training: tuple[TrainingState, bytes] | None = None,
) -> dict[str, bytes]:
    """Content of every file of an export. `ancestors`: from the parent to the root."""
    contract = version.contract
    card = ExportedPolicy(
        format="nexus-policy-1",
        tenant=version.tenant,
        id=version.id,
        created=version.created,
        ancestors=list(ancestors),
        step=version.step,
        records=version.records,
        seed=version.seed,
        metrics=version.metrics,
        trace=version.trace,
        weights=version.weights,
        adapter=version.adapter,
        contract_sha256=contract_hash(contract),
        statistics_hash=contract.statistics_hash,
    )
    files = {HEAD: weights, CONTRACT: _pretty(contract), README: _readme(version).encode(), VERSION: _pretty(card)}
    if adapter is not None and contract.lora is not None:
        config = adapter_config(contract.lora, read_header(adapter, ADAPTER), contract.backbone)
        files |= {ADAPTER: adapter, ADAPTER_CONFIG: _pretty(config)}
    if training is not None:
        files |= {STATE: training[1], CURSOR: _pretty(training[0])}
    return files


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"


def _readme(version: PolicyVersion) -> str:
    contract, head = version.contract, version.contract.head
    lines = [
        f"# {version.id}",
        "",
        f"A policy of the Nexus Bus: the head `{head.type}`, {contract.horizon} actions of {contract.action.size} numbers",
        f"on the backbone `{contract.backbone}` (fingerprint {contract.backbone_fingerprint[:12]}).",
        f"Made at step {version.step} of job `{version.job}`, {version.created}.",
        "",
        '- Back into a service: `nexus import DIR --name NAME`, then `init = "NAME@0"` in a job document.',
        f"- `{HEAD}`: weights of the head; `{CONTRACT}`: prompt, cameras, normalisation and everything else that must fit.",
        f'- In Python: `safetensors.torch.load_file("{HEAD}")`, and the module to load it into by',
        f"  `nexus_bus.models.heads.build_head(contract.head, FeatureShape(H, N), {contract.observation.state_size},"
        f" {contract.action.size}, seed=0)`, H and N being width and layers of the backbone.",
    ]
    if version.adapter is not None:
        lines.append(
            f"- `{ADAPTER}`: `peft.PeftModel.from_pretrained(model, DIR)`, where `model` is the backbone from transformers."
        )
    return "\n".join([*lines, ""])


def write(directory: Path, files: Mapping[str, bytes], *, force: bool = False) -> list[Path]:
    """Write an export, whole or not at all. Files of other names in the directory are left alone.

    Args:
        force: the directory may hold something; files of an export there are replaced.

    Raises:
        BadJob: something is there already.
        Unavailable: the disk is full or refuses.
    """
    directory = Path(os.path.abspath(directory))  # not resolve(): a link to a directory stays a link
    there = os.path.isdir(directory)
    if os.path.lexists(directory) and not there:
        raise BadJob(f"{directory}: is no directory")
    # Beside the target, so that moving into place needs no more room and cannot stop half-way for want of it.
    aside = (directory if there else directory.parent) / f".{directory.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        if there and not force and any(directory.iterdir()):
            raise BadJob(f"{directory}: is not empty; choose another directory, or replace an export there with --force")
        for name, content in files.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_bytes(content)
        if there:
            _replace(directory, aside, files)
        else:
            aside.rename(directory)
    except (OSError, ValueError) as error:  # the latter of a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise Unavailable(f"{directory}: {reason}; the export was not written") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [directory / name for name in FILES if name in files]


def _replace(directory: Path, aside: Path, files: Mapping[str, bytes]) -> None:
    """Move files into place one by one; the one that makes it an export goes first and comes last. Two take turns."""
    turn = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(turn, fcntl.LOCK_EX)
        (directory / VERSION).unlink(missing_ok=True)
        for name in FILES:
            if name in files:
                (directory / name).parent.mkdir(exist_ok=True)
                (aside / name).replace(directory / name)
            else:
                (directory / name).unlink(missing_ok=True)
    finally:
        os.close(turn)


def read(directory: Path) -> Exported:
    """Read an export and check that it is whole and unchanged.

    Raises:
        NotFound: there is no such directory.
        BadMessage: a file is missing, cut off, too large, not of its format, or not what policy_version.json says.
        ContractError: weights, adapter and contract do not belong together, or numbers are not finite.
    """
    if not os.path.isdir(directory):
        raise NotFound(f"{directory}: is no directory")
    card = _decode(directory, VERSION, ExportedPolicy)
    contract = _decode(directory, CONTRACT, PolicyContract)
    if (has := contract_hash(contract)) != card.contract_sha256:
        raise ContractError(f"{CONTRACT}: was changed: its hash is {has[:12]}…, {VERSION} says {card.contract_sha256[:12]}…")
    if contract.statistics_hash != card.statistics_hash:
        raise ContractError(f"{CONTRACT}: statistics_hash is not the one of {VERSION}")
    weights = _bytes(directory, HEAD)
    adapter = _bytes(directory, ADAPTER) if card.adapter is not None or contract.lora is not None else None
    for name, content, ref in ((HEAD, weights, card.weights), (ADAPTER, adapter, card.adapter)):
        if (has := hashlib.sha256(content).hexdigest() if content is not None else "") != (ref.sha256 if ref else ""):
            raise BadMessage(f"{name}: was changed or cut off: its sha256 is {has[:12]}…, {VERSION} says otherwise")
    check_weights(contract, weights, adapter)
    if adapter is not None and contract.lora is not None:
        config = _decode(directory, ADAPTER_CONFIG, dict[str, Any])
        for key, has, wanted in (
            ("r", config.get("r"), contract.lora.rank),
            ("lora_alpha", config.get("lora_alpha"), contract.lora.alpha),
        ):
            if has != wanted:
                raise ContractError(f"{ADAPTER_CONFIG}: {key} is {has}, contract.lora says {wanted}")
    return Exported(card, contract, weights, adapter)


def check_weights(contract: PolicyContract, weights: bytes, adapter: bytes | None) -> None:
    """What can be said about weights without building the head: they are whole, finite, and of the contract's adapter.

    Raises:
        BadMessage, ContractError: names the file and the tensor.
    """
    check_tensors(weights, HEAD)
    if (adapter is None) != (contract.lora is None):
        has, says = ("no adapter", "has one") if adapter is None else ("an adapter", "has none")
        raise ContractError(f"{ADAPTER}: there is {has}, but contract.lora {says}")
    if adapter is not None and contract.lora is not None:
        check_adapter(check_tensors(adapter, ADAPTER), contract.lora, ADAPTER)


def _decode(directory: Path, name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_bytes(directory, name), type=kind)
    except msgspec.DecodeError as error:
        raise BadMessage(f"{name}: {error}") from error


def _bytes(directory: Path, name: str) -> bytes:
    path = directory / name
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe or a device might never end
            raise BadMessage(f"{path}: is no regular file")
        if found.st_size > LARGEST:
            raise BadMessage(f"{path}: larger than {LARGEST} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        pickled = sorted(found.name for found in directory.iterdir() if found.suffix in PICKLED)
        if pickled:
            raise BadMessage(
                f"{directory}: holds {pickled[0]}, which runs code when it is read, and no {name}; only safetensors are taken"
            ) from None
        raise BadMessage(f"{directory}: has no {name}; it is no export, or one that was cut off") from None
    except OSError as error:
        raise BadMessage(f"{path}: {error.strerror or error}") from error
