"""From episodes to numbers: each counted once, by task and in pairs, with what a reader has to know."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from nexus_bus.errors import BadJob, NotFound
from nexus_bus.evaluation.selection import choose, evaluations
from nexus_bus.evaluation.statistics import newcombe, wilson
from nexus_bus.evaluation.summary import compare, manifest, once, summarise
from schemas.evaluation import EvaluationEpisode
from schemas.job import EnvironmentSpec
from schemas.plan import JobState

Played = Callable[..., EvaluationEpisode]
Job = Callable[..., JobState]


def test_an_episode_that_is_there_twice_counts_once_and_the_first_one_does(played: Played):
    first, again = played(1, success=True), played(1, success=False)
    assert once([first, played(0), again, played(1, purpose="before")]) == [played(1, purpose="before"), played(0), first]


def test_a_summary_has_rate_interval_means_sums_and_ends(played: Played):
    found = summarise([played(i, success=i < 6, length=10 + i) for i in range(8)])
    assert (found.episodes, found.successes, found.success) == (8, 6, 0.75)
    assert (found.low, found.high) == wilson(6, 8)
    assert (found.mean_return, found.mean_length) == (0.75, 13.5)
    assert (found.simulate_s, found.forward_s, found.wait_s) == (4.0, 2.0, 8.0)
    assert found.ends == {"success": 6, "time_limit": 2}


def test_a_report_says_what_is_missing_what_varies_and_who_played(played: Played, job: Job):
    state = replace(job("failed", episodes=3, tasks=("touch", "push")), reason="an episode could not be played")
    episodes = [played(0, task="touch", trial=0), played(1, task="push", trial=0, success=False, simulator="tabletop-2")]
    made = manifest(state, episodes)
    (one,) = made.evaluations
    assert (one.planned, one.overall.episodes, list(one.tasks)) == (6, 2, ["touch", "push"])
    assert (one.tasks["touch"].success, one.tasks["push"].success) == (1.0, 0.0)
    notes = " ".join(made.notes)
    assert "The simulator is deterministic" in notes
    assert "2 of 6 episodes are there; the job is failed: an episode could not be played" in notes
    assert "several simulators: tabletop-1 (mujoco 3.3.0); tabletop-2" in notes


def test_a_simulator_that_does_not_repeat_itself_is_said_so(played: Played, job: Job):
    state = job(environment=EnvironmentSpec(id="gymnasium", task="Pendulum-v1"), episodes=1)
    assert state.plan.varies
    notes = " ".join(manifest(state, [played(0, task="Pendulum-v1")]).notes)
    assert "may give another episode" in notes
    assert "deterministic" not in notes


def test_a_report_of_nothing_says_why(job: Job):
    with pytest.raises(BadJob, match="no episode of 'score' is there: it is waiting"):
        manifest(job("waiting"), [])


def test_two_policies_are_compared_by_task_and_trial_whatever_their_order(played: Played):
    first = [played(i, success=i < 5, task="touch" if i % 2 else "push", trial=i // 2) for i in range(10)]
    second = [played(i, success=i < 8, task="touch" if i % 2 else "push", trial=i // 2, length=9) for i in range(10)]
    found = compare("a", first, "b", reversed(second))
    assert (found.both, found.only_a, found.only_b, found.neither) == (5, 0, 3, 2)
    assert (found.difference, found.pairs, found.identical, found.unpaired) == (pytest.approx(0.3), 10, 0, 0)
    assert (found.low, found.high) == newcombe(5, 0, 3, 2)
    assert found.return_low < found.return_difference < found.return_high
    assert found.tasks.keys() == {"push", "touch"}
    assert sum(by for by, _, _ in found.tasks.values()) / 2 == pytest.approx(0.3)


def test_the_same_episodes_are_identical_and_those_of_one_alone_are_counted(played: Played):
    found = compare("a", [played(i) for i in range(4)], "b", [played(i) for i in range(3)])
    assert (found.pairs, found.identical, found.unpaired, found.p_value) == (3, 3, 1, 1.0)
    with pytest.raises(BadJob, match="no trial in common"):
        compare("a", [played(0)], "b", [played(1)])


def _named(state: JobState, name: str, **fields: Any) -> JobState:
    spec = replace(state.plan.spec, name=name)
    return replace(state, plan=replace(state.plan, spec=spec), **fields)


def test_policies_and_jobs_are_found_and_protocols_that_differ_are_refused(job: Job):
    old = _named(job(seed=1), "old", init="pick@1", submitted="1")
    new = _named(job(seed=1), "new", init="pick@2", submitted="2")
    other = _named(job(seed=5, episodes=7), "other", init="pick@2", submitted="3")
    known = evaluations([old, new, other])
    assert [one.job for one in choose(known, "pick@1", "pick@2")] == ["old", "new"], "the newest of one protocol"
    assert [one.job for one in choose(known, "old", "new")] == ["old", "new"]
    with pytest.raises(BadJob, match="differ in trials: 60 and 7; seed: 1 and 5"):
        choose(known, "old", "other")
    with pytest.raises(NotFound, match="no evaluation 'pick@9'; there are pick@1"):
        choose(known, "pick@9", "old")
    with pytest.raises(NotFound, match="no evaluation 'old:before'"):
        choose(known, "old", None)
