"""A tenant's own environment as an entry of the catalogue: what may be offered, and what a job may say of it."""

from typing import Any

import msgspec
import pytest

from nexus_bus.documents import job_spec
from nexus_bus.envs.catalog import describe
from nexus_bus.envs.offered import CAMERAS, NUMBERS, check, entries, is_own
from nexus_bus.errors import BadJob, BadMessage, NotFound
from nexus_bus.evaluation.protocol import protocol_of
from nexus_bus.plan import compile_plan
from nexus_bus.progress import leave
from schemas.environment import OwnOffer
from schemas.job import EnvironmentSpec
from schemas.plan import JobState
from schemas.policy import ActionSpec, ObservationSpec

INF = float("inf")


def offer(action: dict[str, Any] | None = None, seen: dict[str, Any] | None = None, **fields: Any) -> OwnOffer:
    """Two tasks of an arm."""
    task = {
        "action": msgspec.to_builtins(ActionSpec(size=2, low=[-1, -1], high=[1, 1])) | (action or {}),
        "observation": msgspec.to_builtins(ObservationSpec(cameras={"wrist": (96, 96, 3)}, state_size=4)) | (seen or {}),
        "max_steps": 40,
        "instruction": "open the door",
    }
    given = {"environment": "own-arm", "worker": "w", "sessions": 1, "simulator": "arm 1.2", **fields}
    tasks = {"door": task, "drawer": task | {"max_steps": 60, "instruction": "close the drawer"}}
    return msgspec.convert({"tasks": tasks, **given}, OwnOffer)


OWN = entries([offer()])


def test_a_job_may_name_it_while_it_is_offered() -> None:
    known = describe(EnvironmentSpec(id="own-arm", task="drawer", options={"max_steps": 50}), OWN)
    assert (known.instructions, known.max_steps, known.simulator) == (["close the drawer"], 50, "arm 1.2")
    assert known.action.size == 2
    assert not known.expert
    assert describe(EnvironmentSpec(id="own-arm", task="door", options={"instruction": "ajar"}), OWN).instructions == ["ajar"]


@pytest.mark.parametrize(
    ("environment", "error", "said"),
    [
        ({"id": "own", "task": "door"}, NotFound, "no worker of yours serves 'own' right now; start one first: nexus worker"),
        ({"id": "own-arm", "task": "window"}, NotFound, "own-arm has no task 'window'"),
        ({"id": "own-arm", "task": "door", "options": {"image_size": 64}}, BadJob, "options.image_size: own-arm has no such"),
        ({"id": "owner", "task": "door"}, NotFound, "no environment 'owner'"),
    ],
)
def test_what_is_not_there_is_refused(environment: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        describe(msgspec.convert(environment, EnvironmentSpec), OWN)


def test_a_plan_for_it_stands_alone_when_it_is_away_again() -> None:
    document = {
        "kind": "rl", "name": "pick", "environment": {"id": "own-arm", "task": "door"},
        "evaluation": {"episodes": 2, "tasks": ["door", "drawer"]},
    }  # fmt: skip
    plan = compile_plan(job_spec(document), "acme", own=OWN)
    assert plan.subjects["rollout orders"] == "rollout.own.acme.own-arm.pick"
    assert plan.instructions == ["open the door", "close the drawer"]
    protocol = protocol_of(plan, ["arm 1.2"])
    assert (protocol.environment, protocol.max_steps, protocol.simulator) == ("own-arm", 60, "arm 1.2")
    state = JobState(plan=plan, phase="evaluating_before", submission="s", submitted="now")
    orders = leave(msgspec.structs.replace(state, phase="preparing")).orders
    assert {name for name, _, _ in orders} <= {"rollout.own"}


def test_no_expert_can_be_asked_for() -> None:
    document = {
        "kind": "sft",
        "name": "pick",
        "environment": {"id": "own-arm", "task": "door"},
        "data": {"expert": {"episodes": 2}},
    }
    with pytest.raises(BadJob, match="own-arm has no scripted expert"):
        compile_plan(job_spec(document), "acme", own=OWN)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"action": {"size": NUMBERS + 1, "low": [0.0] * 257, "high": [1.0] * 257}}, "tasks.door.action: 257 numbers"),
        ({"action": {"size": 2**31 - 1}}, "with 2 and 2 bounds"),
        ({"action": {"low": [1.0, -1.0]}}, "the lower below the upper"),
        ({"action": {"high": [INF, 1.0]}}, "a policy needs finite ones"),
        ({"action": {"low": [float("nan"), -1.0]}}, "a policy needs finite ones"),
        ({"seen": {"cameras": {}}}, f"observation.cameras: 0; from 1 to {CAMERAS}"),
        ({"seen": {"cameras": {str(i): (8, 8, 3) for i in range(9)}}}, f"9; from 1 to {CAMERAS}"),
        ({"seen": {"cameras": {"wide": (4000, 8, 3)}}}, "'wide' of 4000 x 8; at most 2048 pixels a side"),
        ({"seen": {"state_size": 4000}}, "observation.state_size: 4000; at most 1024"),
    ],
)
def test_sizes_that_nobody_could_hold_are_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BadMessage, match=said):
        check(offer(**wrong))


def test_what_can_be_held_is_taken() -> None:
    check(offer())


@pytest.mark.parametrize(("name", "own"), [("own", True), ("own-arm", True), ("ownarm", False), ("tabletop", False)])
def test_its_name_says_whose_it_is(name: str, own: bool) -> None:
    assert is_own(name) is own


@pytest.mark.parametrize(
    "field",
    [{"environment": "own-"}, {"environment": "tabletop"}, {"environment": "own.arm"}, {"sessions": 65}, {"worker": "a.b"}],
)
def test_names_that_would_break_out_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        offer(**field)
