"""`nexus policies`, `export`, `import`: as a person types them, against a real server and a real master."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from nexus_bus import registry
from nexus_bus.bus import Bus
from nexus_bus.clock import now
from nexus_bus.envs.catalog import describe
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from schemas.job import EnvironmentSpec, HeadSpec
from schemas.policy import PolicyVersion

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture(autouse=True)
async def pick(bus: Bus) -> list[PolicyVersion]:
    """Versions of two jobs: warm@0, then pick@0 and pick@1 that started from it; pick@0 is retired."""
    known = describe(EnvironmentSpec(id="tabletop", task="touch"))
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"), head=HeadSpec(horizon=4), action=known.action, observation=known.observation
    )
    weights = await bus.blobs.put(save({"head.weight": np.ones((2, 2), np.float32)}))
    made = [
        PolicyVersion(
            id=f"{job}@{n}", tenant="acme", job=job, n=n, parent=parent, contract=contract, weights=weights, created=now(),
            retired="2026-01-02T03:04:05+00:00" if (job, n) == ("pick", 0) else "",
        )
        for job, n, parent in (("warm", 0, None), ("pick", 0, "warm@0"), ("pick", 1, "pick@0"))
    ]  # fmt: skip
    for version in made:
        await bus.kv("registry").create(registry.policy_key("acme", version.job, version.n), version)
    return made


async def test_policies_are_listed_with_where_they_come_from_and_what_is_kept(nexus: Run, pick: list[PolicyVersion]):
    code, out, _ = await nexus("policies")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["pick@0", "pick@1", "warm@0"]
    assert "retired 2026-01-02" in out
    _, out, _ = await nexus("policies", "pick", "--json")
    assert [version["id"] for version in json.loads(out)] == ["pick@0", "pick@1"]
    assert json.loads(out)[1]["parent"] == "pick@0"
    assert (await nexus("policies", "list", "warm@0"))[0] == 0


async def test_an_unknown_job_is_said_in_a_sentence(nexus: Run):
    assert await nexus("policies", "nope") == (
        1, "", "nexus: policies: acme has no job 'nope' and no policy of that name; `nexus policies` lists all\n"
    )  # fmt: skip
    code, out, err = await nexus("policies", "nope@3")
    assert (code, out) == (2, "")
    assert "no 'nope@3'" in err
    assert (await nexus("policies", "--tenant", "other"))[:2] == (0, "other has no policies\n")


async def test_a_version_is_pinned_and_let_go(nexus: Run):
    assert await nexus("policies", "pin", "pick@latest") == (0, "pick@1: pinned\n", "")
    assert " pinned " in (await nexus("policies", "pick"))[1]
    code, out, _ = await nexus("policies", "unpin", "pick@1", "--json")
    assert (code, json.loads(out)["pinned"]) == (0, False)
    code, _, err = await nexus("policies", "pin", "pick@0")
    assert (code, err) == (2, "nexus: policy: pick@0 was retired on 2026-01-02T03:04:05; it cannot be kept any more\n")


async def test_the_tree_goes_to_the_root_over_jobs(nexus: Run):
    code, out, _ = await nexus("policies", "tree", "pick@1")
    assert code == 0
    assert [line.split("  ")[0].strip() for line in out.splitlines()[1:]] == ["pick@1 … pick@0", "warm@0"]
    _, out, _ = await nexus("policies", "tree", "pick@1", "--json")
    assert [version["id"] for version in json.loads(out)] == ["pick@1", "pick@0", "warm@0"]


async def test_a_policy_leaves_and_comes_back(nexus: Run, tmp_path: Path, pick: list[PolicyVersion]):
    code, out, _ = await nexus("export", "pick@1", tmp_path / "mine", "--json")
    assert code == 0
    assert str(tmp_path / "mine" / "action_head.safetensors") in json.loads(out)
    code, _, err = await nexus("export", "pick@1", tmp_path / "mine")
    assert (code, err.endswith("or replace an export there with --force\n")) == (2, True)
    assert (await nexus("export", "pick@1", tmp_path / "mine", "--force"))[0] == 0
    assert await nexus("import", tmp_path / "mine", "--name", "second") == (0, "second@0 is acme/pick@1\n", "")
    _, out, _ = await nexus("policies", "second@0", "--json")
    came = json.loads(out)[0]
    assert came["weights"]["sha256"] == pick[2].weights.sha256
    _, out, _ = await nexus("policies", "tree", "second@0")
    assert [line.split("  ")[0].strip() for line in out.splitlines()[1:]] == [
        "second@0", "acme/pick@1 … pick@0 (elsewhere)", "warm@0 (elsewhere)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["export", "pick@9", "out"], 2, "acme has no 'pick@9'"),
        (["export", "pick@0", "out"], 2, "pick@0 was retired on 2026-01-02T03:04:05; its weights are gone"),
        (["export", "pick", "out"], 2, "not of the form <job>@<n> or <job>@latest"),
        (["export", "pick@1", "out", "--training-state"], 2, "training state: pick@1 has none; it was not trained here"),
        (["export", "pick@1", "file"], 2, "file: is no directory"),
        (["import", "nowhere"], 2, "nowhere: is no directory"),
        (["import", "pickled"], 2, "pytorch_model.bin, which runs code when it is read"),
        (["import", "exported", "--name", "a.b"], 2, "name: 'a.b' is not a name"),
    ],
)
async def test_what_cannot_be_done_is_one_sentence(
    words: list[str], code: int, says: str, nexus: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    await nexus("export", "pick@1", "exported")
    found = await nexus(*words)
    assert (found[0], found[1]) == (code, "")
    assert says in found[2]
    assert found[2].count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_commands_need_no_torch():
    code = (
        "import sys; import nexus_bus.cli.export, nexus_bus.cli.policies, nexus_bus.exported, nexus_bus.client\n"
        "print(sorted({'torch', 'transformers', 'safetensors', 'peft'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
