"""Who may begin: of each tenant so many jobs at once, the others wait in line. The master's; all but `Roster` is pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from nexus_bus import registry
from nexus_bus.bus import Bus
from schemas.plan import TERMINAL, JobState

Jobs = Mapping[str, JobState]  # of one tenant, by name


@dataclass(frozen=True)
class Limits:
    """Of one tenant."""

    jobs: int  # that run at once; those that rest count for nothing
    queued: int  # that wait


def running(jobs: Iterable[JobState]) -> int:
    """How many hold a place."""
    return sum(state.phase not in TERMINAL and state.phase not in ("waiting", "paused") for state in jobs)


def line(jobs: Iterable[JobState]) -> list[str]:
    """Names of those that wait for a place, in their order; a job that waits for another one's policy stands nowhere."""
    waiting = (state for state in jobs if state.phase == "waiting" and state.queued)
    return [state.plan.spec.name for state in sorted(waiting, key=_order)]


def place(state: JobState, jobs: Jobs, limits: Limits) -> int:
    """Where a job would stand in the line; 0: it may begin."""
    ahead = sum(_order(jobs[name]) < _order(state) for name in line(jobs.values()) if name != state.plan.spec.name)
    return max(0, ahead + 1 - max(0, limits.jobs - running(jobs.values())))


def next_ones(jobs: Jobs, limits: Limits) -> list[str]:
    """Waiting jobs worth looking at: those whose turn has come, and those that wait for another job."""
    others = [name for name, state in jobs.items() if state.phase == "waiting" and not state.queued]
    return line(jobs.values())[: max(0, limits.jobs - running(jobs.values()))] + others


def estimate(at: int, jobs: Iterable[JobState], limits: Limits) -> float:
    """Seconds until the place `at` comes to its turn, if jobs go on taking what the tenant's took; 0: nothing to go by."""
    took = [_seconds(state.started, state.ended) for state in jobs if state.phase == "completed" and state.started]
    return math.ceil(at / limits.jobs) * sum(took) / len(took) if took else 0.0


def refusal(jobs: Jobs, limits: Limits) -> str:
    """Why no further job is taken, or nothing."""
    waiting = sum(state.phase == "waiting" for state in jobs.values())
    if waiting < limits.queued:
        return ""
    return f"max_queued: {waiting} jobs of yours wait already, at most {limits.queued} may; let some begin, or cancel one"


def waits(at: int, seconds: float, limits: Limits) -> str:
    """What a person reads about a job in the line."""
    about = f", in about {seconds / 60:.0f} min" if seconds >= 90 else f", in about {seconds:.0f} s" if seconds else ""
    return f"max_jobs: {limits.jobs} jobs of yours run, as many as may at once; place {at} in the line{about}"


def _order(state: JobState) -> tuple[str, str]:
    return state.submitted, state.plan.spec.name


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


class Roster:
    """Jobs by tenant as this master last saw them: its own writes at once, another master's within a tick."""

    def __init__(self, bus: Bus) -> None:
        """Knows nobody yet."""
        self._kv = bus.kv("registry")
        self._jobs: dict[str, dict[str, JobState]] = {}
        self._revisions: dict[tuple[str, str], int] = {}

    def note(self, state: JobState, revision: int) -> None:
        """Take a state that was read or written; of one job, older ones are passed over."""
        tenant, job = state.plan.tenant, state.plan.spec.name
        if tenant in self._jobs and revision >= self._revisions.get((tenant, job), 0):
            self._jobs[tenant][job], self._revisions[tenant, job] = state, revision

    async def of(self, tenant: str) -> Jobs:
        """A tenant's jobs, by name. What cannot be read is left out."""
        if tenant not in self._jobs:
            self._jobs[tenant] = {}
            for entry in (await self._kv.entries(registry.job_key(tenant, ""), JobState)).values():
                self.note(entry.value, entry.revision)
        return self._jobs[tenant]
