"""`nexus env` and what `nexus doctor` says of simulators with packages of their own."""

import json
from pathlib import Path

import pytest

from nexus_bus.cli import main
from nexus_bus.envs import recipes

ROBOT = Path(__file__).resolve().parents[3] / "ops" / "examples" / "robot"


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEXUS_ENVS", str(tmp_path))
    return tmp_path


def test_list_names_what_there_is_and_what_a_job_may_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "--json"]) in (0, None)
    rows = json.loads(capsys.readouterr().out)
    assert {row["state"] for row in rows.values()} == {"absent"}
    assert "libero-90" in rows["libero"]["environments"]
    assert "gym-pusht==0.1.8" in rows["pusht"]["pins"]
    main(["env", "list"])
    text = capsys.readouterr().out
    assert "libero-spatial" in text
    assert "Vulkan" in text


def test_install_tells_where_and_that_it_can_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(recipes, "_run", run.append)
    monkeypatch.setattr(recipes, "check", lambda name: "")
    assert main(["env", "install", "pusht"]) == 0
    assert str(tmp_path / "pusht" / "venv") in capsys.readouterr().out
    assert "pymunk==6.11.1" in run[1]
    assert "msgspec==0.23.0" in run[1]
    assert not any(pin.startswith(("torch", "transformers", "nexus")) for pin in run[1])


def test_an_unknown_one_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "install", "libreo"]) == 2
    assert "did you mean 'libero'" in capsys.readouterr().err


def test_check_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "libero"]) == 1
    assert "nexus env install libero" in capsys.readouterr().err


def test_check_runs_the_conformance_of_an_environment_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "minigrid", "--task", "goto-red-ball"]) == 0
    assert "minigrid conforms; not checked: what resets leave behind (--resets 200)\n" in capsys.readouterr().out
    assert main(["env", "check", "minigrid", "--task", "goto-red-ball", "--resets", "20"]) == 0
    assert capsys.readouterr().out == "minigrid conforms\n"
    assert main(["env", "check", "minigrid", "--task", "fly"]) == 2
    assert "there are goto" in capsys.readouterr().err.lower()


def test_the_robot_of_the_examples_conforms(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROBOT)
    assert main(["env", "check", "two_joint_arm:make_env"]) == 0
    assert "two_joint_arm:make_env conforms" in capsys.readouterr().out


def test_check_of_one_whose_step_raises_says_where_and_shows_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stiff.py").write_text(
        "import numpy as np\nfrom two_joint_arm import Arm\n\n\nclass Stiff(Arm):\n    def step(self, action):\n"
        "        print('moving')\n        return np.zeros(2).reshape(3)\n\n\n"
        "def make_env(n_envs, use_async_envs, cfg):\n    assert (n_envs, use_async_envs, cfg) == (1, False, None)\n"
        "    return Stiff()\n"
    )
    monkeypatch.syspath_prepend(ROBOT)
    monkeypatch.chdir(tmp_path)
    assert main(["env", "check", "stiff:make_env"]) == 1
    out, err = capsys.readouterr()
    where = "cannot reshape array of size 2 into shape (3,) (stiff.py, line 8, in step)"
    assert f"every step says whether it succeeded: ValueError: {where}\n" in out
    assert f"an episode ends once, within its limit: EnvironmentFault: step: ValueError: {where}\n" in out
    assert "other seeds give other episodes" not in out  # a rule that needs no step was looked at all the same
    assert "moving" in err


def test_check_of_what_cannot_be_loaded_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "nowhere:make"]) == 1
    assert "No module named 'nowhere'" in capsys.readouterr().err


def test_doctor_tells_of_environments_and_vulkan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pusht" / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "pusht" / "venv" / "bin" / "python").touch()
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert not checks["environment pusht"]["ok"]
    assert "`nexus env install pusht` again" in checks["environment pusht"]["found"]
    assert "libero" in checks["more environments"]["found"]
    assert not checks["environment pusht"]["needed"]
    assert "mesa-vulkan-drivers" in checks["Vulkan"]["advice"]
