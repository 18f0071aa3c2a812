"""Kinds of backbones, one file each; a checkpoint's `model_type` (or the `kind` in its nexus.json) names its family here."""

import torch

from nexus_bus.errors import BadJob
from nexus_bus.models.bases import PAIR, BackboneInfo, require_weights
from nexus_bus.models.families.base import Family, Hidden, Loader, Profile, Row
from nexus_bus.models.families.padded import MANNERS, Padded
from nexus_bus.models.families.pair import Pair
from nexus_bus.models.families.qwen import Qwen

__all__ = ["FAMILIES", "Family", "Hidden", "Profile", "Row", "load_family"]

FAMILIES: dict[str, Loader] = {
    "qwen3_vl": Qwen,
    "qwen2_5_vl": Qwen,
    "qwen2_vl": Qwen,
    **dict.fromkeys(MANNERS, Padded),
    PAIR: Pair,
}


def load_family(info: BackboneInfo, device: torch.device, profile: Profile) -> Family:
    """Load a backbone by its family.

    Raises:
        BadJob: no family of ours reads it, or its weights are incomplete.
    """
    if info.model_type not in FAMILIES:
        raise BadJob(f"base: {info.name!r} is a {info.model_type!r}; served are {', '.join(FAMILIES)}")
    require_weights(info)
    return FAMILIES[info.model_type](info, device, profile)
