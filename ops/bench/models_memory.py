"""Memory of tenant slots, and of backbones that processes share. Each in processes of its own, so that nothing else counts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from nexus_bus.models import process

MB = 1 << 20
SLOTS = 32


def slots(bench: Any) -> dict[str, float]:
    """Memory per extra tenant slot, 1 → 32: a trainer's, with optimizer, and an inference worker's."""
    return _child("slots", bench.device, bench.profile, str(4 if bench.quick else SLOTS)).end()


def sharing(bench: Any) -> dict[str, float]:
    """Proportional memory of a process's backbone, alone and beside a second one: mapped weights are held once."""
    base = str(bench.directory / "shared")  # a copy: this process maps the other one
    shutil.copytree(list(bench.backbones.values())[-1].info.path, base, dirs_exist_ok=True)
    first = _child("sharing", bench.device, bench.profile, base)
    first.ready()
    alone = first.ask()
    second = _child("sharing", bench.device, bench.profile, base)
    second.ready()
    both = [child.ask() for child in (first, second)]
    first.end()
    second.end()
    return {
        "weights_mb": alone["rss"],
        "weights_pss_alone_mb": alone["pss"],
        "weights_pss_of_two_mb": sum(child["pss"] for child in both) / 2,
        "process_pss_alone_mb": alone["process"],
        "process_pss_of_two_mb": sum(child["process"] for child in both) / 2,
    }


class _Process:
    """A child that says "ready", then answers each line with a line of JSON; the last one at its end."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "ops.bench.models_memory", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours

    def ready(self) -> None:
        self._line()

    def ask(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def end(self) -> dict[str, float]:
        out, _ = self._process.communicate()
        return json.loads(out.splitlines()[-1]) if out else {}

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a bench process ended with code {self._process.wait()}")
        return line


def _child(*arguments: str) -> _Process:
    return _Process(*arguments)


def _measure_slots(device: str, profile: Any, count: int) -> None:
    import psutil

    from nexus_bus.learning.group import GroupTrainer
    from nexus_bus.models.backbone import Backbone
    from nexus_bus.models.paging import slot_bytes
    from nexus_bus.models.slots import PolicySlot, build_module
    from ops.bench.models_base import NANO, contract, members

    backbone = Backbone.load(NANO, device, profile)
    trainer, own = GroupTrainer(backbone), psutil.Process()

    def train(number: int) -> list[Any]:
        group = members(backbone, ["oft"] * number, 1)
        for member in group:  # one after another: a group's activations are not a slot's
            trainer.run([member])
        return group

    kept = train(1)
    before = own.memory_info().rss
    kept += train(count - 1)
    trained = own.memory_info().rss
    terms = contract(backbone, "oft")
    acting = [PolicySlot.load(f"bench@{i}", terms, build_module(terms, backbone.shape, i)) for i in range(count - 1)]
    after = own.memory_info().rss
    tensors, _ = kept[0].slot.state()
    found = {
        "slot_mb": (trained - before) / (count - 1) / MB,
        "slot_tensors_mb": sum(tensor.nbytes for tensor in tensors.values()) / MB,
        "policy_slot_mb": (after - trained) / (count - 1) / MB,
        "policy_slot_tensors_mb": slot_bytes(acting[0]) / MB,
    }
    print(json.dumps(found))


def _measure_sharing(device: str, profile: Any, base: str) -> None:
    from nexus_bus.models.backbone import Backbone
    from ops.bench.models_base import looks

    Backbone.load(base, device, profile).encode(looks(4))
    print("ready", flush=True)
    for _ in sys.stdin:
        whole = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
        rss, pss = _mapped(f"{base}/model.safetensors")
        process_pss = int(whole[1]) / 1024 if whole else 0.0
        print(json.dumps({"rss": rss, "pss": pss, "process": process_pss}), flush=True)


def _mapped(path: str) -> tuple[float, float]:
    """Resident and proportional MB of a file's mappings in this process."""
    rss = pss = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(path)
        elif inside and (found := re.match(r"^(Rss|Pss):\s+(\d+) kB", line)):
            rss += int(found[2]) if found[1] == "Rss" else 0
            pss += int(found[2]) if found[1] == "Pss" else 0
    return rss / 1024, pss / 1024


if __name__ == "__main__":
    process.settings(1)  # before torch
    what, on, how, argument = sys.argv[1:]
    if what == "slots":
        _measure_slots(on, how, int(argument))
    else:
        _measure_sharing(on, how, argument)
