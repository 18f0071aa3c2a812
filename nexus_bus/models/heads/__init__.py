"""Action modules: each tenant's private head on the shared features. One file each; `catalog.HEADS` says what they take."""

from nexus_bus.models.catalog import check_head
from nexus_bus.models.heads.base import ActionModule, HeadNeeds, HeadSample, PolicyModule
from nexus_bus.models.heads.gr00t import Gr00t
from nexus_bus.models.heads.oft import Oft
from schemas.job import HeadSpec

__all__ = ["ActionModule", "Gr00t", "HeadNeeds", "HeadSample", "Oft", "PolicyModule", "build_head"]

_CLASSES = {"oft": Oft, "gr00t": Gr00t}


def build_head(spec: HeadSpec, feature_size: int, state_size: int, action_size: int, seed: int) -> ActionModule:
    """A fresh head whose weights depend on the seed alone.

    Raises:
        BadJob: no such head or option.
    """
    checked = check_head(spec)
    head = _CLASSES[checked.type](checked, feature_size, state_size, action_size)
    head.initialise(seed)
    return head
