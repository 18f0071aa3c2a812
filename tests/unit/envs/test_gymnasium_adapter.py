"""Any registered Gymnasium environment with a bounded vector action can be served."""

import numpy as np
import pytest

from nexus_bus.envs.session import Session
from nexus_bus.errors import NotFound
from schemas.job import EnvironmentSpec

SPEC = EnvironmentSpec(id="gymnasium", task="Pusher-v5", options={"image_size": 32, "instruction": "push it", "max_steps": 6})


@pytest.mark.gl
def test_a_registered_environment_becomes_a_session() -> None:
    session = Session(SPEC)
    assert (session.description.action.size, session.description.action.high[0]) == (7, 2.0)
    first = session.reset(0)
    assert (first.instruction, first.images["render"].shape, first.state.shape) == ("push it", (32, 32, 3), (23,))
    done = session.step(np.ones((10, 7)))
    assert (done.executed, done.end, done.truncated) == (6, "time_limit", True)
    again = session.reset(0)
    np.testing.assert_array_equal(first.state, again.state)
    with pytest.raises(NotFound, match="no scripted expert"):
        session.expert()
    with pytest.raises(NotFound, match="from its seed"):
        session.save()
    session.close()
    session.close()
