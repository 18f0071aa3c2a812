"""Which evaluations are meant: `JOB`, `JOB:before`, `JOB:after`, or a policy version `JOB@N` that was evaluated somewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nexus_bus.errors import BadJob, NotFound
from nexus_bus.evaluation.protocol import differences, protocol_of
from schemas.evaluation import Protocol, Purpose
from schemas.plan import JobState

SHOWN = 20  # evaluations in an error


@dataclass(frozen=True)
class Chosen:
    """One evaluation of a job."""

    state: JobState
    purpose: Purpose
    policy: str

    @property
    def job(self) -> str:
        """The job's name."""
        return self.state.plan.spec.name

    @property
    def label(self) -> str:
        """For people."""
        kind = self.state.plan.spec.kind
        return f"{self.policy} ({self.job}{'' if kind == 'eval' else f':{self.purpose}'})"

    def protocol(self, simulators: Iterable[str] = ()) -> Protocol:
        """What it follows; `simulators` are those that played."""
        return protocol_of(self.state.plan, set(simulators))


def evaluations(states: Iterable[JobState]) -> list[Chosen]:
    """All that were begun, those that began last first."""
    found: list[Chosen] = []
    for state in sorted(states, key=lambda one: one.submitted, reverse=True):
        spec = state.plan.spec
        if spec.evaluation is None or spec.environment is None:
            continue
        if spec.kind == "eval":
            found += [Chosen(state, "after", state.init)] if state.init else []
            continue
        if "success_after" in state.scores or state.phase == "evaluating_after":
            found.append(Chosen(state, "after", f"{spec.name}@{max(state.version, 0)}"))
        if "success_before" in state.scores or state.phase == "evaluating_before":
            found.append(Chosen(state, "before", f"{spec.name}@0"))
    return found


def choose(states: Sequence[JobState], a: str, b: str | None) -> tuple[Chosen, Chosen]:
    """The two to compare. Of a policy that was evaluated more than once: the last time under the protocol of the other.

    Args:
        states: the tenant's jobs.
        b: None means that `a` is a job that was evaluated before and after its training.

    Raises:
        NotFound: there is no such evaluation; says how to make it.
        BadJob: their protocols differ, and it says in what; or one name says one evaluation, and there is no other.
    """
    names = (f"{a}:before", f"{a}:after") if b is None else (a, b)
    if b is None and ("@" in a or ":" in a or any(one.plan.spec.name == a and one.plan.spec.kind == "eval" for one in states)):
        raise BadJob(f"compare: {a!r} is one evaluation; name the other, too: `nexus compare {a} OTHER`")
    first, second = (_named(states, name) for name in names)
    refused: list[str] = []
    for one in first:
        for other in second:
            differing = differences(one.protocol(), other.protocol())
            if not differing:
                return one, other
            refused = refused or differing
    raise BadJob(f"compare: the protocols of {first[0].label} and {second[0].label} differ in {'; '.join(refused)}")


def _named(states: Sequence[JobState], name: str) -> list[Chosen]:
    known = evaluations(states)
    job, colon, purpose = name.partition(":")
    if "@" in name:
        found = [one for one in known if one.policy == name]
    elif colon:
        found = [one for one in known if (one.job, one.purpose) == (job, purpose)]
    else:
        found = [one for one in known if one.job == name][:1]
    if not found:
        raise NotFound(f"compare: {_missing(states, name)}{_others(known)}")
    return found


def _missing(states: Sequence[JobState], name: str) -> str:
    """Why an evaluation is not there, and how to make it."""
    job, _, purpose = name.partition(":")
    state = next((one for one in states if one.plan.spec.name == job), None)
    if "@" in name:
        return f"{name} was not evaluated; `nexus eval --policy {name}` does that"
    if state is None:
        return f"there is no job {job!r}; `nexus jobs` lists them"
    spec, evaluation = state.plan.spec, state.plan.spec.evaluation
    if spec.kind == "eval" and purpose:
        return f"{job!r} is an eval job, it has no {purpose!r}: leave that out"
    how = f"`nexus eval --policy {job}@{0 if purpose == 'before' else 'latest'}` makes one"
    if evaluation is None:
        how = f"`nexus eval --policy {job}@0` and `{job}@latest` make two to compare" if purpose else how
        return f"job {job!r} made no evaluation, its document has no [evaluation] table; {how}"
    if purpose and not getattr(evaluation, purpose, False):
        return f"job {job!r} makes no evaluation {purpose!r}; {how}"
    why = f": {state.reason}" if state.reason else ""
    return f"job {job!r} has not begun to evaluate{f' {purpose}' if purpose else ''}, it is {state.phase}{why}"


def _others(known: Sequence[Chosen]) -> str:
    names = sorted({one.label for one in known})
    return f"; there are {', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''}" if names else ""
