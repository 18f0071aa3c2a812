"""Episodes and jobs for tests of reports and comparisons."""

from collections.abc import Callable
from typing import Any

import pytest

from nexus_bus.plan import compile_plan
from schemas.evaluation import EvaluationEpisode
from schemas.job import EnvironmentSpec, EvaluationSpec, HeadSpec, JobSpec
from schemas.plan import JobState


def episode(
    index: int, *, success: bool = True, purpose: str = "after", policy: str = "pick@3", **fields: Any
) -> EvaluationEpisode:
    task, trial = fields.pop("task", "touch"), fields.pop("trial", index)
    given: dict[str, Any] = {
        "job": "score", "purpose": purpose, "index": index, "task": task, "trial": trial, "seed": 500 + trial,
        "policy": "pick@3",
        "success": success, "end": "success" if success else "time_limit", "episode_return": float(success), "length": 10,
        "simulate_s": 0.5, "forward_s": 0.25, "wait_s": 1.0, "simulator": "tabletop-1 (mujoco 3.3.0)", "time": "now",
    }  # fmt: skip
    return EvaluationEpisode(**given | fields)


def state(phase: Any = "completed", *, environment: EnvironmentSpec | None = None, **evaluation: Any) -> JobState:
    spec = JobSpec(
        kind="eval", name="score", init="pick@3", head=HeadSpec(horizon=4), evaluation=EvaluationSpec(**evaluation),
        environment=environment or EnvironmentSpec(id="tabletop", task="touch"),
    )  # fmt: skip
    return JobState(plan=compile_plan(spec, "acme"), phase=phase, submission="s", submitted="now", init="pick@3", started="now")


@pytest.fixture
def played() -> Callable[..., EvaluationEpisode]:
    """`played(3, success=False, task=…)`: the record of one episode."""
    return episode


@pytest.fixture
def job() -> Callable[..., JobState]:
    """`job("failed", episodes=5, tasks=(…))`: an eval job as the registry holds it."""
    return state
