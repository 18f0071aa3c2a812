"""A job's phases, as pure functions: what each happening hands out, and that repeating one changes nothing."""

import msgspec
import pytest

from nexus_bus import progress
from schemas.control import JobReport
from schemas.environment import FeedOrder, PrepareOrder
from schemas.job import DataSpec, EnvironmentSpec, EvaluationSpec, ExpertSpec, HeadSpec, JobSpec, Ppo, Sft
from schemas.plan import JobState, Phase, Plan
from schemas.policy import ActionSpec, ObservationSpec
from schemas.rollout import EpisodeResult, RolloutOrder

ACTION = ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3)
SEEN = ObservationSpec(cameras={"front": (96, 96, 3)}, state_size=3)


def plan(spec: JobSpec, phases: list[Phase], batches: int) -> Plan:
    return Plan(
        tenant="acme", spec=spec, phases=phases, roles=[], subjects={}, action=ACTION, observation=SEEN,
        max_steps=50, execute=4, instructions=["touch the red block"], batches=batches,
    )  # fmt: skip


def rl(staleness: int = 1, updates: int = 4) -> JobState:
    spec = JobSpec(
        kind="rl", name="touch", head=HeadSpec(horizon=4), environment=EnvironmentSpec(id="tabletop", task="touch"),
        algorithm=Ppo(updates=updates, episodes_per_update=3, staleness=staleness),
        evaluation=EvaluationSpec(episodes=2, seed=500),
    )  # fmt: skip
    phases: list[Phase] = ["waiting", "preparing", "evaluating_before", "training", "evaluating_after", "completed"]
    return JobState(plan=plan(spec, phases, updates), phase="preparing", submission="s", submitted="now")


def sft() -> JobState:
    spec = JobSpec(
        kind="sft", name="touch", head=HeadSpec(horizon=4), environment=EnvironmentSpec(id="tabletop", task="touch"),
        data=DataSpec(expert=ExpertSpec(episodes=5)), algorithm=Sft(steps=200),
    )  # fmt: skip
    phases: list[Phase] = ["waiting", "data", "preparing", "training", "completed"]
    return JobState(plan=plan(spec, phases, 200), phase="waiting", submission="s", submitted="now", dataset="touch")


def episode(purpose: str, index: int, *, success: bool) -> JobReport:
    result = EpisodeResult(
        job="touch", purpose=purpose, batch=0, index=index, policy="touch@0", seed=500 + index, success=success,
        episode_return=float(success), length=10, end="success" if success else "time_limit", environment="tabletop",
    )  # type: ignore[arg-type]  # purpose is one of three literals  # fmt: skip
    return JobReport(job="touch", kind="episode", episode=result)


def learned(batches: int, version: int) -> JobReport:
    return JobReport(job="touch", kind="learned", batches=batches, version=version)


def test_a_job_waits_for_its_first_version_then_is_evaluated_on_it() -> None:
    happening = progress.advance(rl(), learned(0, 0))
    assert happening.state.phase == "evaluating_before"
    orders = [order for _, _, order in happening.orders]
    assert [type(order) for order in orders] == [RolloutOrder, RolloutOrder]
    assert [(order.policy, order.seed, order.greedy, order.purpose) for order in orders] == [
        ("touch@0", 500, True, "before"),
        ("touch@0", 501, True, "before"),
    ]


def test_an_evaluation_counts_each_trial_once_and_ends_in_a_score() -> None:
    state = progress.advance(rl(), learned(0, 0)).state
    state = progress.advance(state, episode("before", 0, success=True)).state
    assert progress.advance(state, episode("before", 0, success=True)).state == state, "a repeated report counts once"
    happening = progress.advance(state, episode("before", 1, success=False))
    assert happening.state.phase == "training"
    assert happening.score is not None
    assert (happening.score.success, happening.score.episodes, happening.score.policy) == (0.5, 2, "touch@0")
    assert happening.score.low < 0.5 < happening.score.high


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_producers_are_paced_to_the_staleness_bound(staleness: int) -> None:
    state = msgspec.structs.replace(rl(staleness, updates=5), phase="evaluating_before", version=0)
    happening = progress.enter(state, "training")
    issued = [order for _, _, order in happening.orders]
    state = happening.state
    for update in range(5):
        ahead = {order.batch for order in issued}
        assert max(ahead) <= update + staleness, "nothing is over-produced"
        for order in issued:
            version = int(order.policy.partition("@")[2])
            assert order.batch - version <= staleness, "no record is learned later than the bound allows"
            assert version <= update, "only published versions play"
        if update < 4:
            happening = progress.advance(state, learned(update + 1, update + 1))
            state, issued = happening.state, issued + [order for _, _, order in happening.orders]
    assert sorted((order.batch, order.index) for order in issued) == [(b, i) for b in range(5) for i in range(3)]
    assert len({order.seed for order in issued}) == 15, "every episode has its own seed"


def test_a_repeated_report_hands_out_the_same_orders_under_the_same_ids() -> None:
    state = progress.enter(msgspec.structs.replace(rl(), version=0), "training").state
    first, again = (progress.advance(state, learned(1, 1)) for _ in range(2))
    assert first.orders == again.orders
    assert first.orders
    assert progress.advance(first.state, learned(1, 1)).orders == [], "after the state is written, nothing is handed out twice"


def test_sft_records_first_then_feeds_within_its_window() -> None:
    happening = progress.leave(sft())
    assert [type(order) for _, _, order in happening.orders] == [PrepareOrder]
    prepared = progress.advance(happening.state, JobReport(job="touch", kind="prepared", frames=120))
    assert (prepared.state.phase, prepared.state.frames) == ("preparing", 120)
    happening = progress.advance(prepared.state, learned(0, 0))
    feeds = [order for _, _, order in happening.orders]
    assert all(isinstance(order, FeedOrder) for order in feeds)
    assert feeds[-1].last == progress.FEED_AHEAD
    happening = progress.advance(happening.state, learned(25, 0))
    assert [order.first for _, _, order in happening.orders] == [60, 80]
    done = progress.advance(happening.state, JobReport(job="touch", kind="trained", batches=200, version=2))
    assert (done.state.phase, done.state.version) == ("completed", 2)


def test_a_closed_job_ignores_what_comes_late() -> None:
    state = msgspec.structs.replace(rl(), phase="cancelled")
    assert progress.advance(state, learned(3, 3)).state == state


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)]
)
def test_wilson_interval_matches_published_values(successes: int, episodes: int, low: float, high: float) -> None:
    assert progress.wilson(successes, episodes) == pytest.approx((low, high), abs=1e-3)


def test_a_recording_that_a_pause_took_back_is_handed_out_anew_by_a_name_of_its_own() -> None:
    happening = progress.leave(sft())
    ((_, before, _),) = happening.orders
    paused = progress.pause(happening.state, "by request", 1.0, 0.0)
    again = progress.resume(paused, 2.0, 0.0)
    ((kind, name, order),) = again.orders
    assert (kind, order.dataset, order.resumed) == ("env.prepare", "touch", 1)
    assert name != before
    prepared = progress.advance(paused, JobReport(job="touch", kind="prepared", frames=120)).state
    assert progress.resume(prepared, 2.0, 0.0).orders == [], "one that was done meanwhile is not"
