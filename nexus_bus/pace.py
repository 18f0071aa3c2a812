"""When a group closes: as soon as one more would gain nothing, or is not worth its wait. Pure; whoever groups asks it.

Between the queue and the forward. A group goes at B samples, the knee of the forward's own measured curve, or when the next
arrival is expected later than it would save: a lone asker waits for nobody, a crowd fills groups. Nothing waits past its bound.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

WITHIN = 1.05  # the knee: the smallest size this close to the best time per sample
LONGEST_S, TOTAL_S = 0.5, 3.0  # of one measured forward, and of all of them
TRIES, TRIES_S = 3, 0.2  # the best of so many, while they take less than this together
RECENT = 0.2  # weight of the newest arrival gap, and of the newest forward


@dataclass(frozen=True)
class Curve:
    """What one grouped forward costs by its size: measured points, straight lines between and beyond them."""

    sizes: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]

    def cost(self, size: int) -> float:
        """Seconds of a forward of that many samples."""
        points = list(zip(self.sizes, self.seconds, strict=True))
        if len(points) == 1 or size <= points[0][0]:
            return points[0][1] * size / points[0][0]
        above = next((i for i in range(1, len(points)) if points[i][0] >= size), len(points) - 1)
        (low, start), (high, end) = points[above - 1 : above + 1]
        return start + (end - start) * (size - low) / (high - low)

    def knee(self) -> int:
        """The smallest measured size whose time per sample is within 5 % of the best."""
        each = [seconds / size for size, seconds in zip(self.sizes, self.seconds, strict=True)]
        return next(size for size, took in zip(self.sizes, each, strict=True) if took <= min(each) * WITHIN)

    def saving(self, size: int) -> float:
        """Seconds saved when one more joins a group of that size, instead of a forward of its own."""
        return max(0.0, self.cost(1) - (self.cost(size + 1) - self.cost(size)))


def measure(run: Callable[[int], object], largest: int, clock: Callable[[], float] = time.perf_counter) -> Curve:
    """Time `run(size)` at 1, 2, 4 … `largest`, after one call to warm up; ends early where a forward takes long."""
    run(1)
    began = clock()
    sizes: list[int] = []
    seconds: list[float] = []
    for size in sorted({*(1 << i for i in range(largest.bit_length())), largest}):
        started, best = clock(), float("inf")
        for _ in range(TRIES):
            before = clock()
            run(size)
            best = min(best, clock() - before)
            if clock() - started > TRIES_S:
                break
        sizes.append(size)
        seconds.append(best)
        if best > LONGEST_S or clock() - began + 2 * best > TOTAL_S:  # the next one takes about twice as long
            break
    return Curve(tuple(sizes), tuple(seconds))


class Pace:
    """Decides whether a group waits for one more. Times are of one monotonic clock, in seconds."""

    def __init__(self, curve: Curve, batch: int, bound: float) -> None:
        """`batch` samples at most, and `bound` the longest wait that anybody is put to."""
        self.curve = curve
        self.batch = min(batch, curve.knee())
        self.bound = bound
        self._never = 2 * min(bound, curve.cost(1))  # a gap that no wait is worth
        self.gap = self._never  # expected time between arrivals; at first nobody is expected
        self._last = float("-inf")
        self._scale = 1.0

    def arrived(self, at: float) -> None:
        """A request came. A night's silence counts no more than a late arrival, so that a crowd is soon seen after it."""
        gap = min(max(0.0, at - self._last), self._never)
        self.gap += RECENT * (gap - self.gap)
        self._last = max(self._last, at)

    def ran(self, size: int, seconds: float) -> None:
        """A group was served. Real ones are cheaper than measured where features are known; there is less to save then."""
        self._scale += RECENT * (min(1.0, seconds / self.curve.cost(size)) - self._scale)

    def patience(self, held: int, closes: float, now: float) -> float:
        """How long to wait for one more beside the `held` samples; 0: the group goes.

        Whoever adds a whole request after each answer cuts none; only the last may carry the group past `batch`.

        Args:
            closes: when the first of those held must go, see `bound`.
        """
        left = closes - now
        if held >= self.batch or left <= 0:
            return 0.0
        saving = self.curve.saving(held) * self._scale
        silence = max(0.0, now - self._last)
        if self.gap >= min(saving, left):
            return 0.0
        wait = min(saving - silence, left)  # a silence as long as the saving: they have stopped coming
        return wait if now + wait > now else 0.0  # nor is one so short that the clock cannot tell it from none
