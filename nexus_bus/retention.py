"""Which policy versions give up their weights: pure functions, used by the master. Lineage and entries stay for ever."""

from collections.abc import Collection, Iterable

from schemas.job import Ppo, RetentionSpec
from schemas.plan import TERMINAL, JobState


def retire(versions: Collection[int], pins: Collection[int], spec: RetentionSpec, in_use: Collection[int]) -> list[int]:
    """Numbers of a job's versions to retire, oldest first.

    Args:
        versions: those that still have weights.
        pins: those kept whatever the rules say.
        in_use: those that somebody starts from, plays or evaluates, or that a score names.
    """
    newest = set(sorted(versions)[-spec.keep :])
    forever = {n for n in versions if spec.every and n % spec.every == 0}
    return sorted(set(versions) - newest - forever - set(pins) - set(in_use))


def in_use(jobs: Iterable[JobState]) -> set[str]:
    """Ids (`<job>@<n>`) of the versions that a tenant's jobs need or have scored.

    A job that runs needs what it starts from or evaluates, and of its own versions those that its rollouts may still play:
    orders go out for at most `staleness` versions behind what is learned. A score needs its version for good.
    """
    found: set[str] = set()
    for state in jobs:
        spec = state.plan.spec
        if state.phase not in TERMINAL:
            found |= {ref for ref in (state.init, spec.init) if ref and not ref.endswith("@latest")}
            behind = spec.algorithm.staleness if isinstance(spec.algorithm, Ppo) else 0
            oldest = min(state.done, state.version) - behind if "training" in (state.phase, state.paused) else state.version
            found |= {f"{spec.name}@{n}" for n in range(max(0, oldest), state.version + 1)}
        elif spec.kind == "eval" and state.scores and state.init:
            found.add(state.init)
        if "success_before" in state.scores:
            found.add(f"{spec.name}@0")
        if "success_after" in state.scores and spec.kind != "eval":
            found.add(f"{spec.name}@{max(state.version, 0)}")
    return found
