"""What every algorithm is: it names the prompts it needs features of, then learns in a private slot. See `ALGORITHMS`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nexus_bus.errors import BadMessage, Refused
from nexus_bus.models.features import VLAFeature
from nexus_bus.models.heads import ActionModule
from nexus_bus.models.prompt import Prompt
from nexus_bus.models.slots import Slot, State, state_row
from nexus_bus.tensors import decode_image, from_tensor
from schemas.base import Tensor
from schemas.environment import Observation
from schemas.policy import PolicyContract

BETAS = (0.9, 0.95)  # of AdamW, as the field trains action heads

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
    def learn(self, slot: Slot, work: Work, features: list[VLAFeature]) -> LearnResult:
        """Learn one unit of work.

        Raises:
            Diverged: a loss or gradient is not finite; the slot is then to be rolled back.
        """

    def make_slot(
        self, tenant: str, job: str, contract: PolicyContract, module: ActionModule, state: State | None = None
    ) -> Slot:
        """A slot at its beginning, or at a committed state."""
        slot = Slot(
            tenant=tenant,
            job=job,
            contract=contract,
            module=module.train(),
            optimizer=self.optimizer(module),
            generator=torch.Generator().manual_seed(self.slot_seed),
        )
        if state is not None:
            slot.restore(state)
        return slot


def observation_prompt(observation: Observation, contract: PolicyContract) -> Prompt:
    """Images in the contract's camera order, and the instruction.

    Raises:
        BadMessage: a camera is missing or shows another size.
    """
    images: list[NDArray[np.uint8]] = []
    for camera, shape in contract.observation.cameras.items():
        if (image := observation.images.get(camera)) is None:
            raise BadMessage(f"observation.images: no camera {camera!r}; there is {', '.join(observation.images) or 'none'}")
        if image.shape != shape:
            raise BadMessage(f"observation.images.{camera}: shape {list(image.shape)}, the contract says {list(shape)}")
        images.append(decode_image(image))
    return Prompt(images, observation.instruction)


def observation_states(observations: Iterable[Observation], slot: Slot) -> torch.Tensor:
    """Normalised states [B, S]. Raises BadMessage for a state that does not fit the contract."""
    size = slot.contract.observation.state_size
    return torch.from_numpy(np.stack([state_row(slot.state_norm, from_tensor(o.state), size) for o in observations]))


def numbers(tensor: Tensor, shape: tuple[int, ...], field_name: str) -> NDArray[np.float32]:
    """A finite float array of this shape. Raises BadMessage naming the field."""
    array = from_tensor(tensor)
    if array.shape != shape:
        raise BadMessage(f"{field_name}: shape {list(array.shape)}, expected {list(shape)}")
    array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise BadMessage(f"{field_name}: holds numbers that are not finite")
    return array


def gradient_step(slot: Slot, loss: torch.Tensor, grad_clip: float, rates: Mapping[str, float]) -> float:
    """Backward, clip every parameter group to a norm of its own, step with the group's learning rate by its name.

    The groups share no parameters, so a large error of the value does not shrink the step of the policy.

    Returns:
        The gradient's norm before clipping, all groups together.

    Raises:
        Diverged: loss or gradient not finite; no weight has been touched.
    """
    slot.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    groups = slot.optimizer.param_groups
    norm = math.hypot(*(float(torch.nn.utils.clip_grad_norm_(group["params"], grad_clip)) for group in groups))
    if not math.isfinite(norm) or not torch.isfinite(loss):
        raise Diverged(
            f"step {slot.step}: loss {float(loss.detach()):g}, gradient norm {norm:g}; "
            "lower the learning rate or check the data"
        )
    for group in groups:
        group["lr"] = rates[group["name"]]
    slot.optimizer.step()
    slot.optimizer.zero_grad(set_to_none=True)
    slot.step += 1
    return norm
