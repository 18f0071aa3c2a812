"""From a scene to what the model is asked: the run-time prompt with its query tokens, and plain questions.

One picture carries several sentences at once. All begin with the same picture, and in a causal model what stands before the
sentence does not depend on it; so the picture is encoded once, each sentence is a branch that sees the picture and itself
only, and every branch gives exactly what it would give as a prompt of its own.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from ops.pretrain import language
from ops.pretrain.checkpoint import IMAGE_TOKENS, MERGE, PATCH
from ops.pretrain.language import COLOURS, GENERIC, NOUNS, SHAPES
from ops.pretrain.pool import Pool
from ops.pretrain.vocabulary import ACTS, BEHIND, BY_NAME, DIRECTIONS, GROUPS, QUERY_TOKEN, QUERY_TOKENS

NUMBERS = tuple(group.name for group in GROUPS if group.name not in ("act", "step"))
_NUMBER_WORDS = ("one", "two", "three", "four", "five")
_ACT_ODDS = np.array([30, 9, 9, 9, 9, 6, 5, 2, 2, 4, 2, 5.0])


@dataclass
class Batch:
    """`pictures` x `branches` sentences. Arrays over query branches are in the order of `query_at`."""

    images: NDArray[np.uint8]
    ids: torch.Tensor  # [pictures, length]
    positions: torch.Tensor  # [3, pictures, length], rotary: every branch goes on where the picture ends
    mask: torch.Tensor  # [pictures, 1, length, length], added to attention scores
    query_at: torch.Tensor  # [queries, QUERY_TOKENS], positions in the flattened ids
    numbers: NDArray[np.float64]  # [queries, len(NUMBERS)]; nan where the picture cannot tell
    acts: torch.Tensor  # [queries]
    answer_at: torch.Tensor  # [answers], positions that predict
    answers: torch.Tensor  # [answers], the token that follows
    cells: torch.Tensor  # [pictures, IMAGE_TOKENS, len(COLOURS) + 1, 3]: is that colour (or the tip) in this cell, and where


class Questioner:
    """Makes batches from a pool."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, branches: int) -> None:
        self._tokenizer = tokenizer
        self.branches = branches
        self.prefix = self._ids("<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * IMAGE_TOKENS + "<|vision_end|>")
        self._suffix = self._ids("<|im_end|>\n<|im_start|>assistant\n")
        self._query = tokenizer.convert_tokens_to_ids(QUERY_TOKEN)
        self._pad = tokenizer.pad_token_id
        self._end = tokenizer.eos_token_id
        self._image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._cached = lru_cache(maxsize=100_000)(self._ids)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    @property
    def image_span(self) -> slice:
        """Where the picture's tokens stand."""
        start = self.prefix.index(self._image)
        return slice(start, start + IMAGE_TOKENS)

    def _head_positions(self) -> NDArray[np.int64]:
        """Rotary positions [3, prefix] (time, height, width): the picture's tokens form a grid."""
        side = int(IMAGE_TOKENS**0.5)
        start = self.image_span.start
        grid = np.indices((1, side, side)).reshape(3, -1) + start
        head = np.tile(np.arange(start), (3, 1))
        rest = np.tile(start + side + np.arange(len(self.prefix) - self.image_span.stop), (3, 1))
        return np.concatenate([head, grid, rest], axis=1)

    def batch(self, pool: Pool, indices: NDArray[np.int64], rng: np.random.Generator, questions: float = 0.2) -> Batch:
        """Ask `branches` things about each picture; a share `questions` of them are plain questions."""
        query_at, numbers, acts, answer_at, answers = [], [], [], [], []
        rows: list[list[list[int]]] = []
        for row, index in enumerate(indices):
            scene = {name: values[index] for name, values in pool.scenes.items()}
            targets = rng.permutation(int(scene["count"]))
            rows.append([])
            end = len(self.prefix)
            for branch in range(self.branches):
                target = int(targets[branch % len(targets)])
                if rng.random() < questions:
                    text, answer = plain_question(scene, target, rng)
                    said = [*self._cached(answer), self._end]
                    tokens = self._cached(text) + self._suffix + said
                    end += len(tokens)
                    answer_at += [(row, at) for at in range(end - len(said) - 1, end - 1)]
                    answers += said
                else:
                    act, text, values = instruction(scene, target, rng)
                    tokens = self._cached(text) + self._suffix + [self._query] * QUERY_TOKENS
                    end += len(tokens)
                    query_at.append([(row, at) for at in range(end - QUERY_TOKENS, end)])
                    numbers.append(values)
                    acts.append(ACTS.index(act))
                rows[-1].append(tokens)
        ids, positions, mask = self._pack(rows)
        place = np.array([ids.shape[1], 1])
        return Batch(
            images=pool.take(indices),
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            mask=torch.where(torch.from_numpy(mask), 0.0, torch.finfo(torch.float32).min)[:, None],
            query_at=torch.from_numpy(np.array(query_at) @ place),
            numbers=np.array(numbers),
            acts=torch.tensor(acts),
            answer_at=torch.from_numpy(np.array(answer_at, int).reshape(-1, 2) @ place),
            answers=torch.tensor(answers, dtype=torch.long),
            cells=cells(pool, indices),
        )

    def _pack(self, rows: list[list[list[int]]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Lay branches one behind another: ids [n, length], positions [3, n, length], and what may be seen."""
        head = self._head_positions()
        first, start = int(head.max()) + 1, len(self.prefix)
        length = start + max(sum(map(len, row)) for row in rows)
        ids = np.full((len(rows), length), self._pad)
        positions = np.zeros((3, len(rows), length), np.int64)
        owner = np.full((len(rows), length), -1)
        ids[:, :start], positions[:, :, :start], owner[:, :start] = self.prefix, head[:, None], 0
        for row, branches in enumerate(rows):
            at = start
            for number, tokens in enumerate(branches, start=1):
                span = slice(at, at + len(tokens))
                ids[row, span], owner[row, span] = tokens, number
                positions[:, row, span] = first + np.arange(len(tokens))
                at = span.stop
        past = np.tri(length, dtype=bool)
        mask = past & ((owner[:, None] == 0) | (owner[:, :, None] == owner[:, None]))
        return ids, positions, mask


def cells(pool: Pool, indices: NDArray[np.int64]) -> torch.Tensor:
    """What each picture token covers: per colour, and last for the tip, (present, u, v), from the middle in half cells."""
    side = int(IMAGE_TOKENS**0.5)
    table = np.zeros((len(indices), IMAGE_TOKENS, len(COLOURS) + 1, 3), np.float32)
    scenes = {name: pool.scenes[name][indices] for name in ("count", "colour", "uv", "tip_uv")}
    for row, count in enumerate(scenes["count"]):
        seen = [*zip(scenes["colour"][row][:count], scenes["uv"][row], strict=False), (len(COLOURS), scenes["tip_uv"][row])]
        for kind, uv in seen:
            at = np.clip((uv * side).astype(int), 0, side - 1)
            table[row, at[1] * side + at[0], kind] = (1, *((uv * 2 - 1) * side))
    return torch.from_numpy(table)


def patches(images: NDArray[np.uint8]) -> torch.Tensor:
    """What the checkpoint's image processor makes of pictures of its own size: [n * 36, 1536], in -1..1."""
    count, side = len(images), images.shape[1] // (PATCH * MERGE)
    x = images.reshape(count, side, MERGE, PATCH, side, MERGE, PATCH, 3).transpose(0, 1, 4, 2, 5, 7, 3, 6)
    x = np.repeat(x[:, :, :, :, :, :, None], 2, axis=6)  # a still picture is shown as two equal frames
    return torch.from_numpy(x.reshape(count * (side * MERGE) ** 2, -1)).float() / 127.5 - 1


def name_of(scene: dict[str, Any], target: int, rng: np.random.Generator) -> str:
    """A name that fits `target` and nothing else in the scene."""
    count = int(scene["count"])
    colour, shape = scene["colour"][:count], scene["shape"][:count]
    nouns = NOUNS[SHAPES[shape[target]]]
    noun = nouns[rng.integers(len(nouns))]
    if (colour == colour[target]).sum() == 1 and rng.random() < 0.1:
        noun = GENERIC[rng.integers(len(GENERIC))]
    if (shape == shape[target]).sum() == 1 and rng.random() < 0.05:
        return noun if noun not in GENERIC else f"{COLOURS[colour[target]]} {noun}"
    return f"{COLOURS[colour[target]]} {noun}"


def instruction(scene: dict[str, Any], target: int, rng: np.random.Generator) -> tuple[str, str, NDArray[np.float64]]:
    """Return (act, sentence, numbers): a request as a tenant's environment would word it, and what it is about."""
    if rng.random() < 0.03:
        act, text = language.bare(rng)
        return act, text, facts(scene, None, act)
    act = ACTS[rng.choice(len(ACTS), p=_ACT_ODDS / _ACT_ODDS.sum())]
    other = (target + 1) % int(scene["count"])
    names = [language.article(name_of(scene, i, rng), rng) for i in (target, other)]
    return act, language.ask(act, names[0], names[1], rng), facts(scene, target, act)


def facts(scene: dict[str, Any], target: int | None, act: str) -> NDArray[np.float64]:
    """The numbers of `NUMBERS`; nan where there is no such thing or the picture cannot tell."""
    known: dict[str, float] = dict(zip(("ju", "jv"), scene["tip_uv"], strict=True))
    tip = scene["tip"]
    known |= dict(zip(("px", "py", "pz"), tip, strict=True))
    if target is not None:
        place = scene["position"][target]
        delta = place - tip
        begin = delta[:2] - BEHIND * np.array(DIRECTIONS.get(act, (0.0, 0.0)))
        known |= dict(zip(("tx", "ty", "dx", "dy", "dz", "ax", "ay"), (*place[:2], *delta, *begin), strict=True))
        known |= {"dd": float(np.hypot(*delta[:2]))} | dict(zip(("iu", "iv"), scene["uv"][target], strict=True))
    hidden = () if scene["metric"] else [name for name in NUMBERS if BY_NAME[name].metric]
    return np.array([np.nan if name in hidden else known.get(name, np.nan) for name in NUMBERS])


def say(name: str, value: float) -> str:
    """The token for `value` in group `name`."""
    group = BY_NAME[name]
    return group.tokens[round(float(group.encode(np.asarray(value))))]


def plain_question(scene: dict[str, Any], target: int, rng: np.random.Generator) -> tuple[str, str]:
    """Return a question about the scene, and its answer."""
    name = name_of(scene, target, rng)
    place, uv, count = scene["position"][target], scene["uv"], int(scene["count"])
    roll = rng.random()
    if roll < 0.35:
        asked = f"where is the {name}?", say("iu", uv[target, 0]) + say("iv", uv[target, 1])
    elif roll < 0.55 and scene["metric"]:
        asked = f"where is the {name} on the table?", say("tx", place[0]) + say("ty", place[1])
    elif roll < 0.65:
        asked = "where is the gripper?", say("ju", scene["tip_uv"][0]) + say("jv", scene["tip_uv"][1])
    elif roll < 0.75:
        asked = "how many objects are there?", _NUMBER_WORDS[count - 1]
    elif roll < 0.9 or count == 1:
        asked = _present(scene, name, rng)
    else:
        asked = _beside(scene, target, name)
    return asked


def _present(scene: dict[str, Any], name: str, rng: np.random.Generator) -> tuple[str, str]:
    if rng.random() < 0.5:
        return f"is there a {name}?", "yes"
    absent = [i for i in range(len(COLOURS)) if i not in scene["colour"][: scene["count"]]]
    return f"is there a {COLOURS[absent[rng.integers(len(absent))]]} object?", "no"


def _beside(scene: dict[str, Any], target: int, name: str) -> tuple[str, str]:
    order = np.argsort(scene["uv"][: scene["count"], 0])
    rank = int(np.flatnonzero(order == target)[0])
    side = "left" if rank > 0 else "right"
    neighbour = int(order[rank - 1] if rank > 0 else order[1])
    return f"which object is {side} of the {name}?", COLOURS[scene["colour"][neighbour]]
