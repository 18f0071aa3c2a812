"""Retention: which versions give up their weights, and which nobody may take from those who need them."""

from typing import Any

import pytest

from nexus_bus.retention import in_use, retire
from schemas.job import EnvironmentSpec, EvaluationSpec, JobSpec, Ppo, RetentionSpec, Sft
from schemas.plan import JobState, Plan
from schemas.policy import ActionSpec, ObservationSpec


@pytest.mark.parametrize(
    ("keep", "every", "pins", "needed", "gone"),
    [
        (100, 0, [], [], []),
        (10, 0, [], [], []),
        (3, 0, [], [], [0, 1, 2, 3, 4, 5, 6]),
        (1, 0, [2], [5], [0, 1, 3, 4, 6, 7, 8]),
        (2, 4, [], [], [1, 2, 3, 5, 6, 7]),
        (1, 1, [], [], []),
    ],
)
def test_what_is_neither_new_nor_kept_nor_needed_goes(
    keep: int, every: int, pins: list[int], needed: list[int], gone: list[int]
):
    assert retire(range(10), pins, RetentionSpec(keep=keep, every=every), needed) == gone


def test_retired_ones_do_not_count_among_the_newest():
    assert retire([0, 1, 2, 7, 9], [], RetentionSpec(keep=3), []) == [0, 1]


def test_the_latest_always_stays():
    assert retire([4], [], RetentionSpec(keep=1), []) == []
    assert retire([], [], RetentionSpec(keep=1), []) == []


def job(name: str, phase: Any, version: int, *, spec: dict[str, Any] | None = None, **fields: Any) -> JobState:
    given: dict[str, Any] = {"kind": "rl", "environment": EnvironmentSpec(id="tabletop", task="touch"), "algorithm": Ppo()}
    plan = Plan(
        tenant="acme", spec=JobSpec(name=name, **given | (spec or {})), phases=[], roles=[], subjects={},
        max_steps=1, execute=1, action=ActionSpec(size=1, low=[0.0], high=[1.0]),
        observation=ObservationSpec(cameras={}, state_size=1), instructions=[], batches=50,
    )  # fmt: skip
    return JobState(plan=plan, phase=phase, submission="s", submitted="now", version=version, **fields)


def test_rollouts_that_may_still_come_have_their_versions():
    running = job("pick", "training", 7, spec={"algorithm": Ppo(staleness=2)}, done=7)
    assert in_use([running]) == {"pick@5", "pick@6", "pick@7"}
    late = job("pick", "training", 7, done=4)
    assert in_use([late]) == {f"pick@{n}" for n in range(3, 8)}, "what the master has not counted yet may still be played"
    assert in_use([job("pick", "training", 5, spec={"kind": "sft", "algorithm": Sft()}, done=500)]) == {"pick@5"}


def test_an_ended_job_needs_nothing_but_its_scores():
    assert in_use([job("pick", "completed", 9)]) == set()
    scored = job("pick", "completed", 9, scores={"success_before": 0.1, "success_after": 0.6})
    assert in_use([scored]) == {"pick@0", "pick@9"}


@pytest.mark.parametrize("phase", ["waiting", "preparing", "training"])
def test_what_a_running_job_starts_from_is_needed(phase: Any):
    child = job("child", phase, -1, spec={"init": "pick@3"})
    assert "pick@3" in in_use([child])
    resolved = job("child", phase, -1, spec={"init": "pick@latest"}, init="pick@8")
    assert "pick@8" in in_use([resolved])
    assert not any("latest" in policy for policy in in_use([resolved]))


def test_an_evaluated_version_is_needed_while_it_is_played_and_once_it_has_a_score():
    spec: dict[str, Any] = {"kind": "eval", "algorithm": None, "init": "pick@3", "evaluation": EvaluationSpec()}
    assert in_use([job("score", "evaluating_after", -1, spec=spec, init="pick@3")]) == {"pick@3"}
    assert in_use([job("score", "completed", -1, spec=spec, init="pick@3", scores={"success_after": 0.5})]) == {"pick@3"}
    assert in_use([job("score", "failed", -1, spec=spec, init="pick@3")]) == set()
