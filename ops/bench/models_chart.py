"""The model benches as a picture."""

import re
from pathlib import Path
from typing import Any

Numbers = dict[str, float]


def draw(numbers: Numbers, told: dict[str, Any], path: Path) -> bool:
    """Six panels; False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 8.5))
    panels = (
        (_found(numbers, r"group_forward_x_(\d+x\d+)(.*)"), "grouped forward, × (tenants × samples)", 1.0),
        (_found(numbers, r"group_step_x_8x1_(oft|gr00t|pi|fast|mixed)(.*)"), "whole step of 8 tenants, × by head", 1.0),
        (_found(numbers, r"batch_(\d+)_ms(.*)"), "forward, ms a sample by batch", None),
        (
            _found(numbers, r"(cache_second_pass|cache_second_pass_disk|lora_group|packing)_x(?:_8x1)?(_24m|_tiny|)"),
            "others, ×",
            1.0,
        ),
        (_found(numbers, r"(publish_to_served|longest_stall)_ms_(\d+mb)"), "publishing, ms", None),
        (_found(numbers, r"((?:policy_)?slot)(_mb|_tensors_mb)"), "a tenant's slot, MB", None),
    )
    for axis, (series, title, line) in zip(axes.flat, panels, strict=True):
        _bars(axis, series, title, line)
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    figure.suptitle(
        f"{told['machine']['cpu']}, {told['machine']['cores']} cores, {told['how']['device']}; {versions}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _found(numbers: Numbers, pattern: str) -> dict[str, Numbers]:
    """Series name → label → value, of the keys that match (label, series)."""
    series: dict[str, Numbers] = {}
    for key, value in numbers.items():
        if (match := re.fullmatch(pattern, key)) is not None:
            series.setdefault(match[2].strip("_") or "nexus-nano", {})[match[1]] = value
    return series


def _bars(axis: Any, series: dict[str, Numbers], title: str, line: float | None) -> None:
    labels = list(dict.fromkeys(label for values in series.values() for label in values))
    width = 0.8 / max(1, len(series))
    for i, (name, values) in enumerate(series.items()):
        places = [labels.index(label) + i * width for label in values]
        drawn = axis.bar(places, list(values.values()), width, label=name)
        axis.bar_label(drawn, fmt="%.3g", fontsize=7)
    if line is not None:
        axis.axhline(line, color="grey", linewidth=0.8)
    largest = max((value for values in series.values() for value in values.values()), default=1.0)
    if largest > 30 * min((value for values in series.values() for value in values.values() if value > 0), default=1.0):
        axis.set_yscale("log")
    axis.set_title(title, fontsize=10)
    places = [place + width * (len(series) - 1) / 2 for place in range(len(labels))]
    axis.set_xticks(places, [label.replace("_", "\n") for label in labels], fontsize=8)
    if series:
        axis.legend(fontsize=8)
