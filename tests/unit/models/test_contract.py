"""The contract: built from parts that fit, refused by name for every part that does not."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from nexus_bus.errors import BadJob, ContractError
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract, check_contract
from schemas.job import HeadSpec, LoraSpec
from schemas.policy import ActionSpec, Normalizer, ObservationSpec, PolicyContract, Statistics

ACTION = ActionSpec(size=2, low=[-1.0, -0.5], high=[1.0, 0.5])
WIDE = ActionSpec(size=5, low=[-1.0] * 5, high=[1.0] * 5)
SIGHT = ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3)
STATE = Statistics(min=[0.0] * 3, max=[1.0] * 3, mean=[0.5] * 3, std=[0.1] * 3, q01=[0.0] * 3, q99=[1.0] * 3, count=10)
OTHER = msgspec.structs.replace(STATE, mean=[0.6] * 3)
INFO = describe_backbone("nexus-nano")


def contract(**changes: object) -> PolicyContract:
    parts = {"backbone": INFO, "head": HeadSpec(horizon=4), "action": ACTION, "observation": SIGHT, "state_statistics": STATE}
    return build_contract(**(parts | changes))  # type: ignore[arg-type]


def test_a_contract_names_everything_that_must_fit():
    made = contract()
    assert (made.backbone, made.horizon, made.query_tokens, made.image_size) == ("nexus-nano", 4, 8, 96)
    assert made.head.options["blocks"] == 2
    assert made.action_norm.mode == "min_max", "without action statistics the bounds serve"
    assert made.action_norm.statistics is not None
    assert made.action_norm.statistics.max == [1.0, 0.5]
    assert made.image_filter == "none"
    check_contract(made, backbone=INFO, action=ACTION, observation=SIGHT)
    assert msgspec.json.decode(msgspec.json.encode(made), type=PolicyContract) == made


def test_without_data_and_bounds_numbers_pass_as_they_are():
    endless = ActionSpec(size=1, low=[float("-inf")], high=[float("inf")])
    made = contract(action=endless, state_statistics=None)
    assert made.action_norm.mode == made.state_norm.mode == "identity"


def test_other_image_sizes_are_filtered():
    assert contract(observation=ObservationSpec(cameras={"a": (128, 128, 3)}, state_size=3)).image_filter == "bicubic"


def test_what_others_would_wait_for_to_be_unfolded_is_refused():
    full_hd: Any = {f"{n}": (1080, 1920, 3) for n in range(5)}
    contract(observation=ObservationSpec(cameras=dict(list(full_hd.items())[:4]), state_size=3))
    for cameras, said in (
        (full_hd, "5 with 10368000 pixels in all; at most 16 with 8388608"),
        ({"top": (4096, 4096, 3)}, "1 with 16777216 pixels"),
        ({f"{n}": (8, 8, 3) for n in range(17)}, "17 with 1088 pixels"),
    ):
        with pytest.raises(ContractError, match=rf"contract\.observation\.cameras: {said}"):
            contract(observation=ObservationSpec(cameras=cameras, state_size=3))  # type: ignore[arg-type]


def test_a_horizon_beyond_the_query_tokens_is_refused():
    with pytest.raises(ContractError, match=r"contract\.horizon: 9 actions.*at most 8"):
        contract(head=HeadSpec(horizon=9))


def test_an_unknown_head_is_the_jobs_mistake():
    with pytest.raises(BadJob, match=r"head\.type: 'nope'"):
        contract(head=HeadSpec(type="nope"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backbone_fingerprint": "0" * 64}, "contract.backbone_fingerprint"),
        ({"image_size": 224}, "contract.image_size: the policy has 224, here it is 96"),
        ({"prompt": "do {instruction}"}, "contract.prompt"),
        ({"query_tokens": 16}, "contract.query_tokens"),
        ({"horizon": 5}, "contract.head.horizon"),
        ({"action": msgspec.structs.replace(ACTION, high=[1.0, 0.6])}, "contract.action.high"),
        ({"action": msgspec.structs.replace(ACTION, gripper="zero_one")}, "contract.action.gripper"),
        ({"action": msgspec.structs.replace(ACTION, rotation="axis_angle")}, "contract.action.rotation"),
        ({"action": msgspec.structs.replace(ACTION, low=[0.0])}, "contract.action: 2 dimensions"),
        ({"observation": ObservationSpec(cameras={"wrist": (96, 96, 3)}, state_size=3)}, "contract.observation.cameras"),
        ({"observation": ObservationSpec(cameras={"front": (64, 64, 3)}, state_size=3)}, "contract.observation.cameras"),
        ({"observation": ObservationSpec(cameras=SIGHT.cameras, state_size=4)}, "contract.state_norm.statistics.mean: 3"),
        ({"state_norm": Normalizer(mode="quantile")}, "contract.state_norm.statistics: missing"),
        ({"state_norm": Normalizer()}, "contract.statistics_hash"),
        ({"state_norm": Normalizer(mode="mean_std", statistics=OTHER)}, "contract.statistics_hash"),
        ({"image_filter": "bicubic"}, "contract.image_filter: the policy has 'bicubic', here it is 'none'"),
        ({"lora": LoraSpec(last_layers=99)}, "contract.lora.last_layers: 99, but nexus-nano has 4 layers"),
        ({"head": HeadSpec(type="nope", horizon=4)}, "contract.head.type: 'nope'"),
        ({"lora": LoraSpec(targets=("qkv",))}, "contract.lora.targets: no layer of the language model of 'nexus-nano'"),
        ({"head": HeadSpec(horizon=4, options={"width": 8192, "blocks": 16})}, "contract.head.options: the weights"),
        ({"head": HeadSpec(type="fast", horizon=64), "action": WIDE}, "contract.head.horizon: 64 actions of 5 numbers"),
        ({"action": msgspec.structs.replace(ACTION, low=[2.0, 0.0])}, "contract.action: the lower bound of dimension 0 is 2"),
    ],
)
def test_every_misfit_is_refused_by_name(changes: dict[str, object], says: str):
    with pytest.raises(ContractError, match=says):
        check_contract(msgspec.structs.replace(contract(), **changes), backbone=INFO, action=ACTION, observation=SIGHT)


def test_a_policy_for_another_state_size_is_refused():
    with pytest.raises(ContractError, match=r"contract\.observation\.state_size: the policy has 3, here it is 4"):
        check_contract(contract(), observation=ObservationSpec(cameras=SIGHT.cameras, state_size=4))


def test_an_adapter_is_part_of_the_contract_and_a_head_may_need_one():
    lora = LoraSpec(rank=4)
    assert contract(lora=lora).lora == lora
    with pytest.raises(ContractError, match=r"contract\.lora: no adapter, but the head 'fast' is of tier lora"):
        contract(head=HeadSpec(type="fast", horizon=4))


def test_a_contract_is_checked_without_torch():
    code = (
        "import sys; from nexus_bus.models.contract import check_contract; from schemas.policy import PolicyContract\n"
        "import msgspec; check_contract(msgspec.json.decode(sys.stdin.buffer.read(), type=PolicyContract))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=msgspec.json.encode(contract()), capture_output=True, check=True)
    assert done.stdout.strip() == b"False"
