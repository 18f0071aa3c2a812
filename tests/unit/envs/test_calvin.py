"""The CALVIN adapter against a stand-in for its checkout, which no package registry has."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nexus_bus.envs.catalog import ENVIRONMENTS
from nexus_bus.envs.conformance import check
from nexus_bus.envs.session import Session
from nexus_bus.errors import NotFound
from schemas.job import EnvironmentSpec

SPEC = EnvironmentSpec(id="calvin", task="open_drawer", options={"max_steps": 20})


class Table:
    """What the adapter uses of PlayTableSimEnv: a drawer that opens with the first number of the action."""

    def __init__(self) -> None:
        self.scene, self.pictures, self.grips = SimpleNamespace(np_random=None), 0, set()

    def seed(self, seed: int) -> None:
        self.np_random = np.random.default_rng(seed)

    def reset(self) -> dict[str, Any]:
        self.drawer, self.blocks = 0.0, self.scene.np_random.integers(0, 255, (200, 200, 3), np.uint8)
        return self._seen()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], int, bool, dict[str, Any]]:
        self.grips.add(float(action[6]))
        self.drawer += 0.05 * float(action[0])
        return self._seen(), 0, False, self.get_info()

    def get_info(self) -> dict[str, Any]:
        return {"drawer": self.drawer}

    def _seen(self) -> dict[str, Any]:
        self.get_camera_obs()
        return {"robot_obs": np.full(15, self.drawer)}

    def get_camera_obs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.pictures += 1
        seen = self.blocks + np.uint8(100 * self.drawer)
        return {"rgb_static": seen, "rgb_gripper": seen[:84, :84]}, {}

    def close(self) -> None:
        self.closed = True


class Oracle:
    def get_task_info_for_set(self, start: dict[str, Any], now: dict[str, Any], wanted: set[str]) -> set[str]:
        return wanted if now["drawer"] - start["drawer"] > 0.12 else set()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    tables = [one := Table()]
    (tmp_path / "calvin_env" / "conf").mkdir(parents=True)
    monkeypatch.setenv("NEXUS_CALVIN", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    @contextlib.contextmanager
    def initialize_config_dir(folder: str, version_base: None) -> Any:
        assert folder == str(tmp_path / "calvin_env" / "conf")
        yield

    def compose(name: str, overrides: list[str]) -> Any:
        assert "scene=calvin_scene_D" in overrides
        return SimpleNamespace(env="env")

    def instantiate(config: object, **options: object) -> object:
        if config == "env":
            assert options["show_gui"] is False
            return tables.pop() if tables else Table()
        return Oracle()

    stand_in = SimpleNamespace(
        initialize_config_dir=initialize_config_dir, compose=compose, utils=SimpleNamespace(instantiate=instantiate)
    )
    monkeypatch.setitem(sys.modules, "hydra", stand_in)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "omegaconf", SimpleNamespace(OmegaConf=SimpleNamespace(load=str)))  # type: ignore[arg-type]
    return one


def test_it_conforms(table: Table) -> None:
    assert check(SPEC) == []
    assert table.closed


def test_success_is_the_oracles_and_the_gripper_is_a_sign(table: Table) -> None:
    session = Session(SPEC)
    seen = session.reset(1)
    assert seen.instruction == "open the drawer"
    assert {name: picture.shape for name, picture in seen.images.items()} == {"static": (200, 200, 3), "gripper": (84, 84, 3)}
    done = session.step(np.array([[1, 0, 0, 0, 0, 0, 0.3], [1, 0, 0, 0, 0, 0, -0.2], [1, 0, 0, 0, 0, 0, 0]], float))
    assert (done.successes, done.end) == ([False, False, True], "success")
    assert table.grips == {1.0, -1.0}
    assert table.pictures == 2  # those that were looked at


def test_without_a_checkout_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEXUS_CALVIN", raising=False)
    with pytest.raises(NotFound, match="NEXUS_CALVIN names"):
        Session(SPEC)


def test_its_34_tasks_are_asked_in_its_own_words() -> None:
    tasks = ENVIRONMENTS["calvin"].tasks
    assert len(tasks) == 34
    assert tasks["rotate_red_block_right"] == ("rotate the red block to the right",)
    assert tasks["lift_pink_block_drawer"] == ("grasp the pink block in the drawer",)
    assert tasks["lift_blue_block_slider"] == ("pick up the blue block in the sliding cabinet",)
    assert tasks["push_into_drawer"] == ("push the block into the drawer",)
