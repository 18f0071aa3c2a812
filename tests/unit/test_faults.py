"""The plan of faults: what it says, that it happens once, and that there is none by default."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nexus_bus import faults
from nexus_bus.errors import Refused

COMES_TO_POINTS = """
import sys
from nexus_bus import faults
faults.start("trainer", sys.argv[1])
for n in range(4):
    faults.at("after-write", "state.acme.pick")
    print(n, flush=True)
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in force for processes that start from now on."""
    path = tmp_path / "plan"
    path.touch()
    monkeypatch.setenv(faults.FILE, str(path))
    return path


def process(worker: str = "trainer-0") -> tuple[int, int]:
    """Return code, and how often it came past the point."""
    done = subprocess.run([sys.executable, "-c", COMES_TO_POINTS, worker], capture_output=True, text=True, check=False)
    return done.returncode, sum(line.isdecimal() for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "line", ["trainer after-write/state 3 kill", "trainer-0 after-write 3 kill", "trainer after-write/state.acme 3 kill"]
)
def test_a_process_dies_where_the_plan_says_and_the_next_one_lives(plan: Path, line: str) -> None:
    plan.write_text(f"{line}  # the third time\n")
    assert process() == (-signal.SIGKILL, 2)
    assert process() == (0, 4), "it has happened"
    number, _, worker, _ = plan.with_name("plan.done").read_text().split()
    assert (number, worker) == ("1", "trainer-0")


def test_what_is_planned_for_others_or_elsewhere_does_not_happen(plan: Path) -> None:
    plan.write_text("rollout after-write 1 kill\ntrainer-1 after-write 1 kill\ntrainer after-write/policy 1 kill\n")
    assert process() == (0, 4)
    assert process("trainer-1") == (-signal.SIGKILL, 0)


def test_faults_of_one_plan_happen_one_after_another(plan: Path) -> None:
    plan.write_text("trainer after-write 1 kill\ntrainer after-write 2 kill\n")
    assert [process() for _ in range(3)] == [(-signal.SIGKILL, 0), (-signal.SIGKILL, 1), (0, 4)]


def test_a_line_may_be_added_while_it_runs_and_half_a_line_says_nothing(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    faults.start("trainer", "trainer-0")
    try:
        with plan.open("a") as file:
            file.write("trainer after-ack 1 freeze 2.5")
            file.flush()
            faults.at("after-ack", "train.record")
            assert not slept
            file.write("\n")
        for _ in range(2):
            faults.at("after-ack", "train.record")
        assert slept == [2.5]
    finally:
        monkeypatch.delenv(faults.FILE)
        faults.start("trainer", "trainer-0")
    with plan.open("a") as file:
        file.write("trainer after-ack 1 freeze 2.5\n")
    faults.at("after-ack", "train.record")
    assert slept == [2.5], "there is no plan any more"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trainer after-lunch 1 kill", "no point 'after-lunch'"),
        ("trainer after-write/state soon kill", "N is 'soon'"),
        ("trainer after-write/state 0 kill", "N is '0'"),
        ("trainer after-write/state 1 explode", "the action is 'explode'"),
        ("trainer after-write/state 1 freeze", "the action is 'freeze'"),
        ("trainer after-write/state 1 freeze long", "the action is 'freeze long'"),
        ("trainer", "is not WORKER POINT N ACTION"),
    ],
)
def test_a_plan_that_says_nothing_is_refused_by_its_line(plan: Path, line: str, says: str) -> None:
    plan.write_text(f"# what is to happen\n{line}\n")
    with pytest.raises(Refused, match=f"line 2: .*{says}"):
        faults.start("trainer", "trainer-0")


def test_a_plan_that_is_not_there_is_refused(plan: Path) -> None:
    plan.unlink()
    with pytest.raises(Refused, match=r"NEXUS_FAULTS: .* is no file"):
        faults.start("trainer", "trainer-0")
