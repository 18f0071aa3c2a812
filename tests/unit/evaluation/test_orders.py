"""An evaluation of several tasks as the master hands it out: every (task, trial) once, after a pause only what is missing."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from nexus_bus import progress
from nexus_bus.envs.catalog import describe
from nexus_bus.evaluation.statistics import wilson
from schemas.control import JobReport
from schemas.job import EnvironmentSpec
from schemas.plan import JobState
from schemas.rollout import EpisodeResult, RolloutOrder

TASKS = ("touch", "reach", "push")
SIMULATOR = describe(EnvironmentSpec(id="tabletop", task="touch")).simulator


def report(order: RolloutOrder, *, success: bool) -> JobReport:
    result = EpisodeResult(
        job=order.job, purpose=order.purpose, batch=0, index=order.index, policy=order.policy, seed=order.seed, success=success,
        episode_return=float(success), length=5, end="success" if success else "time_limit", environment="tabletop",
    )  # fmt: skip
    return JobReport(job=order.job, kind="episode", episode=result)


@pytest.fixture
def begun(job: Callable[..., JobState]) -> progress.Happening:
    """An evaluation of 4 trials of 3 tasks, as it begins."""
    return progress.leave(job("waiting", episodes=4, seed=70, tasks=TASKS, films=2, simulator=SIMULATOR))


def orders(happening: progress.Happening) -> list[RolloutOrder]:
    return [order for _, _, order in happening.orders]


def test_every_trial_of_every_task_is_one_order_and_tasks_take_turns(begun: progress.Happening):
    found = orders(begun)
    assert len({msg_id for _, msg_id, _ in begun.orders}) == 12
    assert {(one.environment.task, one.trial) for one in found} == {(task, trial) for task in TASKS for trial in range(4)}
    assert [one.environment.task for one in found[:3]] == list(TASKS), "a quarter of the episodes is a quarter of each task"
    assert all(one.seed == 70 + (one.trial or 0) for one in found), "one trial has one seed, whatever the task"
    assert {(one.films, one.simulator, one.greedy, one.policy) for one in found} == {(2, SIMULATOR, True, "pick@3")}


def test_what_was_counted_is_not_played_again_after_a_pause(begun: progress.Happening):
    state, found = begun.state, orders(begun)
    for one in found[:5]:
        state = progress.advance(state, report(one, success=True)).state
    resumed = progress.resume(progress.pause(state, "enough", 0.0, 0.0), 1.0, 0.0)
    again = {(one.environment.task, one.trial) for one in orders(resumed)}
    assert again == {(one.environment.task, one.trial) for one in found[5:]}
    assert not {msg_id for _, msg_id, _ in resumed.orders} & {msg_id for _, msg_id, _ in begun.orders}, "the queue knows those"


def test_the_score_has_each_task_and_a_repeated_report_counts_once(begun: progress.Happening):
    state, happening = begun.state, begun
    for one in orders(begun):
        happening = progress.advance(state, report(one, success=one.environment.task != "push" and one.trial != 0))
        state = happening.state
        assert progress.advance(state, report(one, success=True)).state == state
    assert state.phase == "completed"
    score = happening.score
    assert score is not None
    assert (score.successes, score.episodes) == (6, 12)
    assert [(one.task, one.successes, one.episodes) for one in score.tasks] == [
        ("touch", 3, 4),
        ("reach", 3, 4),
        ("push", 0, 4),
    ]
    assert (score.tasks[0].low, score.tasks[0].high) == wilson(3, 4)


def test_one_task_is_as_it_always_was(job: Callable[..., Any]):
    happening = progress.leave(job("waiting", episodes=3, seed=70))
    assert [(one.index, one.trial, one.seed, one.environment.task) for one in orders(happening)] == [
        (0, 0, 70, "touch"),
        (1, 1, 71, "touch"),
        (2, 2, 72, "touch"),
    ]
    assert replace(happening.state, solved={}) == happening.state
