"""A dataset that is not there, or does not fit a job, is said when the job is sent; what is not known is not said."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pushing import FEATURES, make, worker

from nexus_bus import registry
from nexus_bus.bus import Bus, Card, EmbeddedServer, Presence
from nexus_bus.client import Client
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadJob, NotFound, Unavailable
from nexus_bus.offers import offer_key
from nexus_bus.plan import compile_plan
from nexus_bus.plan_data import misfit
from schemas.dataset import DatasetInfo
from schemas.environment import OwnOffer, OwnTask
from schemas.job import EnvironmentSpec, JobSpec
from schemas.plan import JobState
from schemas.policy import ActionSpec, ObservationSpec
from workers import environment

ACTION = ActionSpec(size=2, low=[-1.0, -1.0], high=[1.0, 1.0])
SEEN = ObservationSpec(cameras={"top": (8, 8, 3)}, state_size=2)


def job(name: str, dataset: str, where: str = "own-arm", **more: Any) -> JobSpec:
    document = {"kind": "sft", "name": name, "environment": {"id": where, "task": "touch"}, "data": {"dataset": dataset}}
    return msgspec.convert(document | more, JobSpec)


async def offer(bus: Bus, seen: ObservationSpec = SEEN, action: ActionSpec = ACTION) -> None:
    """The tenant's own robot, which shows and takes this."""
    task = OwnTask(action=action, observation=seen, max_steps=9, instruction="touch it")
    said = OwnOffer(environment="own-arm", worker="w", sessions=1, tasks={"touch": task}, simulator="arm 1")
    await bus.kv("offers").put(offer_key("acme", "own-arm", "w"), said)


async def taken(client: Client, spec: JobSpec) -> bool:
    """Whether the gateway lets it through to the master."""
    return bool((await client.call("job.submit", spec)).submission)


async def test_a_dataset_that_is_not_there_is_refused_at_once_by_a_name_that_is_near(
    acme: Client, served: environment.Environment, bus: Bus, tmp_path: Path
) -> None:
    await acme.push_dataset(make(tmp_path / "demos"))
    with pytest.raises(BadJob, match=r"^data\.dataset: you have no dataset 'demo'; did you mean 'demos'\?.*nexus data push"):
        await acme.submit(job("a", "demo"))
    with pytest.raises(BadJob, match=r"^data\.dataset: the provider has put no 'public/demo' there"):
        await acme.submit(job("a", "public/demo"))
    assert await acme.job("a") is None
    assert await acme.dataset("demo") is None
    found = await acme.dataset("demos")
    assert found is not None
    assert found.features == {key: feature["shape"] for key, feature in FEATURES.items()}
    await offer(bus)
    assert await taken(acme, job("a", "demos"))


async def test_a_dataset_of_nobody_else_is_looked_into(
    acme: Client, served: environment.Environment, root: Path, tmp_path: Path
) -> None:
    make(root / "globex/secret")
    make(root / "public/shelf")
    make(root / "acme/sets/inner")
    for name in ("../globex/secret", "public/../globex/secret", ".incoming", "/"):
        with pytest.raises(NotFound):
            await acme.dataset(name)
    assert await acme.dataset("secret") is None
    assert [(await acme.dataset(name) or DatasetInfo(dataset="", bytes=0, files=0, time="")).dataset
            for name in ("public/shelf", "sets/inner")] == ["public/shelf", "sets/inner"]  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "action", "said"),
    [
        (
            ObservationSpec(cameras={"front": (8, 8, 3)}, state_size=2), ACTION,
            r"no feature observation\.images\.front, and own-arm shows the camera 'front' \(8×8\); its pictures are "
            r"observation\.images\.top \(8×8\)",
        ),
        (
            ObservationSpec(cameras={"top": (96, 64, 3)}, state_size=2), ACTION,
            r"observation\.images\.top of 'demos' is 8×8, and own-arm shows 96×64",
        ),
        (ObservationSpec(cameras={"top": (8, 8, 3)}, state_size=7), ACTION, r"observation\.state of 'demos' has 2 numbers.* 7"),
        (SEEN, ActionSpec(size=3, low=[-1.0] * 3, high=[1.0] * 3), r"action of 'demos' has 2 numbers, and own-arm has 3"),
    ],
    ids=["camera", "size", "state", "action"],
)  # fmt: skip
async def test_a_dataset_that_does_not_fit_the_environment_is_refused_at_once(
    acme: Client,
    served: environment.Environment,
    bus: Bus,
    tmp_path: Path,
    seen: ObservationSpec,
    action: ActionSpec,
    said: str,
) -> None:
    await acme.push_dataset(make(tmp_path / "demos"))
    await offer(bus, seen, action)
    with pytest.raises(BadJob, match=rf"^data\.dataset: .*{said}"):
        await acme.submit(job("a", "demos"))


async def test_what_is_not_known_is_not_said(
    acme: Client, bus: Bus, server: EmbeddedServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await offer(bus)
    assert await taken(acme, job("nobody-answers", "demos"))
    with monkeypatch.context() as impatient:
        impatient.setattr("nexus_bus.client.calls.AGAIN_S", 3600.0)  # it would ask again until somebody comes
        with pytest.raises(Unavailable, match="nobody serves it"):
            await acme.dataset("demos")
    async with worker(server.url, root):
        assert await taken(acme, job("what-the-master-refuses", "../demos"))
        recording = job("records", "other", "tabletop", data={"dataset": "demos", "expert": {"episodes": 1}})
        state = JobState(plan=compile_plan(recording, "acme"), phase="data", submission="s", submitted="now")
        await bus.kv("registry").put(registry.job_key("acme", "records"), state)
        assert await taken(acme, job("reads-what-is-being-recorded", "demos"))
        await bus.kv("registry").put(registry.job_key("acme", "records"), msgspec.structs.replace(state, phase="failed"))
        with pytest.raises(BadJob, match="no dataset 'demos'"):
            await acme.submit(job("reads-what-never-came", "demos"))
        hosts = [
            await Presence(bus, Card("environment", {"worker": host, "host": host}, "s", ""), lambda: (0, {})).start()
            for host in ("here", "there")
        ]
        assert await taken(acme, job("another-host-may-have-it", "demos"))
        for one in hosts:
            await one.stop()


def test_a_dataset_of_more_cameras_fits_and_one_of_unknown_features_is_not_judged() -> None:
    known = describe(EnvironmentSpec(id="tabletop", task="touch"))
    shapes = {f"observation.images.{camera}": list(shape) for camera, shape in known.observation.cameras.items()}
    features = shapes | {
        "observation.images.wrist": [4, 4, 3], "observation.state": [known.observation.state_size], "action": [3, 1]
    }  # fmt: skip
    info = DatasetInfo(dataset="demos", bytes=0, files=0, time="", features=features)
    assert misfit(info, "tabletop", known.action, known.observation) == ""
    assert misfit(msgspec.structs.replace(info, features={}), "tabletop", known.action, known.observation) == ""
    stateless = msgspec.structs.replace(info, features=shapes | {"action": [3]})
    assert "no feature observation.state" in misfit(stateless, "tabletop", known.action, known.observation)
