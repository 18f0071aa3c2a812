"""Which GL there is gets found out once, and a machine without one is told what to install."""

import os

import pytest

from nexus_bus.envs import rendering
from nexus_bus.envs.session import Session
from nexus_bus.errors import Unavailable
from schemas.job import EnvironmentSpec


@pytest.fixture(autouse=True)
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", ""))  # restored afterwards
    monkeypatch.setenv("LP_NUM_THREADS", os.environ.get("LP_NUM_THREADS", "0"))
    monkeypatch.setenv("NEXUS_RENDERING", "")  # restored afterwards too
    monkeypatch.delenv("NEXUS_RENDERING")
    monkeypatch.setattr(rendering, "probe", rendering.probe.__wrapped__)


def test_egl_comes_first_then_osmesa(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(rendering, "_works", lambda name: tried.append(name) or name == "osmesa")
    assert rendering.probe() == rendering.Rendering("osmesa")
    assert tried == ["egl", "osmesa"]
    assert os.environ["MUJOCO_GL"] == "osmesa"
    assert rendering.probe().backend == "osmesa"
    assert tried == ["egl", "osmesa"]  # children and later calls need not try again


def test_the_wish_of_the_environment_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setattr(rendering, "_works", lambda name: True)
    assert rendering.probe().backend == "osmesa"


def test_without_opengl_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_works", lambda name: False)
    with pytest.raises(Unavailable, match="apt-get install libosmesa6"):
        Session(EnvironmentSpec(id="tabletop", task="touch"))
    Session(EnvironmentSpec(id="minigrid", task="goto")).close()  # needs none
