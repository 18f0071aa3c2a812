"""What every environment has to get right, as a check that ships with the protocol: `check(spec)` on yours finds what is wrong.

It plays a few short episodes. A session guards the rest (refusals, limits, end reasons), whatever the adapter does.
`python -m nexus_bus.envs.conformance ENVIRONMENT TASK [OPTIONS] [RESETS]` is how it runs on another interpreter, or on an
environment that is not ours: `module:callable`.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from nexus_bus.envs.blame import place
from nexus_bus.envs.catalog import ENVIRONMENTS
from nexus_bus.envs.session import Observed, Session, Stepped
from nexus_bus.errors import NexusError, NotFound
from schemas.job import EnvironmentSpec

EXPERT_EPISODES = 5
GROWTH = {"MB of memory": 64, "open files": 8, "threads": 8}  # what a process may gain over the resets of a leak check
_STEPS = 12
_SETTLED = 20  # resets after which caches are full


@dataclass(frozen=True)
class Finding:
    """One broken rule: its name, and what was seen."""

    rule: str
    seen: str


def check(spec: EnvironmentSpec, resets: int = 0) -> list[Finding]:
    """Everything that is wrong with this environment; an empty list means that it conforms.

    Args:
        resets: how often to reset it for the leak check, e.g. 200; 0 leaves that out.

    Raises what opening a Session raises.
    """
    session = Session(spec)
    found: list[Finding] = []
    for rule, probe in {**RULES, LEAKS: lambda session: _leaks(session, resets)}.items():
        try:
            found += [Finding(rule, seen) for seen in probe(session)]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is the finding, and other rules go on
            found.append(Finding(rule, f"{type(error).__name__}: {error}{place(error)}"))
    return found + [Finding("it closes cleanly, and a second time does nothing", seen) for seen in _closing(session)]


def _described(session: Session) -> list[str]:
    moments = [session.reset(1), *(done.observed for done in _play(session))]
    found = list(dict.fromkeys(seen for moment in moments for seen in _moment(moment, session)))
    if not np.array_equal(session.render(), next(iter(moments[-1].images.values()), None)):  # type: ignore[arg-type]
        found.append("render shows something else than the first camera's picture of the same moment")
    moved = not np.array_equal(moments[0].state, moments[-1].state)
    if moved and all(np.array_equal(picture, moments[-1].images[name]) for name, picture in moments[0].images.items()):
        found.append(f"the pictures stand still while the state moves, over {len(moments) - 1} actions")
    return found


def _moment(observed: Observed, session: Session) -> list[str]:
    """What is wrong with one observation."""
    known = session.description
    found: list[str] = []
    shapes = {camera: picture.shape for camera, picture in observed.images.items()}
    if shapes != {camera: tuple(shape) for camera, shape in known.observation.cameras.items()}:
        found.append(f"pictures {shapes}, described {known.observation.cameras}")
    found += [f"{camera} is {p.dtype}, not uint8" for camera, p in observed.images.items() if p.dtype != np.uint8]
    if observed.state.shape != (known.observation.state_size,) or observed.state.dtype != np.float32:
        found.append(
            f"state {observed.state.dtype} {observed.state.shape}, described float32 ({known.observation.state_size},)"
        )
    if not observed.instruction.strip():
        found.append("no instruction: a policy is told nothing")
    elif observed.instruction not in known.instructions and not any("{" in text or not text for text in known.instructions):
        found.append(f"asked {observed.instruction!r}, which is none of those described")
    blank = [camera for camera, picture in observed.images.items() if picture.min() == picture.max()]
    return found + [f"{camera} is a picture of one colour" for camera in blank]


def _same_seed(session: Session) -> list[str]:
    first, history = session.reset(3), _play(session)
    session.reset(4)
    _play(session)
    again, repeated = session.reset(3), _play(session)
    found = [] if _equal(first, again) else ["the first observation differs"]
    return found if all(map(_alike, history, repeated)) else [*found, "the same actions led elsewhere"]


def _apart(session: Session) -> list[str]:
    """Sessions share a process, and one that is lost is opened again: neither may be seen in an episode."""
    alone, history = session.reset(12), _play(session)
    before = _children()
    try:
        other = Session(session.spec)
    except NexusError as error:
        return [f"a second one cannot be opened beside it: {error}"]
    found: list[str] = []
    together: list[Stepped] = []
    try:
        if not _equal(alone, other.reset(12)) or not all(map(_alike, history, _play(other))):
            found.append("another session gave another episode for the same seed")
        session.reset(12)
        other.reset(13)
        for action in _actions(session)[: _STEPS // 4]:
            together += [session.step(action[None])] if session.end == "running" else []
            _ = other.step(action[None]) if other.end == "running" else None
    finally:
        other.close()
    for step, action in enumerate(_actions(session)[_STEPS // 4 :]):
        together += [session.step(action[None])] if session.end == "running" else []
        if step == 0:
            gc.collect()  # what the closed one left goes now, and not by luck in the middle of somebody's episode
    if not all(map(_alike, history, together)):
        found.append("a session that was played and closed beside it changed its episode")
    left = _children() - before
    return found + ([f"closing it left {len(left)} processes running"] if left else [])


def _flags(session: Session) -> list[str]:
    """Asked of the simulator itself, because a session makes a flag of whatever it is given."""
    simulator = session._simulator  # noqa: SLF001
    session.reset(14)
    for step, action in enumerate(_actions(session), 1):
        moment = simulator.act(action)
        if getattr(simulator, "silent", False):
            return [f"nothing said at step {step}, so that no episode would ever succeed: give info['is_success']"]
        if not isinstance(moment.success, bool | np.bool_):
            return [f"{moment.success!r} at step {step}, expected True or False"]
        if moment.terminated or moment.truncated:
            break
    return []


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
        done = session.step(np.zeros((_STEPS, session.description.action.size)))
    if session.end == "running" or done is None:
        return [f"no end after {session.steps} steps"]
    if session.steps > session.description.max_steps:
        return [f"{session.steps} steps, its limit is {session.description.max_steps}"]
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


def _leaks(session: Session, resets: int) -> list[str]:
    before: dict[str, int] = {}
    for count in range(resets):
        if count == min(_SETTLED, resets // 2):
            before = _held()
        session.reset(count)
        session.step(_actions(session)[:1])
    grown = {what: amount - before[what] for what, amount in _held().items() if what in before}
    return [f"{grown[what]} {what} more after {resets} resets" for what, most in GROWTH.items() if grown.get(what, 0) > most]


def _closing(session: Session) -> list[str]:
    found: list[str] = []
    for time in ("first", "second"):
        try:
            session.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            found.append(f"the {time} time, {type(error).__name__}: {error}")
    return found


def _held() -> dict[str, int]:
    """What this process has, by the names of GROWTH; nothing where the system does not tell."""
    process = Path("/proc/self")
    try:
        resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        counted = [len(list((process / name).iterdir())) for name in ("fd", "task")]
    except OSError:
        return {}
    return dict(zip(GROWTH, (resident >> 20, *counted), strict=True))


def _children() -> set[str]:
    """Process ids of those that this one has started; empty where the system does not tell."""
    found: set[str] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found |= set(file.read_text().split())
    return found


LEAKS = "resets leave nothing behind"
RULES: dict[str, Callable[[Session], list[str]]] = {
    "gives what its description says": _described,
    "the same seed gives the same episode": _same_seed,
    "sessions stand apart": _apart,
    "other seeds give other episodes": _other_seeds,
    "a chunk is its actions": _chunks,
    "every step says whether it succeeded": _flags,
    "an episode ends once, within its limit": _limit,
    "a saved episode goes on as if never left": _saving,
    "the expert succeeds": _expert,
}


def _actions(session: Session) -> np.ndarray:
    """Anything within the bounds; of places to be at once, only those around the middle: the far ones tear an arm apart."""
    action = session.description.action
    low, high = np.array(action.low), np.array(action.high)
    reach = 0.3 if action.control.endswith("_absolute") else 1.0
    middle, half = (low + high) / 2, reach * (high - low) / 2
    return np.random.Generator(np.random.PCG64(0)).uniform(middle - half, middle + half, (_STEPS, action.size))


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


def main() -> int:
    """Check what the command line names; findings as JSON on the last line. Returns 1 if there are any."""
    environment, task, *more = sys.argv[1:]
    if ":" in environment:
        own = importlib.import_module("nexus_bus.envs.own")
        own.register(environment)
        environment, task = own.ID, task or next(iter(ENVIRONMENTS[own.ID].tasks))
    spec = EnvironmentSpec(id=environment, task=task, options=msgspec.json.decode(more[0]) if more else {})
    found = check(spec, int(more[1]) if len(more) > 1 else 0)
    sys.stdout.write(msgspec.json.encode([asdict(finding) for finding in found]).decode() + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
