"""What a tenant's own worker offers, as an entry of the catalogue. Its numbers decide sizes elsewhere, so they are looked at.

A job names such an environment by `own`, or `own-NAME` where the worker was started with a name.
"""

import math
from collections.abc import Iterable

from nexus_bus.envs.entry import END, EnvironmentEntry, Option, Options, steps
from nexus_bus.errors import BadMessage
from schemas.environment import OwnOffer, OwnTask
from schemas.policy import ActionSpec, ObservationSpec

ID = "own"
LONGEST = 100_000  # steps of an episode
NUMBERS = 256  # of an action
STATE = 1024  # numbers of a state
CAMERAS, SIDE = 8, 2048  # of an observation, and pixels of one
VARIES = "a tenant's own environment, a robot perhaps: whether it repeats itself was not checked"
SUCCESS = "info['is_success'] or info['success']"
START = "nexus worker environment --env MODULE:CALLABLE --creds FILE"


def is_own(environment: str) -> bool:
    """Whether an id means an environment of the tenant's own."""
    return environment == ID or environment.startswith(f"{ID}-")


def options(longest: int) -> dict[str, Option]:
    """What a job may say of one whose longest task is cut off after so many steps."""
    return {
        "instruction": Option("", "the sentence given to the policy; empty: the environment's own"),
        "max_steps": steps(longest, LONGEST),
        "end_on_success": END,
    }


def entry(offer: OwnOffer) -> EnvironmentEntry:
    """As one of the catalogue."""

    def spaces(task: str, _: Options) -> tuple[ActionSpec, ObservationSpec]:
        return offer.tasks[task].action, offer.tasks[task].observation

    def sentences(task: str, chosen: Options) -> tuple[str, ...]:
        return (str(chosen["instruction"]) or offer.tasks[task].instruction,)

    return EnvironmentEntry(
        summary="of a tenant's own",
        tasks={name: (task.instruction,) for name, task in offer.tasks.items()},
        options=options(max(task.max_steps for task in offer.tasks.values())),
        adapter="",
        packages=(),
        spaces=spaces,
        sentences=sentences,
        expert=False,
        success=offer.success or SUCCESS,
        varies=VARIES,
        simulator=offer.simulator,
    )


def entries(offers: Iterable[OwnOffer]) -> dict[str, EnvironmentEntry]:
    """By id. Of two workers with one id, what the later one in the alphabet says counts: they serve the same."""
    return {offer.environment: entry(offer) for offer in sorted(offers, key=lambda one: one.worker)}


def check(offer: OwnOffer) -> None:
    """Refuse an offer that nothing could be trained for. Raises BadMessage, which begins with the field."""
    for name, task in offer.tasks.items():
        if wrong := _wrong(task):
            raise BadMessage(f"tasks.{name}.{wrong}")


def _wrong(task: OwnTask) -> str:
    action, seen = task.action, task.observation
    low, high = action.low, action.high
    if action.size > NUMBERS or len(low) != action.size or len(high) != action.size:
        return f"action: {action.size} numbers with {len(low)} and {len(high)} bounds; at most {NUMBERS}, each with both"
    if not all(math.isfinite(one) and math.isfinite(other) and one < other for one, other in zip(low, high, strict=True)):
        return f"action: bounds {low} to {high}; a policy needs finite ones, the lower below the upper"
    if seen.state_size > STATE:
        return f"observation.state_size: {seen.state_size}; at most {STATE}"
    if not 1 <= len(seen.cameras) <= CAMERAS:
        return f"observation.cameras: {len(seen.cameras)}; from 1 to {CAMERAS}"
    for camera, (height, width, _) in seen.cameras.items():
        if max(height, width) > SIDE or len(camera) > 100:
            return f"observation.cameras: {camera[:100]!r} of {height} x {width}; at most {SIDE} pixels a side"
    return ""
