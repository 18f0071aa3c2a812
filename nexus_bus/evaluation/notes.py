"""What a reader of a report has to know besides its numbers: what may vary, what is missing, what went wrong on the way."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from nexus_bus.bounds import MARGIN
from schemas.evaluation import Evaluated, EvaluationEpisode
from schemas.plan import TERMINAL, JobState

STILL_S = 1.0  # without an episode under way: when the service was away, it was for longer
CLIPPED = 0.05  # of all action components, above which it is told
SHOWN = 3  # times that an evaluation stood still, the longest ones


def nothing(state: JobState) -> str:
    """Why no episode of a job that evaluates is there."""
    job, phase = state.plan.spec.name, state.phase
    why = f": {state.reason}" if state.reason else ""
    if any(name.startswith("episodes_") for name in state.scores):
        return f"the episodes of {job!r} are past their age; its score is left, and `nexus jobs` shows it"
    if phase in TERMINAL:
        return f"{job!r} is {phase}{why}; it played no episode of an evaluation to its end"
    if phase == "waiting":
        return f"{job!r} waits to begin{why}; it has played nothing yet"
    if phase == "paused":
        return f"{job!r} is paused{why}; it has played nothing yet, and `nexus resume {job}` lets it go on"
    if phase.startswith("evaluating"):
        total = state.plan.spec.evaluation.total if state.plan.spec.evaluation is not None else 0
        return f"{job!r} is evaluating, and none of {total} episodes has ended yet; `nexus watch {job}` follows it"
    return f"{job!r} is {phase}, and evaluates after that"


def notes(state: JobState, found: Sequence[Evaluated], episodes: Sequence[EvaluationEpisode]) -> Iterable[str]:
    """A sentence or two for each thing; `episodes` are those of all evaluations."""
    if state.plan.varies:
        yield f"The same seed may give another episode in this simulator: {state.plan.varies}."
    else:
        yield (
            "The catalogue declares this simulator deterministic: the same policy, protocol and seed should give the same "
            "episodes. `nexus compare` of two such runs counts how many are identical."
        )
    if any(len(one.tasks) > 1 for one in found):
        yield (
            "All tasks together are pooled in one interval, as if they were one: it speaks of these tasks, each with as many "
            "trials as it has here, and of no others."
        )
    for one in found:
        yield from _of_one(state, one)
        yield from _clipped(one, [each for each in episodes if each.purpose == one.purpose])
        yield from _still(one, [each for each in episodes if each.purpose == one.purpose])


def _of_one(state: JobState, one: Evaluated) -> Iterable[str]:
    if one.overall.episodes < one.planned:
        why = f"; the job is {state.phase}{': ' if state.reason else ''}{state.reason}" if state.phase in TERMINAL else ""
        yield f"{one.policy}: {one.overall.episodes} of {one.planned} episodes are there{why}. Numbers are of these."
    if len(one.simulators) > 1:
        yield f"{one.policy} was played by several simulators: {'; '.join(one.simulators)}."
    if len(one.services) > 1:
        yield f"{one.policy} was played by several versions of the service: {', '.join(one.services)}."
    if one.repeated:
        yield (
            f"{one.policy}: of {one.overall.episodes} episodes {one.repeated} had to be handed out again, after a fault of a "
            "simulator or of a worker (see `attempts`; the job's events say why). Each counts once, as it ended."
        )


def _clipped(one: Evaluated, episodes: Sequence[EvaluationEpisode]) -> Iterable[str]:
    share = sum(each.clipped * each.length for each in episodes) / max(1, sum(each.length for each in episodes))
    if share > CLIPPED:
        yield (
            f"{one.policy}: {share:.0%} of its action components lay outside the bounds by more than {MARGIN:.0%} of their "
            "range, and were cut: the usual sign of actions that were not brought back to the environment's units."
        )


def _still(one: Evaluated, episodes: Sequence[EvaluationEpisode]) -> Iterable[str]:
    """When none of it was played between its first episode and its last: the service was away, or it was stopped."""
    try:
        spans = sorted(_span(each) for each in episodes)
    except ValueError:  # a time of somebody else's making
        return
    found: list[tuple[float, int, datetime]] = []  # seconds, episodes that were there, when it went on
    until = spans[0][1]
    for number, (begin, end) in enumerate(spans):
        if (seconds := (begin - until).total_seconds()) > STILL_S:
            found.append((seconds, number, begin))
        until = max(until, end)
    for seconds, number, begin in sorted(sorted(found, reverse=True)[:SHOWN], key=lambda gap: gap[1]):
        yield (
            f"{one.policy}: {number} of {one.planned} episodes were there already when it went on at "
            f"{begin:%Y-%m-%d %H:%M:%S} UTC; in the {seconds:.1f} s before, none was being played."
        )
    if len(found) > SHOWN:
        yield f"{one.policy}: it stood still {len(found) - SHOWN} times more, for less long."


def _span(one: EvaluationEpisode) -> tuple[datetime, datetime]:
    end = datetime.fromisoformat(one.time)
    return end - timedelta(seconds=one.simulate_s + one.forward_s + one.wait_s), end
