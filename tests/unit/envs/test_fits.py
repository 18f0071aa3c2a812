"""What goes wrong silently is compared when a session is leased: every convention of the specs, not only sizes."""

import msgspec
import pytest

from nexus_bus.envs.catalog import describe
from nexus_bus.errors import ContractError
from nexus_bus.sessions import fits
from schemas.environment import SessionOpen
from schemas.job import EnvironmentSpec

SPEC = EnvironmentSpec(id="libero-spatial", task="0")


def asking(part: str, **changes: object) -> SessionOpen:
    known = describe(SPEC)
    specs = {"action": known.action, "observation": known.observation}
    if part:
        specs[part] = msgspec.structs.replace(specs[part], **changes)
    return SessionOpen(tenant="acme", job="pick", environment=SPEC, **specs)  # type: ignore[arg-type]


def test_the_policy_that_was_trained_there_fits() -> None:
    fits(asking(""), describe(SPEC))


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("action", {"size": 8}, "action.size: the environment has 7, the policy expects 8"),
        ("action", {"high": [2.0] * 7}, "action bounds"),
        ("action", {"gripper": "plus_open"}, "action.gripper: the environment has minus_open, the policy expects plus_open"),
        ("action", {"rotation": "euler_xyz"}, "action.rotation: the environment has axis_angle"),
        ("action", {"control": "joint_position_absolute"}, "action.control: the environment has osc_pose_delta"),
        ("observation", {"state_size": 7}, "observation.state_size"),
        ("observation", {"cameras": {"agentview": (256, 256, 3)}}, "observation.cameras"),
        ("observation", {"orientation": "upright"}, "observation.orientation: the environment has mirrored"),
    ],
)
def test_a_policy_with_another_convention_is_refused_by_name(part: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ContractError, match=said):
        fits(asking(part, **changes), describe(SPEC))
