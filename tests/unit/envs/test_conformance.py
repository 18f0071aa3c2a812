"""The environments that ship conform, and the check finds what is wrong with one that does not."""

import numpy as np
import pytest
from fake_simulator import SPEC, Fake

from nexus_bus.envs.conformance import check
from nexus_bus.envs.simulator import Observed
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
    assert check(EnvironmentSpec(id="tabletop", task=task, options=options)) == []


@pytest.mark.parametrize("task", ["goto", "goto-red-ball", "pickup"])
def test_the_grid_world_conforms_without_opengl(task: str) -> None:
    assert check(EnvironmentSpec(id="minigrid", task=task)) == []


@pytest.mark.gl
@pytest.mark.slow
@pytest.mark.parametrize("task", ["reach", "button-press-topdown", "drawer-open", "drawer-close"])
def test_metaworld_conforms(task: str) -> None:
    pytest.importorskip("metaworld")
    assert check(EnvironmentSpec(id="metaworld", task=task)) == []


@pytest.mark.gl
@pytest.mark.parametrize("task", ["Pusher-v5", "Reacher-v5"])
def test_a_registered_gymnasium_environment_conforms(task: str) -> None:
    options: dict[str, Scalar] = {"instruction": "do it", "max_steps": 30, "image_size": 64}
    assert check(EnvironmentSpec(id="gymnasium", task=task, options=options)) == []


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


def test_the_check_finds_a_broken_simulator(fake: type[Fake]) -> None:
    looks = iter(range(1_000_000))

    def observe(self: Fake) -> Observed:  # every look differs, and its state has one number too many
        return Observed({"front": np.zeros((4, 4, 3), np.uint8)}, np.array([next(looks), 0, 0], np.float32), "count")

    fake.observe = observe  # type: ignore[method-assign]
    broken = {finding.rule for finding in check(SPEC)}
    assert {"gives what its description says", "the same seed gives the same episode", "a chunk is its actions"} <= broken
    assert fake.closed == 2  # the second time is a check of its own
