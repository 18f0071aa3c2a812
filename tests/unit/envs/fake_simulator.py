"""Simulators that do what a test tells them: one for the catalogue of this process, one for a child, which misbehaves."""

import ctypes
import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from nexus_bus.envs import catalog
from nexus_bus.envs.simulator import Moment, Observed
from nexus_bus.errors import NotFound
from schemas.job import EnvironmentSpec, Scalar
from schemas.policy import ActionSpec, ObservationSpec

SPEC = EnvironmentSpec(id="fake", task="count")


class Fake:
    """Counts its steps; the sixth is a success. Class attributes are the test's levers."""

    reward = 0.5
    fault: Exception | None = None
    executed: list[np.ndarray]
    state = 0.0
    closed = 0

    def __init__(self, spec: EnvironmentSpec, options: dict[str, Scalar]) -> None:
        del spec, options
        self.executed = []
        self.seed = 0

    def reset(self, seed: int) -> None:
        self.seed, self.executed = seed, []

    def act(self, action: np.ndarray) -> Moment:
        if self.fault:
            raise self.fault
        self.executed.append(action)
        return Moment(self.reward, success=len(self.executed) == 6, terminated=len(self.executed) == 8)

    def observe(self) -> Observed:
        picture = np.full((4, 4, 3), self.seed % 251, np.uint8)
        return Observed({"front": picture}, np.array([len(self.executed), self.state], np.float32), "count")

    def expert(self) -> np.ndarray:
        return np.array([9.0, 0.0])

    def save(self) -> bytes:
        raise NotFound("cannot")

    def restore(self, state: bytes) -> None:
        raise NotFound("cannot")

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """The catalogue with the fake in it."""

    class Fresh(Fake):
        pass

    monkeypatch.setattr("fake_simulator.Current", Fresh, raising=False)
    entry = catalog.EnvironmentEntry(
        summary="counts",
        tasks={"count": ("count",)},
        options={"max_steps": catalog.Option(7, "limit"), "end_on_success": catalog.Option(default=True, meaning="")},
        adapter="fake_simulator:Current",
        packages=(),
        extra="",
        spaces=lambda task, options: (
            ActionSpec(size=2, low=[-1.0, -1.0], high=[1.0, 1.0]),
            ObservationSpec(cameras={"front": (4, 4, 3)}, state_size=2),
        ),
        gl=False,
    )
    monkeypatch.setitem(catalog.ENVIRONMENTS, "fake", entry)
    return Fresh


MISDEEDS = ("none", "segfault", "hang", "memory", "prints", "asks", "raises", "exits", "forks", "hires", "nan", "leaves",
            "stuck", "grey")  # fmt: skip


class Unruly(gymnasium.Env[Any, Any]):
    """The first number of an action says what it does wrong; for `own`, hence with LeRobot's names."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's way
    action_space = gymnasium.spaces.Box(0.0, len(MISDEEDS), (1,), np.float32)
    observation_space = gymnasium.spaces.Dict(
        pixels=gymnasium.spaces.Dict(dict.fromkeys(("wrist", "front"), gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8))),
        agent_pos=gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64),
    )
    task_description = "behave"
    _max_episode_steps = 40

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.kept = 0, []
        self.look = self.np_random.integers(0, 255, (8, 8, 3), np.uint8)
        return self._seen(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        getattr(self, MISDEEDS[int(action[0])])()
        return self._seen(), 0.0, False, False, {"is_success": self.count == 30}

    def _seen(self) -> dict[str, Any]:
        return {"pixels": {"wrist": self.look, "front": self.look[::-1]}, "agent_pos": np.array([self.count, 0.5])}

    def none(self) -> None:
        """Nothing."""

    def segfault(self) -> None:
        ctypes.string_at(0)

    def hang(self) -> None:
        while True:
            time.sleep(1)

    def memory(self) -> None:
        for _ in range(4000):
            self.kept.append(np.ones(1 << 17))  # a megabyte, touched
            time.sleep(0.001)
        self.hang()

    def prints(self) -> None:
        for _ in range(2000):
            print("noise " * 20)  # noqa: T201
            print("more noise", file=sys.stderr)  # noqa: T201
        os.write(1, b"\x00\xff" * 10_000)

    def asks(self) -> None:
        assert sys.stdin.read() == ""
        assert os.read(0, 1) == b""

    def raises(self) -> None:
        raise RuntimeError("joint left the room")

    def exits(self) -> None:
        sys.stderr.write("license server not found\n")
        sys.stderr.flush()
        os._exit(3)

    def forks(self) -> None:
        """A process of its own that outlives it and holds whatever it inherited."""
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        os._exit(4)

    def hires(self) -> None:
        """A process of its own that eats the memory."""
        if os.fork() == 0:
            self.memory()
        self.hang()

    def nan(self) -> None:
        self.look = self.look
        self.count = float("nan")  # type: ignore[assignment]

    def leaves(self) -> None:
        sys.exit(5)

    def stuck(self) -> None:
        """From now on it cannot be closed."""
        self.close = self.raises

    def grey(self) -> None:
        self.look = self.look[..., 0]


def make_nothing() -> None:
    """Forgets to return what it made."""


def make_unplugged() -> Unruly:
    raise OSError("no arm\non port 7")


def make_leaves() -> Unruly:
    sys.exit(3)


def make_unseeing() -> Unruly:
    class Unseeing(Unruly):
        def _seen(self) -> dict[str, Any]:
            self.count = float("nan")  # type: ignore[assignment]
            return super()._seen()

    return Unseeing()


def make_ancient() -> Unruly:
    class Ancient(Unruly):
        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0]

    return Ancient()


def make_unruly() -> Unruly:
    return Unruly()


def make_hub(n_envs: int = 1, use_async_envs: bool = False) -> dict[str, dict[int, Any]]:
    """EnvHub's contract: vectors by suite and number."""
    assert not use_async_envs
    return {
        "drawer": {
            number: gymnasium.vector.SyncVectorEnv([make_unruly] * n_envs, autoreset_mode="SameStep") for number in (0, 1)
        }
    }
