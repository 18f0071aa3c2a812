"""The command line: instant, one clear sentence when something is wrong, JSON for programs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.cli import COMMANDS, main
from nexus_bus.cli.options import connect
from nexus_bus.errors import Unavailable

HEAVY = (
    "torch",
    "transformers",
    "mujoco",
    "gymnasium",
    "numpy",
    "nats",
    "rich",
    "yaml",
    "opentelemetry",
    "structlog",
    "asyncio",
)
DOCUMENT = """
kind = "sft"
name = "touch"
environment = { id = "tabletop", task = "touch" }
data = { expert = { episodes = 5 } }
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server to be found."""
    monkeypatch.setenv("NEXUS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("NEXUS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("nexus_bus.cli.options.CONNECT_S", 0.2)


def test_help_imports_nothing_heavy():
    code = f"import sys; from nexus_bus.cli import main; main(['--help']); print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.endswith("[]\n")
    assert all(f"\n  {name} " in said for name in COMMANDS)


def test_help_of_every_command_needs_no_torch_and_no_simulator():
    code = (
        "import sys, io, contextlib; from nexus_bus.cli import main, COMMANDS\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    codes = [main([name, '--help']) for name in COMMANDS]\n"
        "print(set(codes), sorted({'torch', 'transformers', 'mujoco', 'nats'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "{0} []\n"


def test_a_mistyped_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]):
    assert main(["jbos"]) == 2
    assert "Did you mean `nexus jobs`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["jobs"], ["policies"], ["watch"], ["usage"], ["trace"], ["dead", "list"], ["cancel", "a"]]
)
def test_without_a_server_one_sentence_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nexus: no NATS server with JetStream at nats://127.0.0.1:1")
    assert said.err.endswith("Start one with `nexus up`\n")
    assert said.err.count("\n") == 1


def test_plan_needs_no_server(document: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(document)]) == 0
    said = capsys.readouterr().out
    assert "waiting → data → preparing → training → completed" in said
    assert "train.batch.default.touch" in said
    assert "note: no evaluation" in said


def test_plan_as_json_is_the_plan(document: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(document), "--json", "--tenant", "acme"]) == 0
    plan: Any = json.loads(capsys.readouterr().out)
    assert (plan["tenant"], plan["spec"]["head"]["type"], plan["batches"]) == ("acme", "oft", 400)


def test_plan_of_what_starts_from_an_unknown_policy_says_what_it_could_not_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "rl.toml"
    path.write_text('kind = "rl"\nname = "a"\ninit = "b@1"\nenvironment = { id = "tabletop", task = "touch" }\n')
    assert main(["plan", str(path)]) == 0
    assert "init was not looked up" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_a_wrong_document_is_refused_before_anything_is_asked(command: str, document: Path, capsys: pytest.CaptureFixture[str]):
    document.write_text(DOCUMENT.replace("episodes", "episods"))
    assert main([command, str(document)]) == 2
    assert capsys.readouterr().err == (f"nexus: {document}:5: data.expert.episods: no such field; did you mean 'episodes'?\n")


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "nowhere.toml"]) == 2
    assert capsys.readouterr().err == "nexus: nowhere.toml: No such file or directory\n"


def test_eval_wants_a_policy_or_a_document(capsys: pytest.CaptureFixture[str]):
    assert main(["eval"]) == 2
    assert "--policy" in capsys.readouterr().err


def test_the_tenant_must_be_a_name(capsys: pytest.CaptureFixture[str]):
    assert main(["jobs", "--tenant", "a.b"]) == 2
    assert capsys.readouterr().err.startswith("nexus: tenant: 'a.b' is not a name")


def test_config_says_where_a_value_comes_from(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("NEXUS_INFERENCE_BATCH", "7")
    assert main(["config", "inference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["values"]["batch"] == 7
    assert "NEXUS_INFERENCE_BATCH" in found["sources"]["batch"]
    assert found["sources"]["wait_ms"] == "default"


def test_the_catalogue_lists_what_a_job_may_name(capsys: pytest.CaptureFixture[str]):
    assert main(["catalog"]) == 0
    said = capsys.readouterr().out
    assert "head oft" in said
    assert "environment tabletop" in said
    assert main(["catalog", "gr00t", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["head"]) == ["gr00t"]
    assert main(["catalog", "nothing"]) == 2


def test_a_setting_is_key_and_value(capsys: pytest.CaptureFixture[str]):
    assert main(["worker", "rollout", "--set", "concurrency"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
    assert main(["worker", "trainor"]) == 2


def test_down_where_nothing_runs(capsys: pytest.CaptureFixture[str]):
    assert main(["down"]) == 0
    assert capsys.readouterr().out.startswith("nothing runs on ")


def test_a_fault_of_ours_is_one_sentence_and_with_debug_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(*_: object) -> None:
        raise RuntimeError("a screw is loose")

    monkeypatch.setattr("nexus_bus.config.load", broken)
    assert main(["config", "master"]) == 1
    assert capsys.readouterr().err == "nexus: internal error: RuntimeError: a screw is loose (`nexus --debug …` shows where)\n"
    with pytest.raises(RuntimeError):
        main(["--debug", "config", "master"])


def test_doctor_reports_as_json(capsys: pytest.CaptureFixture[str]):
    code = main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["python"]["ok"]
    assert code == (0 if all(check["ok"] for check in checks.values() if check["needed"]) else 1)


async def test_that_no_server_was_named_is_said_where_none_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NEXUS_HOME", str(tmp_path))
    monkeypatch.delenv("NEXUS_URL", raising=False)
    monkeypatch.setattr("nexus_bus.cli.options.CONNECT_S", 0.5)
    monkeypatch.setattr("nexus_bus.config.FALLBACK", "nats://127.0.0.1:9")
    with pytest.raises(Unavailable, match=f"no server was started in {tmp_path}, and none was named: --url or NEXUS_URL"):
        await connect("nats://127.0.0.1:9", "acme").__aenter__()
    with pytest.raises(Unavailable) as caught:
        await connect("nats://127.0.0.1:10", "acme").__aenter__()
    assert "none was named" not in str(caught.value)
    assert capsys.readouterr().err == ""
