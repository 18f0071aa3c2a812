"""Which evaluations are meant: `JOB`, `JOB:before`, `JOB:after`, or a policy version `JOB@N` that was evaluated somewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nexus_bus.errors import BadJob, NotFound
from nexus_bus.evaluation.protocol import differences, protocol_of
from schemas.evaluation import Protocol, Purpose
from schemas.plan import JobState


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


def choose(known: Sequence[Chosen], a: str, b: str | None) -> tuple[Chosen, Chosen]:
    """The two to compare. Of a policy that was evaluated more than once: the last time under the protocol of the other.

    Args:
        b: None means that `a` is a job that was evaluated before and after its training.

    Raises:
        NotFound: there is no such evaluation.
        BadJob: their protocols differ; says in what.
    """
    first, second = (
        (_named(known, f"{a}:before"), _named(known, f"{a}:after")) if b is None else (_named(known, a), _named(known, b))
    )
    refused: list[str] = []
    for one in first:
        for other in second:
            differing = differences(one.protocol(), other.protocol())
            if not differing:
                return one, other
            refused = refused or differing
    raise BadJob(f"compare: the protocols of {first[0].label} and {second[0].label} differ in {'; '.join(refused)}")


def _named(known: Sequence[Chosen], name: str) -> list[Chosen]:
    job, colon, purpose = name.partition(":")
    if "@" in name:
        found = [one for one in known if one.policy == name]
    elif colon:
        found = [one for one in known if (one.job, one.purpose) == (job, purpose)]
    else:
        found = [one for one in known if one.job == name][:1]
    if not found:
        names = sorted({one.label for one in known})
        there = f"; there are {', '.join(names[:20])}" if names else "; `nexus eval` makes them"
        raise NotFound(f"compare: no evaluation {name!r}{there}")
    return found
