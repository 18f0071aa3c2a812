"""Record a dataset of episodes as they are played: by an environment's scripted expert, or by whoever plays them.

A frame is what was seen before an action, and the action that was wanted there; with noise another one was executed, so that
the data also shows the way back. The same spec and seed of an expert give the same bytes.

`python -m nexus_bus.data.record DOCUMENT` is how nexus_bus/recording.py runs it, in a process that may crash. Told to end
(SIGTERM) it rests: the episodes that it has stay, and the same document goes on with the next attempt.
"""

import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from nexus_bus.clock import derive_seed
from nexus_bus.data.writer import DatasetInfo, DatasetWriter, Feature, Pictures
from nexus_bus.envs.catalog import ENVIRONMENTS, describe
from nexus_bus.envs.entry import EnvironmentEntry
from nexus_bus.envs.offered import is_own
from nexus_bus.envs.session import Session
from nexus_bus.envs.simulator import Observed
from nexus_bus.errors import ContractError, NotFound
from schemas.job import EnvironmentSpec, ExpertSpec
from schemas.policy import ActionSpec, ObservationSpec

PATIENCE = 4  # attempts per wanted episode before the recording gives up
IMAGES = "observation.images."

Keep = Literal["successes", "all"]
Progress = Callable[[int, int], None]
Asked = Callable[[], bool]  # whether it is to rest


class Order(msgspec.Struct, frozen=True):
    """The document on the command line."""

    environment: EnvironmentSpec
    expert: ExpertSpec
    root: str
    key: str = ""  # whose it is; what rests is gone on with under the same one


class Rested(Exception):
    """A recording rests."""


class Take:
    """An episode while it is recorded: a row for every action. `task` is the sentence that it began with."""

    def __init__(self, cameras: Iterable[str]) -> None:
        self.task = ""
        self.success = False  # at any step
        self._columns: dict[str, list[Any]] = {key: [] for key in ("observation.state", "action", "next.success")}
        self._columns |= {f"{IMAGES}{camera}": [] for camera in cameras}

    def add(self, seen: Observed, action: np.ndarray, success: bool) -> None:
        """What was seen, the action `[D]` that was wanted there, and whether the task was solved after it."""
        self.task = self.task or seen.instruction
        self.success = self.success or success
        self._columns["observation.state"].append(seen.state)
        self._columns["action"].append(action)
        self._columns["next.success"].append(success)
        for camera, picture in seen.images.items():
            self._columns[f"{IMAGES}{camera}"].append(picture)

    def frames(self) -> dict[str, Pictures]:
        """As a writer takes them: pictures one by one, numbers `[N, …]`."""
        return {key: rows if key.startswith(IMAGES) else np.stack(rows) for key, rows in self._columns.items()}


def features_of(action: ActionSpec, observation: ObservationSpec, pictures: str = "image") -> dict[str, Feature]:
    """The columns of a dataset of an environment; `pictures` is "image" (exact) or "video" (small)."""
    features: dict[str, Feature] = {
        "observation.state": {"dtype": "float32", "shape": [observation.state_size], "names": None},
        "action": {"dtype": "float32", "shape": [action.size], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
    }
    for camera, shape in observation.cameras.items():
        names = ["height", "width", "channels"]
        features[f"{IMAGES}{camera}"] = {"dtype": pictures, "shape": list(shape), "names": names}
    return features


def fps_of(environment: str) -> int:
    """Frames a second that a dataset of an environment says it has, if nobody says otherwise."""
    known = ENVIRONMENTS.get(environment)
    return known.fps if known is not None else EnvironmentEntry.fps


def record(
    play: Callable[[int], Take],
    writer: DatasetWriter,
    *,
    who: str,
    episodes: int,
    keep: Keep = "successes",
    progress: Progress | None = None,
) -> DatasetInfo:
    """Keep episodes until there are enough; `progress(episodes, attempts)` is called after each attempt.

    Args:
        play: plays the attempt of this number.
        who: begins the error.

    Raises:
        ContractError: it succeeds too rarely.
        Rested: `play` raised it; what was kept stays, and a writer of the same key goes on with the attempt that was under way.
    """
    attempts, successes, kept = writer.note.get("attempts", 0), writer.note.get("successes", 0), writer.episodes
    with writer:
        while kept < episodes:
            if attempts >= PATIENCE * episodes + 16:
                raise ContractError(f"{who}: {successes} successes in {attempts} tries")
            try:
                take = play(attempts)
            except Rested:
                writer.rest({"attempts": attempts, "successes": successes})
                raise
            attempts += 1
            successes += take.success
            if take.success or keep == "all":
                writer.add_episode(take.frames(), take.task)
                kept += 1
            if progress is not None:
                progress(kept, attempts)
        info = writer.finalize()
    return msgspec.structs.replace(info, attempts=attempts, success=successes / attempts)


def record_expert(
    spec: EnvironmentSpec,
    expert: ExpertSpec,
    root: Path | str,
    progress: Progress | None = None,
    pictures: str = "image",
    *,
    keep: Keep = "successes",
    fps: int | None = None,
    key: str = "",
    asked: Asked = lambda: False,
) -> DatasetInfo:
    """Record `expert.episodes` episodes of the scripted expert; see `record`.

    Args:
        keep: all episodes, or successful ones alone.
        fps: default the environment's.
        key: of the writer.
        asked: looked at before each step.

    Raises:
        NotFound: the environment has no expert.
        ContractError: the expert (with this noise) succeeds too rarely; nothing is left behind.
        Rested: it was asked to.
    """
    if is_own(spec.id) or not describe(spec).expert:
        raise NotFound(f"environment {spec.id} has no scripted expert; give a dataset instead, or let a policy play")
    session = Session(spec)
    known = session.description
    try:
        return record(
            lambda attempt: _demonstration(session, expert, attempt, asked),
            DatasetWriter(root, fps or fps_of(spec.id), features_of(known.action, known.observation, pictures), spec.id, key),
            who=f"expert of {spec.id}/{spec.task} with noise {expert.noise:g}",
            episodes=expert.episodes,
            keep=keep,
            progress=progress,
        )
    finally:
        session.close()


def _demonstration(session: Session, expert: ExpertSpec, attempt: int, asked: Asked) -> Take:
    rng = np.random.Generator(np.random.PCG64(derive_seed(expert.seed, "noise", attempt)))
    observed = session.reset(expert.seed, attempt)
    take = Take(session.description.observation.cameras)
    while session.end == "running":
        if asked():
            raise Rested
        action = session.expert()
        executed = action + rng.normal(0.0, expert.noise, action.shape) if expert.noise else action
        done = session.step(executed[None])
        take.add(observed, action, done.successes[-1])
        observed = done.observed
    return take


def main() -> None:
    """Record what the document on the command line says. Prints a line after each attempt, and what was written as the last."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: told.append(signum))

    def progress(kept: int, attempts: int) -> None:
        sys.stdout.write(f'{{"episodes":{kept},"attempts":{attempts}}}\n')
        sys.stdout.flush()

    try:
        info = record_expert(order.environment, order.expert, order.root, progress, key=order.key, asked=lambda: bool(told))
    except Rested:
        return
    sys.stdout.write(msgspec.json.encode(info).decode() + "\n")


if __name__ == "__main__":
    main()
