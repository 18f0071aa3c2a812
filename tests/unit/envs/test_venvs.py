"""Simulators in virtual environments of their own: recipes, what a child there is given, conformance where one is installed."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from nexus_bus.envs import recipes
from nexus_bus.envs.catalog import ENVIRONMENTS, describe
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.envs.session import Session
from nexus_bus.envs.wire import PROTOCOL
from nexus_bus.errors import EnvironmentFault, NotFound, Unavailable
from nexus_bus.tensors import decode_image, to_tensor
from schemas.environment import SessionCall
from schemas.job import EnvironmentSpec

FIRST = {name: next(iter(entry.tasks)) for name, entry in ENVIRONMENTS.items() if entry.venv}
SLOW = ("libero-spatial", "libero-object", "libero-goal", "libero-long", "libero-90", "maniskill")
SMALL = {"image_size": 64}


def usable(environment: str) -> None:
    """Skip, with what is missing, unless this environment can be played here."""
    if wrong := recipes.check(ENVIRONMENTS[environment].venv):
        pytest.skip(f"{environment}: {wrong}")


@pytest.fixture
def small_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose virtual environment is this very interpreter under another name."""
    monkeypatch.setenv("NEXUS_ENVS", str(tmp_path))
    (tmp_path / "pusht" / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "pusht" / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("environment", FIRST)
def test_what_a_policy_must_fit_is_known_without_installing(environment: str) -> None:
    for task in ENVIRONMENTS[environment].tasks:
        known = describe(EnvironmentSpec(id=environment, task=task))
        assert known.action.control
        assert len(known.action.low) == known.action.size
        assert all(known.instructions)
        assert known.success


def test_every_recipe_serves_an_environment_and_pins_to_the_point() -> None:
    assert {entry.venv for entry in ENVIRONMENTS.values() if entry.venv} == set(recipes.RECIPES)
    for recipe in recipes.RECIPES.values():
        assert all(pin.count("==") == 1 for pin in recipe.pins)
        assert any(pin.startswith("numpy==") for pin in recipe.pins)


def test_conventions_of_libero_are_in_its_spec() -> None:
    known = describe(EnvironmentSpec(id="libero-spatial", task="2"))
    assert known.instructions == ["pick up the black bowl from table center and place it on the plate"]
    assert (known.action.gripper, known.action.rotation, known.action.control) == ("minus_open", "axis_angle", "osc_pose_delta")
    assert known.observation.cameras == {"agentview": (256, 256, 3), "wrist": (256, 256, 3)}
    assert (known.observation.orientation, known.observation.state_size, known.max_steps) == ("mirrored", 8, 220)
    counts = {name: len(ENVIRONMENTS[name].tasks) for name in ENVIRONMENTS if name.startswith("libero-")}
    assert counts == {"libero-spatial": 10, "libero-object": 10, "libero-goal": 10, "libero-long": 10, "libero-90": 90}


def test_alohas_bounds_reach_its_starting_pose() -> None:
    known = describe(EnvironmentSpec(id="aloha", task="insertion"))
    pose = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.1] * 2)  # radians, and grippers from 0 (closed) to 1
    np.testing.assert_array_equal(np.clip(pose, known.action.low, known.action.high), pose)
    assert known.observation.cameras == {"top": (480, 640, 3)}


def test_one_that_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_ENVS", str(tmp_path))
    assert recipes.check("pusht") == "not installed: `nexus env install pusht`"
    with pytest.raises(NotFound, match="gym_pusht is not installed here: nexus env install pusht"):
        Session(EnvironmentSpec(id="pusht", task="push"))
    with pytest.raises(NotFound, match=r"no environment 'libro'.*did you mean 'libero'"):
        recipes.install("libro", print)


def test_another_interpreter_finds_our_code_and_nothing_else_of_ours(small_venv: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    variables = recipes.variables(folder, small_venv)
    assert sorted(path.name for path in Path(variables["PYTHONPATH"]).iterdir()) == ["nexus_bus", "schemas"]
    code = "import nexus_bus.envs.entry, schemas, os; print(nexus_bus.__file__, schemas.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout.count(variables["PYTHONPATH"]) == 2


async def test_the_child_runs_on_the_interpreter_of_its_environment(small_venv: Path) -> None:
    small_venv.write_text("#!/bin/sh\necho wrong interpreter >&2\nexit 7\n")  # noqa: ASYNC240 - a line
    with pytest.raises(EnvironmentFault, match="ended with code 7: wrong interpreter"):
        await SimulatorHost.start(environment="pusht")
    other = await SimulatorHost.start(environment="tabletop")  # has none of its own
    await other.stop()


async def test_a_child_of_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexus_bus.envs.host.PROTOCOL", 999)
    with pytest.raises(EnvironmentFault, match=f"speaks protocol {PROTOCOL}, this host 999"):
        await SimulatorHost.start()


def test_an_installation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_ENVS", str(tmp_path))
    monkeypatch.setattr(recipes, "_run", _fail)
    with pytest.raises(Unavailable, match="no such version"):
        recipes.install("pusht", lambda _: None)
    assert not (tmp_path / "pusht" / "venv").exists()


def _fail(command: list[str]) -> None:
    if "venv" in command:
        Path(command[-1], "bin").mkdir(parents=True)
        return
    raise Unavailable("pip: no such version")


def test_a_version_other_than_the_pinned_one_is_told(small_venv: Path) -> None:
    site = small_venv.parent.parent / "lib" / "python3.11" / "site-packages" / "pymunk-7.0.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: pymunk\nVersion: 7.0.0\n")
    assert "pymunk==6.11.1, found 7.0.0" in recipes.missing("pusht")
    assert "pymunk 7.0.0" in describe(EnvironmentSpec(id="pusht", task="push")).simulator


@pytest.mark.parametrize(
    ("ending", "found"), [("exit 0", []), ("kill -SEGV $$", ["its process ends cleanly: ended by SIGSEGV"])]
)
def test_a_simulator_that_crashes_when_all_is_said_does_not_conform(small_venv: Path, ending: str, found: list[str]) -> None:
    small_venv.write_text(f"#!/bin/sh\necho '[]'\n{ending}\n")
    assert recipes.conformance("pusht", "pusht", "push") == found


def test_a_check_that_does_not_come_to_its_end_says_so(small_venv: Path) -> None:
    small_venv.write_text("#!/bin/sh\necho 'loading scene'\necho 'no display' >&2\nexit 3\n")
    with pytest.raises(Unavailable, match="conformance of pusht push: ended with code 3: no display"):
        recipes.conformance("pusht", "pusht", "push")


@pytest.mark.parametrize("environment", [name for name in FIRST if name not in SLOW])
def test_it_conforms(environment: str) -> None:
    usable(environment)
    entry = ENVIRONMENTS[environment]
    for task in entry.tasks:
        assert recipes.conformance(entry.venv, environment, task, '{"image_size":64}') == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("environment", SLOW)
def test_it_conforms_slowly(environment: str) -> None:
    usable(environment)
    found = recipes.conformance(
        ENVIRONMENTS[environment].venv, environment, FIRST[environment], '{"image_size":64,"max_steps":40}'
    )
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("environment", ["pusht", "panda", "fetch", "aloha"])
def test_two_hundred_resets_leave_nothing_behind(environment: str) -> None:
    usable(environment)
    found = recipes.conformance(ENVIRONMENTS[environment].venv, environment, FIRST[environment], '{"image_size":64}', 200)
    assert found == []


async def test_an_episode_in_another_venv() -> None:
    usable("pusht")
    host = await SimulatorHost.start(environment="pusht")
    spec = EnvironmentSpec(id="pusht", task="push", options={**SMALL, "max_steps": 20})
    session = await host.open(spec)
    reply = await host.call(session, SessionCall(op="reset", seed=3))
    assert reply.observation is not None
    assert decode_image(reply.observation.images["top"]).shape == (64, 64, 3)
    middle = to_tensor(np.full((32, 2), 256, np.float32))
    reply = await host.call(session, SessionCall(op="step", actions=middle))
    assert (reply.truncated, reply.end, reply.steps) == (True, "time_limit", 20)
    assert (await host.describe(spec)).simulator == describe(spec).simulator
    await host.stop()


async def look(host: SimulatorHost, session: int, spec: EnvironmentSpec, op: Literal["reset", "step"]) -> list[bytes]:
    """The pictures after a reset, or after three actions around the middle."""
    action = describe(spec).action
    chunk = to_tensor(np.linspace(action.low, action.high, 9, dtype=np.float32)[[4, 5, 4]])
    reply = await host.call(session, SessionCall(op=op, seed=3, actions=chunk if op == "step" else None), "raw")
    assert reply.observation is not None
    return [image.data for image in reply.observation.images.values()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("environment", "tasks"),
    [
        pytest.param("tabletop", ("touch", "push"), marks=pytest.mark.gl),
        pytest.param("gymnasium", ("Pusher-v5", "Reacher-v5"), marks=pytest.mark.gl),
        ("aloha", ("transfer-cube", "insertion")),
        ("fetch", ("reach", "slide")),
        ("panda", ("reach", "stack")),
        pytest.param("libero-90", ("0", "89"), marks=pytest.mark.slow),  # a kitchen and a study
        pytest.param("maniskill", ("pick-cube", "push-cube"), marks=pytest.mark.slow),
    ],
)
async def test_sessions_of_two_tasks_in_one_process_show_what_they_do_alone(environment: str, tasks: tuple[str, ...]) -> None:
    if ENVIRONMENTS[environment].venv:
        usable(environment)
    specs = [EnvironmentSpec(id=environment, task=task, options=SMALL) for task in tasks]
    alone: list[list[list[bytes]]] = []
    for spec in specs:
        host = await SimulatorHost.start(environment=environment, call_timeout=300)
        session = await host.open(spec)
        alone.append([await look(host, session, spec, op) for op in ("reset", "step", "step")])
        await host.stop()
    host = await SimulatorHost.start(environment=environment, call_timeout=300)
    one, other = [await host.open(spec) for spec in specs]
    here, there = [await look(host, one, specs[0], "reset")], [await look(host, other, specs[1], "reset")]
    here.append(await look(host, one, specs[0], "step"))  # the other was drawn last
    there.append(await look(host, other, specs[1], "step"))
    await host.close(other)
    here.append(await look(host, one, specs[0], "step"))
    await host.stop()
    assert here == alone[0]
    assert there == alone[1][:2]
