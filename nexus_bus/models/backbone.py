"""The frozen backbone: one vision-language model a process, turning looks of many tenants into features in one forward.

Exact profile: float32, and every product of a sample is the same to the bit whoever shares its forward, if the matrix
library is told so (`MKL_CBWR`, see process.py). `Backbone.load` tries it out; where it does not hold, samples go through
one at a time, so that the promise stands and only speed is lost.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from nexus_bus.errors import BadJob
from nexus_bus.models.bases import BackboneInfo, describe_backbone
from nexus_bus.models.families import Family, Hidden, Profile, Row, load_family
from nexus_bus.models.features import Look, VLAFeature, feature_id
from nexus_bus.models.grafts import Adapter
from nexus_bus.models.heads.base import FeatureShape
from nexus_bus.models.prompt import Prompt
from nexus_bus.pace import Curve, measure
from schemas.job import LoraSpec

TILE = {"exact": 16, "fast": 64}  # samples per forward until `tune` has measured; of one adapter, always


class Backbone:
    """A loaded backbone. Safe to call from one thread at a time."""

    def __init__(self, family: Family) -> None:
        """Use `Backbone.load`."""
        self.family = family
        self.info: BackboneInfo = family.info
        self.profile = family.profile
        self.device = family.device
        self.shape = FeatureShape(hidden=self.info.hidden, layers=self.info.layers)
        self.tile = self.block = TILE[self.profile]
        if self.profile == "exact" and not self._invariant():
            self.tile = 1

    @classmethod
    def load(cls, base: str, device: str = "auto", profile: Profile = "exact") -> "Backbone":
        """Load by the same path whether shipped, a directory or from the hub.

        Raises:
            NotFound: no such base.
            BadJob: not of a family we can read, or its weights are incomplete.
        """
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        transformers_logging.disable_progress_bar()
        return cls(load_family(describe_backbone(base), place, profile))

    def tune(self, largest: int) -> Curve:
        """Measure what a forward costs by its size, and from now on cut groups at the knee; a second, or a few.

        The blocks of an adapter are left as they are: where its gradient is cut must be the same in every run.
        """
        size = self.info.image_size
        look = Look(Prompt([np.zeros((size, size, 3), np.uint8)], "put the red block on the green one"))
        alone, self.tile = self.tile, max(self.tile, largest)
        try:
            curve = measure(lambda samples: self.encode([look] * samples), largest)
        finally:
            self.tile = alone
        self.tile = curve.knee() if alone > 1 else 1
        return curve

    @property
    def fingerprint(self) -> str:
        """Hash of configuration and weights."""
        return self.info.fingerprint

    def adapter(self, spec: LoraSpec, seed: int = 0) -> Adapter:
        """A fresh adapter for this backbone; it changes nothing until it is trained.

        Raises:
            BadJob: this family takes none, or a target that no layer is called.
        """
        made = Adapter(spec, self.places(spec))
        made.initialise(seed)
        return made.to(self.device)

    def places(self, spec: LoraSpec) -> dict[str, tuple[int, int]]:
        """Layers that an adapter of this specification adapts, with their (in, out) sizes. Raises as `adapter`."""
        grafts = getattr(self.family, "grafts", None)
        if grafts is None:
            raise BadJob(f"tier: {self.info.name} takes no adapters; use 'frozen'")
        return grafts.places(spec)

    def ids(self, looks: Sequence[Look]) -> list[str]:
        """Content names of the features that `encode` would give, without a forward.

        Raises:
            BadMessage: an image or an instruction that cannot be shown to the backbone.
        """
        return [self._id(look) for look in looks]

    def encode(self, looks: Sequence[Look]) -> list[VLAFeature]:
        """A feature for every look, in as few forwards as there are tiles.

        Gradients flow to adapters and suffixes if grad mode is on, never to the backbone. Features without either lie on the
        CPU, where they can be kept; the others stay on the device.

        Raises:
            BadMessage: an image or an instruction that cannot be shown to the backbone.
            BadJob: a suffix, where this family takes none.
        """
        if not self.family.suffixes and any(look.suffix is not None for look in looks):
            raise BadJob(f"head.type: it appends tokens to the prompt; {self.info.name} takes none")
        made: dict[int, VLAFeature] = {}
        starts: dict[int, list[int]] = {}
        for i, look in enumerate(looks):
            starts.setdefault(look.prefix[0] if look.prefix is not None else 0, []).append(i)
        for start, places in starts.items():
            for rows in self._tiles([looks[i] for i in places]):
                members = [looks[places[row]] for row in rows]
                for row, feature in zip(rows, self._forward(members, start), strict=True):
                    made[places[row]] = feature
        return [made[i] for i in range(len(looks))]

    def prefix_of(self, look: Look) -> Look | None:
        """What of an adapted look is the same for everybody: its hidden states below the first adapted layer, as a look of its
        own that can be kept; None where there is no such layer."""
        least, layer = self.family.resumes, look.adapter.first if look.adapter is not None else 0
        if least is None or layer < max(least, 1) or look.suffix is not None or look.past is not None:
            return None
        return Look(look.prompt, (layer,), scope=look.scope) if all(n == -1 or n >= layer for n in look.layers) else None

    def _tiles(self, looks: Sequence[Look]) -> Iterator[list[int]]:
        """Which looks go together. Those of one adapter stay together, cut only at multiples of a block of their own: how
        its gradient is summed up must not depend on who else is there."""
        blocks: dict[int, list[int]] = {}
        for i, look in enumerate(looks):
            blocks.setdefault(
                id(look.adapter) if look.adapter is not None else -1 - i if look.suffix is not None else 0, []
            ).append(i)
        alone = blocks.pop(0, [])
        parts = [[i] for i in alone]
        for block in blocks.values():
            parts += [block[start : start + self.block] for start in range(0, len(block), self.block)]
        tile: list[int] = []
        for part in parts:
            if tile and len(tile) + len(part) > self.tile:
                yield tile
                tile = []
            tile = tile + part
        if tile:
            yield tile

    def _forward(self, looks: Sequence[Look], start: int) -> list[VLAFeature]:
        texts = [self.family.text(look.prompt.instruction, len(look.prompt.images)) for look in looks]
        rows = [
            Row(
                text,
                look.prompt.images,
                look.adapter,
                look.suffix,
                _pictures(look),
                look.prefix[1] if look.prefix is not None else None,
                look.past,
            )
            for text, look in zip(texts, looks, strict=True)
        ]
        layers = sorted({layer for look in looks for layer in look.layers})
        going_on = [look.past is not None and not look.past.empty for look in looks]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not all(look.frozen for look in looks)):
            hidden = self.family.forward(rows, layers, start)
        return [
            VLAFeature(
                feature_id=self._id(look),
                hidden=_chosen(states, look),
                token_type=row.text.token_type[: 0 if went_on else None],
                query_span=(0, 0) if went_on else row.text.query_span,
            )
            for look, row, states, went_on in zip(looks, rows, hidden, going_on, strict=True)
        ]

    def _id(self, look: Look) -> str:
        text = self.family.text(look.prompt.instruction, len(look.prompt.images))
        return feature_id(self.fingerprint, self.profile, look.layers, text.digest, look.prompt.pixels)

    def _invariant(self) -> bool:
        """Whether features come out the same to the bit, alone and among ragged neighbours."""
        noise = np.random.default_rng(0)
        size = self.info.image_size
        probes = [
            Look(Prompt([noise.integers(0, 256, (size, size, 3), dtype=np.uint8)], "go " * (1 + 5 * (i % 3)))) for i in range(5)
        ]
        together = self.encode(probes)
        return all(
            torch.equal(self.encode([probe])[0].hidden, both.hidden) for probe, both in zip(probes, together, strict=True)
        )


def _pictures(look: Look) -> tuple[str, bytes] | None:
    """The name of its pictures, where the feature itself will not be kept: adapters change it, but not the vision tower."""
    return (look.scope, look.prompt.pixels) if look.scope and not look.frozen else None


def _chosen(states: Hidden, look: Look) -> torch.Tensor:
    """The layers a look wants, side by side; of a frozen one a copy of its own, since the group's memory is shared."""
    parts = [states[layer] for layer in look.layers]
    hidden = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return hidden.detach().to("cpu", copy=True) if look.frozen else hidden
