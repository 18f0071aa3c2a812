"""The environments that ship conform, and the check finds what is wrong with one that does not."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_simulator import SPEC, Fake

from nexus_bus.clock import derive_seed
from nexus_bus.envs.conformance import check
from nexus_bus.envs.simulator import Moment, Observed
from schemas.job import EnvironmentSpec, Scalar


@pytest.mark.gl
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("touch", {}),
        ("reach", {"blocks": 1, "state": "tip_previous"}),
        ("push", {"reward": "dense", "state": "tip_velocity_previous", "cameras": "front+top", "image_size": 64}),
        ("slide", {"blocks": 4, "state": "tip_velocity", "target": "yellow"}),
    ],
)
def test_the_tabletop_conforms(task: str, options: dict[str, Scalar]) -> None:
    assert check(EnvironmentSpec(id="tabletop", task=task, options=options), resets=200) == []


@pytest.mark.parametrize("task", ["goto", "goto-red-ball", "pickup"])
def test_the_grid_world_conforms_without_opengl(task: str) -> None:
    assert check(EnvironmentSpec(id="minigrid", task=task), resets=200) == []


@pytest.mark.gl
@pytest.mark.slow
@pytest.mark.parametrize("task", ["reach", "button-press-topdown", "drawer-open", "drawer-close"])
def test_metaworld_conforms(task: str) -> None:
    pytest.importorskip("metaworld")
    assert check(EnvironmentSpec(id="metaworld", task=task), resets=200) == []


@pytest.mark.gl
@pytest.mark.parametrize("task", ["Pusher-v5", "Reacher-v5"])
def test_a_registered_gymnasium_environment_conforms_but_for_the_flag_that_it_lacks(task: str) -> None:
    options: dict[str, Scalar] = {"instruction": "do it", "max_steps": 30, "image_size": 64}
    found = check(EnvironmentSpec(id="gymnasium", task=task, options=options))
    assert [(finding.rule, finding.seen) for finding in found] == [
        (FLAG, "nothing said at step 1, so that no episode would ever succeed: give info['is_success']")
    ]


def test_resets_that_leave_something_behind_are_found(fake: type[Fake]) -> None:
    kept: list[np.ndarray] = []
    reset = fake.reset

    def leaking(self: Fake, seed: int) -> None:
        kept.append(np.ones(1 << 20))  # 8 MB
        reset(self, seed)

    fake.reset = leaking  # type: ignore[method-assign]
    assert "resets leave nothing behind" in {finding.rule for finding in check(SPEC, resets=30)}
    fake.reset = reset  # type: ignore[method-assign]
    assert "resets leave nothing behind" not in {finding.rule for finding in check(SPEC, resets=30)}


def test_a_task_without_a_sentence_is_found(fake: type[Fake]) -> None:
    def observe(self: Fake) -> Observed:
        return Observed({"front": np.eye(4, dtype=np.uint8)[..., None].repeat(3, 2)}, np.zeros(2, np.float32), " ")

    fake.observe = observe  # type: ignore[method-assign]
    assert "no instruction: a policy is told nothing" in {finding.seen for finding in check(SPEC)}


def rules(fake: type[Fake], resets: int = 0, **broken: Any) -> set[str]:
    """The rules that a simulator with these methods breaks, of those that one without them keeps."""
    kept = {finding.rule for finding in check(SPEC)}
    for name, method in broken.items():
        setattr(fake, name, method)
    return {finding.rule for finding in check(SPEC, resets)} - kept


def picture(value: int) -> dict[str, np.ndarray]:
    shown = np.full((4, 4, 3), value % 251, np.uint8)
    shown[0] = 255
    return {"front": shown}


def seen(self: Fake, images: Any = None, state: Any = None, instruction: str = "count") -> Observed:
    """What a simulator shows that is in order: it depends on the seed and on how many actions there were."""
    count = len(self.executed)
    honest = np.array([count, self.seed % 97], np.float32)
    return Observed(picture(self.seed + count) if images is None else images, honest if state is None else state, instruction)


@pytest.fixture
def fine(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """A simulator with which nothing is wrong."""
    monkeypatch.setattr(fake, "observe", seen)
    assert check(SPEC) == []
    return fake


SAYS = "gives what its description says"
FLAG = "every step says whether it succeeded"
APART = "sessions stand apart"
CLOSES = "it closes cleanly, and a second time does nothing"


@pytest.mark.parametrize(
    "observe",
    [
        lambda self: seen(self, images=picture(7)),
        lambda self: seen(self, images={"front": np.zeros((4, 4, 3), np.uint8)}),
        lambda self: seen(self, images={"front": picture(len(self.executed))["front"].astype(np.float32)}),
        lambda self: seen(self, state=np.zeros(2 + bool(self.executed), np.float32)),
        lambda self: seen(self, instruction="count" if not self.executed else ""),
        lambda self: seen(self, instruction="count" if not self.executed else "dance"),
    ],
    ids=["a picture that stands still", "a blank one", "floats", "a state that grows", "no sentence later", "another one"],
)
def test_what_a_simulator_shows_wrongly_at_any_step_is_found(fine: type[Fake], observe: Callable[[Fake], Observed]) -> None:
    assert SAYS in rules(fine, observe=observe)


def test_a_success_that_is_no_flag_is_found(fine: type[Fake]) -> None:
    assert rules(fine, act=lambda self, action: self.executed.append(action) or Moment(0.5, success="yes")) == {FLAG}


def test_a_simulator_that_says_nothing_of_success_is_found(fine: type[Fake]) -> None:
    assert rules(fine, silent=True) == {FLAG}


def test_sessions_that_share_a_state_are_found(fine: type[Fake]) -> None:
    shared: list[np.ndarray] = []

    def reset(self: Fake, seed: int) -> None:
        shared.clear()
        self.seed, self.executed = seed, shared

    assert rules(fine, reset=reset) == {APART}


def test_a_session_whose_end_blinds_the_others_is_found(fine: type[Fake]) -> None:
    blind: list[bool] = []

    def observe(self: Fake) -> Observed:
        return seen(self, images=picture(0) if blind else None)

    assert rules(fine, observe=observe, close=lambda _: blind.append(True)) == {APART}


def test_sessions_that_differ_for_one_seed_are_found(fine: type[Fake]) -> None:
    made = iter(range(1000))

    def reset(self: Fake, seed: int) -> None:
        self.number = getattr(self, "number", None) or next(made)  # type: ignore[attr-defined]
        self.seed, self.executed = seed + self.number, []  # type: ignore[attr-defined]

    assert rules(fine, reset=reset) == {APART}


def test_a_simulator_that_can_be_opened_only_once_is_found(fine: type[Fake]) -> None:
    opened: list[Fake] = []

    def init(self: Fake, *_: object) -> None:
        opened.append(self)
        if len(opened) > 1:
            raise RuntimeError("the port is taken")

    fine.__init__ = init  # type: ignore[method-assign]
    assert [(finding.rule, finding.seen) for finding in check(SPEC)] == [
        (APART, "a second one cannot be opened beside it: open: RuntimeError: the port is taken")
    ]


def test_a_process_that_closing_leaves_is_found(fine: type[Fake]) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def reset(self: Fake, seed: int) -> None:
        if self.__dict__.setdefault("engine", None) is None:
            self.engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # type: ignore[attr-defined]
            started.append(self.engine)  # type: ignore[attr-defined]
        self.seed, self.executed = seed, []

    try:
        assert rules(fine, reset=reset) == {APART}
    finally:
        for one in started:
            one.communicate()


def test_files_that_resets_leave_open_are_found(fine: type[Fake]) -> None:
    files: list[int] = []

    def reset(self: Fake, seed: int) -> None:
        files.append(os.open(os.devnull, os.O_RDONLY))
        self.seed, self.executed = seed, []

    try:
        assert rules(fine, resets=60, reset=reset) == {"resets leave nothing behind"}
    finally:
        for file in files:
            os.close(file)


def test_a_close_that_fails_is_a_finding_and_not_the_end_of_the_check(fine: type[Fake]) -> None:
    def close(self: Fake) -> None:
        self.closes = getattr(self, "closes", 0) + 1  # type: ignore[attr-defined]
        if self.closes > 1:  # type: ignore[attr-defined]
            raise RuntimeError("no such client")

    assert rules(fine, close=close) == {CLOSES}


def test_a_simulator_that_fails_is_a_finding_of_the_rule_that_it_fails_in(fine: type[Fake]) -> None:
    def reset(self: Fake, seed: int) -> None:
        if seed == derive_seed(8, "trial", 0):
            raise RuntimeError("joint left the room")
        self.seed, self.executed = seed, []

    fine.reset = reset  # type: ignore[method-assign]
    finding = check(SPEC)[0]
    assert [finding] == check(SPEC)
    assert finding.rule == "an episode ends once, within its limit"
    assert re.fullmatch(
        r"EnvironmentFault: reset: RuntimeError: joint left the room \(test_conformance\.py, line \d+, in reset\)", finding.seen
    )


def test_a_step_that_raises_is_a_finding_of_each_rule_that_needs_one_and_the_others_are_looked_at(fine: type[Fake]) -> None:
    def act(self: Fake, action: np.ndarray) -> Moment:
        raise ZeroDivisionError("no ground")

    fine.act = act  # type: ignore[method-assign]
    found = {finding.rule: finding.seen for finding in check(SPEC)}
    assert {FLAG, SAYS, "a chunk is its actions"} <= found.keys()
    assert {"other seeds give other episodes", CLOSES}.isdisjoint(found)
    assert re.fullmatch(r"ZeroDivisionError: no ground \(test_conformance\.py, line \d+, in act\)", found[FLAG])


def test_the_check_finds_a_broken_simulator(fake: type[Fake]) -> None:
    looks = iter(range(1_000_000))

    def observe(self: Fake) -> Observed:  # every look differs, and its state has one number too many
        return Observed({"front": np.zeros((4, 4, 3), np.uint8)}, np.array([next(looks), 0, 0], np.float32), "count")

    fake.observe = observe  # type: ignore[method-assign]
    broken = {finding.rule for finding in check(SPEC)}
    assert {"gives what its description says", "the same seed gives the same episode", "a chunk is its actions"} <= broken
    assert fake.closed == 3  # one that was beside it, and the second time is a check of its own
