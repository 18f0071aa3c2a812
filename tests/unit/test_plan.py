"""The compiler: what a job document becomes, and what it is refused for."""

import json
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.documents import job_spec
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadJob, NotFound, Refused
from nexus_bus.models.bases import SHIPPED, describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.plan import compile_plan
from schemas.base import BlobRef
from schemas.job import EnvironmentSpec, EvaluationSpec, HeadSpec, JobSpec, Ppo, Sft
from schemas.plan import Plan
from schemas.policy import PolicyVersion


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that somebody installed beside the project are not what these tests are about."""
    monkeypatch.setattr("nexus_bus.models.catalog.installed", dict)


EXAMPLES = sorted((Path(__file__).parents[2] / "ops" / "examples").glob("*.toml"))
TABLETOP: dict[str, Any] = {"id": "tabletop", "task": "touch", "options": {"blocks": 1, "target": "red"}}
SFT: dict[str, Any] = {"kind": "sft", "name": "a", "environment": TABLETOP, "data": {"expert": {"episodes": 5}}}
RL: dict[str, Any] = {"kind": "rl", "name": "a", "environment": TABLETOP}
EVAL: dict[str, Any] = {"kind": "eval", "name": "a", "environment": TABLETOP, "init": "b@1"}


def planned(document: dict[str, Any], init: PolicyVersion | JobSpec | None = None) -> Plan:
    return compile_plan(job_spec(document), "acme", init)


def refusal(document: dict[str, Any], init: PolicyVersion | JobSpec | None = None) -> str:
    with pytest.raises(Refused) as caught:
        planned(document, init)
    return str(caught.value)


def version(head: HeadSpec | None = None, environment: dict[str, Any] = TABLETOP) -> PolicyVersion:
    """A policy b@1 trained in an environment."""
    known = describe(EnvironmentSpec(**environment))
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"),
        head=head or HeadSpec(type="oft", horizon=4),
        action=known.action,
        observation=known.observation,
    )
    weights = BlobRef(sha256="0" * 64, size=1)
    return PolicyVersion(
        id="b@1", tenant="acme", job="b", n=1, parent=None, contract=contract, weights=weights, created="2026-01-01T00:00:00Z"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_shipped_examples_compile(path: Path):
    assert compile_plan(job_spec(path), "acme").spec.name


def test_sft_records_prepares_and_trains():
    plan = planned(SFT)
    assert plan.phases == ["waiting", "data", "preparing", "training", "completed"]
    assert plan.roles == ["environment", "health", "master", "trainer"]
    assert plan.subjects["sft batches"] == "train.batch.acme.a"
    assert plan.batches == Sft().steps


def test_rl_evaluates_before_and_after_where_asked():
    plan = planned(RL | {"evaluation": {"episodes": 10}, "algorithm": {"name": "ppo", "updates": 3}})
    assert plan.phases == ["waiting", "preparing", "evaluating_before", "training", "evaluating_after", "completed"]
    assert plan.batches == 3
    assert set(plan.roles) == {"environment", "health", "inference", "master", "rollout", "trainer"}
    only_after = planned(RL | {"evaluation": {"before": False}})
    assert "evaluating_before" not in only_after.phases


def test_eval_learns_nothing():
    plan = planned(EVAL, version())
    assert plan.phases == ["waiting", "evaluating_after", "completed"]
    assert "trainer" not in plan.roles
    assert (plan.batches, plan.spec.algorithm) == (0, None)
    assert plan.spec.evaluation == EvaluationSpec()


def test_defaults_are_filled_in():
    sft, rl = planned(SFT).spec, planned(RL).spec
    assert sft.head is not None
    assert sft.head.type == "oft"
    assert sft.head.options["blocks"] == 2
    assert isinstance(sft.algorithm, Sft)
    assert isinstance(rl.algorithm, Ppo)


def test_the_head_of_init_is_inherited():
    head = HeadSpec(type="oft", horizon=4, options={"blocks": 3})
    for init in (version(head), job_spec(SFT | {"name": "b", "head": {"horizon": 4, "options": {"blocks": 3}}})):
        plan = planned(RL | {"init": "b@1"}, init)
        assert plan.spec.head is not None
        assert (plan.spec.head.horizon, plan.spec.head.options["blocks"], plan.execute) == (4, 3, 4)


def test_estimates_count_what_will_run():
    plan = planned(RL | {"evaluation": {"episodes": 10}, "algorithm": {"name": "ppo", "updates": 3, "episodes_per_update": 4}})
    assert plan.estimates["episodes"] == 3 * 4 + 2 * 10
    assert plan.estimates["environment_steps"] == 32 * plan.max_steps
    assert plan.estimates["inference_requests"] == pytest.approx(32 * plan.max_steps / plan.execute)
    assert plan.estimates["records"] == 12
    assert planned(SFT).estimates["environment_steps"] == 5 * planned(SFT).max_steps


def test_notes_say_what_may_surprise():
    assert "random weights" in planned(RL).notes[0]
    assert "waits for job 'b'" in planned(RL | {"init": "b@latest"}, job_spec(SFT | {"name": "b"})).notes[0]
    assert "not known here" in " ".join(planned(RL | {"init": "b@1"}).notes)
    assert "no evaluation" in planned(SFT).notes[-1]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (SFT | {"lora": {"rank": 4}}, 'lora: needs tier = "lora"'),
        (SFT | {"tier": "lora", "lora": {"last_layers": 9}}, "lora.last_layers: 9, but nexus-nano has 4"),
        (SFT | {"tier": "lora", "lora": {"targets": [".*"]}}, "lora.targets: no layer of the language model of 'nexus-nano'"),
        (SFT | {"tier": "lora", "lora": {"targets": ["q_proj", "qkv"]}}, "lora.targets: no layer"),
        (EVAL | {"tier": "lora", "lora": {"rank": 4}}, "lora: an eval job takes the adapter that its policy has"),
        (SFT | {"head": {"options": {"width": 8192, "blocks": 16}}}, "head.options: the weights of this 'oft' take"),
        (
            SFT | {"head": {"type": "gr00t", "options": {"repeats": 64}}, "algorithm": {"name": "sft", "batch_size": 1024}},
            "algorithm.batch_size: 1024 samples of 64 noise draws make 65536",
        ),
        (SFT | {"head": {"type": "fast"}}, "tier: 'fast' needs lora"),
        (EVAL | {"init": None}, "init: an eval job names"),
        (EVAL | {"algorithm": {"name": "sft"}}, "algorithm: an eval job learns nothing"),
        (EVAL | {"environment": None}, "environment: "),
        (SFT | {"algorithm": {"name": "ppo"}}, "algorithm: 'ppo' needs"),
        (SFT | {"data": None}, "data: an sft job needs"),
        (SFT | {"data": {}}, "data: an sft job needs"),
        (SFT | {"environment": None}, "environment: "),
        (RL | {"algorithm": {"name": "sft"}}, "algorithm: 'sft' needs"),
        (RL | {"data": {"dataset": "d"}}, "data: an rl job"),
        (RL | {"environment": None}, "environment: "),
        (RL | {"head": {"type": "gr00t"}}, "head.type: 'gr00t' has no log-prob for reinforcement learning; use oft"),
        (RL | {"head": {"type": "diffusion"}}, "head.type: 'diffusion' does not exist; there are fast, gr00t, oft, pi"),
        (RL | {"head": {"options": {"depth": 3}}}, "head.options.depth: "),
        (RL | {"head": {"horizon": 33}}, "head.horizon: 33"),
        (RL | {"environment": TABLETOP | {"execute": 9}}, "environment.execute: 9 actions of a chunk of 8"),
        (RL | {"environment": {"id": "kitchen", "task": "cook"}}, "environment.id: no environment 'kitchen'; there are"),
        (RL | {"environment": {"id": "tabletop", "task": "lift"}}, "environment.task: tabletop has no task 'lift'; there"),
        (RL | {"environment": TABLETOP | {"options": {"bloks": 1}}}, "environment.options.bloks: "),
        (RL | {"environment": TABLETOP | {"options": {"blocks": 99}}}, "environment.options.blocks: 99"),
        (RL | {"base": "no-such"}, "base: 'no-such' is neither"),
        (SFT | {"data": {"dataset": "../theirs"}}, "data.dataset: "),
        (SFT | {"data": {"dataset": "/etc"}}, "data.dataset: "),
        (SFT | {"algorithm": {"name": "sft", "steps": 5, "warmup_steps": 6}}, "algorithm.warmup_steps: 6 of 5"),
        (SFT | {"budget": {"wall_s": 0.0}}, "budget.wall_s: "),
        (SFT | {"budget": {"device_s": 0.0}}, "budget.device_s: "),
    ],
)  # fmt: skip
def test_a_refusal_begins_with_the_field_and_says_what_exists(document: dict[str, Any], said: str):
    assert refusal({key: value for key, value in document.items() if value is not None}).startswith(said)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (RL | {"init": "b@1", "head": {"type": "oft", "horizon": 8}}, "head: b@1 has the head oft with horizon 4"),
        (RL | {"init": "b@1", "environment": TABLETOP | {"options": {"state": "tip_velocity"}}}, "init: b@1 was trained with"),
        (RL | {"init": "b@1", "environment": TABLETOP | {"options": {"image_size": 64}}}, "init: b@1 was trained with"),
        (RL | {"init": "b@1", "environment": {"id": "metaworld", "task": "reach"}}, "init: b@1 was trained with action.size 3"),
        (EVAL | {"environment": TABLETOP | {"execute": 5}}, "environment.execute: 5 actions of a chunk of 4"),
    ],
)
def test_what_does_not_fit_the_given_policy_is_refused(document: dict[str, Any], said: str):
    assert refusal(document, version()).startswith(said)


def test_a_policy_of_another_backbone_is_refused():
    import msgspec

    other = version()
    contract = msgspec.structs.replace(other.contract, backbone="big", backbone_fingerprint="f" * 64)
    assert refusal(EVAL, msgspec.structs.replace(other, contract=contract)).startswith("base: b@1 was trained on 'big'")
    assert refusal(RL | {"init": "b@1"}, job_spec(SFT | {"base": "else"})).startswith("base: b@1 is trained on 'else'")


def test_refusals_of_the_catalogues_keep_their_class():
    with pytest.raises(NotFound):
        planned(RL | {"environment": {"id": "kitchen", "task": "cook"}})
    with pytest.raises(BadJob):
        planned(RL | {"head": {"type": "diffusion"}})


def test_the_compiler_loads_no_simulator_and_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from nexus_bus.documents import job_spec; from nexus_bus.plan import compile_plan;"
        f"compile_plan(job_spec({SFT!r}), 'acme');"
        "print(sorted({'torch', 'transformers', 'mujoco', 'gymnasium', 'nats'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (RL | {"evaluation": {"episodes": 2**31 - 1}}, "evaluation.episodes"),
        (RL | {"algorithm": {"name": "ppo", "episodes_per_update": 4096, "staleness": 8}}, "algorithm.episodes_per_update"),
        (SFT | {"data": {"expert": {"episodes": 2**31 - 1}}}, "data.expert.episodes"),
        (SFT | {"data": {"dataset": "a\0b"}}, "data.dataset"),
        (SFT | {"data": {"dataset": "."}}, "data.dataset"),
        (SFT | {"data": {"dataset": "a" * 3000}}, "data.dataset"),
    ],
)
def test_what_no_service_could_hold_is_refused(document: dict[str, Any], field: str):
    said = refusal(document)
    assert said.startswith(field)
    assert len(said) < 400


def test_the_latency_that_a_job_asks_for_is_the_plans():
    assert compile_plan(job_spec(SFT | {"latency_ms": 5}), "acme").latency_ms == 5
    with pytest.raises(BadJob, match="latency_ms"):
        job_spec(SFT | {"latency_ms": 0})


def test_a_job_takes_the_base_that_the_service_holds_and_no_other(tmp_path: Path):
    for path in SHIPPED["nexus-nano"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    facts = json.loads((tmp_path / "nexus.json").read_text())
    (tmp_path / "nexus.json").write_text(json.dumps(facts | {"name": "mine"}))
    assert compile_plan(job_spec(SFT), "acme", None, str(tmp_path)).spec.base == str(tmp_path)
    with pytest.raises(BadJob, match=r"base: the job asks for 'nexus-nano', this service holds .*; leave `base` out"):
        compile_plan(job_spec(SFT | {"base": "nexus-nano"}), "acme", None, str(tmp_path))
    assert compile_plan(job_spec(SFT | {"base": "mine"}), "acme", None, str(tmp_path)).spec.base == str(tmp_path), "by its name"


def test_a_service_looks_at_no_path_that_a_job_names(tmp_path: Path):
    def said(base: str) -> str:
        with pytest.raises(BadJob) as caught:
            compile_plan(job_spec(SFT | {"base": base}), "acme", None, "nexus-nano")
        return str(caught.value).replace(base[:80], "X")

    (tmp_path / "bomb").mkdir()
    (tmp_path / "bomb/config.json").write_text("[" * 1_000_000)
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair/nexus.json").write_text('{"kind": "pair", "vision": "/etc", "text": "/etc"}')
    named = [str(tmp_path / name) for name in ("bomb", "pair", "none")]
    found = {said(base) for base in (*named, "some/model", "y" * 9999)}
    assert found == {"base: the job asks for 'X', this service holds 'nexus-nano'; leave `base` out to take that"}
