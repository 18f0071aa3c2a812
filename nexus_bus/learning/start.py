"""Beginning: a job's state and, where it starts from one, a policy version become a slot and its algorithm."""

from typing import Any

import msgspec

from nexus_bus.clock import derive_seed
from nexus_bus.errors import ContractError
from nexus_bus.learning.algorithms import Algorithm, Ppo, PpoWork, SftWork, make_algorithm
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.checkpoint import load_adapter, load_weights
from nexus_bus.models.contract import build_contract, check_contract
from nexus_bus.models.slots import Slot, build_module
from schemas.job import HeadSpec
from schemas.plan import JobState
from schemas.policy import PolicyContract, PolicyVersion


def begin_slot(
    state: JobState,
    backbone: Backbone,
    seed: int,
    initial: PolicyVersion | None = None,
    weights: bytes | None = None,
    adapter_weights: bytes | None = None,
) -> tuple[Slot, Algorithm[Any]]:
    """A slot as it stands before the first batch.

    Args:
        seed: of fresh weights, noise and shuffles.
        initial, weights, adapter_weights: the version to start from, and its files.

    Raises:
        ContractError: backbone, data, environment and initial policy do not fit each other; names the field.
    """
    plan, spec = state.plan, state.plan.spec
    if spec.algorithm is None:
        raise ContractError(f"{spec.name}: an eval job learns nothing")
    if describe_backbone(spec.base).fingerprint != backbone.fingerprint:
        raise ContractError(f"base: the job asks for {spec.base!r}, this service's trainers hold {backbone.info.name!r}")
    lora = spec.lora  # the plan has filled it in
    if initial is not None:
        contract = msgspec.structs.replace(initial.contract, lora=lora)  # an adapter may be added to a frozen policy
        check_contract(contract, backbone=backbone.info, action=plan.action, observation=plan.observation)
    else:
        contract = build_contract(
            backbone=backbone.info,
            head=spec.head or HeadSpec(),
            action=plan.action,
            observation=plan.observation,
            action_statistics=state.action_statistics,
            state_statistics=state.state_statistics,
            lora=lora,
        )
    module = build_module(contract, backbone.shape, seed).to(backbone.device)
    if weights is not None:
        load_weights(module, weights)
    adapter = backbone.adapter(lora, derive_seed(seed, "adapter")) if lora is not None else None
    if adapter is not None and adapter_weights is not None:
        load_adapter(adapter, adapter_weights)
    algorithm = make_algorithm(spec.algorithm, seed)
    return algorithm.make_slot(plan.tenant, spec.name, contract, module, adapter), algorithm


def work_of(algorithm: Algorithm[Any], messages: list[Any], contract: PolicyContract) -> Any:
    """The records of one batch as the algorithm's work.

    Raises:
        BadMessage: a record that does not fit the contract; names it and the field.
    """
    if isinstance(algorithm, Ppo):
        return PpoWork.from_messages(messages, contract)
    return SftWork.from_message(messages[0], contract)
