"""The disk below the feature cache meets what is not its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from structlog.testing import capture_logs

from nexus_bus.models.cache import FeatureCache
from nexus_bus.models.features import VLAFeature

FEATURE = VLAFeature("0001", torch.ones(10, 16), torch.zeros(10, dtype=torch.uint8), (2, 10))


@pytest.mark.parametrize("metadata", [None, {"query_span": "7"}, {"query_span": "[1]"}, {"other": "[1, 2]"}])
def test_a_file_of_another_making_is_a_miss(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    FeatureCache(tmp_path).put("acme", FEATURE)
    path = tmp_path / "acme" / "00" / "0001"
    running = FeatureCache(tmp_path)
    path.write_bytes(save({"hidden": torch.zeros(1, 1), "token_type": torch.zeros(1)}, metadata))
    assert running.get("acme", "0001") is None
    assert not path.exists()


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis" / "chapter.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with capture_logs() as logs:
        cache = FeatureCache(tmp_path)
        cache.put("acme", FEATURE)
        cache.close()
    assert cache.get("acme", "0001") is not None, "memory goes on"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
    assert thesis.read_text() == "years of work"
    assert ["a directory of its own" in entry["error"] for entry in logs] == [True]
