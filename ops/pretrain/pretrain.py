"""Pretrain nexus-nano: draw the pool, train, write the checkpoint every so often, then measure and plot.

Reads nothing but this package; writes the checkpoint folder, `log.jsonl`, `curve.png` and, in `--work`, the pool and a
resumable state. Killed, it goes on from the last state when started again with the same arguments.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from ops.pretrain.checkpoint import build_config, build_model, save_checkpoint
from ops.pretrain.objective import Objective, look
from ops.pretrain.pool import Pool, open_pool
from ops.pretrain.questions import Questioner, cells
from ops.pretrain.tokenizer import build_tokenizer

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Settings:
    """One run; the defaults made the checkpoint that ships."""

    out: Path
    work: Path
    seed: int = 0
    steps: int = 7000
    vision_steps: int = 2000
    pictures: int = 80_000
    batch: int = 24  # pictures a step
    branches: int = 4  # sentences a picture
    rate: float = 1.2e-3
    vision_rate: float = 1.5e-3  # alone; afterwards the tower goes on with a third of `rate`
    threads: int = 1
    save_every: int = 1000


def train(settings: Settings) -> None:
    """Run all steps and leave the final checkpoint in `settings.out`."""
    torch.set_num_threads(settings.threads)
    tokenizer = build_tokenizer()
    model = build_model(build_config(tokenizer), settings.seed)
    if not (settings.out / "config.json").is_file():
        save_checkpoint(model, tokenizer, settings.out, 0)
    pool = open_pool(settings.work / f"pool-{settings.seed}", settings.seed, settings.pictures, os.cpu_count() or 1)
    print(f"{len(pool)} pictures")
    questioner = Questioner(tokenizer, settings.branches)
    objective = Objective(tokenizer, questioner, model.config.text_config.hidden_size)
    _teach_vision(settings, model, objective, pool)
    optimizer = torch.optim.AdamW(_groups(model, objective, settings.rate), betas=(0.9, 0.98), fused=True)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, settings.steps, pct_start=0.06)
    state = settings.work / f"state-{settings.seed}.safetensors"
    named = dict(model.named_parameters()) | {f"helper.{name}": p for name, p in objective.helper.named_parameters()}
    first = _resume(named, optimizer, schedule, state)
    model.train()
    log = HERE / "log.jsonl"
    before = log.read_text().splitlines(keepends=True) if first else []
    log.write_text("".join(line for line in before if json.loads(line)["step"] <= first))
    window: list[tuple[float, ...]] = []
    started = time.perf_counter()
    for step in range(first, settings.steps):
        rng = np.random.default_rng((settings.seed, 1, step))  # of the step alone, so a resumed run draws the same
        batch = questioner.batch(pool, _order(len(pool), settings, step), rng)
        terms = objective(model, batch)
        terms.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        window.append((terms.helper, terms.query, terms.answer, terms.target_cm, float(norm)))
        done = step + 1
        if done % 50 == 0:
            mean = np.mean(window, axis=0).round(4).tolist()
            window.clear()
            line = dict(zip(("helper", "query", "answer", "target_cm", "grad_norm"), mean, strict=True))
            line = {"step": done, **line, "rate": schedule.get_last_lr()[0], "seconds": round(time.perf_counter() - started)}
            line["groups"] = {name: round(value, 3) for name, value in terms.group_loss.items()}
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print({key: value for key, value in line.items() if key != "groups"}, flush=True)
        if done % settings.save_every == 0 or done == settings.steps:
            save_checkpoint(model, tokenizer, settings.out, done)
            _keep(named, optimizer, done, state)


def _teach_vision(settings: Settings, model: Qwen3VLForConditionalGeneration, objective: Objective, pool: Pool) -> None:
    """Train the vision tower alone on the helper's loss, so that the language model finds pictures worth looking at."""
    kept = settings.work / f"vision-{settings.seed}.safetensors"
    modules = {"visual": model.model.visual, "helper": objective.helper}
    named = {f"{part}.{name}": p for part, module in modules.items() for name, p in module.named_parameters()}
    if kept.is_file():
        for name, tensor in load_file(str(kept)).items():
            named[name].data.copy_(tensor)
        return
    optimizer = torch.optim.AdamW(named.values(), lr=settings.vision_rate, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.vision_rate, settings.vision_steps, pct_start=0.1)
    model.train()
    losses: list[float] = []
    for step in range(settings.vision_steps):
        indices = np.random.default_rng((settings.seed, 3, step)).integers(0, len(pool), settings.batch)
        loss = objective.picture_loss(look(model, pool.take(indices)), cells(pool, indices))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"vision {step + 1}: {np.mean(losses[-100:]):.3f}", flush=True)
    save_file({name: p.detach().contiguous() for name, p in named.items()}, str(kept))


def _groups(model: Qwen3VLForConditionalGeneration, objective: Objective, rate: float) -> list[dict[str, Any]]:
    """The parameters with their rates: decay matrices only, move the vision tower slowly."""
    groups = []
    for module, speed in ((model.model.language_model, 1.0), (model.model.visual, 0.33), (objective.helper, 0.33)):
        for matrix in (True, False):
            chosen = [p for p in module.parameters() if (p.ndim > 1) == matrix]
            groups.append({"params": chosen, "lr": rate * speed, "weight_decay": 0.02 if matrix else 0.0})
    return groups


def _order(size: int, settings: Settings, step: int) -> np.ndarray:
    """Pictures of a step: every one once per pass, in a new order each pass."""
    per_pass = size // settings.batch
    order = np.random.default_rng((settings.seed, 2, step // per_pass)).permutation(size)
    at = step % per_pass * settings.batch
    return order[at : at + settings.batch]


def _keep(named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    """Write weights and optimizer moments, whole or not at all."""
    tensors = {"step": torch.tensor([step])}
    for name, parameter in named.items():
        moments = optimizer.state[parameter]
        tensors |= {f"w.{name}": parameter.detach(), f"m.{name}": moments["exp_avg"], f"v.{name}": moments["exp_avg_sq"]}
    part = path.with_suffix(".part")
    save_file(tensors, str(part))
    part.replace(path)


def _resume(
    named: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.OneCycleLR,
    path: Path,
) -> int:
    """Load a kept state if there is one. Returns the step to go on with."""
    if not path.is_file():
        return 0
    tensors = load_file(str(path))
    step = int(tensors["step"])
    for name, parameter in named.items():
        parameter.data.copy_(tensors[f"w.{name}"])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": tensors[f"m.{name}"],
            "exp_avg_sq": tensors[f"v.{name}"],
        }
    for _ in range(step):
        schedule.step()
    return step


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.pretrain", description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "nexus_bus" / "models" / "nano")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder: 2.3 GB of pictures, the resumable state")
    for name in ("seed", "steps", "vision_steps", "pictures", "batch", "branches", "threads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name))
    parser.add_argument("--rate", type=float, default=Settings.rate)
    arguments = parser.parse_args()
    settings = Settings(**vars(arguments))
    train(settings)
    from ops.pretrain.curve import draw  # matplotlib is not needed to train

    draw(HERE / "log.jsonl", HERE / "curve.png")


if __name__ == "__main__":
    main()
