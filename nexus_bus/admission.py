"""Who may begin: of each tenant so many jobs at once, the others wait in line. Pure; the master's.

The line goes by priority, then by age. Before it stand the jobs that a limit of the tenant lets rest, since they held a place
already. Whoever is stopped by something that does not concern those behind it, such as a training job where all slots are
taken, lets them pass.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from schemas.plan import TERMINAL, JobState, Limit

Jobs = Mapping[str, JobState]  # of one tenant, by name; those that are closed do not matter here

TOLD = 64  # jobs of a tenant that are told at once what they wait for now: a long line must not hold up the other tenants


@dataclass(frozen=True)
class Bar:
    """Why a tenant's jobs may not run for now."""

    limit: Limit
    why: str  # a sentence for a person, that begins with the limit
    training: bool = False  # eval jobs may all the same


@dataclass(frozen=True)
class Limits:
    """What holds for one tenant at this moment."""

    jobs: int  # that run at once; those that rest count for nothing
    queued: int  # that wait
    slots: int | None = None  # training jobs that run at once; None: as many as jobs
    bars: tuple[Bar, ...] = ()
    closed: str = ""  # why no new job is taken
    sure: bool = True  # False while what was used is still being counted: nothing begins meanwhile
    jobs_by: str = "max_jobs"  # who says so: the service's setting, or the tenant's own limit
    queued_by: str = "max_queued"

    def bar(self, state: JobState) -> Bar | None:
        """What stops this job, whoever else runs."""
        return next((bar for bar in self.bars if trains(state) or not bar.training), None)


class Verdict(NamedTuple):
    """Whether a job may run."""

    limit: Limit = ""  # that stops it; "": it may
    why: str = ""
    place: int = 0  # in the line; 0: it rests, or may run
    turn: int = 0  # among those that wait for the same


class Left(NamedTuple):
    """What is still asked about a closed job."""

    dataset_bytes: int
    seconds: float  # from its beginning to its end; 0: it did not complete
    trains: bool


class Past:
    """What a tenant's closed jobs left, added up."""

    def __init__(self) -> None:
        """Of none."""
        self.dataset_bytes = 0
        self._seconds = {True: 0.0, False: 0.0}  # by whether they trained
        self._completed = {True: 0, False: 0}

    def add(self, left: Left, times: int = 1) -> None:
        """Count a job, or with -1 no longer."""
        self.dataset_bytes += times * left.dataset_bytes
        if left.seconds > 0:
            self._seconds[left.trains] += times * left.seconds
            self._completed[left.trains] += times

    def mean_s(self, kinds: tuple[bool, ...] = (True, False)) -> float:
        """Seconds that a job took that completed: of those that trained, of the others, or of all. 0: none has."""
        completed = sum(self._completed[trained] for trained in kinds)
        return sum(self._seconds[trained] for trained in kinds) / completed if completed else 0.0


def running(jobs: Iterable[JobState]) -> int:
    """How many hold a place."""
    return sum(map(_runs, jobs))


def _runs(state: JobState) -> bool:
    return state.phase not in TERMINAL and state.phase not in ("waiting", "paused")


def trains(state: JobState) -> bool:
    """Whether a job needs a slot, and keeps what it learns."""
    return state.plan.spec.kind != "eval"


def left(state: JobState) -> Left:
    """What remains of a job once it is closed."""
    completed = state.phase == "completed" and state.started
    return Left(state.dataset_bytes, _seconds(state.started, state.ended) if completed else 0.0, trains(state))


def held(state: JobState) -> bool:
    """Whether a job rests because of a limit of its tenant, and goes on by itself."""
    return state.phase == "paused" and bool(state.limit)


def order(state: JobState) -> tuple[int, str, str]:
    """Sorts a tenant's own jobs: the higher priority first, then the older one."""
    return -state.plan.spec.priority, state.submitted, state.plan.spec.name


def line(jobs: Iterable[JobState]) -> list[str]:
    """Names of those that wait for a place, in their order; a job that waits for another one's policy stands nowhere."""
    return [state.plan.spec.name for state in sorted(filter(_waits, jobs), key=order)]


def verdicts(jobs: Jobs, limits: Limits, newcomer: JobState | None = None) -> dict[str, Verdict]:
    """Of each job that rests because of a limit or stands in line, whether it may run now; `newcomer` stands there too."""
    candidates = {name: state for name, state in jobs.items() if held(state) or _waits(state)}
    if newcomer is not None:
        candidates[newcomer.plan.spec.name] = newcomer
    room, place, turns, found = _Room(jobs, limits), 0, Counter[Limit](), dict[str, Verdict]()
    for name, state in sorted(candidates.items(), key=lambda item: (item[1].phase != "paused", *order(item[1]))):
        bar = room.bar(state)
        if bar is None:
            room.take(state)
            found[name] = Verdict()
            continue
        turns[bar.limit] += 1
        place += not held(state)
        found[name] = Verdict(bar.limit, bar.why, 0 if held(state) else place, turns[bar.limit])
    return found


def next_ones(jobs: Jobs, limits: Limits) -> list[str]:
    """Jobs worth looking at: those that may run now, those that wait for something else than before, and those that wait for
    another job.
    """
    found = verdicts(jobs, limits)
    begin = [name for name, verdict in found.items() if not verdict.limit]
    told = [name for name, verdict in found.items() if verdict.limit and verdict.limit != jobs[name].limit]
    others = [name for name, state in jobs.items() if state.phase == "waiting" and not state.queued]
    return begin + told[:TOLD] + others


def stops(state: JobState, jobs: Jobs, limits: Limits) -> str:
    """Why a job may not run this moment, whoever stands in line; or nothing."""
    bar = _Room(jobs, limits).bar(state)
    if bar is None:
        return ""
    return f"{bar.why}; wait, or pause one" if bar.limit in ("jobs", "slots") else bar.why


def refusal(jobs: Jobs, limits: Limits) -> str:
    """Why no further job is taken, or nothing."""
    waiting = sum(state.phase == "waiting" for state in jobs.values())
    if limits.closed or waiting < limits.queued:
        return limits.closed
    by, most = limits.queued_by, limits.queued
    return f"{by}: {waiting} jobs of yours wait already, at most {most} may; let some begin, or cancel one"


def import_refusal(limits: Limits) -> str:
    """Why no policy is taken in, or nothing. It cannot wait in a line: what it brings lies in store already."""
    return limits.closed or next((bar.why for bar in limits.bars if bar.limit == "stored_bytes"), "")


def estimate(verdict: Verdict, past: Past, limits: Limits, jobs: Jobs) -> float:
    """Seconds until a job comes to its turn, if jobs go on taking what the tenant's took; until one has completed, if they take
    what the plans of those that run expect of a device. 0: nothing to go by, as with a budget that somebody has to raise.
    """
    width = {"jobs": limits.jobs, "slots": limits.slots}.get(verdict.limit)
    like = (True,) if verdict.limit == "slots" else (True, False)
    return math.ceil(verdict.turn / width) * (past.mean_s(like) or _planned_s(jobs, like)) if width else 0.0


def _planned_s(jobs: Jobs, like: tuple[bool, ...]) -> float:
    """What a running job of the kind takes, by its plan."""
    planned = [state.plan.estimates.get("device_s", 0.0) for state in jobs.values() if trains(state) in like and _runs(state)]
    return sum(planned) / len(planned) if planned else 0.0


def waits(verdict: Verdict, seconds: float) -> str:
    """What a person reads about a job in the line."""
    about = f", in about {seconds / 60:.0f} min" if seconds >= 90 else f", in about {math.ceil(seconds)} s" if seconds else ""
    return f"{verdict.why}; place {verdict.place} in the line{about}"


def rests(why: str) -> str:
    """What a person reads about a job that a limit of its tenant lets rest."""
    return f"{why}; it goes on by itself once it may"


class _Room:
    """What is left of a tenant's places."""

    def __init__(self, jobs: Jobs, limits: Limits) -> None:
        self.limits = limits
        self.jobs = limits.jobs - running(jobs.values())
        self.slots = math.inf if limits.slots is None else limits.slots - running(filter(trains, jobs.values()))
        self.no_slot = Bar("slots", f"limits.slots: at most {limits.slots} of your training jobs may run at once")
        self.no_place = Bar("jobs", f"{limits.jobs_by}: at most {limits.jobs} of your jobs may run at once")

    def bar(self, state: JobState) -> Bar | None:
        """What stops a job."""
        if (bar := self.limits.bar(state)) is not None:
            return bar
        if trains(state) and self.slots <= 0:
            return self.no_slot
        return self.no_place if self.jobs <= 0 else None

    def take(self, state: JobState) -> None:
        """Give a place to a job."""
        self.jobs -= 1
        self.slots -= trains(state)


def _waits(state: JobState) -> bool:
    return state.phase == "waiting" and state.queued > 0


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
