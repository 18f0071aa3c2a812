"""Machines whose clocks are hours apart: a request is answered as long as its asker waits, and let go after that."""

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tests.conftest import Eventually
from tests.line.asking import Asker, Start
from tests.line.test_inference import asker, backbone, start  # noqa: F401 - fixtures
from workers import inference as worker

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("askers", [-7200.0, 0.0, 7200.0])
@pytest.mark.parametrize("workers", [-7200.0, 0.0, 7200.0])
async def test_patience_is_counted_by_one_clock(
    asker: Asker,  # noqa: F811 - the fixtures above
    start: Start,  # noqa: F811
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    askers: float,
    workers: float,
) -> None:
    """Of asker and worker, each so many seconds ahead of the server's clock."""
    clock = SimpleNamespace(time=lambda: time.time() + workers, monotonic=time.monotonic, time_ns=time.time_ns)
    monkeypatch.setattr(worker, "time", clock)
    shown = timedelta(seconds=askers)
    monkeypatch.setattr("nexus_bus.bus.headers.now", lambda: f"{datetime.now(UTC) + shown:%Y-%m-%dT%H:%M:%S.%f%z}")
    await asker.publish("good")
    expires = time.time() + 0.2
    late = await asker.send("good@0", deadline=expires + askers)
    await eventually(lambda: time.time() > expires + 0.2)
    served = await start()
    patient = await asker.ask("good@0", 1, deadline=time.time() + askers + 30)
    assert patient.error == ""
    await eventually(lambda: not any(not one.settled for one in served.held))
    assert late not in asker.replies
    assert served.context.pulse.gauges["late"] == 1
