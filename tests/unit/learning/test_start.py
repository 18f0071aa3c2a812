"""How a job's slot begins: from its own specification, or not at all."""

import shutil
from pathlib import Path

import pytest

from nexus_bus.errors import ContractError
from nexus_bus.learning.start import begin_slot
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.bases import SHIPPED
from schemas.job import EnvironmentSpec, HeadSpec, JobSpec, Ppo
from schemas.plan import JobState, Plan
from schemas.policy import ActionSpec, ObservationSpec


def state(base: str) -> JobState:
    spec = JobSpec(
        kind="rl", name="touch", base=base, head=HeadSpec(horizon=4), algorithm=Ppo(),
        environment=EnvironmentSpec(id="tabletop", task="touch"),
    )  # fmt: skip
    plan = Plan(
        tenant="acme", spec=spec, phases=["waiting"], roles=[], subjects={}, max_steps=50, execute=4, batches=20,
        action=ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3), instructions=[],
        observation=ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3),
    )  # fmt: skip
    return JobState(plan=plan, phase="preparing", submission="s", submitted="now")


def test_a_slot_begins_from_the_seed_alone(backbone: Backbone) -> None:
    first, again = (begin_slot(state("nexus-nano"), backbone, 7, None, None)[0].module.state_dict() for _ in range(2))
    assert all((first[name] == again[name]).all() for name in first)


def test_a_job_for_another_backbone_is_refused_by_name(backbone: Backbone, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(SHIPPED["nexus-nano"], other)
    assert begin_slot(state(str(other)), backbone, 7, None, None), "the same files under another name are the same backbone"
    (other / "generation_config.json").write_text("{}")
    with pytest.raises(ContractError, match="base"):
        begin_slot(state(str(other)), backbone, 7, None, None)
