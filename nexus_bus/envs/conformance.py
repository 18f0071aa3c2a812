"""What every environment has to get right, as a check that ships with the protocol: `check(spec)` on yours finds what is wrong.

It plays a few short episodes. A session guards the rest (refusals, limits, end reasons), whatever the adapter does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nexus_bus.envs.session import Observed, Session, Stepped
from nexus_bus.errors import NotFound
from schemas.job import EnvironmentSpec

EXPERT_EPISODES = 5
_STEPS = 12


@dataclass(frozen=True)
class Finding:
    """One broken rule: its name, and what was seen."""

    rule: str
    seen: str


def check(spec: EnvironmentSpec) -> list[Finding]:
    """Everything that is wrong with this environment; an empty list means that it conforms.

    Raises what opening a Session raises.
    """
    session = Session(spec)
    try:
        return [Finding(rule, seen) for rule, probe in RULES.items() for seen in probe(session)]
    finally:
        session.close()


def _described(session: Session) -> list[str]:
    observed, known = session.reset(1), session.description
    found: list[str] = []
    shapes = {camera: picture.shape for camera, picture in observed.images.items()}
    if shapes != {camera: tuple(shape) for camera, shape in known.observation.cameras.items()}:
        found.append(f"pictures {shapes}, described {known.observation.cameras}")
    found += [f"{camera} is {p.dtype}, not uint8" for camera, p in observed.images.items() if p.dtype != np.uint8]
    if observed.state.shape != (known.observation.state_size,) or observed.state.dtype != np.float32:
        found.append(
            f"state {observed.state.dtype} {observed.state.shape}, described float32 ({known.observation.state_size},)"
        )
    blank = [camera for camera, picture in observed.images.items() if picture.min() == picture.max()]
    return found + [f"{camera} is a picture of one colour" for camera in blank]


def _same_seed(session: Session) -> list[str]:
    first, history = session.reset(3), _play(session)
    session.reset(4)
    _play(session)
    again, repeated = session.reset(3), _play(session)
    found = [] if _equal(first, again) else ["the first observation differs"]
    return found if all(map(_alike, history, repeated)) else [*found, "the same actions led elsewhere"]


def _other_seeds(session: Session) -> list[str]:
    starts = [session.reset(seed, trial) for seed in (5, 6) for trial in (0, 1)]
    return (
        ["four seeds and trials gave one and the same start"] if all(_equal(starts[0], other) for other in starts[1:]) else []
    )


def _chunks(session: Session) -> list[str]:
    """A chunk must be what its actions are one by one, so observing in between may change nothing."""
    actions = _actions(session)
    session.reset(7)
    whole = session.step(actions)
    session.reset(7)
    single = [done := session.step(actions[i : i + 1]) for i in range(whole.executed)]
    same = _equal(whole.observed, done.observed) and whole.rewards == [one.rewards[0] for one in single]
    return [] if same else ["a chunk gave another result than its actions one by one"]


def _limit(session: Session) -> list[str]:
    session.reset(8)
    done: Stepped | None = None
    while session.end == "running" and session.steps <= session.description.max_steps:
        done = session.step(np.zeros((1, session.description.action.size)))
    if session.end == "running" or done is None:
        return [f"no end after {session.steps} steps"]
    return (
        [] if done.terminated != done.truncated else [f"terminated {done.terminated} and truncated {done.truncated} at the end"]
    )


def _saving(session: Session) -> list[str]:
    session.reset(9)
    _play(session, 3)
    if session.end != "running":
        return []
    try:
        state = session.save()
    except NotFound:
        return []  # it says that it cannot, which is honest
    here, history = session.step(_actions(session)[:1]).observed, _play(session)
    session.reset(10)
    session.restore(state)
    there, repeated = session.step(_actions(session)[:1]).observed, _play(session)
    return [] if _equal(here, there) and all(map(_alike, history, repeated)) else ["a restored episode went on differently"]


def _expert(session: Session) -> list[str]:
    if not session.description.expert:
        return []
    successes = 0
    for seed in range(EXPERT_EPISODES):
        session.reset(seed)
        while session.end == "running":
            done = session.step(session.expert()[None])
            successes += any(done.successes) and session.end != "running"
    return [] if successes == EXPERT_EPISODES else [f"the expert succeeded {successes} times of {EXPERT_EPISODES}"]


RULES: dict[str, Callable[[Session], list[str]]] = {
    "gives what its description says": _described,
    "the same seed gives the same episode": _same_seed,
    "other seeds give other episodes": _other_seeds,
    "a chunk is its actions": _chunks,
    "an episode ends once, within its limit": _limit,
    "a saved episode goes on as if never left": _saving,
    "the expert succeeds": _expert,
}


def _actions(session: Session) -> np.ndarray:
    action = session.description.action
    return np.random.Generator(np.random.PCG64(0)).uniform(action.low, action.high, (_STEPS, action.size))


def _play(session: Session, steps: int = _STEPS) -> list[Stepped]:
    history: list[Stepped] = []
    for action in _actions(session)[:steps]:
        if session.end == "running":
            history.append(session.step(action[None]))
    return history


def _equal(one: Observed, other: Observed) -> bool:
    pictures = one.images.keys() == other.images.keys() and all(
        np.array_equal(one.images[c], other.images[c]) for c in one.images
    )
    return pictures and np.array_equal(one.state, other.state) and one.instruction == other.instruction


def _alike(one: Stepped, other: Stepped) -> bool:
    return _equal(one.observed, other.observed) and (one.rewards, one.end) == (other.rewards, other.end)
