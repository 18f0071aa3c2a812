"""Whether actions stand beside the observations they were taken on, or one frame off. Below data/check.py.

An action at frame t moves the robot from t to t + 1. If it is a step, it goes with the change of the state from t to t + 1;
if it is a position, with the state at t + 1. Where another frame explains the motion much better, the columns are shifted:
a policy trained on such data looks fine and fails. A robot that answers slowly hides a shift, and nothing is said of it then.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

LAGS = (-1, 0, 1)  # of the motion behind the action, in frames
LEAST, LEAST_OF_ONE = 20, 10  # frames to say anything of all episodes together, or of one against the others
SURELY = 50  # frames of one episode from which its shift is no chance
STEP, POSITION = 0.5, 0.9  # share of the variance that an action explains, to be taken for a step or a position
MARGIN = 0.5  # of what is left unexplained without a shift, at most, with it
SURE = 0.25  # the same of a single episode

Episodes = Callable[[], Iterable[tuple[int, np.ndarray, np.ndarray]]]  # number, state [n, S], action [n, D]


@dataclass(frozen=True)
class Alignment:
    """`lag`: frames by which motion comes too late after its action in most of the data, usually 0; `odd`: other episodes."""

    lag: int
    odd: dict[int, int]  # episode -> its lag
    unsure: str = ""  # why nothing can be said; empty where something was


def alignment(episodes: Episodes) -> Alignment:
    """Compare actions with the motion before, at and after them. Two passes; nothing is held."""
    total: _Sums | None = None
    for _, state, action in episodes():
        found = _Sums.of(state, action)
        total = found if total is None else total + found
    count = 0 if total is None else int(total.count.min())
    if total is None or count < LEAST:
        return Alignment(0, {}, f"{count} frames have a frame before and two after them in their episode, {LEAST} are needed")
    pairs = total.pairs()
    if not pairs:
        return Alignment(0, {}, "no number of an action explains how one of the state moves")
    lag = _lag(total, pairs, MARGIN)
    odd: dict[int, int] = {}
    for number, state, action in episodes():
        if len(state) >= LEAST_OF_ONE:
            own = _lag(_Sums.of(state, action), pairs, SURE, usual=lag)
            if own != lag:
                odd[number] = own
    return Alignment(lag, odd)


@dataclass(frozen=True)
class _Sums:
    """Of actions a and motions y at each lag, for steps and positions: what their correlation needs. `[lag, kind, ...]`."""

    count: np.ndarray  # [lag, 1, 1, 1]
    a: np.ndarray  # [lag, kind, D, 1]
    aa: np.ndarray
    y: np.ndarray  # [lag, kind, 1, S]
    yy: np.ndarray
    ay: np.ndarray  # [lag, kind, D, S]

    @classmethod
    def of(cls, state: np.ndarray, action: np.ndarray) -> "_Sums":
        state, action = state.astype(np.float64), action.astype(np.float64)
        steps = state[1:] - state[:-1]
        parts = []
        for lag in LAGS:
            first, last = max(0, -lag), max(0, min(len(steps), len(steps) - lag))  # frames t whose motion t + lag exists
            a = action[first:last]
            motions = (steps[first + lag : last + lag], state[1:][first + lag : last + lag])
            parts.append(
                (
                    np.full((1, 1, 1), len(a)),
                    np.stack([a.sum(0)[:, None]] * 2),
                    np.stack([(a**2).sum(0)[:, None]] * 2),
                    np.stack([y.sum(0)[None] for y in motions]),
                    np.stack([(y**2).sum(0)[None] for y in motions]),
                    np.stack([a.T @ y for y in motions]),
                )
            )
        return cls(*(np.stack(values) for values in zip(*parts, strict=True)))

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(*(mine + theirs for mine, theirs in zip(self.__dict__.values(), other.__dict__.values(), strict=True)))

    def explained(self) -> tuple[np.ndarray, np.ndarray]:
        """Share of each motion's variance that each action explains, and the slope, `[lag, kind, D, S]`."""
        n = np.maximum(self.count, 1)
        together = self.ay - self.a * self.y / n
        of_a, of_y = self.aa - self.a**2 / n, self.yy - self.y**2 / n
        flat = (of_a <= 1e-12 * np.maximum(self.aa, 1e-300)) | (of_y <= 1e-12 * np.maximum(self.yy, 1e-300))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(flat, 0.0, together**2 / (of_a * of_y))
            slope = np.where(flat, 0.0, together / of_a)
        return np.clip(share, 0.0, 1.0), slope

    def pairs(self) -> list[tuple[int, int, int]]:
        """(kind, action, state) of each dimension of the state that an action moves."""
        share, slope = self.explained()
        # A position is followed, so it has the state's own scale; a policy that steers by the state has the opposite sign.
        share[:, 1] *= (slope[:, 1] > 0.5) & (slope[:, 1] < 2.0)
        best = share.max(0)
        found = []
        for s in range(best.shape[2]):
            kind = 0 if best[0, :, s].max() >= STEP else 1
            action = int(best[kind, :, s].argmax())
            if best[kind, action, s] >= (STEP, POSITION)[kind]:
                found.append((kind, action, s))
        return found


def _lag(sums: _Sums, pairs: list[tuple[int, int, int]], margin: float, usual: int = 0) -> int:
    """What most pairs say; `usual` unless another explains the motion by far better."""
    share, _ = sums.explained()
    votes: dict[int, int] = dict.fromkeys(LAGS, 0)
    for kind, action, s in pairs:
        left = 1.0 - share[:, kind, action, s]
        best, here = int(left.argmin()), left[LAGS.index(usual)]
        votes[LAGS[best] if left[best] < margin * here and share[best, kind, action, s] >= STEP else usual] += 1
    most = max(LAGS, key=lambda lag: (votes[lag], lag == usual))
    return most if votes[most] * 2 > len(pairs) else usual
