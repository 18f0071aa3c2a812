"""What every algorithm is: it learns in a private slot, and says what it needs as it goes. See `ALGORITHMS`.

`learn` is a generator. It asks for features (and is sent a FeatureBatch) and for descents (and is sent the gradient's norm);
whoever drives it serves the askings of many tenants together, in one forward and one backward. See group.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nexus_bus.errors import BadMessage, Refused
from nexus_bus.models.grafts import Adapter
from nexus_bus.models.heads import ActionModule
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Slot, state_row
from nexus_bus.pixels import UNIT, pixels
from nexus_bus.tensors import decode_image, from_tensor
from schemas.base import Tensor
from schemas.environment import Observation
from schemas.policy import PolicyContract

BETAS = (0.9, 0.95)  # of AdamW, as the field trains action heads
NAMED, NAME = 8, 40  # cameras in an error, and characters of each: a sender may call them anything

Work = TypeVar("Work")


class Diverged(Refused):
    """A loss or gradient that is not finite. The same work on the same weights would give it again."""


@dataclass(frozen=True)
class LearnResult:
    """What one unit of work did to a slot."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0  # features used
    steps: int = 0  # gradient steps taken


@dataclass(frozen=True, eq=False)
class Features:
    """Asks for features of the work's prompts; the answer is a FeatureBatch on the slot's device."""

    rows: torch.Tensor | None = None  # indices of prompts; None: all
    suffix: Sequence[torch.Tensor] | None = None  # per row, what the head appends to the prompt
    grad: bool = True  # whether gradients are to reach the slot's adapter


@dataclass(frozen=True, eq=False)
class Descend:
    """Asks for one gradient step down a loss; the answer is the gradient's norm before clipping.

    Every parameter group is clipped to a norm of its own: they share no parameters, so a large error of the value does not
    shrink the step of the policy.
    """

    loss: torch.Tensor
    grad_clip: float
    rates: Mapping[str, float]  # learning rate by the group's name
    last: bool = False  # nothing is asked for after it: the step is taken once `learn` has returned


Learning: TypeAlias = Generator[Features | Descend, Any, LearnResult]


class Algorithm(ABC, Generic[Work]):
    """Turns work into gradient steps. It keeps no state of its own: all of it is in the slot."""

    def __init__(self, slot_seed: int) -> None:
        self.slot_seed = slot_seed

    @abstractmethod
    def optimizer(self, module: ActionModule) -> torch.optim.Optimizer:
        """A fresh optimizer over the module's trained parameters."""

    @abstractmethod
    def prompts(self, work: Work) -> list[Prompt]:
        """What the backbone must encode, in the order that `learn` reads."""

    @abstractmethod
    def learn(self, slot: Slot, work: Work) -> Learning:
        """Learn one unit of work. What it raises ends this work alone; the slot is then rolled back."""

    def make_slot(
        self,
        tenant: str,
        job: str,
        contract: PolicyContract,
        module: ActionModule,
        adapter: Adapter | None = None,
    ) -> Slot:
        """A slot at its beginning."""
        optimizer = self.optimizer(module)
        if adapter is not None:
            optimizer.add_param_group({"params": list(adapter.parameters()), "name": "adapter", "weight_decay": 0.0})
        return Slot(
            tenant=tenant,
            job=job,
            contract=contract,
            module=module.train(),
            adapter=adapter,
            optimizer=optimizer,
            generator=torch.Generator().manual_seed(self.slot_seed),
        )


def observation_prompt(observation: Observation, contract: PolicyContract) -> Prompt:
    """Images in the contract's camera order, and the instruction.

    Raises:
        BadMessage: a camera is missing or shows another size; not one picture is unfolded then.
    """
    for camera, shape in contract.observation.cameras.items():
        if (image := observation.images.get(camera)) is None:
            there = ", ".join(name[:NAME] for name in list(observation.images)[:NAMED]) or "none"
            raise BadMessage(f"observation.images: no camera {camera[:NAME]!r}; there is {there}")
        if image.shape != shape:
            found, said = list(image.shape), list(shape)
            raise BadMessage(f"observation.images.{camera[:NAME]}: shape {found}, the contract says {said}")
    images = [decode_image(observation.images[camera]) for camera in contract.observation.cameras]
    return Prompt(images, observation.instruction)


def observation_prompts(observations: Sequence[Observation], contract: PolicyContract) -> list[Prompt]:
    """Of one unit of work, all of whose pictures are held at once.

    Raises:
        BadMessage: as `observation_prompt`; or they would unfold to more than a trainer has room for.
    """
    if (unfolded := len(observations) * pixels(contract.observation.cameras)) > UNIT:
        raise BadMessage(
            f"observation.images: {len(observations)} observations at once unfold to {unfolded} pixels; at most {UNIT}: take "
            "fewer episodes an update or samples a batch, smaller pictures, or shorter episodes"
        )
    return [observation_prompt(observation, contract) for observation in observations]


def observation_states(observations: Iterable[Observation], slot: Slot) -> torch.Tensor:
    """Normalised states [B, S] on the slot's device. Raises BadMessage for a state that does not fit the contract."""
    size = slot.contract.observation.state_size
    rows = np.stack([state_row(slot.state_norm, from_tensor(o.state), size) for o in observations])
    return torch.from_numpy(rows).to(slot.device)


def numbers(tensor: Tensor, shape: tuple[int, ...], field_name: str) -> NDArray[np.float32]:
    """A finite float array of this shape. Raises BadMessage naming the field."""
    array = from_tensor(tensor)
    if array.shape != shape:
        raise BadMessage(f"{field_name}: shape {list(array.shape)}, expected {list(shape)}")
    array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise BadMessage(f"{field_name}: holds numbers that are not finite")
    return array
