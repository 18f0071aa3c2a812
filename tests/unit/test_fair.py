"""Fair shares: device time by weights whatever is queued and whatever it costs, no credit for idling, nobody starves."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_bus.fair import HANDLING_S, RECENT, Shares, fill, gives_way, in_turns

COSTS = st.floats(min_value=0.001, max_value=0.2)
ENDLESS = 1_000_000

few = settings(deadline=None, max_examples=30)


def serve(
    shares: Shares, costs: dict[str, float], groups: int, size: int = 8, *, spread: float = 0.0, seed: int = 0
) -> Counter[str]:
    """Device-seconds by tenant after so many groups of requests, each tenant always having more than a group holds."""
    spent: Counter[str] = Counter()
    chance = np.random.default_rng(seed)
    for _ in range(groups):
        for turn in list(islice(shares.turns(dict.fromkeys(costs, ENDLESS)), size)):
            cost = costs[turn.key] * (1 + spread * (2 * chance.random() - 1))
            spent[turn.key] += cost
            shares.settle(turn, cost)
    return spent


def jain(shares: list[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@few
@given(costs=st.lists(COSTS, min_size=2, max_size=6), size=st.integers(1, 32), seed=st.integers(0, 999))
def test_equal_tenants_get_equal_device_time_whatever_their_requests_cost(costs: list[float], size: int, seed: int) -> None:
    tenants = {f"t{i}": cost for i, cost in enumerate(costs)}
    turns = 400 + sum(round(20 * max(costs) / cost) for cost in costs)
    spent = serve(Shares(), tenants, turns // size, size, spread=0.5, seed=seed)
    assert jain([spent[tenant] for tenant in tenants]) >= 0.95


@few
@given(
    weights=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    costs=st.lists(st.sampled_from([0.01, 0.03, 0.1]), min_size=4, max_size=4),
)
def test_device_time_goes_by_weight(weights: list[int], costs: list[float]) -> None:
    shares = Shares()
    tenants = {f"t{i}": cost for i, (_, cost) in enumerate(zip(weights, costs, strict=False))}
    for tenant, weight in zip(tenants, weights, strict=True):
        shares.add(tenant, weight)
    spent = serve(shares, tenants, 30 * sum(weights) * round(max(costs) / min(costs)) // 8 + 100)
    assert jain([spent[tenant] / weight for tenant, weight in zip(tenants, weights, strict=True)]) >= 0.95


def test_who_was_idle_comes_back_at_the_smallest_counter_of_those_who_were_not() -> None:
    shares = Shares()
    shares.add("quiet")
    serve(shares, {"busy": 0.01, "busier": 0.03}, 200)
    together = min(shares.counter("busy"), shares.counter("busier"))
    assert shares.counter("quiet") == 0
    shares.turns({"quiet": 1, "busy": 1, "busier": 1})
    assert shares.counter("quiet") == together
    spent = serve(shares, {"quiet": 0.01, "busy": 0.01, "busier": 0.01}, 60)
    assert jain(list(spent.values())) > 0.99, "neither credit for the night, nor a debt"


def test_nobody_gathers_credit_while_somebody_else_is_alone() -> None:
    shares = Shares()
    serve(shares, {"first": 0.01}, 100)
    serve(shares, {"second": 0.01}, 100)  # alone, after the first one left
    spent = serve(shares, {"first": 0.01, "second": 0.01}, 20)
    assert jain(list(spent.values())) > 0.99


@few
@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=60), st.data())
def test_nobody_who_waits_starves_and_counters_stay_together(rounds: list[set[str]], data: st.DataObject) -> None:
    """Whoever comes and goes beside it, and whatever becomes of their turns."""
    shares = Shares()
    costs = {tenant: data.draw(COSTS, label=tenant) for tenant in "abcdefx"}
    since = 0.0  # of others' device time since x was served
    for others in [*rounds, set("abcdef")] * 5:
        waiting = dict.fromkeys(sorted(others | {"x"}), ENDLESS)
        for turn in list(islice(shares.turns(waiting), 4)):
            failed = turn.key in "ab" and data.draw(st.booleans())
            shares.settle(turn, None if failed else costs[turn.key])
            since = 0.0 if turn.key == "x" else since + (HANDLING_S if failed else costs[turn.key])
        counters = [shares.counter(tenant) for tenant in waiting]
        assert max(counters) - min(counters) <= 5 * 0.2, "no further apart than what a group can cost"
        assert since <= 8 * 5 * 0.2


def test_asking_for_what_is_refused_gives_no_place_before_others() -> None:
    shares = Shares()
    served: Counter[str] = Counter()
    for _ in range(2000):
        for turn in list(islice(shares.turns({"nonsense": ENDLESS, "work": ENDLESS}), 8)):
            served[turn.key] += 1
            shares.settle(turn, None if turn.key == "nonsense" else 0.01)
    assert served["work"] * 0.01 == pytest.approx(served["nonsense"] * HANDLING_S, rel=0.1)


def test_a_turn_is_charged_when_it_is_given_and_corrected_when_it_is_measured() -> None:
    shares = Shares()
    shares.add("a", 2.0)
    serve(shares, {"a": 0.1}, 1, size=1)
    assert shares.counter("a") == pytest.approx(0.05)
    (turn,) = shares.turns({"a": 1})
    assert turn.expected == pytest.approx(0.1)
    assert shares.counter("a") == pytest.approx(0.1)
    shares.settle(turn, 0.2)
    assert shares.counter("a") == pytest.approx(0.15)
    (turn,) = shares.turns({"a": 1})
    assert turn.expected == pytest.approx(0.1 + RECENT * 0.1)
    shares.remove("a")
    shares.settle(turn, 1.0)  # measured after its tenant left


def test_before_anything_is_measured_these_are_weighted_rounds() -> None:
    shares = Shares()
    shares.add("gold", 3)
    turns = [turn.key for turn in islice(shares.turns({"gold": 100, "iron": 100, "short": 2}), 42)]
    assert Counter(turns) == {"gold": 30, "iron": 10, "short": 2}
    assert list(shares.turns({"iron": 0})) == []


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of acme"):
        Shares().add("acme", weight)


def test_what_is_held_for_long_goes_to_whoever_holds_fewest() -> None:
    flood = [("loud", f"loud-{i}") for i in range(4)]
    late = [("quiet", "quiet-0"), ("quiet", "quiet-1")]
    assert in_turns([*flood, *late], {}) == ["loud-0", "quiet-0", "loud-1", "quiet-1", "loud-2", "loud-3"]
    assert in_turns([*flood, *late], {"loud": 9}) == ["quiet-0", "quiet-1", "loud-0", "loud-1", "loud-2", "loud-3"]


def test_a_full_house_gives_way_until_all_hold_the_same() -> None:
    held = {f"loud-{i}": ("loud", f"2026-01-0{i}") for i in range(4)}
    assert gives_way(held, "loud") == ""
    assert gives_way(held, "quiet") == "loud-3", "the newest"
    held = {f"loud-{i}": ("loud", str(i)) for i in range(2)} | {"quiet-0": ("quiet", "9")}
    assert gives_way(held, "quiet") == "", "it would be the other's turn to complain"
    assert gives_way({"loud-0": ("loud", "1")}, "quiet") == "", "nobody loses its only one"


def test_one_job_gets_its_half_of_the_steps_that_many_jobs_would_fill() -> None:
    shares = Shares()
    spent: Counter[str] = Counter()
    for _ in range(200):
        turns = fill(shares, {"one": [8], "many": [8] * 64}, 32, lambda samples: samples / 100)
        assert turns
        for turn in turns:
            spent[turn.key] += 1
            shares.settle(turn, 0.08)
    assert jain(list(spent.values())) > 0.99


def test_a_step_is_filled_up_where_that_takes_no_longer() -> None:
    shares = Shares()
    for _ in range(20):
        turns = fill(shares, {"one": [8], "many": [8] * 64}, 32, lambda samples: 0.05 + samples / 10_000)
        assert Counter(turn.key for turn in turns) == {"one": 1, "many": 3}
        for turn in turns:
            shares.settle(turn, 0.0125)


def test_only_the_last_carries_a_step_past_its_size() -> None:
    turns = fill(Shares(), {"a": [20, 20, 20]}, 32, lambda samples: samples / 100)
    assert len(turns) == 2
    assert fill(Shares(), {"a": [500]}, 32, lambda samples: samples / 100)
    assert fill(Shares(), {}, 32, lambda samples: samples / 100) == []
