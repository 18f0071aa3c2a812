"""A session keeps the rules, whatever the simulator does."""

import sys

import msgspec
import numpy as np
import pytest
from fake_simulator import SPEC, Fake

from nexus_bus.envs.session import Session
from nexus_bus.envs.simulator import Observed
from nexus_bus.envs.stepped import restart, termination, transition, truncation
from nexus_bus.errors import BadMessage, ContractError, EnvironmentFault, NotFound
from schemas.job import EnvironmentSpec

ZEROS = np.zeros((3, 2), np.float32)


def test_an_episode_runs_to_success_inside_a_chunk(fake: type[Fake]) -> None:
    session = Session(SPEC)
    first = session.reset(1)
    assert (first.instruction, first.state.tolist(), session.end) == ("count", [0.0, 0.0], "running")
    middle = session.step(np.zeros((4, 2)))
    assert (middle.executed, middle.rewards, middle.end) == (4, [0.5] * 4, "running")
    last = session.step(np.zeros((4, 2)))
    assert (last.executed, last.successes, last.terminated, last.truncated, last.end) == (
        2,
        [False, True],
        True,
        False,
        "success",
    )
    assert last.observed.state[0] == 6


def test_success_that_does_not_end_the_episode_runs_into_the_limit(fake: type[Fake]) -> None:
    session = Session(EnvironmentSpec(id="fake", task="count", options={"end_on_success": False}))
    session.reset(1)
    done = session.step(np.zeros((10, 2)))
    assert done.successes == [False] * 5 + [True, False]
    assert (done.terminated, done.truncated, done.end) == (False, True, "time_limit")


def test_an_end_without_success_is_a_failure(fake: type[Fake]) -> None:
    session = Session(EnvironmentSpec(id="fake", task="count", options={"end_on_success": False, "max_steps": 50}))
    session.reset(1)
    assert session.step(np.zeros((10, 2))).end == "failure"
    assert session.steps == 8


def test_steps_outside_an_episode_are_refused(fake: type[Fake]) -> None:
    session = Session(SPEC)
    with pytest.raises(BadMessage, match="reset first"):
        session.step(ZEROS)
    with pytest.raises(BadMessage, match="reset first"):
        session.render()
    session.reset(1)
    session.step(np.zeros((8, 2)))
    with pytest.raises(BadMessage, match=r"over \(success\)"):
        session.step(ZEROS)
    session.reset(1)
    session.leave()
    with pytest.raises(BadMessage, match="reset first"):
        session.step(ZEROS)


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        (np.array([[0.0, np.nan]]), r"actions\[0, 1\]: nan is not finite"),
        (np.array([[0.0, 0.0], [np.inf, 0.0]]), r"actions\[1, 0\]: inf is not finite"),
        (np.zeros((1, 3)), r"shape \[1, 3\], expected \[1..64, 2\]"),
        (np.zeros(2), r"shape \[2\]"),
        (np.zeros((0, 2)), r"shape \[0, 2\]"),
        (np.zeros((65, 2)), r"shape \[65, 2\]"),
        (np.zeros((1, 2), bool), "dtype bool"),
    ],
)
def test_bad_actions_never_reach_the_simulator(fake: type[Fake], actions: np.ndarray, text: str) -> None:
    session = Session(SPEC)
    session.reset(1)
    with pytest.raises(ContractError, match=text):
        session.step(actions)
    assert session.step(ZEROS).observed.state[0] == 3  # nothing of the refused chunk was executed, and the episode goes on


def test_actions_are_clipped_to_the_bounds(fake: type[Fake]) -> None:
    session = Session(SPEC)
    session.reset(1)
    done = session.step(np.array([[5.0, -0.5]]))
    np.testing.assert_array_equal(session._simulator.executed[0], [1.0, -0.5])  # type: ignore[attr-defined]
    np.testing.assert_array_equal(session.expert(), np.float32([1.0, 0.0]))
    assert done.clipped == 0.5  # it is told: of un-normalised actions nothing else would be seen


def test_what_was_cut_off_is_counted_over_what_was_executed(fake: type[Fake]) -> None:
    session = Session(SPEC)
    session.reset(1)
    assert session.step(np.array([[1.0, -1.0], [1.01, -1.01]])).clipped == 0.0  # a gripper's 1 is rarely met to the digit
    done = session.step(np.array([[9.0, 9.0], [0.0, -9.0], [0.0, 0.0], [0.0, 0.0], *[[9.0, 9.0]] * 20]))
    assert (done.executed, done.end, done.clipped) == (4, "success", 3 / 8)


def test_a_simulator_that_raises_is_a_fault(fake: type[Fake]) -> None:
    session = Session(SPEC)
    session.reset(1)
    fake.fault = RuntimeError("joint left the room")
    with pytest.raises(EnvironmentFault, match="step: RuntimeError: joint left the room"):
        session.step(ZEROS)


@pytest.mark.parametrize(("lever", "value"), [("reward", float("nan")), ("state", float("inf"))])
def test_numbers_that_are_not_finite_are_a_fault(fake: type[Fake], lever: str, value: float) -> None:
    session = Session(SPEC)
    session.reset(1)
    setattr(fake, lever, value)
    with pytest.raises(EnvironmentFault):
        session.step(ZEROS)


def test_seed_and_trial_name_the_episode(fake: type[Fake]) -> None:
    session = Session(SPEC)
    seeds = []
    for seed, trial in ((1, 0), (1, 1), (2, 0), (1, 0)):
        session.reset(seed, trial)
        seeds.append(session._simulator.seed)  # type: ignore[attr-defined]
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3


def test_what_the_simulator_cannot_do_is_told(fake: type[Fake]) -> None:
    session = Session(SPEC)
    session.reset(1)
    with pytest.raises(NotFound, match="cannot"):
        session.save()
    with pytest.raises(BadMessage, match=r"state: 8 bytes that are not a saved session \(.*\); give what save\(\) of the same"):
        session.restore(b"\x00rubbish")
    before = {"environment": session._kind(), "steps": -5, "end": "running", "simulator": b""}
    with pytest.raises(BadMessage, match=r"not a saved session \(Expected `int` >= 0 - at `\$\.steps`\)"):
        session.restore(msgspec.msgpack.encode(before))


def test_an_environment_whose_package_is_missing_says_how_to_install_it(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "minigrid.envs.babyai.goto", None)
    monkeypatch.delitem(sys.modules, "nexus_bus.envs.minigrid", raising=False)
    with pytest.raises(NotFound, match=r"pip install 'nexus-bus\[minigrid\]'"):
        Session(EnvironmentSpec(id="minigrid", task="goto"))


def test_recorded_initial_states_are_chosen_by_the_trial(fake: type[Fake]) -> None:
    chosen: list[int] = []
    fake.choose = lambda self, trial: chosen.append(trial)  # type: ignore[attr-defined]
    session = Session(SPEC)
    session.reset(7, 0)
    session.reset(7, 49)
    assert chosen == [0, 49]


def test_the_four_constructors_cannot_contradict_themselves() -> None:
    seen = Observed({}, np.zeros(1, np.float32), "count")
    begun, going = restart(seen), transition(seen, [0.0], [False])
    won, lost = termination(seen, [1.0], [True]), termination(seen, [0.0], [False])
    cut = truncation(seen, [0.0, 0.0], [False, False])
    assert [(s.executed, s.terminated, s.truncated, s.end) for s in (begun, going, won, lost, cut)] == [
        (0, False, False, "running"),
        (1, False, False, "running"),
        (1, True, False, "success"),
        (1, True, False, "failure"),
        (2, False, True, "time_limit"),
    ]
    assert cut.observed is seen  # the final one, for the bootstrap
