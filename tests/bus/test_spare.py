"""A spare process becomes the worker that it is told to be, and is nobody's burden when it is not needed."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from nexus_bus.spare import Spare

pytestmark = pytest.mark.timeout(240)


async def test_a_spare_becomes_who_it_is_told_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any):
    monkeypatch.setattr("nexus_bus.spare.LATER_S", 0.1)
    spare, log = Spare(tmp_path / "spare.log", os.environ), tmp_path / "trainer-0.log"
    assert spare.take("trainer-0", ["--version"], log) is None, "nobody asked for one"
    spare.start()
    try:
        await eventually(lambda: spare.ready, within=90)
        process = spare.take("trainer-0", ["--version"], log)
        assert process is not None
        assert not spare.ready
        assert await process.wait() == 0, (tmp_path / "spare.log").read_text()
        assert log.read_text().startswith("nexus, version")
        assert (tmp_path / "spare.log").read_text() == "", "what it loads, it loads in silence"
        await eventually(lambda: spare.ready, within=90)  # the next one
    finally:
        await spare.stop()


async def test_a_spare_ends_with_its_host(tmp_path: Path, eventually: Any):
    spare, before = Spare(tmp_path / "spare.log", os.environ), set(psutil.Process().children())
    spare.start()
    await eventually(lambda: spare.ready, within=90)
    (child,) = set(psutil.Process().children()) - before
    await spare.stop()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not spare.ready
