"""The words: how objects are named, how a task is asked for, and plain questions about a picture."""

from collections.abc import Iterator

import numpy as np

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "cyan", "pink", "white")
SHAPES = ("block", "ball", "cylinder", "button")
NOUNS = {
    "block": ("block", "block", "cube", "box"),
    "ball": ("ball", "sphere"),
    "cylinder": ("cylinder", "can"),
    "button": ("button", "puck", "disc"),
}
GENERIC = ("object", "thing")

_PUSH = ("push", "push", "slide", "move", "shove", "nudge")
_SIDES = {
    "left": ("to the left", "to the left", "left", "towards the left"),
    "right": ("to the right", "to the right", "right", "towards the right"),
    "forward": ("forward", "forwards", "away", "away from you", "to the far side"),
    "back": ("back", "backward", "backwards", "towards you", "to the near side"),
}
TASKS: dict[str, tuple[str, ...]] = {
    "touch": (
        "touch {o}", "touch {o}", "touch {o}", "reach {o}", "reach for {o}", "go to {o}", "move to {o}", "tap {o}",
        "move the gripper to {o}", "poke {o}", "touch {o} with the gripper", "hover over {o}", "reach to {o}",
        "move above {o}", "move above {o}",
    ),
    **{act: tuple(f"{verb} {{o}} {side}" for verb in _PUSH for side in sides) for act, sides in _SIDES.items()},
    "lift": ("pick up {o}", "lift {o}", "grasp {o}", "grab {o}", "pick {o} up", "take {o}", "lift {o} up"),
    "place": (
        "put {o} in the white zone", "place {o} on the table", "move {o} to the target", "push {o} to the goal",
        "push {o} into the zone", "put {o} into the bin", "place {o} on the goal", "pick and place {o}",
    ),
    "press": ("press {o}", "press {o} down", "press {o} from the top", "push down on {o}", "press {o} from above"),
    "open": ("open {o}", "pull {o} open"),
    "close": ("close {o}", "push {o} closed"),
    "turn": ("turn {o}", "rotate {o}"),
    "toward": ("push {o} to {p}", "move {o} towards {p}", "put {o} next to {p}", "bring {o} to {p}"),
}  # fmt: skip
# Sentences without an object that the scenes hold: only the action and the gripper are asked for.
BARE: dict[str, tuple[str, ...]] = {
    "open": ("open the drawer", "open the door", "open the window", "open the cabinet", "open the faucet"),
    "close": ("close the drawer", "close the door", "close the window", "close the box", "close the faucet"),
    "press": ("press the button", "press the button from the top", "press the handle", "push the coffee button"),
    "turn": ("turn the dial", "rotate the faucet", "unlock the door"),
    "lift": ("pull the handle", "pull the lever", "pick up the bowl", "unplug the peg"),
    "place": ("insert the peg", "sweep it into the hole", "put the bowl on the plate", "assemble the nut"),
    "touch": ("reach the goal", "reach the target", "move the gripper to the goal position"),
}


def article(name: str, rng: np.random.Generator) -> str:
    """Return `name` with the article in front."""
    return f"{'that' if rng.random() < 0.02 else 'the'} {name}"


def ask(act: str, obj: str, other: str, rng: np.random.Generator) -> str:
    """Return a sentence that asks for `act` on `obj` (and `other`, where the action needs two)."""
    text = TASKS[act][rng.integers(len(TASKS[act]))].format(o=obj, p=other)
    return dress(text, rng)


def bare(rng: np.random.Generator) -> tuple[str, str]:
    """Return (act, sentence) without an object of the scene."""
    act = tuple(BARE)[rng.integers(len(BARE))]
    return act, dress(BARE[act][rng.integers(len(BARE[act]))], rng)


def dress(text: str, rng: np.random.Generator) -> str:
    """Vary what people vary without meaning: a capital, a full stop, a please."""
    roll = rng.random(3)
    if roll[0] < 0.04:
        text = f"please {text}"
    if roll[1] < 0.12:
        text = text[0].upper() + text[1:]
    return f"{text}." if roll[2] < 0.12 else text


def corpus() -> Iterator[str]:
    """Yield the strings that the tokenizer is trained on: every sentence shape with every name."""
    names = [f"the {c} {n}" for c in COLOURS for group in (*NOUNS.values(), GENERIC) for n in group]
    for index, name in enumerate(names):
        other = names[(index * 7 + 3) % len(names)]
        for templates in TASKS.values():
            for text in templates:
                line = text.format(o=name, p=other)
                yield line
        yield from (
            f"where is {name}?", f"where is {name} on the table?", f"is there a {name[4:]}?", "yes", "no",
            f"which object is left of {name}?", f"which object is right of {name}?", "which object is closest to the gripper?",
            "how many objects are there?", "where is the gripper?", "one two three four five", "user", "assistant", "system",
            f"please {text.format(o=name, p=other)}.", f"Touch {name}.", f"Push {name}.", f"Reach {name}.", f"Move {name}.",
            f"Pick up {name}.", f"Slide {name}.", f"Lift {name}.", "what is closest to the gripper?", f"a {name[4:]}",
        )  # fmt: skip
    for texts in BARE.values():
        for _ in range(40):
            yield from texts
