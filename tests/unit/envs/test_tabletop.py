"""The tabletop: what it asks is what counts, and an episode can be left and taken up again to the bit."""

import numpy as np
import pytest

from nexus_bus.clock import derive_seed
from nexus_bus.envs.session import Session
from nexus_bus.errors import BadMessage
from schemas.job import EnvironmentSpec, Scalar

pytestmark = pytest.mark.gl


def session(task: str, **options: Scalar) -> Session:
    return Session(EnvironmentSpec(id="tabletop", task=task, options={"image_size": 32, **options}))


@pytest.mark.parametrize("task", ["touch", "reach", "push", "slide"])
def test_the_expert_always_succeeds(task: str) -> None:
    one = session(task)
    simulator = one._simulator  # without the session there is no picture at each step
    for trial in range(100):
        simulator.reset(derive_seed(0, "trial", trial))
        steps = next((n for n in range(1, 51) if simulator.act(simulator.expert()).success), None)
        assert steps is not None, trial
    one.close()


def test_random_actions_rarely_succeed() -> None:
    one, rng, successes = session("touch"), np.random.default_rng(0), 0
    for seed in range(20):
        one.reset(seed)
        while one.end == "running":
            one.step(rng.uniform(-1, 1, (10, 3)))
        successes += one.end == "success"
    one.close()
    assert successes <= 3


def test_the_wrong_block_does_not_count() -> None:
    one = session("touch")
    simulator = one._simulator
    successes = 0
    for seed in range(10):
        one.reset(seed)
        asked = simulator._target  # type: ignore[attr-defined]
        while one.end == "running" and one.steps < 20:
            simulator._target = (asked + 1) % 3  # type: ignore[attr-defined]
            action = one.expert()
            simulator._target = asked  # type: ignore[attr-defined]
            one.step(action[None])
        successes += one.end == "success"
    one.close()
    assert successes <= 1  # one may lie in the way


def test_left_and_right_are_those_of_the_picture() -> None:
    for side in ("left", "right"):
        one = session("push", blocks=1, image_size=96)
        seed = next(s for s in range(20) if one.reset(s).instruction.endswith(side))
        before = _red_column(one.reset(seed).images["front"])
        while one.end == "running":
            done = one.step(one.expert()[None])
        moved = _red_column(done.observed.images["front"]) - before
        one.close()
        assert (moved < -3) if side == "left" else (moved > 3)


def _red_column(picture: np.ndarray) -> float:
    red = (picture[..., 0] > 120) & (picture[..., 1] < 60)
    return float(np.nonzero(red)[1].mean())


def test_dense_reward_adds_up_to_progress_and_success() -> None:
    one = session("push", reward="dense")
    one.reset(2)
    rewards: list[float] = []
    while one.end == "running":
        rewards += one.step(one.expert()[None]).rewards
    one.close()
    assert 1.2 < sum(rewards) < 3.0
    assert rewards[-1] > 0.9


def test_sessions_that_look_the_same_share_one_scene_and_do_not_disturb_each_other() -> None:
    alone = session("touch")
    alone.reset(5)
    expected = alone.step(np.full((5, 3), 0.5)).observed
    alone.close()
    one, other = session("touch"), session("push")
    assert one._simulator._stage is other._simulator._stage  # type: ignore[attr-defined]
    one.reset(5)
    other.reset(6)
    other.step(np.full((5, 3), -0.5))
    seen = one.step(np.full((5, 3), 0.5)).observed
    other.close()
    one.render()  # still open after the other has gone
    one.close()
    one.close()
    np.testing.assert_array_equal(seen.images["front"], expected.images["front"])
    np.testing.assert_array_equal(seen.state, expected.state)


def test_a_state_of_another_scene_is_refused() -> None:
    three, four = session("touch"), session("touch", blocks=4)
    three.reset(0)
    with pytest.raises(BadMessage, match="another task or number of blocks"):
        four.restore(three.save())
    push = session("push")
    with pytest.raises(BadMessage, match="saved from tabletop-1"):
        push.restore(three.save())
    for one in (three, four, push):
        one.close()


def test_a_saved_episode_goes_on_in_another_session() -> None:
    one, other = session("touch", state="tip_previous"), session("touch", state="tip_previous")
    one.reset(3)
    one.step(np.full((2, 3), 0.3))
    seen = other.restore(one.save())
    np.testing.assert_array_equal(seen.images["front"], one.render())
    while one.end == "running":
        here, there = one.step(one.expert()[None]), other.step(other.expert()[None])
        np.testing.assert_array_equal(here.observed.images["front"], there.observed.images["front"])
        np.testing.assert_array_equal(here.observed.state, there.observed.state)
    assert one.end == other.end == "success"
    assert one.steps == other.steps
    one.close()
    other.close()


def test_a_session_that_ends_takes_no_picture_of_another_along() -> None:
    ended, other = session("push", image_size=48), session("push")
    ended.reset(1)
    before = other.reset(1)
    ended.close()
    after = other.reset(1)
    other.close()
    assert before.images.keys() == after.images.keys()
    assert all(np.array_equal(before.images[camera], after.images[camera]) for camera in before.images)
