"""Does a head on the frozen features act? Imitate the expert of the project's own tabletop, then let the head drive.

`python -m ops.pretrain.closed_loop` writes `closed_loop.json`. Test episodes have seeds that no demonstration had. The same
head on a backbone of random weights is the measure of what the tip's position, which the head also sees, does alone.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from nexus_bus.envs.catalog import build
from nexus_bus.envs.rendering import require
from nexus_bus.envs.simulator import Observed, Simulator
from ops.pretrain.checkpoint import build_model
from ops.pretrain.probe import DEFAULT, HERE, Frozen, fit_head
from schemas.job import EnvironmentSpec

CAMERA = "front"
STEPS = 50
TASKS = ("touch", "reach", "push", "slide")


def _inputs(frozen: Frozen, seen: list[Observed]) -> torch.Tensor:
    """Features of the first query token, and the state."""
    features = frozen.features(np.stack([o.images[CAMERA] for o in seen]), [o.instruction for o in seen])[:, 0]
    return torch.cat([features, torch.tensor(np.stack([o.state for o in seen]))], dim=1)


def demonstrate(world: Simulator, episodes: int) -> tuple[list[Observed], torch.Tensor]:
    """The expert's episodes, acted with some noise so that they also show how to come back."""
    rng = np.random.default_rng(0)
    seen, actions = [], []
    for episode in range(episodes):
        world.reset(1000 + episode)
        for _ in range(STEPS):
            action = world.expert()
            seen.append(world.observe())
            actions.append(action)
            if world.act(np.clip(action + rng.normal(0, 0.3, len(action)), -1, 1)).success:
                break
    return seen, torch.tensor(np.stack(actions), dtype=torch.float32)


def drive(world: Simulator, frozen: Frozen, head: torch.nn.Module, episodes: int) -> float:
    """Share of episodes that succeed."""
    wins = 0
    for episode in range(episodes):
        world.reset(90_000 + episode)
        for _ in range(STEPS):
            with torch.no_grad():
                action = head(_inputs(frozen, [world.observe()]))[0].numpy()
            if world.act(np.clip(action, -1, 1)).success:
                wins += 1
                break
    return wins / episodes


def measure(folder: Path, demonstrations: int, episodes: int) -> dict[str, dict[str, float]]:
    """Success per task, for the checkpoint and for the same geometry with random weights."""
    report: dict[str, dict[str, float]] = {}
    for task in TASKS:
        world = build(EnvironmentSpec(id="tabletop", task=task, options={"image_size": 96}))
        seen, actions = demonstrate(world, demonstrations)
        report[task] = {"demonstrations": demonstrations, "frames": len(seen), "episodes": episodes}
        for label in ("pretrained", "random"):
            frozen = Frozen(folder)
            if label == "random":
                frozen.model = build_model(frozen.model.config, seed=1).eval()
            head = fit_head(_inputs(frozen, seen), actions, steps=4000)
            report[task][label] = drive(world, frozen, head, episodes)
        print(task, report[task], flush=True)
        world.close()
    return report


def main() -> None:
    """Measure a checkpoint and write `closed_loop.json`."""
    parser = argparse.ArgumentParser(prog="python -m ops.pretrain.closed_loop", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT)
    parser.add_argument("--demonstrations", type=int, default=100)
    parser.add_argument("--episodes", type=int, default=100)
    arguments = parser.parse_args()
    require()
    torch.set_num_threads(1)
    report = measure(arguments.checkpoint, arguments.demonstrations, arguments.episodes)
    (HERE / "closed_loop.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
