"""A person's job document: what it may be written in, and what is said when it is wrong."""

from pathlib import Path
from typing import Any

import pytest

from nexus_bus.documents import job_spec, located
from nexus_bus.errors import BadJob, NotFound
from schemas.job import JobSpec, Ppo

TOML = """
kind = "rl"
name = "pick"
[environment]
id = "tabletop"
task = "touch"
[algorithm]
name = "ppo"
updates = 3
"""
YAML = "{kind: rl, name: pick, environment: {id: tabletop, task: touch}, algorithm: {name: ppo, updates: 3}}"
JSON = (
    '{"kind": "rl", "name": "pick", "environment": {"id": "tabletop", "task": "touch"},'
    ' "algorithm": {"name": "ppo", "updates": 3}}'
)
EXAMPLES = sorted((Path(__file__).parents[2] / "ops" / "examples").glob("*.toml"))


def written(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def refusal(document: dict[str, Any] | Path) -> str:
    with pytest.raises(BadJob) as caught:
        job_spec(document)
    return str(caught.value)


def test_toml_yaml_and_json_say_the_same(tmp_path: Path):
    specs = [job_spec(written(tmp_path, name, text)) for name, text in (("a.toml", TOML), ("a.yaml", YAML), ("a.json", JSON))]
    assert specs[0] == specs[1] == specs[2]
    assert isinstance(specs[0], JobSpec)
    assert isinstance(specs[0].algorithm, Ppo)
    assert specs[0].algorithm.updates == 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_shipped_examples_are_documents(path: Path):
    assert job_spec(path).name


def test_an_unknown_field_is_named_with_its_line_and_what_was_meant(tmp_path: Path):
    said = refusal(written(tmp_path, "a.toml", TOML.replace("updates", "update")))
    assert said.endswith("a.toml:9: algorithm.update: no such field; did you mean 'updates'?")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hed": {}}, "hed: no such field; did you mean 'head'?"),
        ({"head": {"horzon": 3}}, "head.horzon: no such field; did you mean 'horizon'?"),
        ({"zzz": 1}, "zzz: no such field; there are algorithm, base, budget"),
        ({"algorithm": {"name": "ppo", "steps": 3}}, "algorithm.steps: no such field; there are clip"),
        ({"algorithm": {"name": "grpo"}}, "algorithm.name: Invalid value 'grpo'; there are sft, ppo"),
        ({"algorithm": {"steps": 3}}, "algorithm.name: missing"),
        ({"kind": "train"}, "kind: Invalid enum value 'train'; there are eval, rl, sft"),
        ({"name": "My Job"}, "name: a name is lower-case letters"),
        ({"name": "a.b"}, "name: a name is lower-case letters"),
        ({"init": "pick"}, "init: a policy is named <job>@<number> or <job>@latest"),
        ({"head": {"horizon": "8"}}, "head.horizon: Expected `int`, got `str`"),
        ({"head": {"horizon": 0}}, "head.horizon: Expected `int` >= 1"),
        ({"seed": -1}, "seed: Expected `int` >= 0"),
        ({"evaluation": {"success": "never"}}, "evaluation.success: Invalid enum value 'never'; there are any_step, last_step"),
    ],
)
def test_a_refusal_begins_with_the_field(change: dict[str, Any], said: str):
    assert refusal({"kind": "rl", "name": "pick"} | change).startswith(said)


def test_a_missing_field_is_named():
    assert refusal({"kind": "rl"}) == "name: missing"
    assert refusal({"kind": "rl", "name": "a", "environment": {"id": "tabletop"}}) == "environment.task: missing"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "kind = ", "not well formed"),
        ("a.yaml", "a: [1", "not well formed"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "not well formed"),
        ("a.json", "{", "not well formed"),
        ("a.json", "[" * 100_000, "not well formed"),
        ("a.json", "[]", "a table of fields, not a list"),
        ("a.yaml", "", "a table of fields, not a NoneType"),
        ("a.txt", "kind: rl", "ends in .toml, .yaml or .json"),
        ("a.toml", "#" * (1 << 21), "larger than"),
    ],
)
def test_what_is_no_document_is_said_to_be_none(tmp_path: Path, name: str, text: str, said: str):
    assert said in refusal(written(tmp_path, name, text))


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path):
    assert "No such file" in refusal(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in refusal(tmp_path / "b.toml")


def test_a_line_is_given_only_where_it_is_sure(tmp_path: Path):
    twice = TOML + "\n[evaluation]\nsuccess = 'never'\nupdates = 1\n"
    assert ":9:" not in refusal(written(tmp_path, "a.toml", twice.replace("updates = 3", 'updates = "3"')))


def test_a_refusal_of_the_plan_names_the_line_too(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text('kind = "rl"\nname = "a"\n\n[environment]\nid = "tabletop"\ntask = "toch"\n')
    error = located(path, NotFound("environment.task: tabletop has no task 'toch'; did you mean 'touch'?"))
    assert isinstance(error, NotFound)
    assert str(error).startswith(f"{path}:6: environment.task: tabletop has no task")
    whole = BadJob("init: no such version")
    assert str(located(path, whole)) == f"{path}: init: no such version"
    assert located(path, BadJob("a sentence without a field")).args == ("a sentence without a field",)
