"""`nexus data`: as a person types it, without a server."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexus_bus.cli import main
from nexus_bus.data.reader import Dataset
from nexus_bus.data.writer import DatasetWriter

Run = Callable[..., tuple[int, str, str]]
FRONT = "observation.images.front"


@pytest.fixture
def nexus(capsys: pytest.CaptureFixture[str]) -> Run:
    """`nexus("inspect", path)`: exit code, what was printed, what was said about errors."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["data", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def write(root: Path, *, black: bool = False) -> Path:
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        FRONT: {"dtype": "video", "shape": [16, 24, 3], "names": None},
    }
    rng = np.random.default_rng(0)
    with DatasetWriter(root, 10, features, "so100") as writer:
        for number in range(3):
            pictures = np.full((10 + number, 16, 24, 3), 90, np.uint8)
            if black and number == 1:
                pictures[4] = 0
            frames = {
                "observation.state": rng.normal(size=(10 + number, 3)).astype(np.float32),
                "action": rng.normal(size=(10 + number, 2)).astype(np.float32),
                FRONT: pictures,
            }
            writer.add_episode(frames, "put the [red] cup down")
        writer.finalize()
    return root


def test_inspect_tells_what_a_dataset_holds(nexus: Run, tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    code, out, _ = nexus("inspect", root)
    assert code == 0
    assert "set: LeRobot v3.0, robot so100, 10 frames a second" in out
    assert "3 episodes of 10 to 12 frames, median 11; 33 frames" in out
    assert "put the [red] cup down" in out, "a task is text, not markup"
    assert [line.split() for line in out.splitlines() if line.startswith("observation.images.")] == [
        ["observation.images.front", "video", "16×24×3", "h264"]
    ]
    code, out, _ = nexus("inspect", root, "--json")
    found = json.loads(out)
    assert found["tasks"] == {"put the [red] cup down": 3}
    assert found["cameras"] == {"front": {"dtype": "video", "shape": [16, 24, 3], "codec": "h264"}}
    assert found["features"]["action"] == {"dtype": "float32", "shape": [2]}
    assert found["bytes"] == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert set(found["bytes_by_folder"]) == {"meta", "data", "videos"}


def test_check_finds_nothing_and_exits_with_0(nexus: Run, tmp_path: Path) -> None:
    code, out, _ = nexus("check", write(tmp_path / "set"))
    assert code == 0
    notice, total = out.splitlines()
    assert notice.startswith(
        "notice alignment [action] whether actions stand beside their own observations was not judged: no n"
    )
    assert total == "set: 3 episodes, 33 frames, 33 pictures looked at: 0 errors, 0 warnings, 1 notice"


def test_check_says_where_and_exits_with_1(nexus: Run, tmp_path: Path) -> None:
    root = write(tmp_path / "set", black=True)
    code, out, _ = nexus("check", root)
    assert code == 1
    assert out.splitlines()[0] == f"error black [episode 1, frame 4, {FRONT}] 1 black picture"
    assert out.splitlines()[-1].endswith("33 pictures looked at: 1 error, 0 warnings, 1 notice")
    code, out, _ = nexus("check", root, "--json")
    assert code == 1
    assert json.loads(out)["findings"][0] == {
        "code": "black", "severity": "error", "text": "1 black picture", "key": FRONT, "episode": 1, "frame": 4
    }  # fmt: skip
    assert nexus("check", root, "--pictures", 0)[0] == 0


def test_a_dataset_that_is_not_there_is_a_wrong_request(nexus: Run, tmp_path: Path) -> None:
    for command in ("inspect", "check"):
        code, out, err = nexus(command, tmp_path / "nothing")
        assert (code, out) == (2, "")
        assert "there is no meta/info.json" in err
    (tmp_path / "set/meta").mkdir(parents=True)
    (tmp_path / "set/meta/info.json").write_text('{"codebase_version": "v9.9"}')
    code, out, _ = nexus("check", tmp_path / "set")
    assert code == 1
    assert "error unreadable meta/info.json: codebase_version 'v9.9', this reader takes v2.0, v2.1, v3.0" in out


def test_what_a_push_would_bring_is_checked_before_anybody_is_asked(
    nexus: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXUS_URL", "nats://127.0.0.1:9")  # nobody is there
    root = write(tmp_path / "set")
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats["action"] = {name: (np.asarray(values) + 3).tolist() for name, values in stats["action"].items()}
    path.write_text(json.dumps(stats))
    code, _, err = nexus("push", root)
    assert code == 2
    wrong, refused = err.splitlines()
    assert wrong.startswith("error statistics [action] meta states a min of [")
    assert "(max, mean, std, q01, q10, q50, q90, q99 too); `nexus data convert` computes all anew" in wrong
    assert "1 error, 0 warnings, 1 notice, so that it was not sent; mend it, or send it by --force" in refused
    code, _, err = nexus("push", root, "--force")
    assert (code, "error statistics [action]" in err) == (1, True)
    assert "127.0.0.1:9" in err


def test_convert_writes_a_dataset_that_checks_well(nexus: Run, tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    code, out, _ = nexus("convert", root, tmp_path / "new", "--pictures", "image")
    assert (code, out) == (0, f"{tmp_path / 'new'}: 3 episodes, 33 frames\n")
    assert Dataset(tmp_path / "new").features[FRONT]["dtype"] == "image"
    assert nexus("check", tmp_path / "new")[0] == 0
    code, out, _ = nexus("convert", root, tmp_path / "blind", "--drop", FRONT, "--json")
    assert json.loads(out)["frames"] == 33
    assert Dataset(tmp_path / "blind").cameras == {}
    code, _, err = nexus("convert", root, tmp_path / "blind")
    assert code == 2
    assert "is a dataset already; name another directory, or say --replace" in err
    assert nexus("convert", root, tmp_path / "blind", "--replace")[0] == 0
    assert set(Dataset(tmp_path / "blind").cameras) == {"front"}
    code, _, err = nexus("convert", root, root, "--replace")
    assert code == 2
    assert "would replace the source" in err
    assert len(Dataset(root)) == 33


def test_record_needs_no_server(nexus: Run, tmp_path: Path) -> None:
    words = ("record", "minigrid", tmp_path / "set", "--task", "goto", "--episodes", 2, "--seed", 3, "-o", "image_size=32")
    code, out, _ = nexus(*words)
    assert code == 0
    dataset = Dataset(tmp_path / "set")
    assert out == f"{tmp_path / 'set'}: 2 episodes, {len(dataset)} frames, 100% of 2 tries succeeded\n"
    assert dataset.images(0)["grid"].shape == (32, 32, 3)
    assert nexus("check", tmp_path / "set")[0] == 0
    assert nexus(*words)[0] == 2
    assert nexus(*words, "--replace")[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("minigrid", "--task", "fly"), "minigrid has no task 'fly'"),
        (("moon", "--task", "goto"), "no environment 'moon'"),
        (("minigrid", "--task", "goto", "-o", "gravity=2"), "minigrid has no such option"),
        (("minigrid", "--task", "goto", "-o", "image_size"), "is not of the form KEY=VALUE"),
        (("minigrid", "--task", "goto", "-o", "image_size=big"), "image_size: expected int"),
        (("gymnasium", "--task", "Pendulum-v1"), "no scripted expert"),
    ],
)
def test_what_cannot_be_recorded_is_refused(nexus: Run, tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    code, _, err = nexus("record", words[0], tmp_path / "set", *words[1:])
    assert code == 2
    assert text in err
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "name one environment, by ENVIRONMENT or --env; 0 are named"),
        (("minigrid", "--env", "tabletop"), "2 are named"),
        (("minigrid", "tabletop"), "2 are named"),
        (("minigrid", "--execute", 2), "--execute is of a policy; name one by --policy"),
        (("minigrid", "--sample"), "--sample is of a policy; name one by --policy"),
        (("minigrid", "--policy", "pick@0", "--noise", 0.1), "--noise is of the expert"),
        (("minigrid", "--policy", "pick@0", "--keep", "some"), "'some' is not one of 'successes', 'all'"),
        (("minigrid", "--policy", "pick@0", "--fps", 0), "Invalid value for '--fps'"),
        (("own", "--noise", 0.1), "environment own has no scripted expert"),
    ],
)
def test_options_that_do_not_go_together_are_refused(nexus: Run, tmp_path: Path, words: tuple[object, ...], text: str) -> None:
    *named, last = (*words, tmp_path / "set")
    code, _, err = nexus("record", *named, last, "--task", "goto")
    assert code == 2
    assert text in err
    assert not (tmp_path / "set").exists()


def test_record_needs_a_server_for_a_policy(nexus: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexus_bus.logs.start", lambda *_: None)  # logging is the process's, and other tests are in it
    words = ("record", "--policy", "pick@0", "--env", "minigrid", "--task", "goto", "--url", "nats://127.0.0.1:1")
    code, _, err = nexus(*words, tmp_path / "set")
    assert code == 1
    assert "no NATS server" in err
    assert not (tmp_path / "set").exists()


def test_an_expert_may_keep_its_failures_too(nexus: Run, tmp_path: Path) -> None:
    words = ("record", "--env", "minigrid", "--task", "goto", "--episodes", 3, "-o", "image_size=32", "-o", "max_steps=1")
    code, out, _ = nexus(*words, "--keep", "all", "--fps", 5, tmp_path / "set", "--json")
    assert code == 0
    info = json.loads(out)
    assert (info["episodes"], info["frames"], info["attempts"]) == (3, 3, 3)
    assert Dataset(tmp_path / "set").fps == 5
    successes = np.concatenate([columns["next.success"] for _, columns in Dataset(tmp_path / "set").numbers(["next.success"])])
    assert successes.mean() == pytest.approx(info["success"])
    code, _, err = nexus(*words, tmp_path / "successes")
    assert "successes in 28 tries" in err


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from nexus_bus.cli import main; code = main(['data', '--help']); "
        "assert not {'av', 'h5py', 'torch', 'mujoco'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("inspect", "check", "convert", "record"):
        assert command in done.stdout
