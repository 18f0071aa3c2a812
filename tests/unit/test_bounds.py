"""How much of a policy's actions lay outside the bounds is counted on the way to the report, wherever they are cut."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nexus_bus.bounds import MARGIN, outside
from nexus_bus.tensors import to_tensor
from schemas.environment import Observation, SessionReply
from schemas.evaluation import EvaluationEpisode
from schemas.inference import InferenceReply
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec
from schemas.rollout import RolloutOrder
from workers.rollout import Episode, Rollout

SEEN = Observation(images={}, state=to_tensor(np.zeros(1, np.float32)), instruction="go")
ACTIONS = to_tensor(np.zeros((4, 2), np.float32))


def test_what_overshoots_a_little_is_not_outside() -> None:
    low, high = np.array([-1.0, 0.0]), np.array([1.0, 0.02])
    slack = 0.9 * MARGIN
    assert outside(np.array([[1 + 2 * slack, 0.02 * (1 + slack)], [-1 - 2 * slack, -0.02 * slack]]), low, high) == 0.0
    assert outside(np.array([[1.5, 0.01], [0.0, -1.0], [90.0, 45.0]]), low, high) == pytest.approx(4 / 6)


async def test_an_episode_is_recorded_with_its_share_whoever_cut_it() -> None:
    """Ours are cut where they are made, a robot's in its session; an episode's actions count, not its chunks."""
    rollout, kept = Rollout.__new__(Rollout), []

    async def record(_tenant: str, episode: EvaluationEpisode, *_: Any) -> None:
        kept.append(episode)

    rollout.context = SimpleNamespace(pulse=SimpleNamespace(progress=0))  # type: ignore[assignment]
    rollout.recorder = SimpleNamespace(record=record)  # type: ignore[assignment]
    order = RolloutOrder(
        tenant="acme", job="score", purpose="after", batch=0, index=0, policy="pick@1", seed=1, noise_seed=0, greedy=True,
        environment=EnvironmentSpec(id="tabletop", task="touch"), action=ActionSpec(size=2, low=[-1, -1], high=[1, 1]),
        observation=ObservationSpec(cameras={}, state_size=1), max_steps=10, execute=4,
    )  # fmt: skip
    episode = Episode(order)
    for executed, made, stepped in ((4, 0.5, 0.0), (4, 0.0, 0.25), (2, 0.0, 0.0)):
        answer = InferenceReply(id="a", policy="pick@1", actions=ACTIONS, clipped=made)
        reply = SessionReply(observation=SEEN, rewards=[0.0] * executed, successes=[False] * executed, clipped=stepped)
        rollout._note(episode, SEEN, answer, reply)
    await rollout._record(episode, "after", "toy-1", 1.0, 1)
    assert kept[0].clipped == pytest.approx((4 * 0.5 + 4 * 0.25) / 10)
