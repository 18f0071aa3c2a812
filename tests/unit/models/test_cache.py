"""The feature cache: bounded, shared between processes, and never a reason to fail."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache, encode_cached
from nexus_bus.models.features import FeatureBatch, VLAFeature
from nexus_bus.models.prompt import Prompt


def feature(name: str, size: int = 10, fill: float = 1.0) -> VLAFeature:
    return VLAFeature(name, torch.full((size, 16), fill), torch.zeros(size, dtype=torch.uint8), (size - 4, size))


def disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_what_is_put_is_got_in_another_process_too(tmp_path: Path):
    FeatureCache(tmp_path).put(feature("ab01", fill=0.5))
    again = FeatureCache(tmp_path).get("ab01")
    assert again is not None
    assert torch.equal(again.hidden, feature("ab01", fill=0.5).hidden)
    assert again.query_span == (6, 10)
    assert FeatureCache(tmp_path).get("ffff") is None


def test_bfloat16_features_survive_the_disk(tmp_path: Path):
    rough = VLAFeature("aa", torch.randn(4, 8).bfloat16(), torch.zeros(4, dtype=torch.uint8), (2, 4))
    FeatureCache(tmp_path).put(rough)
    again = FeatureCache(tmp_path).get("aa")
    assert again is not None
    assert torch.equal(again.hidden, rough.hidden)


def test_memory_and_disk_stay_below_their_bounds(tmp_path: Path):
    cache = FeatureCache(tmp_path, memory_bytes=3000, disk_bytes=20_000)
    for i in range(200):
        cache.put(feature(f"{i:04x}"))
        assert cache.memory_used <= 3000
    assert disk(tmp_path) <= 20_000 * 17 // 16 + 1000
    assert cache.get("00c7") is not None, "the newest is kept"
    assert cache.get("0000") is None, "the oldest went"


def test_a_torn_file_is_a_miss(tmp_path: Path):
    FeatureCache(tmp_path).put(feature("cd"))
    path = next(path for path in tmp_path.rglob("cd") if path.is_file())
    path.write_bytes(path.read_bytes()[:40])
    assert FeatureCache(tmp_path).get("cd") is None
    assert not path.exists()


def test_a_disk_that_refuses_is_no_error(tmp_path: Path):
    cache = FeatureCache(tmp_path)
    (tmp_path / "ee").write_text("a file where a folder should be")
    cache.put(feature("ee55"))
    assert cache.get("ee55") is not None


def test_processes_share_a_directory_while_it_overflows(tmp_path: Path):
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from nexus_bus.models.cache import FeatureCache; assert 'transformers' not in sys.modules\n"
        "from nexus_bus.models.features import VLAFeature\n"
        "cache = FeatureCache(Path(sys.argv[1]), memory_bytes=0, disk_bytes=15_000)\n"
        "for i in range(60):\n"
        "    cache.put(VLAFeature(f'{i:04x}', torch.full((10, 16), float(i)), torch.zeros(10, dtype=torch.uint8), (6, 10)))\n"
        "    for j in range(max(0, i - 3), i + 1):\n"
        "        got = cache.get(f'{j:04x}')\n"
        "        assert got is None or float(got.hidden[0, 0]) == j\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(90) for process in running] == [0, 0]
    assert disk(tmp_path) <= 15_000 * 19 // 16 + 3000
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()], "no half-written file is left"


def test_equal_prompts_are_encoded_once_and_known_ones_not_at_all(backbone: Backbone):
    rng = np.random.default_rng(0)
    a, b, c = (Prompt([rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)], "touch the red block") for _ in range(3))
    cache = FeatureCache()
    features, stats = encode_cached(backbone, [a, b, a, Prompt(b.images, b.instruction)], cache)
    assert (stats.total, stats.unique, stats.hits, stats.groups, len(stats.forwarded)) == (4, 2, 0, 1, 2)
    assert features[0] is features[2]
    assert features[1] is features[3]
    more, stats = encode_cached(backbone, [c, a], cache)
    assert (stats.unique, stats.hits, stats.groups) == (2, 1, 1)
    assert torch.equal(more[1].hidden, features[0].hidden)
    _, stats = encode_cached(backbone, [a, c], cache)
    assert (stats.hits, stats.groups, stats.forward_s) == (2, 0, 0.0)
    assert encode_cached(backbone, [], cache)[1].unique == 0


def test_a_batch_pads_on_the_right_and_says_so():
    batch = FeatureBatch.collate([feature("a", 5), feature("b", 9, fill=2.0)])
    assert batch.hidden.shape == (2, 9, 16)
    assert batch.mask.sum(1).tolist() == [5, 9]
    assert float(batch.hidden[0, 5:].abs().sum()) == 0.0
    assert batch.query.shape == (2, 4, 16)
    assert torch.equal(batch.rows(torch.tensor([1])).query[0], torch.full((4, 16), 2.0))
