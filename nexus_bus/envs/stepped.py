"""What a call on a session brought, made by four constructors alone, so that no reply can contradict itself.

Names after dm_env: an episode is a restart, transitions, and one termination (the task itself ended) or truncation (it was cut
off, and would have gone on). The last observation comes with both: learners bootstrap from the final one of a truncation.
"""

from dataclasses import dataclass, field

from nexus_bus.envs.simulator import Observed
from schemas.environment import EndReason


@dataclass(frozen=True)
class Stepped:
    """The lists have one entry per executed action; `observed` is of the moment after the last one."""

    observed: Observed
    rewards: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    end: EndReason = "running"
    clipped: float = 0.0  # share of the executed actions' components that lay outside the bounds (bounds.py)

    @property
    def executed(self) -> int:
        """How many actions of the chunk were done."""
        return len(self.rewards)


def restart(observed: Observed) -> Stepped:
    """An episode began."""
    return Stepped(observed)


def transition(observed: Observed, rewards: list[float], successes: list[bool]) -> Stepped:
    """The whole chunk was done and the episode goes on."""
    return Stepped(observed, rewards, successes)


def termination(observed: Observed, rewards: list[float], successes: list[bool]) -> Stepped:
    """The task ended: a success if the last action was one, a failure if not."""
    return Stepped(observed, rewards, successes, terminated=True, end="success" if successes[-1] else "failure")


def truncation(observed: Observed, rewards: list[float], successes: list[bool]) -> Stepped:
    """The episode was cut off, by its limit or by the simulator's own."""
    return Stepped(observed, rewards, successes, truncated=True, end="time_limit")
