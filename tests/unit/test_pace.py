"""Closing of groups: at the knee, never past a bound, and nobody waits for somebody who is not coming."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus_bus.pace import Curve, Pace, measure

SIZES = (1, 2, 4, 8, 16, 32)
CURVE = Curve(SIZES, (0.006, 0.008, 0.012, 0.020, 0.038, 0.075))  # per sample 6, 4, 3, 2.5, 2.375, 2.34 ms
BOUND = 0.004


def replay(arrivals: list[float], pace: Pace) -> tuple[list[int], list[float]]:
    """Sizes of the groups that a worker with this pace makes of these arrivals, and how long each request waited for others.

    The time that a request spends behind another group's forward is not counted: nobody chose it.
    """
    groups: list[int] = []
    waits: list[float] = []
    now, coming = 0.0, list(arrivals)
    while coming:
        now = opened = max(now, coming[0])
        held: list[float] = []
        while True:
            while coming and coming[0] <= now and len(held) < pace.batch:
                held.append(coming.pop(0))
                pace.arrived(held[-1])
            wait = pace.patience(len(held), held[0] + pace.bound, now)
            if wait <= 0:
                break
            now = min(now + wait, coming[0]) if coming else now + wait
        groups.append(len(held))
        waits += [now - max(opened, at) for at in held]
        spent = CURVE.cost(len(held))
        pace.ran(len(held), spent)
        now += spent
    return groups, waits


def test_the_knee_is_the_smallest_size_near_the_best():
    assert CURVE.knee() == 16
    assert Curve((1, 2, 4), (0.01, 0.02, 0.04)).knee() == 1, "nothing is gained by grouping"
    assert Curve((1,), (0.7,)).knee() == 1


def test_costs_lie_on_lines_through_the_measured_points():
    assert CURVE.cost(8) == 0.020
    assert CURVE.cost(6) == pytest.approx(0.016)
    assert CURVE.cost(64) == pytest.approx(0.149)
    assert Curve((1,), (0.7,)).cost(3) == pytest.approx(2.1)
    assert CURVE.saving(1) == pytest.approx(0.004)
    assert Curve((1, 2), (0.01, 0.03)).saving(1) == 0.0, "a neighbour that costs more than it saves"


def test_a_lone_asker_never_waits():
    groups, waits = replay([i * 0.05 for i in range(200)], Pace(CURVE, 32, BOUND))
    assert set(groups) == {1}
    assert max(waits) == 0.0


def test_a_crowd_fills_groups_up_to_the_knee():
    rng = np.random.default_rng(0)
    groups, _ = replay(list(np.cumsum(rng.exponential(0.0015, 2000))), Pace(CURVE, 32, BOUND))
    assert np.mean(groups) > 4
    flood, _ = replay(list(np.cumsum(rng.exponential(0.0001, 4000))), Pace(CURVE, 32, BOUND))
    assert np.mean(flood) > 15
    assert max(flood) == CURVE.knee()


def test_after_a_night_of_silence_a_crowd_is_seen_within_a_few_requests():
    pace = Pace(CURVE, 32, BOUND)
    for i in range(50):
        pace.arrived(i * 0.0005)
    pace.arrived(40_000.0)
    for i in range(1, 4):
        pace.arrived(40_000.0 + i * 0.0005)
    assert pace.patience(4, 40_000.0 + BOUND, 40_000.0 + 0.0015) > 0


def test_who_stops_coming_is_not_waited_for():
    pace = Pace(CURVE, 32, bound=1.0)
    for i in range(50):
        pace.arrived(i * 0.0005)
    now = 49 * 0.0005
    wait = pace.patience(1, now + 1.0, now)
    assert wait == pytest.approx(CURVE.saving(1)), "no longer than what is to be won, however high the bound"
    assert pace.patience(1, now + 1.0, now + wait) == 0.0


def test_known_features_save_nothing_so_nobody_waits_for_them():
    pace = Pace(CURVE, 32, BOUND)
    for i in range(50):
        pace.arrived(i * 0.001)
    assert pace.patience(2, 0.049 + BOUND, 0.049) > 0
    for _ in range(30):
        pace.ran(2, CURVE.cost(2) * 0.05)
    assert pace.patience(2, 0.049 + BOUND, 0.049) == 0.0


def test_a_group_of_many_samples_goes_whole():
    pace = Pace(CURVE, 32, BOUND)
    assert pace.patience(40, 1.0, 0.0) == 0.0


def test_a_wait_that_the_clock_cannot_tell_from_none_is_none():
    pace, saving = Pace(CURVE, 32, 0.1), CURVE.saving(1)
    for number in range(40):
        pace.arrived(at := 6.0 + number * 1e-4)
    now = at + saving  # just when they have stopped coming, but for rounding
    assert saving - (now - at) > 0
    assert now + (saving - (now - at)) == now
    assert pace.patience(1, now + 0.1, now) == 0.0


@given(
    gaps=st.lists(st.floats(0, 0.05), min_size=1, max_size=60),
    bound=st.floats(0, 0.1),
    batch=st.integers(1, 64),
)
def test_no_request_ever_waits_past_its_bound(gaps: list[float], bound: float, batch: int):
    groups, waits = replay(list(np.cumsum(gaps)), Pace(CURVE, batch, bound))
    assert sum(groups) == len(gaps)
    assert max(groups) <= min(batch, CURVE.knee())
    assert max(waits) <= bound + 1e-9


def test_measuring_ends_early_on_a_slow_backbone():
    clock, calls = [0.0], list[int]()

    def run(size: int) -> None:
        calls.append(size)
        clock[0] += each * size

    each = 0.001
    curve = measure(run, 24, lambda: clock[0])
    assert curve.sizes == (1, 2, 4, 8, 16, 24)
    assert curve.seconds == pytest.approx([0.001 * size for size in curve.sizes])
    each, clock[0] = 0.3, 0.0
    calls.clear()
    assert measure(run, 32, lambda: clock[0]).sizes == (1, 2)
    assert calls == [1, 1, 2], "a warm-up, and each size once"
