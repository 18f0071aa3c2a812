"""The policy contract: built once when a job's first version is made, checked before anything acts or learns under it.

Known without torch: the master checks with it what a tenant brings.
"""

from typing import Literal

from nexus_bus.errors import BadJob, ContractError
from nexus_bus.models.bases import BackboneInfo, check_targets
from nexus_bus.models.catalog import check_head, check_size, head_entry, suffix_tokens
from nexus_bus.models.normalize import Normalize, statistics_hash
from nexus_bus.pixels import CAMERAS, SEEN, pixels
from schemas.job import HeadSpec, LoraSpec
from schemas.policy import ActionSpec, Normalizer, NormMode, ObservationSpec, PolicyContract, Statistics


def build_contract(
    *,
    backbone: BackboneInfo,
    head: HeadSpec,
    action: ActionSpec,
    observation: ObservationSpec,
    lora: LoraSpec | None = None,
    action_statistics: Statistics | None = None,
    state_statistics: Statistics | None = None,
    action_mode: NormMode = "min_max",
    state_mode: NormMode = "mean_std",
) -> PolicyContract:
    """The contract of a new policy. `lora`: the adapter that the head is trained with, in the tier of that name.

    Without action statistics the bounds of the action space serve (finite ones; else identity), without state statistics the
    state passes as it is: that is a policy which starts from no data.

    Raises:
        BadJob: the head does not exist or asks for an option it has not.
        ContractError: the parts do not fit each other; the text names the field.
    """
    if action_statistics is None and max(map(abs, (*action.low, *action.high)), default=0.0) < float("inf"):
        action_norm = Normalizer(mode="min_max", statistics=_bounds(action))
    else:
        action_norm = _normalizer(action_mode, action_statistics)
    state_norm = _normalizer(state_mode, state_statistics)
    contract = PolicyContract(
        backbone=backbone.name,
        backbone_fingerprint=backbone.fingerprint,
        head=check_head(head),
        horizon=head.horizon,
        lora=lora,
        query_tokens=backbone.query_tokens,
        action=action,
        observation=observation,
        prompt=backbone.prompt,
        image_size=backbone.image_size,
        image_filter=image_filter(observation, backbone.image_size),
        action_norm=action_norm,
        state_norm=state_norm,
        statistics_hash=statistics_hash(action_norm, state_norm),
    )
    check_contract(contract, backbone=backbone, action=action, observation=observation)
    return contract


def image_filter(observation: ObservationSpec, size: int) -> Literal["none", "bicubic"]:
    """How pictures come to squares of `size` pixels: as they are, if every camera gives just those."""
    return "none" if {camera[:2] for camera in observation.cameras.values()} <= {(size, size)} else "bicubic"


def _normalizer(mode: NormMode, statistics: Statistics | None) -> Normalizer:
    return Normalizer() if statistics is None else Normalizer(mode=mode, statistics=statistics)


def _bounds(action: ActionSpec) -> Statistics:
    middle = [(low + high) / 2 for low, high in zip(action.low, action.high, strict=True)]
    spread = [(high - low) / 12**0.5 for low, high in zip(action.low, action.high, strict=True)]  # of a uniform one
    low, high = list(action.low), list(action.high)
    return Statistics(min=low, max=high, mean=middle, std=spread, q01=low, q99=high, count=0)


def check_contract(
    contract: PolicyContract,
    *,
    backbone: BackboneInfo | None = None,
    action: ActionSpec | None = None,
    observation: ObservationSpec | None = None,
) -> None:
    """Refuse a policy that does not fit what it is about to be used with.

    Raises:
        ContractError: names the field, what the policy has and what it met.
    """
    try:
        head = check_head(contract.head)
        suffix_tokens(head, contract.action.size)
        if backbone is not None:
            check_size(head, backbone.hidden, backbone.layers)
            check_targets(backbone, contract.lora.targets if contract.lora is not None else ())
    except BadJob as error:
        raise ContractError(f"contract.{error}") from error
    _equal("head.horizon", contract.head.horizon, contract.horizon)
    _check_lora(contract, backbone)
    if head_entry(contract.head.type).queries and contract.horizon > contract.query_tokens:
        raise ContractError(
            f"contract.horizon: {contract.horizon} actions, but {contract.backbone} ends its prompts with "
            f"{contract.query_tokens} query tokens; choose a horizon of at most {contract.query_tokens}"
        )
    if not len(contract.action.low) == len(contract.action.high) == contract.action.size:
        raise ContractError(f"contract.action: {contract.action.size} dimensions, but the bounds have another number")
    if odd := [i for i, (low, high) in enumerate(zip(contract.action.low, contract.action.high, strict=True)) if low > high]:
        low, high = contract.action.low[odd[0]], contract.action.high[odd[0]]
        raise ContractError(f"contract.action: the lower bound of dimension {odd[0]} is {low:g}, its upper one {high:g}")
    cameras = contract.observation.cameras
    if len(cameras) > CAMERAS or pixels(cameras) > SEEN:
        raise ContractError(
            f"contract.observation.cameras: {len(cameras)} with {pixels(cameras)} pixels in all; at most {CAMERAS} with "
            f"{SEEN}: others wait while they are unfolded, so scale pictures down where they are made"
        )
    Normalize(contract.action_norm, contract.action.size, "contract.action_norm")
    Normalize(contract.state_norm, contract.observation.state_size, "contract.state_norm")
    expected = statistics_hash(contract.action_norm, contract.state_norm)
    _equal("statistics_hash", contract.statistics_hash, expected)
    if backbone is not None:
        _equal("backbone_fingerprint", contract.backbone_fingerprint, backbone.fingerprint)
        _equal("image_size", contract.image_size, backbone.image_size)
        _equal("query_tokens", contract.query_tokens, backbone.query_tokens)
        _equal("prompt", contract.prompt, backbone.prompt)
    if action is not None:
        for name in ("size", "low", "high", "gripper", "rotation", "control"):
            _equal(f"action.{name}", getattr(contract.action, name), getattr(action, name))
    if observation is not None:
        _equal("observation.state_size", contract.observation.state_size, observation.state_size)
        _equal("observation.orientation", contract.observation.orientation, observation.orientation)
        _equal("observation.cameras", list(contract.observation.cameras.items()), list(observation.cameras.items()))
    # What the pictures are made with follows from the cameras; another filter shows the head other pixels than it learned.
    _equal("image_filter", contract.image_filter, image_filter(observation or contract.observation, contract.image_size))


def _check_lora(contract: PolicyContract, backbone: BackboneInfo | None) -> None:
    tier, tiers = "frozen" if contract.lora is None else "lora", head_entry(contract.head.type).tiers
    if tier not in tiers:
        has = "no adapter" if contract.lora is None else "an adapter"
        raise ContractError(f"contract.lora: {has}, but the head {contract.head.type!r} is of tier {' or '.join(tiers)}")
    if contract.lora is not None and backbone is not None and contract.lora.last_layers > backbone.layers:
        raise ContractError(
            f"contract.lora.last_layers: {contract.lora.last_layers}, but {backbone.name} has {backbone.layers} layers"
        )


def _equal(field: str, has: object, met: object) -> None:
    if has != met:
        raise ContractError(f"contract.{field}: the policy has {has!r}, here it is {met!r}")
