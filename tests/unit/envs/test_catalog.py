"""What a job may ask of an environment is known without loading a simulator, and a refusal lists what there is."""

import subprocess
import sys

import pytest

from nexus_bus.envs.catalog import ENVIRONMENTS, describe, options_of
from nexus_bus.errors import BadJob, NotFound
from schemas.job import EnvironmentSpec


def spec(environment: str = "tabletop", task: str = "touch", **options: str | int | float | bool) -> EnvironmentSpec:
    return EnvironmentSpec(id=environment, task=task, options=options)


def test_describing_loads_no_simulator() -> None:
    code = (
        "import sys; from schemas.job import EnvironmentSpec; from nexus_bus.envs.catalog import describe;"
        "[describe(EnvironmentSpec(id=i, task=t)) for i, t in (('tabletop', 'push'), ('metaworld', 'reach'))];"
        "print([m for m in ('mujoco', 'gymnasium', 'metaworld', 'minigrid', 'torch', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("state", "size"), [("tip", 3), ("tip_velocity", 6), ("tip_previous", 6), ("tip_velocity_previous", 9)]
)
def test_tenants_choose_their_state(state: str, size: int) -> None:
    assert describe(spec(state=state)).observation.state_size == size


def test_the_description_follows_the_options() -> None:
    known = describe(spec(task="push", image_size=64, max_steps=30, blocks=2, cameras="front+top"))
    assert known.observation.cameras == {"front": (64, 64, 3), "top": (64, 64, 3)}
    assert (known.action.size, known.max_steps, known.expert) == (3, 30, True)
    assert known.instructions == [f"push the {c} block to the {side}" for c in ("red", "green") for side in ("left", "right")]
    assert known.simulator.startswith("tabletop-1 (mujoco ")


def test_one_target_asks_for_one_block() -> None:
    assert describe(spec(target="green")).instructions == ["touch the green block"]


def test_an_unknown_environment_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        NotFound, match=r"environment\.id: no environment 'kitchen'; there are tabletop, metaworld, minigrid, gymnasium"
    ):
        describe(spec("kitchen"))


def test_an_unknown_task_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        NotFound, match=r"environment\.task: tabletop has no task 'juggle'; there are touch, reach, push, slide"
    ):
        describe(spec(task="juggle"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block": 1}, r"options\.block: tabletop has no such option; did you mean 'blocks'\? There are blocks, target"),
        ({"blocks": "1"}, r"options\.blocks: expected int, got str"),
        ({"blocks": True}, r"options\.blocks: expected int, got bool"),
        ({"blocks": 5}, r"options\.blocks: 5 is outside \[1, 4\]"),
        ({"reward": "lots"}, r"options\.reward: 'lots' is not one of 'sparse', 'dense'"),
        ({"speed": float("nan")}, r"options\.speed: nan is outside"),
        ({"target": "yellow"}, r"options\.target: no yellow block among red, green, blue"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, str | int | float | bool], text: str) -> None:
    with pytest.raises(BadJob, match=text):
        describe(spec(**options))


def test_defaults_are_filled_in_and_integers_widen() -> None:
    found = options_of(EnvironmentSpec(id="tabletop", task="touch", options={"speed": 0.03}))
    assert found["speed"] == 0.03
    assert found["blocks"] == 3


def test_every_entry_is_complete() -> None:
    for name, entry in ENVIRONMENTS.items():
        assert entry.summary, name
        assert {"max_steps", "end_on_success"} <= set(entry.options), name
        for option, one in entry.options.items():
            assert one.check(option, one.default) == one.default
            assert one.meaning, option


def test_a_gymnasium_id_may_not_import_a_module() -> None:
    with pytest.raises(NotFound, match="no registered environment 'os:Evil-v0'"):
        describe(spec("gymnasium", "os:Evil-v0"))


def test_a_gymnasium_environment_with_discrete_actions_is_refused() -> None:
    with pytest.raises(BadJob, match=r"CartPole-v1 takes Discrete\(2\)"):
        describe(spec("gymnasium", "CartPole-v1"))
