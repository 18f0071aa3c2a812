"""From episodes to numbers: each counted once, by task and in pairs, with what a reader has to know."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadJob, NotFound
from nexus_bus.evaluation.selection import choose
from nexus_bus.evaluation.statistics import newcombe, wilson
from nexus_bus.evaluation.summary import compare, manifest, once, summarise
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.plan import compile_plan
from schemas.base import BlobRef
from schemas.evaluation import EvaluationEpisode
from schemas.job import EnvironmentSpec, EvaluationSpec, HeadSpec, JobSpec
from schemas.plan import JobState
from schemas.policy import PolicyVersion

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
    assert "The catalogue declares this simulator deterministic" in notes
    assert "All tasks together are pooled in one interval" in notes
    assert "2 of 6 episodes are there; the job is failed: an episode could not be played" in notes
    assert "several simulators: tabletop-1 (mujoco 3.3.0); tabletop-2" in notes


def test_actions_outside_the_bounds_are_told_and_a_few_are_not(played: Played, job: Job):
    def told(*shares: float) -> list[str]:
        episodes = [played(n, clipped=share) for n, share in enumerate(shares)]
        return [note for note in manifest(job(episodes=len(shares)), episodes).notes if "outside the bounds" in note]

    assert told(0.04, 0.05) == []
    assert told(0.2, 0.0) == [
        "pick@3: 10% of its action components lay outside the bounds by more than 10% of their range, and were cut: the usual "
        "sign of actions that were not brought back to the environment's units."
    ]


def test_a_simulator_that_does_not_repeat_itself_is_said_so(played: Played, job: Job):
    state = job(environment=EnvironmentSpec(id="gymnasium", task="Pendulum-v1"), episodes=1)
    assert state.plan.varies
    notes = " ".join(manifest(state, [played(0, task="Pendulum-v1")]).notes)
    assert "may give another episode" in notes
    assert "deterministic" not in notes


@pytest.mark.parametrize(
    ("phase", "fields", "says"),
    [
        ("waiting", {"reason": "jobs: 1 of 1 run"}, "'score' waits to begin: jobs: 1 of 1 run; it has played nothing yet"),
        ("evaluating_after", {}, "'score' is evaluating, and none of 60 episodes has ended yet"),
        ("training", {}, "'score' is training, and evaluates after that"),
        ("paused", {"reason": "enough"}, "'score' is paused: enough; .* `nexus resume score` lets it go on"),
        ("failed", {"reason": "no such task"}, "'score' is failed: no such task; it played no episode"),
        ("completed", {"scores": {"episodes_after": 60.0}}, "the episodes of 'score' are past their age; its score is left"),
    ],
)
def test_a_report_of_nothing_says_why(job: Job, phase: str, fields: dict[str, Any], says: str):
    with pytest.raises(BadJob, match=f"^job: {says}"):
        manifest(replace(job(phase), **fields), [])


def at(seconds: float) -> str:
    return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat()


def test_a_report_says_that_it_stood_still_and_what_was_there_by_then(played: Played, job: Job):
    side_by_side = [played(i, time=at(10 + i)) for i in range(4)]  # of 1.75 s each
    later = [played(4 + i, time=at(60 + i), attempts=1 + (i == 0)) for i in range(2)]
    state = job(episodes=6)
    assert not any("went on" in note for note in manifest(state, side_by_side).notes)
    assert not any("handed out again" in note for note in manifest(state, side_by_side).notes)
    made = manifest(state, [*later, *side_by_side])
    (went_on,) = (note for note in made.notes if "went on" in note)
    assert "pick@3: 4 of 6 episodes were there already when it went on at 2026-01-01 00:00:58 UTC" in went_on
    assert "in the 45.2 s before, none was being played" in went_on
    assert any(
        "of 6 episodes 1 had to be handed out again, after a fault of a simulator or of a worker" in note for note in made.notes
    )
    assert made.evaluations[0].repeated == 1


def test_of_an_evaluation_that_stood_still_often_the_longest_times_are_told(played: Played, job: Job):
    begins, clock = [], 10.0
    for i in range(7):
        clock += 10 * i
        begins.append(played(i, time=at(clock)))
    notes = [note for note in manifest(job(episodes=7), begins).notes if "went on" in note or "stood still" in note]
    assert [note.split()[1] for note in notes] == ["4", "5", "6", "it"]
    assert "it stood still 3 times more, for less long" in notes[-1]


def test_a_report_names_what_played_by_its_hashes(played: Played, job: Job):
    known = describe(EnvironmentSpec(id="tabletop", task="touch"))
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"), head=HeadSpec(horizon=4), action=known.action, observation=known.observation
    )
    version = PolicyVersion(
        id="pick@3", tenant="acme", job="pick", n=3, parent=None, contract=contract, created="2026-01-01T00:00:00+00:00",
        weights=BlobRef(sha256="a" * 64, size=1), step=40,
    )  # fmt: skip
    episodes = [played(i, service=("1.0", "1.1")[i]) for i in range(2)]
    (one,) = manifest(job(episodes=2), episodes, {"pick@3": version}).evaluations
    assert one.version is not None
    assert (one.version.weights, one.version.adapter, one.version.step) == ("a" * 64, None, 40)
    assert (one.version.backbone, one.version.backbone_fingerprint) == (contract.backbone, contract.backbone_fingerprint)
    assert len(one.version.contract) == 64
    assert one.services == ["1.0", "1.1"]
    assert any("several versions of the service: 1.0, 1.1" in note for note in manifest(job(episodes=2), episodes).notes)


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
    states = [old, new, other]
    assert [one.job for one in choose(states, "pick@1", "pick@2")] == ["old", "new"], "the newest of one protocol"
    assert [one.job for one in choose(states, "old", "new")] == ["old", "new"]
    with pytest.raises(BadJob, match="differ in trials: 60 and 7; seed: 1 and 5"):
        choose(states, "old", "other")
    with pytest.raises(NotFound, match=r"pick@9 was not evaluated; `nexus eval --policy pick@9` does that; there are pick@1"):
        choose(states, "pick@9", "old")
    for one in ("old", "pick@1", "old:after"):
        with pytest.raises(BadJob, match=f"'{one}' is one evaluation; name the other, too: `nexus compare {one} OTHER`"):
            choose(states, one, None)


@pytest.mark.parametrize(
    ("name", "phase", "evaluation", "says"),
    [
        ("moon", "completed", None, "there is no job 'moon'; `nexus jobs` lists them"),
        (
            "touch",
            "completed",
            None,
            "job 'touch' made no evaluation, .* no .evaluation. table; `nexus eval --policy touch@0` and `touch@latest`",
        ),
        ("touch", "completed", EvaluationSpec(before=False), "job 'touch' makes no evaluation 'before'; `nexus eval"),
        ("touch", "training", EvaluationSpec(), "job 'touch' has not begun to evaluate after, it is training"),
        ("touch", "waiting", EvaluationSpec(), "job 'touch' has not begun to evaluate before, it is waiting"),
    ],
)
def test_a_job_without_an_evaluation_says_so_and_how_one_is_made(
    name: str, phase: Any, evaluation: EvaluationSpec | None, says: str
):
    spec = JobSpec(
        kind="rl", name="touch", environment=EnvironmentSpec(id="tabletop", task="touch"), evaluation=evaluation
    )  # fmt: skip
    scores = {"success_before": 0.0} if phase == "training" else {}
    state = JobState(plan=compile_plan(spec, "acme"), phase=phase, submission="s", submitted="1", scores=scores)
    with pytest.raises(NotFound, match=f"^compare: {says}"):
        choose([state], name, None)
