"""From episodes to numbers: summaries by task and overall, the manifest of a report, and the comparison of two policies."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from nexus_bus.clock import now
from nexus_bus.errors import BadJob
from nexus_bus.evaluation.notes import notes, nothing
from nexus_bus.evaluation.protocol import protocol_of
from nexus_bus.evaluation.statistics import bootstrap, mcnemar, newcombe, wilson
from nexus_bus.exported import contract_hash
from schemas.evaluation import Comparison, Evaluated, EvaluatedPolicy, EvaluationEpisode, Manifest, Purpose, Summary
from schemas.plan import JobState
from schemas.policy import PolicyVersion

Episodes = Sequence[EvaluationEpisode]


def once(episodes: Iterable[EvaluationEpisode]) -> list[EvaluationEpisode]:
    """The first record of each (purpose, task, trial), in the order of the protocol."""
    found: dict[tuple[str, str, int], EvaluationEpisode] = {}
    for one in episodes:
        found.setdefault((one.purpose, one.task, one.trial), one)
    return sorted(found.values(), key=lambda one: (get_args(Purpose).index(one.purpose), one.index))


def summarise(episodes: Episodes) -> Summary:
    """Some episodes in numbers; all zero for none."""
    count, successes = len(episodes), sum(one.success for one in episodes)
    low, high = wilson(successes, count)
    each = max(1, count)
    return Summary(
        episodes=count,
        successes=successes,
        success=successes / each,
        low=low,
        high=high,
        mean_return=sum(one.episode_return for one in episodes) / each,
        mean_length=sum(one.length for one in episodes) / each,
        simulate_s=sum(one.simulate_s for one in episodes),
        forward_s=sum(one.forward_s for one in episodes),
        wait_s=sum(one.wait_s for one in episodes),
        ends=dict(Counter(one.end for one in episodes)),
    )


def by_task(episodes: Iterable[EvaluationEpisode]) -> dict[str, list[EvaluationEpisode]]:
    """Episodes of each task, tasks in the order of the protocol."""
    found: defaultdict[str, list[EvaluationEpisode]] = defaultdict(list)
    for one in sorted(episodes, key=lambda one: one.index):
        found[one.task].append(one)
    return dict(found)


def of(episodes: Iterable[EvaluationEpisode], purpose: Purpose) -> list[EvaluationEpisode]:
    """Those of one of a job's evaluations."""
    return [one for one in episodes if one.purpose == purpose]


def manifest(state: JobState, episodes: Episodes, versions: Mapping[str, PolicyVersion] | None = None) -> Manifest:
    """All of a job's evaluations in numbers.

    Args:
        episodes: as `once` gives them.
        versions: the policies that played, by id, as far as they were looked up.

    Raises BadJob: the job evaluates nothing, or no episode of it is there; says why.
    """
    protocol = protocol_of(state.plan, {one.simulator for one in episodes})
    if not episodes:
        raise BadJob(f"job: {nothing(state)}")
    found = [_evaluated(state, purpose, own, versions or {}) for purpose in get_args(Purpose) if (own := of(episodes, purpose))]
    change = None
    if len(found) == 2:
        labels = [f"{one.policy}, {one.purpose}" for one in found]
        change = compare(labels[0], of(episodes, "before"), labels[1], of(episodes, "after"))
    return Manifest(
        tenant=state.plan.tenant,
        job=state.plan.spec.name,
        phase=state.phase,
        created=now(),
        protocol=protocol,
        evaluations=found,
        change=change,
        notes=list(notes(state, found, episodes)),
    )


def _evaluated(state: JobState, purpose: Purpose, episodes: Episodes, versions: Mapping[str, PolicyVersion]) -> Evaluated:
    evaluation, version = state.plan.spec.evaluation, versions.get(episodes[0].policy)
    return Evaluated(
        purpose=purpose,
        policy=episodes[0].policy,
        version=made_of(version) if version is not None else None,
        planned=evaluation.total if evaluation else len(episodes),
        overall=summarise(episodes),
        tasks={task: summarise(own) for task, own in by_task(episodes).items()},
        simulators=sorted({one.simulator for one in episodes}),
        services=sorted({one.service for one in episodes if one.service}),
        repeated=sum(one.attempts > 1 for one in episodes),
    )


def made_of(version: PolicyVersion) -> EvaluatedPolicy:
    """A version by its hashes."""
    contract = version.contract
    return EvaluatedPolicy(
        weights=version.weights.sha256,
        adapter=version.adapter.sha256 if version.adapter is not None else None,
        backbone=contract.backbone,
        backbone_fingerprint=contract.backbone_fingerprint,
        contract=contract_hash(contract),
        statistics=contract.statistics_hash,
        step=version.step,
        created=version.created,
    )


def compare(a: str, of_a: Iterable[EvaluationEpisode], b: str, of_b: Iterable[EvaluationEpisode]) -> Comparison:
    """B against A, paired by (task, trial); the protocols are known to be the same.

    Raises BadJob: they have no trial in common.
    """
    first = {(one.task, one.trial): one for one in of_a}
    second = {(one.task, one.trial): one for one in of_b}
    keys = [key for key in first if key in second]
    if not first or not second:
        raise BadJob(f"compare: no episode of {b if first else a} is there: it has just begun, or they are past their age")
    if not keys:
        raise BadJob(f"compare: {a} and {b} have no trial in common")
    pairs = [(first[key], second[key]) for key in keys]
    both, only_a, only_b, neither = table = _table(pairs)
    count = len(pairs)
    low, high = newcombe(*table)
    gains = [right.episode_return - left.episode_return for left, right in pairs]
    return_low, return_high = bootstrap(gains)
    tasks = by_task(left for left, _ in pairs)
    return Comparison(
        a=a,
        b=b,
        pairs=count,
        both=both,
        only_a=only_a,
        only_b=only_b,
        neither=neither,
        success_a=(both + only_a) / count,
        success_b=(both + only_b) / count,
        difference=(only_b - only_a) / count,
        low=low,
        high=high,
        p_value=mcnemar(only_a, only_b),
        return_difference=sum(gains) / count,
        return_low=return_low,
        return_high=return_high,
        identical=sum(_outcome(left) == _outcome(right) for left, right in pairs),
        unpaired=len(first.keys() ^ second.keys()),
        tasks={task: _difference([pair for pair in pairs if pair[0].task == task]) for task in tasks} if len(tasks) > 1 else {},
    )


Pairs = Sequence[tuple[EvaluationEpisode, EvaluationEpisode]]


def _table(pairs: Pairs) -> tuple[int, int, int, int]:
    """Both solved it, only A, only B, neither."""
    seen = Counter((left.success, right.success) for left, right in pairs)
    return seen[True, True], seen[True, False], seen[False, True], seen[False, False]


def _difference(pairs: Pairs) -> tuple[float, float, float]:
    table = _table(pairs)
    return (table[2] - table[1]) / len(pairs), *newcombe(*table)


def _outcome(one: EvaluationEpisode) -> tuple[str, float, int, int]:
    return one.end, one.episode_return, one.length, one.seed
