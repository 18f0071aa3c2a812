"""Demonstrations are recorded from the expert, reproducibly, and only those that succeeded."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from nexus_bus.data.reader import Dataset
from nexus_bus.data.record import Order, Rested, record_expert
from nexus_bus.data.writer import resting
from nexus_bus.envs.session import Session
from nexus_bus.errors import ContractError, NotFound
from schemas.job import EnvironmentSpec, ExpertSpec

GRID = EnvironmentSpec(id="minigrid", task="goto", options={"image_size": 32})


def test_a_recording_holds_what_the_expert_saw_and_did(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    info = record_expert(GRID, ExpertSpec(episodes=3, seed=5), tmp_path / "set", progress=lambda *p: seen.append(p))
    assert (info.episodes, info.attempts, info.success) == (3, 3, 1.0)
    assert seen == [(1, 1), (2, 2), (3, 3)]
    dataset = Dataset(tmp_path / "set")
    assert len(dataset) == info.frames
    session = Session(GRID)
    observed, index = session.reset(5, 0), 0
    while session.end == "running":
        frame = dataset.frame(index)
        np.testing.assert_array_equal(frame.images["grid"], observed.images["grid"])
        np.testing.assert_array_equal(frame.state, observed.state)
        np.testing.assert_array_equal(frame.action, session.expert())
        assert frame.instruction == observed.instruction
        observed, index = session.step(session.expert()[None]).observed, index + 1
    assert dataset.episodes[0].end == index


def test_the_same_seed_records_the_same_bytes_in_a_process_of_its_own(tmp_path: Path) -> None:
    expert = ExpertSpec(episodes=2, seed=1, noise=0.1)
    info = record_expert(GRID, expert, tmp_path / "one")
    document = msgspec.json.encode(Order(GRID, expert, str(tmp_path / "two"))).decode()
    done = subprocess.run([sys.executable, "-m", "nexus_bus.data.record", document], capture_output=True, text=True, check=True)
    *steps, last = done.stdout.splitlines()
    assert msgspec.json.decode(last, type=type(info)) == info
    assert len(steps) == info.attempts, "each attempt is told, so that a long recording is no wedged worker"
    one, two = (_digest(tmp_path / name) for name in ("one", "two"))
    assert one == two
    record_expert(GRID, msgspec.structs.replace(expert, seed=2), tmp_path / "two")
    assert _digest(tmp_path / "two") != one


def test_an_environment_without_an_expert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no scripted expert"):
        record_expert(EnvironmentSpec(id="gymnasium", task="Pendulum-v1"), ExpertSpec(), tmp_path / "set")


@pytest.mark.gl
def test_noise_moves_the_robot_but_not_the_labels_and_failures_are_left_out(tmp_path: Path) -> None:
    spec = EnvironmentSpec(id="tabletop", task="touch", options={"image_size": 32, "max_steps": 12})
    info = record_expert(spec, ExpertSpec(episodes=6, noise=0.3), tmp_path / "set")
    assert info.attempts > info.episodes
    dataset = Dataset(tmp_path / "set")
    assert all(episode.end - episode.begin <= 12 for episode in dataset.episodes)
    assert np.abs(np.concatenate([columns["action"] for _, columns in dataset.numbers(["action"])])).max() <= 1.0


@pytest.mark.gl
def test_an_expert_that_cannot_succeed_leaves_nothing(tmp_path: Path) -> None:
    spec = EnvironmentSpec(id="tabletop", task="push", options={"image_size": 32, "max_steps": 2})
    with pytest.raises(ContractError, match="0 successes in 20 tries"):
        record_expert(spec, ExpertSpec(episodes=1), tmp_path / "set")
    assert not (tmp_path / "set").exists()


def _digest(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


def test_a_recording_that_rests_goes_on_with_the_next_attempt_and_ends_in_the_same_dataset(tmp_path: Path) -> None:
    expert, steps = ExpertSpec(episodes=5, seed=5), 0

    def later(limit: int) -> Callable[[], bool]:
        def asked() -> bool:
            nonlocal steps
            steps += 1
            return steps > limit

        return asked

    whole = record_expert(GRID, expert, tmp_path / "whole", asked=later(10_000))
    all_steps, rested = steps, 0
    for part in (0, 4, 3, 2):  # before the first episode, and then in the middle of some
        steps = 0
        with pytest.raises(Rested):
            record_expert(GRID, expert, tmp_path / "set", key="mine", asked=later(all_steps // part if part else 0))
        rest = resting(tmp_path / "set")
        assert rest is not None
        assert rest.episodes >= rested
        rested = rest.episodes
    assert 0 < rested < 5
    seen: list[tuple[int, int]] = []
    assert record_expert(GRID, expert, tmp_path / "set", key="mine", progress=lambda *p: seen.append(p)) == whole
    assert seen[0] == (rested + 1, rested + 1), "nothing is played again"
    one, other = Dataset(tmp_path / "whole"), Dataset(tmp_path / "set")
    for index in range(len(one)):
        a, b = one.frame(index), other.frame(index)
        assert (a.episode, a.instruction) == (b.episode, b.instruction)
        np.testing.assert_array_equal(a.action, b.action)
        np.testing.assert_array_equal(a.images["grid"], b.images["grid"])
    assert one.stats("action") == other.stats("action")
    assert one.stats("observation.images.grid") == other.stats("observation.images.grid")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["set", "whole"]


def test_what_rests_is_thrown_away_by_whoever_writes_something_else_there(tmp_path: Path) -> None:
    steps = iter([False] * 40)
    with pytest.raises(Rested):
        record_expert(GRID, ExpertSpec(episodes=50, seed=5), tmp_path / "set", key="one", asked=lambda: next(steps, True))
    seen: list[tuple[int, int]] = []
    record_expert(GRID, ExpertSpec(episodes=2, seed=6), tmp_path / "set", key="other", progress=lambda *p: seen.append(p))
    assert seen == [(1, 1), (2, 2)]
    assert len(Dataset(tmp_path / "set").episodes) == 2
