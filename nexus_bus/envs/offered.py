"""What a tenant's own worker offers, as an entry of the catalogue. Its numbers decide sizes elsewhere, so they are looked at.

A job names such an environment by `own`, or `own-NAME` where the worker was started with a name.
"""

import math
import struct
from collections.abc import Iterable, Iterator

from nexus_bus.envs.entry import END, EnvironmentEntry, Option, Options, steps
from nexus_bus.errors import BadMessage
from nexus_bus.pixels import pixels
from schemas.base import Image
from schemas.environment import Observation, OwnOffer, OwnTask, SessionCall, SessionReply
from schemas.policy import ActionSpec, ObservationSpec

ID = "own"
LONGEST = 100_000  # steps of an episode
NUMBERS = 256  # of an action
FARTHEST = 1e9  # from 0 that a bound or a reward lies: its square is a float32
STATE = 1024  # numbers of a state
CAMERAS, SIDE = 8, 2048  # of an observation, and pixels of one
PIXELS = 4 << 20  # of all cameras: a forward unfolds those of its whole group
SENTENCE = 400  # characters of an instruction
SHOWN = 8  # tasks in an error
CALL_S = 3600.0  # that a simulator may say it worked on one call
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
    for field, text in (("simulator", offer.simulator), ("success", offer.success)):
        if not text.isprintable():
            raise BadMessage(f"{field}: {text!r}; only what can be printed, in one line")
    for name, task in offer.tasks.items():
        if not name.isprintable():
            raise BadMessage(f"tasks: {name!r}; a name is made of what can be printed")
        if wrong := next(_wrong(task), ""):
            raise BadMessage(f"tasks.{name}.{wrong}")


def _wrong(task: OwnTask) -> Iterator[str]:
    action, seen = task.action, task.observation
    low, high = action.low, action.high
    if action.size > NUMBERS or len(low) != action.size or len(high) != action.size:
        yield f"action: {action.size} numbers with {len(low)} and {len(high)} bounds; at most {NUMBERS}, each with both"
    if not all(-FARTHEST <= one < other <= FARTHEST for one, other in zip(low, high, strict=True)):
        yield f"action: bounds {low} to {high}; a policy needs finite ones, the lower below the upper, within {FARTHEST:g}"
    if seen.state_size > STATE:
        yield f"observation.state_size: {seen.state_size}; at most {STATE}"
    if not 1 <= len(seen.cameras) <= CAMERAS:
        yield f"observation.cameras: {len(seen.cameras)}; from 1 to {CAMERAS}"
    for camera, (height, width, _) in seen.cameras.items():
        if max(height, width) > SIDE or len(camera) > 100 or not camera.isprintable():
            yield f"observation.cameras: {camera[:100]!r} of {height} x {width}; at most {SIDE} pixels a side"
    if (shown := pixels(seen.cameras)) > PIXELS:
        yield f"observation.cameras: {shown} pixels in all; at most {PIXELS}"


def unlike(offer: OwnOffer, other: OwnOffer) -> str:
    """In what two workers of one environment differ, so that what fits one does not fit the other; empty if in nothing."""
    if offer.tasks.keys() != other.tasks.keys():
        return f"tasks: {sorted(offer.tasks)[:SHOWN]} here, {sorted(other.tasks)[:SHOWN]} there"
    for name, task in offer.tasks.items():
        for field in ("action", "observation", "max_steps"):
            here, there = getattr(task, field), getattr(other.tasks[name], field)
            if here != there:
                return f"tasks.{name}.{field}: {str(here)[:SENTENCE]} here, {str(there)[:SENTENCE]} there"
    return ""


def amiss(reply: SessionReply, call: SessionCall, seen: ObservationSpec) -> str:
    """What is wrong with an answer of a tenant's worker, beginning with the field; empty if nothing is.

    It goes on to rollout, inference and training, which others share: no sizes but those agreed upon, and finite numbers.

    Args:
        call: what was asked.
        seen: what the policy takes.
    """
    return next(_amiss(reply, call, seen), "")


def _amiss(reply: SessionReply, call: SessionCall, seen: ObservationSpec) -> Iterator[str]:
    step = call.op == "step"
    sent = call.actions.shape[0] if step and call.actions is not None and call.actions.shape else 0
    done, ended = len(reply.rewards), reply.terminated or reply.truncated
    if done > sent or len(reply.successes) != done:
        yield f"rewards: {done}, and {len(reply.successes)} successes, for {sent} actions; expected as many, one for each done"
    if not all(-FARTHEST <= one <= FARTHEST for one in reply.rewards):
        yield f"rewards: {reply.rewards[:8]}; expected finite ones, within {FARTHEST:g}"
    if not 0 <= reply.device_s <= CALL_S:
        yield f"device_s: {reply.device_s}; expected from 0 to {CALL_S:g}"
    if ended != (step and reply.end != "running"):
        yield f"end: {reply.end} after a {call.op}, terminated {reply.terminated}, truncated {reply.truncated}"
    if reply.image is not None and (wrong := _unlike(reply.image)):
        yield f"image: {wrong}"
    if reply.observation is not None:
        yield from _unexpected(reply.observation, seen)
    elif call.op in ("reset", "step", "restore"):
        yield "observation: missing"


def _unexpected(found: Observation, seen: ObservationSpec) -> Iterator[str]:
    if found.images.keys() != seen.cameras.keys():
        yield f"observation.images: {sorted(found.images)[:CAMERAS]}; expected {sorted(seen.cameras)}"
    for camera, image in found.images.items():
        if wrong := _unlike(image, seen.cameras[camera]):
            yield f"observation.images.{camera}: {wrong}"
    if len(found.instruction) > SENTENCE:
        yield f"observation.instruction: {len(found.instruction)} characters; at most {SENTENCE}"
    state, size = found.state, seen.state_size
    if state.dtype != "float32" or state.shape != (size,) or len(state.data) != 4 * size:
        yield f"observation.state: {state.dtype}{list(state.shape)} in {len(state.data)} bytes; expected float32[{size}]"
    elif not all(map(math.isfinite, struct.unpack(f"<{size}f", state.data))):
        yield "observation.state: a number that is not finite"


def _unlike(image: Image, shape: tuple[int, int, int] | None = None) -> str:
    """Whether it really is what its header says, whoever unfolds it finds out before a pixel is unfolded."""
    height, width, channels = image.shape
    if image.shape != (shape or image.shape) or channels != 3 or not 0 < height * width <= PIXELS:
        return f"shape {list(image.shape)}; expected {list(shape) if shape else 'a colour picture'}"
    if image.encoding == "raw" and len(image.data) != height * width * 3:
        return f"{len(image.data)} bytes; raw, it takes {height * width * 3}"
    return ""
