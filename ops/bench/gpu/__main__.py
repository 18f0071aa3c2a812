"""`python -m ops.bench.gpu`: the backbone on CUDA, both profiles, against the CPU's exact features. No GPU has run it yet."""

import sys

from nexus_bus.models import process

process.settings(1)  # before torch

import torch  # noqa: E402

from nexus_bus.models.backbone import Backbone  # noqa: E402
from ops.bench.prompts import noise_prompts  # noqa: E402


def main() -> int:
    """Print, per profile: tile, largest difference to the CPU, whether neighbours change a feature."""
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    frames = noise_prompts(16)
    reference = Backbone.load("nexus-nano", device="cpu").encode(frames)
    for profile in ("exact", "fast"):
        backbone = Backbone.load("nexus-nano", device="cuda", profile=profile)
        together, alone = backbone.encode(frames), [backbone.encode([frame])[0] for frame in frames]
        gap = max(float((a.hidden.float() - b.hidden).abs().max()) for a, b in zip(together, reference, strict=True))
        own = max(float((a.hidden.float() - b.hidden.float()).abs().max()) for a, b in zip(together, alone, strict=True))
        print(f"{profile:<6} tile {backbone.tile:>3}   to the CPU {gap:.2e}   grouped to alone {own:.2e}")
        if profile == "exact" and own != 0.0:
            print("the exact profile is not exact here")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
