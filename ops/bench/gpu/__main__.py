"""`python -m ops.bench.gpu`: the model benches on CUDA, after both profiles were held against the CPU's exact features.

Writes runs/bench/models-cuda.json and .png, profile `fast`. No GPU has run it yet.
"""

import argparse
import sys
from pathlib import Path

from nexus_bus.models import process

process.settings(1)  # before torch

import torch  # noqa: E402

from nexus_bus.models.backbone import Backbone  # noqa: E402
from ops.bench.models import PARTS, run  # noqa: E402
from ops.bench.models_base import NANO, looks  # noqa: E402


def compare() -> bool:
    """Print, per profile: tile, largest difference to the CPU, whether neighbours change a feature; False if exact is not."""
    frames = looks(16, 8)
    reference = Backbone.load(NANO, device="cpu").encode(frames)
    exact = True
    for profile in ("exact", "fast"):
        backbone = Backbone.load(NANO, device="cuda", profile=profile)
        together, alone = backbone.encode(frames), [backbone.encode([frame])[0] for frame in frames]
        gap = max(float((a.hidden.float() - b.hidden).abs().max()) for a, b in zip(together, reference, strict=True))
        own = max(float((a.hidden.float() - b.hidden.float()).abs().max()) for a, b in zip(together, alone, strict=True))
        print(f"{profile:<6} tile {backbone.tile:>3}   to the CPU {gap:.2e}   grouped to alone {own:.2e}")
        exact = exact and (profile != "exact" or own == 0.0)
    return exact


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/models-cuda.json"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=list(PARTS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    if not compare():
        print("the exact profile is not exact here")
        return 1
    run(device="cuda", profile="fast", quick=arguments.quick, only=arguments.only, out=arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
