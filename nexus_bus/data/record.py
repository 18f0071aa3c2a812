"""Record a dataset from an environment's scripted expert: the start of an SFT job without data of its own.

A frame is what was seen before an action, and the action the expert wanted there; with noise another one was executed, so
that the data also shows the way back. Only successful episodes are kept. The same spec and seed give the same bytes.

`python -m nexus_bus.data.record DOCUMENT` is how workers/environment.py runs it, in a process that may crash.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from nexus_bus.clock import derive_seed
from nexus_bus.data.writer import DatasetInfo, DatasetWriter, Feature
from nexus_bus.envs.catalog import ENVIRONMENTS, EnvDescription, describe
from nexus_bus.envs.session import Session
from nexus_bus.errors import ContractError, NotFound
from schemas.job import EnvironmentSpec, ExpertSpec

PATIENCE = 4  # attempts per wanted episode before the recording gives up


class Order(msgspec.Struct, frozen=True):
    """The document on the command line."""

    environment: EnvironmentSpec
    expert: ExpertSpec
    root: str


def features_of(description: EnvDescription, pictures: str = "image") -> dict[str, Feature]:
    """The columns of a dataset of this environment; `pictures` is "image" (exact) or "video" (small)."""
    features: dict[str, Feature] = {
        "observation.state": {"dtype": "float32", "shape": [description.observation.state_size], "names": None},
        "action": {"dtype": "float32", "shape": [description.action.size], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
    }
    for camera, shape in description.observation.cameras.items():
        names = ["height", "width", "channels"]
        features[f"observation.images.{camera}"] = {"dtype": pictures, "shape": list(shape), "names": names}
    return features


def record_expert(
    spec: EnvironmentSpec,
    expert: ExpertSpec,
    root: Path | str,
    progress: Callable[[int, int], None] | None = None,
    pictures: str = "image",
) -> DatasetInfo:
    """Record `expert.episodes` successful episodes; `progress(episodes, attempts)` is called after each attempt.

    Raises:
        NotFound: the environment has no expert.
        ContractError: the expert (with this noise) succeeds too rarely; nothing is left behind.
    """
    if not describe(spec).expert:
        raise NotFound(f"environment {spec.id} has no scripted expert; give a dataset instead")
    session = Session(spec)
    fps = ENVIRONMENTS[spec.id].fps
    attempts = kept = 0
    try:
        with DatasetWriter(root, fps, features_of(session.description, pictures), spec.id) as writer:
            while kept < expert.episodes:
                if attempts >= PATIENCE * expert.episodes + 16:
                    raise ContractError(
                        f"expert of {spec.id}/{spec.task}: {kept} successes in {attempts} tries, noise {expert.noise}"
                    )
                frames, task, success = _episode(session, expert, attempts)
                attempts += 1
                if success:
                    writer.add_episode(frames, task)
                    kept += 1
                if progress is not None:
                    progress(kept, attempts)
            info = writer.finalize()
    finally:
        session.close()
    return msgspec.structs.replace(info, attempts=attempts, success=kept / attempts)


def _episode(session: Session, expert: ExpertSpec, attempt: int) -> tuple[dict[str, np.ndarray], str, bool]:
    rng = np.random.Generator(np.random.PCG64(derive_seed(expert.seed, "noise", attempt)))
    observed = session.reset(expert.seed, attempt)
    columns: dict[str, list[object]] = {key: [] for key in features_of(session.description)}
    task = observed.instruction
    while session.end == "running":
        action = session.expert()
        executed = action + rng.normal(0.0, expert.noise, action.shape) if expert.noise else action
        columns["observation.state"].append(observed.state)
        for camera, picture in observed.images.items():
            columns[f"observation.images.{camera}"].append(picture)
        columns["action"].append(action)
        done = session.step(executed[None])
        columns["next.success"].append(done.successes[-1])
        observed = done.observed
    return {key: np.stack(values) for key, values in columns.items()}, task, session.end == "success"  # type: ignore[arg-type]


def main() -> None:
    """Record what the document on the command line says. Prints a line after each attempt, and what was written as the last."""
    order = msgspec.json.decode(sys.argv[1], type=Order)

    def progress(kept: int, attempts: int) -> None:
        sys.stdout.write(f'{{"episodes":{kept},"attempts":{attempts}}}\n')
        sys.stdout.flush()

    info = record_expert(order.environment, order.expert, order.root, progress)
    sys.stdout.write(msgspec.json.encode(info).decode() + "\n")


if __name__ == "__main__":
    main()
