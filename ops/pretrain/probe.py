"""What the frozen query features carry: read-outs, linear probes and a small head, on scenes never seen in training.

Run after pretraining: `python -m ops.pretrain.probe`. Writes `probe.json`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from ops.pretrain.language import COLOURS
from ops.pretrain.objective import group_spans, read_out
from ops.pretrain.pool import paint_many
from ops.pretrain.questions import instruction
from ops.pretrain.scenes import Style
from ops.pretrain.vocabulary import QUERY_TOKEN, QUERY_TOKENS

HERE = Path(__file__).parent
DEFAULT = HERE.parents[1] / "nexus_bus" / "models" / "nano"
HOME = Style(plain=True, camera="fixed", count=3, basic_colours=True)  # the look of the project's own tabletop
PROBED = ("tx", "ty", "px", "py", "pz", "dx", "dy", "dz")
Array = NDArray[np.float64]


class Frozen:
    """A checkpoint folder, opened as any user opens it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._tokens = (self._processor.size["shortest_edge"]) // (self._processor.patch_size * self._processor.merge_size) ** 2

    def prompt(self, sentence: str) -> str:
        """The run-time layout: chat template, assistant turn opened, query tokens last."""
        content = [{"type": "image"}, {"type": "text", "text": sentence}]
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return chat.replace("<|image_pad|>", "<|image_pad|>" * self._tokens) + QUERY_TOKEN * QUERY_TOKENS

    @torch.no_grad()
    def features(self, images: NDArray[np.uint8], sentences: list[str]) -> torch.Tensor:
        """Last hidden states at the query tokens [n, 8, hidden] of pictures [n, H, W, 3] with a sentence each."""
        parts = []
        for start in range(0, len(images), 100):
            some = slice(start, start + 100)
            text = self.tokenizer([self.prompt(s) for s in sentences[some]], return_tensors="pt", padding=True)
            seen = self._processor(list(images[some]), return_tensors="pt")
            kinds = (text.input_ids == self.model.config.image_token_id).int()
            hidden = self.model.model(
                input_ids=text.input_ids, attention_mask=text.attention_mask, mm_token_type_ids=kinds, **seen, use_cache=False
            ).last_hidden_state
            queries = text.input_ids == self.tokenizer.convert_tokens_to_ids(QUERY_TOKEN)
            parts.append(hidden[queries].view(len(text.input_ids), QUERY_TOKENS, -1))
        return torch.cat(parts)

    @torch.no_grad()
    def read(self, features: torch.Tensor, name: str) -> Array:
        """What query features [n, 8, hidden] say about one number, through the language-model head [n]."""
        span = group_spans(self.tokenizer)[name]
        scores = self.model.lm_head(features.flatten(0, 1))[:, span]
        return read_out(scores, name).reshape(len(features), -1).mean(1)


def touch_scenes(seed: int, count: int, style: Style) -> tuple[NDArray[np.uint8], list[str], list[dict[str, Any]]]:
    """Fresh scenes, a "touch the ... block" sentence for the first object of each, and what is true of them."""
    images, scenes = paint_many((seed, 99), count, style)
    rows = [{name: values[i] for name, values in scenes.items()} for i in range(count)]
    sentences = [f"touch the {COLOURS[row['colour'][0]]} block" for row in rows]
    truths = [dict(zip(PROBED, _probed(row), strict=True)) for row in rows]
    return images, sentences, truths


def _probed(row: dict[str, Any]) -> list[float]:
    place, tip = row["position"][0], row["tip"]
    return [place[0], place[1], *tip, *(place - tip)]


def ridge(x: Array, y: Array, test: Array, strength: float = 1e-3) -> Array:
    """Predictions for `test` of the linear map fitted from `x` to `y`."""
    mean, scale, level = x.mean(0), x.std(0) + 1e-6, y.mean(0)
    a = (x - mean) / scale
    weights = np.linalg.solve(a.T @ a + strength * len(a) * np.eye(a.shape[1]), a.T @ (y - level))
    return (test - mean) / scale @ weights + level


def expert(truth: dict[str, float]) -> list[float]:
    """A step of 2 cm at most along each axis: over the block, then down on it."""
    move = np.array([truth["dx"], truth["dy"], truth["dz"] + 0.035])
    if np.hypot(move[0], move[1]) > 0.025:
        move[2] = max(move[2], 0.09 - truth["pz"])
    return np.clip(move / 0.02, -1, 1).tolist()


def fit_head(x: torch.Tensor, y: torch.Tensor, seed: int = 0, steps: int = 3000) -> nn.Module:
    """A two-layer head with L1 loss on frozen features."""
    torch.manual_seed(seed)
    head = nn.Sequential(nn.LayerNorm(x.shape[1]), nn.Linear(x.shape[1], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                         nn.Linear(256, y.shape[1]))  # fmt: skip
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,))
        loss = (head(x[rows]) - y[rows]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return head


def measure(folder: Path, count: int = 4000) -> dict[str, Any]:
    """All numbers of the model card."""
    frozen = Frozen(folder)
    report: dict[str, Any] = {}
    styles = {"tabletop": HOME, "front camera, random look": Style(plain=False, camera="near"),
              "shaken camera": Style(plain=True, camera="shaken"), "top camera": Style(plain=True, camera="top")}  # fmt: skip
    for label, style in styles.items():
        images, scenes = paint_many((5, 7, len(label)), count, style)
        rng = np.random.default_rng(11)
        rows = [{name: values[i] for name, values in scenes.items()} for i in range(count)]
        asked = [instruction(row, 0, rng) for row in rows]
        sentences = [text for _, text, _ in asked]
        if style is HOME:
            sentences = [f"touch the {COLOURS[row['colour'][0]]} block" for row in rows]
        truth = np.array([_probed(row) for row in rows])
        features = frozen.features(images, sentences)
        report[label] = _probe(frozen, features, truth)
        if style is HOME:
            report["head"] = _head(features, truth)
            report["wording"] = _wording(frozen, images, rows, truth)
    return report


def _probe(frozen: Frozen, features: torch.Tensor, truth: Array) -> dict[str, Any]:
    half = len(truth) // 2
    result: dict[str, Any] = {}
    for label, x in {"one": features[:, 0], "all": features.flatten(1)}.items():
        guess = ridge(x[:half].double().numpy(), truth[:half], x[half:].double().numpy())
        gap = guess - truth[half:]
        r2 = 1 - (gap**2).sum(0) / ((truth[half:] - truth[half:].mean(0)) ** 2).sum(0)
        result[f"linear, {label} position(s)"] = {
            "r2": dict(zip(PROBED, r2.round(3).tolist(), strict=True)),
            "target_cm": _centimetres(gap[:, 0:2]), "tip_cm": _centimetres(gap[:, 2:4]), "offset_cm": _centimetres(gap[:, 5:7]),
        }  # fmt: skip
    read = np.stack([frozen.read(features, name) for name in PROBED], axis=1) - truth
    result["read out"] = {
        "target_cm": _centimetres(read[:, 0:2]), "tip_cm": _centimetres(read[:, 2:4]), "offset_cm": _centimetres(read[:, 5:7]),
    }  # fmt: skip
    return result


def _centimetres(gap: Array) -> dict[str, float]:
    far = np.linalg.norm(gap, axis=1) * 100
    return {
        "mean": round(float(far.mean()), 2),
        "median": round(float(np.median(far)), 2),
        "over_5": round(float((far > 5).mean()), 3),
    }


def _head(features: torch.Tensor, truth: Array) -> dict[str, float]:
    """Train the small head on three quarters of the scenes; report on the rest."""
    wanted = torch.tensor([expert(dict(zip(PROBED, row, strict=True))) for row in truth], dtype=torch.float32)
    x, cut = features[:, 0], len(truth) * 3 // 4
    head = fit_head(x[:cut], wanted[:cut])
    with torch.no_grad():
        guess = head(x[cut:])
    gap = (guess - wanted[cut:]).abs()
    plain = (wanted[:cut].mean(0) - wanted[cut:]).abs()
    turn = nn.functional.cosine_similarity(guess[:, :2], torch.from_numpy(truth[cut:, 5:7]).float())
    clear = torch.from_numpy(np.hypot(*truth[cut:, 5:7].T) > 0.03)
    return {
        "l1": round(float(gap.mean()), 3),
        "l1_of_the_mean": round(float(plain.mean()), 3),
        "direction_cosine_beyond_3cm": round(float(turn[clear].mean()), 3),
    }


def _wording(frozen: Frozen, images: NDArray[np.uint8], rows: list[dict[str, Any]], truth: Array) -> dict[str, float]:
    """Median target error by sentence, for the sentences that the environments use."""
    result = {}
    for text in ("move above the {} block", "push the {} block to the left", "push the {} block back", "pick up the {} cube"):
        sentences = [text.format(COLOURS[row["colour"][0]]) for row in rows[:500]]
        features = frozen.features(images[:500], sentences)
        gap = np.stack([frozen.read(features, name) for name in ("tx", "ty")], axis=1) - truth[:500, :2]
        result[text] = _centimetres(gap)["median"]
    return result


def main() -> None:
    """Measure a checkpoint and write `probe.json`."""
    parser = argparse.ArgumentParser(prog="python -m ops.pretrain.probe", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT)
    parser.add_argument("--report", type=Path, default=HERE / "probe.json")
    parser.add_argument("--count", type=int, default=4000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = measure(arguments.checkpoint, arguments.count)
    arguments.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
