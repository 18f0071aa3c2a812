"""The model benches run, each part once and small, and give the numbers that others read."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = {
    "group_forward_x_8x1",
    "group_step_x_8x1",
    "group_forward_of_best_batch",
    "cache_second_pass_x",
    "lora_group_x_8x1",
    "publish_to_served_ms_5mb",
    "longest_stall_ms",
    "slot_mb",
}


@pytest.mark.timeout(300)
def test_a_quick_run_gives_every_number(tmp_path: Path) -> None:
    out = tmp_path / "models.json"
    command = [sys.executable, "-m", "ops.bench.models", "--quick", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    measured = json.loads(out.read_text())
    assert measured.keys() >= KEYS | {"machine", "versions"}
    numbers = {key: value for key, value in measured.items() if isinstance(value, float | int)}
    assert all(math.isfinite(value) for value in numbers.values()), numbers
    assert all(measured[key] > 0 for key in KEYS)
    assert all(key in done.stdout for key in KEYS), "and the table says them"


def test_the_gpu_bench_skips_where_there_is_none() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    done = subprocess.run([sys.executable, "-m", "ops.bench.gpu"], check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "skipped: no CUDA device here")
