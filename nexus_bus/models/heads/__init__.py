"""Action modules: each tenant's private head on the shared features. One file each; `catalog.HEADS` says what they take."""

import torch

from nexus_bus.models.catalog import check_head, head_class
from nexus_bus.models.heads.base import ActionModule, FeatureShape, HeadNeeds, HeadSample, PolicyModule
from nexus_bus.models.heads.fast import Fast
from nexus_bus.models.heads.gr00t import Gr00t
from nexus_bus.models.heads.oft import Oft
from nexus_bus.models.heads.pi import Pi
from schemas.job import HeadSpec

__all__ = [
    "CLASSES",
    "ActionModule",
    "Fast",
    "FeatureShape",
    "Gr00t",
    "HeadNeeds",
    "HeadSample",
    "Oft",
    "Pi",
    "PolicyModule",
    "build_head",
    "head_type",
]

CLASSES: dict[str, type[ActionModule]] = {"oft": Oft, "gr00t": Gr00t, "pi": Pi, "fast": Fast}


def head_type(name: str) -> type[ActionModule]:
    """The class of a shipped or installed head.

    Raises:
        BadJob: no such head.
    """
    return CLASSES[name] if name in CLASSES else head_class(name)


def build_head(spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int, seed: int | None) -> ActionModule:
    """A fresh head whose weights depend on the seed alone; without a seed a shell, whose weights are still to be put in.

    Raises:
        BadJob: no such head or option, or the backbone has fewer layers than it is to read.
    """
    checked = check_head(spec)
    kind = head_type(checked.type)
    if seed is not None:
        head = kind(checked, shape, state_size, action_size)
        head.initialise(seed)
        return head
    if checked.type not in CLASSES:  # an installed head may compute constants in its constructor: it gets real tensors
        return kind(checked, shape, state_size, action_size)
    with torch.device("meta"):  # drawing weights only to overwrite them is half the time of a load
        return kind(checked, shape, state_size, action_size)
