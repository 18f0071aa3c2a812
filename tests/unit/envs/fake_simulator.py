"""A simulator that does what a test tells it, and a catalogue entry for it."""

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
