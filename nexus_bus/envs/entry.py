"""What the catalogue says of one environment, and the pieces that entries are made of. Loads no simulator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from nexus_bus.errors import BadJob
from schemas.job import Scalar
from schemas.policy import ActionSpec, ObservationSpec

Options = dict[str, Scalar]


@dataclass(frozen=True)
class Option:
    """One adapter option: its default fixes the type; `choices` or `bounds` (inclusive) say what is allowed."""

    default: Scalar
    meaning: str
    choices: tuple[Scalar, ...] = ()
    bounds: tuple[float, float] | None = None

    def check(self, name: str, value: Scalar) -> Scalar:
        """The value in this option's type. Raises BadJob naming the option."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise BadJob(f"environment.options.{name}: expected {kind.__name__}, got {type(value).__name__} {value!r}")
        if self.choices and value not in self.choices:
            raise BadJob(f"environment.options.{name}: {value!r} is not one of {', '.join(map(repr, self.choices))}")
        if self.bounds and not self.bounds[0] <= cast(float, value) <= self.bounds[1]:
            raise BadJob(f"environment.options.{name}: {value} is outside [{self.bounds[0]:g}, {self.bounds[1]:g}]")
        return value


@dataclass(frozen=True)
class EnvironmentEntry:
    """One environment. `adapter` is `module:Class`, called with (spec, options) when a session opens."""

    summary: str
    tasks: Mapping[str, tuple[str, ...]]  # task -> the sentences it may ask
    options: Mapping[str, Option]
    adapter: str
    packages: tuple[str, ...]  # distributions whose versions decide the numbers
    spaces: Callable[[str, Options], tuple[ActionSpec, ObservationSpec]]
    sentences: Callable[[str, Options], tuple[str, ...]] | None = None  # where options narrow them
    extra: str = ""  # pip extra that installs them beside us
    venv: str = ""  # the virtual environment of its own that has them (recipes.py)
    expert: bool = True
    gl: bool = True  # needs OpenGL
    fps: int = 10  # nominal control rate, for datasets
    success: str = "the task's own check, at any step"  # the rule that a score rests on
    simulator: str = ""  # name and versions, where the packages are somebody else's
    revision: int = 1  # raised when the same seed no longer gives the same episode
    starts: int = 0  # initial states that a trial picks from by its number; 0: each trial has its own, from its seed
    varies: str = ""  # why the same seed may give another episode all the same; empty: it does not


SIZE = Option(96, "side of the square picture in pixels", bounds=(32, 512))
END = Option(default=True, meaning="end the episode at the first success")


def steps(default: int, most: int) -> Option:
    """The option `max_steps`."""
    return Option(default, "steps until the episode is cut off", bounds=(1, most))


def observation(options: Options, state_size: int, *cameras: str, height: int | None = None) -> ObservationSpec:
    """Pictures of `image_size`, square unless `height` says otherwise."""
    width = int(options["image_size"])
    shapes = {name: (height or width, width, 3) for name in cameras}
    return ObservationSpec(cameras=shapes, state_size=state_size)  # type: ignore[arg-type] - a Literal 3


def box(size: int) -> ActionSpec:
    """Numbers in [-1, 1]."""
    return ActionSpec(size=size, low=[-1.0] * size, high=[1.0] * size)
