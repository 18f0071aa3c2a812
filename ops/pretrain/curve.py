"""Draw `curve.png` from `log.jsonl`: `python -m ops.pretrain.curve`."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent


def draw(log: Path, picture: Path) -> None:
    """Plot loss and decoded error over steps."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line["step"] for line in lines]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, label in (("query", "query tokens (KL)"), ("answer", "plain questions (CE)"), ("helper", "picture helper")):
        left.plot(steps, [line[name] for line in lines], label=label, linewidth=1)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend(frameon=False, fontsize=8)
    right.plot(steps, [line["target_cm"] for line in lines], linewidth=1)
    right.set(xlabel="step", ylabel="named object, mean error [cm]", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(HERE / "log.jsonl", HERE / "curve.png")
