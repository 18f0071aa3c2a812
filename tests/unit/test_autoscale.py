"""When a worker more or fewer is wanted: by what waits, for how long, and never beyond what was allowed."""

from types import SimpleNamespace

import pytest

from nexus_bus import autoscale
from nexus_bus.autoscale import DOWN_S, SETTLE_S, UP_S, Autoscaler, Bounds, Look, Memory, decide, load, rules
from nexus_bus.errors import Refused

ROOM = autoscale.QUEUES["rollout"][1]
BOUNDS = Bounds(1, 3)


class Line:
    """A role over time, seen every half second."""

    def __init__(self, workers: int = 1, bounds: Bounds = BOUNDS) -> None:
        self.workers, self.bounds, self.clock, self.memory = workers, bounds, 100.0, Memory()
        self.changes: list[tuple[float, int]] = []

    def go(self, seconds: float, waiting: int = 0, held: int = 0, *, crashing: bool = False) -> int:
        """So many workers after that long with so much to do."""
        ends = self.clock + seconds
        while self.clock < ends:
            self.clock += 0.5
            look = Look(self.clock, self.workers, waiting, held, crashing)
            self.memory, wanted = decide("rollout", self.bounds, self.memory, look)
            assert abs(wanted - self.workers) <= 1
            if wanted != self.workers:
                self.changes.append((self.clock, wanted))
                self.workers = wanted
        return self.workers


def test_a_moment_of_much_work_changes_nothing():
    line = Line()
    for _ in range(20):
        assert line.go(UP_S - 1, waiting=ROOM + 1) == 1
        line.go(1, waiting=ROOM)


def test_work_that_goes_on_waiting_brings_one_worker_at_a_time_up_to_the_bound():
    line = Line()
    assert line.go(UP_S + 1, waiting=1000) == 2
    assert line.go(SETTLE_S - 1, waiting=1000) == 2, "the new one is still loading"
    assert line.go(SETTLE_S, waiting=1000) == 3
    assert line.go(600, waiting=100_000) == 3


def test_what_waits_is_held_against_all_workers():
    assert Line(workers=2).go(600, waiting=2 * ROOM, held=2 * ROOM) == 2
    assert Line(workers=2).go(UP_S + 1, waiting=2 * ROOM + 1, held=2 * ROOM) == 3


def test_idle_workers_leave_one_by_one_and_late():
    line = Line(workers=3)
    assert line.go(DOWN_S - 1) == 3
    assert line.go(2) == 2
    assert line.go(DOWN_S - 2) == 2
    assert line.go(600) == 1


def test_between_the_thresholds_nobody_comes_and_nobody_goes():
    assert Line(workers=2).go(3600, waiting=0, held=ROOM) == 2, "one worker could just take it: no reason to move twice"
    assert Line(workers=2).go(3600, waiting=ROOM) == 2
    line = Line(workers=2)
    for _ in range(20):  # what comes in bursts keeps its workers
        line.go(DOWN_S / 2)
        assert line.go(1, held=ROOM) == 2


def test_a_role_that_crashes_gets_no_more_workers():
    line = Line()
    assert line.go(600, waiting=1000, crashing=True) == 1
    assert line.go(UP_S - 1, waiting=1000) == 1, "the time it crashed does not count"
    assert line.go(2, waiting=1000) == 2
    assert Line(workers=3).go(600, crashing=True) == 3


def test_bounds_hold_even_for_what_was_chosen_otherwise():
    assert Line(workers=0).go(1) == 1
    assert Line(workers=6, bounds=Bounds(1, 4)).go(5, waiting=1000) == 4
    assert Line(workers=1, bounds=Bounds(3, 4)).go(5) == 3


def test_rules_are_read_and_refused_by_what_is_wrong():
    assert rules("rollout=1..4, inference=1..2") == {"rollout": Bounds(1, 4), "inference": Bounds(1, 2)}
    assert rules("") == {}
    for text, said in (
        ("rolout=1..4", "did you mean 'rollout'"),
        ("master=1..2", "no queue to go by"),
        ("rollout=4", "must be MIN..MAX"),
        ("rollout=4..1", "must be MIN..MAX"),
        ("rollout=0..1", "must be MIN..MAX"),
        ("rollout=1..999", "must be MIN..MAX"),
    ):
        with pytest.raises(Refused, match=said):
            rules(text)


def test_a_role_is_loaded_by_the_consumers_of_all_tenants():
    depths = {"ROLLOUT": {"rollout-a": (3, 1), "rollout-b": (4, 0), "data-a": (9, 2)}, "INFERENCE": {"infer-a": (5, 6)}}
    assert load("rollout", depths) == (7, 1)
    assert load("environment", depths) == (9, 2)
    assert load("inference", depths) == (5, 6)
    assert load("trainer", depths) == (0, 0)
    training = {"TRAINING": {"train-a-j1": (0, 60), "train-a-j2": (2, 7)}}
    assert load("trainer", training, {"train-a-j1"}) == (2, 7), "what a paused job holds is work for nobody"


async def test_the_autoscaler_scales_what_it_was_given_and_says_why():
    scaled: list[tuple[str, int, str]] = []

    async def scale(role: str, count: int, why: str) -> None:
        scaled.append((role, count, why))

    bus = SimpleNamespace(up=None, log=None)
    scaler = Autoscaler(bus, {"rollout": BOUNDS}, lambda _: (1, False), scale)
    depths = {"ROLLOUT": {"rollout-a": (70, 24)}, "INFERENCE": {"infer-a": (5000, 0)}}
    for clock in (0.0, 1.0, 2.0, UP_S):
        await scaler.look(depths, clock, scaler.bounds)
    assert scaled == [("rollout", 2, "autoscale 1..3: 70 wait")]
