"""The feature cache: bounded to the byte, shared between processes but not between tenants, and never a reason to fail."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache, encode_cached
from nexus_bus.models.cache_disk import LOCK_S, DiskCache
from nexus_bus.models.features import PUBLIC, FeatureBatch, Look, VLAFeature
from nexus_bus.models.prompt import Prompt

BOUND = 800_000  # of which the index takes its share


def feature(name: str, size: int = 10, fill: float = 1.0) -> VLAFeature:
    return VLAFeature(name, torch.full((size, 16), fill), torch.zeros(size, dtype=torch.uint8), (size - 4, size))


def big(i: int) -> VLAFeature:
    return feature(f"{i:04x}", size=200, fill=float(i))  # 13 KB


def disk(directory: Path) -> int:
    """Bytes of all files, taken while nobody writes."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def features_on(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.parent != directory]


def consistent(directory: Path) -> bool:
    """Whether a fresh look at the directory counts exactly the files that are there."""
    cache = DiskCache(directory, BOUND)
    counted = sum(cache.sizes().values())
    cache.close()
    return counted == sum(path.stat().st_size for path in features_on(directory))


def test_what_is_put_is_got_in_another_process_too(tmp_path: Path) -> None:
    FeatureCache(tmp_path).put("acme", feature("ab01", fill=0.5))
    again = FeatureCache(tmp_path).get("acme", "ab01")
    assert again is not None
    assert torch.equal(again.hidden, feature("ab01", fill=0.5).hidden)
    assert again.query_span == (6, 10)
    assert FeatureCache(tmp_path).get("acme", "ffff") is None


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_hash_is_no_permission(tmp_path: Path, on_disk: bool) -> None:
    cache = FeatureCache(tmp_path if on_disk else None)
    cache.put("acme", feature("ab01"))
    assert cache.get("globex", "ab01") is None
    assert cache.get(PUBLIC, "ab01") is None
    assert cache.get("acme", "ab01") is not None
    if on_disk:
        assert FeatureCache(tmp_path).get("globex", "ab01") is None
    with pytest.raises(ValueError, match="scope"):
        FeatureCache(tmp_path).get("../acme", "ab01")


def test_bfloat16_features_survive_the_disk(tmp_path: Path) -> None:
    rough = VLAFeature("aa", torch.randn(4, 8).bfloat16(), torch.zeros(4, dtype=torch.uint8), (2, 4))
    FeatureCache(tmp_path).put("acme", rough)
    again = FeatureCache(tmp_path).get("acme", "aa")
    assert again is not None
    assert torch.equal(again.hidden, rough.hidden)


def test_memory_and_disk_never_pass_their_bounds(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, memory_bytes=30_000, disk_bytes=BOUND)
    for i in range(120):
        cache.put("acme", big(i))
        assert cache.memory_used <= 30_000
        assert disk(tmp_path) <= BOUND
    kept = len(features_on(tmp_path))
    assert kept * 13_000 > BOUND / 3, "and the room is used"
    assert cache.get("acme", "0077") is not None, "the newest is kept"
    assert cache.get("acme", "0000") is None, "the oldest went"
    stats = cache.stats()["acme"]
    assert stats.evictions == 120 - kept
    assert stats.disk_bytes == sum(path.stat().st_size for path in features_on(tmp_path))
    assert (stats.hits, stats.misses) == (1, 1)
    assert cache.gauges()["cache_disk_bytes"] == stats.disk_bytes


def test_what_is_used_stays_longer(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=BOUND)
    for i in range(120):
        cache.put("acme", big(i))
        assert cache.get("acme", "0000") is not None


def test_a_tenant_that_floods_the_cache_pushes_out_its_own(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=BOUND)
    for i in range(3):
        cache.put("small", big(i))
    for i in range(200):
        cache.put("greedy", big(i))
    assert all(cache.get("small", f"{i:04x}") is not None for i in range(3))


def test_one_too_large_for_the_bound_is_not_kept(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=BOUND)
    cache.put("acme", feature("ab", size=20_000))
    assert cache.get("acme", "ab") is None
    assert cache.gauges()["cache_faults"] == 0


def test_a_torn_file_is_a_miss_and_is_written_again(tmp_path: Path) -> None:
    FeatureCache(tmp_path).put("acme", feature("cd"))
    (path,) = features_on(tmp_path)
    whole = path.read_bytes()
    running = FeatureCache(tmp_path)
    path.write_bytes(whole[:40])
    assert running.get("acme", "cd") is None
    assert not path.exists()
    running.put("acme", feature("cd"))
    assert path.read_bytes() == whole
    assert consistent(tmp_path)


def test_a_disk_that_refuses_is_no_error_and_is_said_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory should be")
    with capture_logs() as logs:
        cache = FeatureCache(blocked)
        for i in range(3):
            cache.put("acme", big(i))
    assert cache.get("acme", "0001") is not None, "memory goes on"
    assert cache.gauges()["cache_faults"] >= 1
    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_a_full_disk_is_no_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FeatureCache(tmp_path, disk_bytes=BOUND)
    cache.put("acme", big(1))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        cache.put("acme", big(2))
    assert cache.get("acme", "0002") is not None
    assert cache.gauges()["cache_faults"] == 1
    assert len(features_on(tmp_path)) == 1
    assert consistent(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory_still_answers(tmp_path: Path) -> None:
    FeatureCache(tmp_path).put("acme", big(1))
    tmp_path.chmod(0o500)
    try:
        cache = FeatureCache(tmp_path)
        cache.put("acme", big(2))
        assert cache.get("acme", "0001") is not None
    finally:
        tmp_path.chmod(0o700)


def test_a_broken_index_is_begun_anew(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=BOUND)
    cache.put("acme", big(1))
    cache.close()
    (tmp_path / "index.sqlite").write_bytes(b"no index" * 4096)
    other = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=BOUND)
    for i in range(2, 5):
        other.put("acme", big(i))
    assert other.get("acme", "0004") is not None
    assert consistent(tmp_path)


def test_a_directory_cleared_by_hand_is_filled_again(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=BOUND)
    cache.put("acme", big(1))
    for path in (*features_on(tmp_path), *tmp_path.glob("index.sqlite*")):
        path.unlink()
    for i in range(3):
        cache.put("acme", big(i))
    assert cache.get("acme", "0002") is not None
    assert consistent(tmp_path)


def test_what_others_left_is_swept_at_the_start(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, disk_bytes=BOUND)
    cache.put("acme", big(1))
    cache.put("acme", big(2))
    cache.close()
    (tmp_path / "acme" / "00" / "0002").unlink()
    orphan = tmp_path / "ab" / "abcd"
    orphan.parent.mkdir()
    orphan.write_bytes(b"of an older layout")
    assert consistent(tmp_path)
    assert [path.name for path in features_on(tmp_path)] == ["0001"]


WRITER = """
import sys, torch
from pathlib import Path
from nexus_bus.models import cache_disk
from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.features import VLAFeature
{setup}
cache = FeatureCache(Path(sys.argv[1]), memory_bytes=0, disk_bytes=800_000)
for i in range(int(sys.argv[2]), int(sys.argv[3])):
    hidden, kinds = torch.full((200, 16), float(i)), torch.zeros(200, dtype=torch.uint8)
    cache.put("acme", VLAFeature(f"{{i:04x}}", hidden, kinds, (196, 200)))
    for j in range(max(0, i - 3), i + 1):
        got = cache.get("acme", f"{{j:04x}}")
        assert got is None or float(got.hidden[0, 0]) == j
    print(i, flush=True)
assert cache.disk.faults == 0
"""


def start(directory: Path, first: int, last: int, setup: str = "") -> "subprocess.Popen[str]":
    code = WRITER.format(setup=setup)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory), str(first), str(last)], stdout=subprocess.PIPE, text=True
    )


def test_two_writers_share_a_directory_and_one_is_killed(tmp_path: Path) -> None:
    dies, lives = start(tmp_path, 0, 100_000), start(tmp_path, 200, 700)
    assert dies.stdout is not None
    for _ in range(100):  # it has filled the directory
        assert dies.stdout.readline()
    dies.send_signal(signal.SIGKILL)
    ends = time.monotonic() + 90
    while lives.poll() is None:
        assert disk(tmp_path) <= BOUND
        assert time.monotonic() < ends
        time.sleep(0.02)
    assert lives.returncode == 0
    for ended in (dies, lives, start(tmp_path, 700, 720)):  # one more: which of the two wrote last is luck
        ended.communicate(timeout=90)
    assert FeatureCache(tmp_path, 0, BOUND).get("acme", f"{719:04x}") is not None
    assert consistent(tmp_path)
    assert disk(tmp_path) <= BOUND


@pytest.mark.parametrize(
    ("step", "nth", "when"),
    [("_write", 1, "before"), ("_rename", 1, "before"), ("_rename", 1, "after"), ("_unlink", 2, "after")],
)
def test_death_at_any_step_leaves_the_directory_within_its_bound(tmp_path: Path, step: str, nth: int, when: str) -> None:
    """A process kills itself within a put; another, which was there all the time, goes on."""
    cache = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=BOUND)
    for i in range(80):
        cache.put("acme", big(i))
    setup = (
        "import itertools, os, signal\n"
        f"real, calls = cache_disk.{step}, itertools.count(1)\n"
        "def step(*args):\n"
        f"    last = next(calls) == {nth}\n"
        f"    if not last or {when == 'after'}:\n        real(*args)\n"
        "    if last:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cache_disk.{step} = step"
    )
    dying = start(tmp_path, 80, 81, setup)
    dying.communicate(timeout=60)
    assert dying.returncode == -signal.SIGKILL
    assert disk(tmp_path) <= BOUND
    for i in range(100, 160):
        cache.put("acme", big(i))
        assert disk(tmp_path) <= BOUND
    assert cache.get("acme", f"{159:04x}") is not None
    assert cache.gauges()["cache_faults"] == 0
    assert consistent(tmp_path)


def test_a_writer_that_hangs_costs_the_others_the_disk_and_one_short_wait(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, disk_bytes=BOUND)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = time.monotonic()
        for i in range(100):
            cache.put("acme", big(i))
        assert time.monotonic() - started < 100 * LOCK_S / 5
    assert cache.get("acme", "0001") is not None
    assert not features_on(tmp_path)
    cache.put("acme", big(200))
    assert len(features_on(tmp_path)) == 1, "and it goes on once the lock is free"


def test_the_index_stays_small(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, memory_bytes=0, disk_bytes=64 << 20)
    for i in range(1500):
        cache.put("acme", feature(f"{i:040x}"))
    own = sum(path.stat().st_size for path in tmp_path.glob("index.sqlite*"))
    assert own < 600_000 + 200 * 1500
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        assert index.execute("SELECT COUNT(*) FROM entries").fetchone() == (1500,)
    index.close()


class Fake:
    """A backbone that notes what it was asked for."""

    tile = 4

    def __init__(self) -> None:
        self.encoded: list[Look] = []

    def ids(self, looks: Sequence[Look]) -> list[str]:
        return [f"{look.prompt.instruction}x" for look in looks]

    def encode(self, looks: Sequence[Look]) -> list[VLAFeature]:
        self.encoded += looks
        return [feature(name) for name in self.ids(looks)]


def see(text: str, scope: str, **options: Any) -> Look:
    return Look(Prompt([], text), scope=scope, **options)


def test_equal_looks_of_two_tenants_are_different() -> None:
    fake: Any = Fake()
    cache = FeatureCache()
    looks = [see("a", "acme"), see("a", "globex"), see("a", "acme"), see("a", PUBLIC), see("a", PUBLIC)]
    features, stats = encode_cached(fake, looks, cache)
    assert [look.scope for look in fake.encoded] == ["acme", "globex", PUBLIC]
    assert features[0] is features[2]
    assert features[3] is features[4]
    assert features[0] is not features[1]
    assert (stats.total, stats.unique, stats.hits, stats.groups) == (5, 3, 0, 1)
    _, stats = encode_cached(fake, [see("a", "acme"), see("a", "initech")], cache)
    assert (stats.hits, len(fake.encoded)) == (1, 4), "a newcomer pays for its own forward"


def test_what_is_private_to_a_look_is_neither_shared_nor_kept() -> None:
    fake: Any = Fake()
    cache = FeatureCache()
    suffix = torch.zeros(2, 4)
    looks = [see("a", "acme", suffix=suffix), see("a", "acme", suffix=suffix), see("b", ""), see("b", "")]
    _, stats = encode_cached(fake, looks, cache)
    assert (len(fake.encoded), stats.unique, stats.hits) == (4, 4, 0)
    assert cache.memory_used == 0
    assert stats.forwarded == {("acme", "ax"): 2, ("", "bx"): 2}


def test_the_forward_is_charged_by_rows() -> None:
    fake: Any = Fake()
    cache = FeatureCache()
    encode_cached(fake, [see("known", "acme")], cache)
    members = [
        [see("a", "acme"), see("known", "acme")],
        [see("a", "acme"), see("b", "acme")],
        [see("a", "globex"), see("c", "globex", suffix=torch.zeros(1, 4))],
    ]
    _, stats = encode_cached(fake, [look for own in members for look in own], cache)
    asked = [{(look.scope, name): 1 for name, look in zip(fake.ids(own), own, strict=True)} for own in members]
    everybody = {key: sum(own.get(key, 0) for own in asked) for own in asked for key in own}
    shares = [stats.share(own, everybody) / stats.forward_s for own in asked]
    assert shares == pytest.approx([0.5 / 4, 1.5 / 4, 2 / 4])
    assert encode_cached(fake, members[0], cache)[1].share({("acme", "ax"): 1}, {("acme", "ax"): 1}) == 0.0


def test_equal_prompts_are_encoded_once_and_known_ones_not_at_all(backbone: Backbone) -> None:
    rng = np.random.default_rng(0)
    prompts = [Prompt([rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)], "touch the red block") for _ in range(3)]
    a, b, c = (Look(prompt, scope="acme") for prompt in prompts)
    cache = FeatureCache()
    twin = Look(Prompt(prompts[1].images, prompts[1].instruction), scope="acme")
    features, stats = encode_cached(backbone, [a, b, a, twin], cache)
    assert (stats.total, stats.unique, stats.hits, stats.groups, len(stats.forwarded)) == (4, 2, 0, 1, 2)
    assert features[0] is features[2]
    assert features[1] is features[3]
    more, stats = encode_cached(backbone, [c, a], cache)
    assert (stats.unique, stats.hits, stats.groups) == (2, 1, 1)
    assert torch.equal(more[1].hidden, features[0].hidden)
    _, stats = encode_cached(backbone, [a, c], cache)
    assert (stats.hits, stats.groups, stats.forward_s) == (2, 0, 0.0)
    assert encode_cached(backbone, [], cache)[1].unique == 0


def test_a_batch_pads_on_the_right_and_says_so() -> None:
    batch = FeatureBatch.collate([feature("a", 5), feature("b", 9, fill=2.0)])
    assert batch.hidden.shape == (2, 9, 16)
    assert batch.mask.sum(1).tolist() == [5, 9]
    assert float(batch.hidden[0, 5:].abs().sum()) == 0.0
    assert batch.query.shape == (2, 4, 16)
    assert torch.equal(batch.rows(torch.tensor([1])).query[0], torch.full((4, 16), 2.0))
