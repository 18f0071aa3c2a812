"""What a tenant's jobs may name: what everybody may, its own environments, its datasets; and nothing of others."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pushing import make, worker
from structlog.testing import capture_logs

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.cli import main
from nexus_bus.client import Client
from nexus_bus.client.sessions import SessionCalls
from nexus_bus.offers import offer_key
from schemas.base import Tensor
from schemas.environment import Observation, OwnFound, OwnOffer, OwnTask
from schemas.inference import InferenceReply, InferenceRequest
from schemas.policy import ActionSpec, ObservationSpec

TASK = OwnTask(
    action=ActionSpec(size=2, low=[-1.0, -1.0], high=[1.0, 1.0]),
    observation=ObservationSpec(cameras={"top": (8, 8, 3)}, state_size=2),
    max_steps=9,
    instruction="open the door",
)


async def offer(bus: Bus, who: str, name: str, by: str, sessions: int = 1) -> None:
    said = OwnOffer(environment=name, worker=by, sessions=sessions, tasks={"door": TASK}, simulator="arm 1")
    await bus.kv("offers").put(offer_key(who, name, by), said)


async def test_the_catalogue_of_a_tenant_has_its_own_environments_and_datasets(
    acme: Client, bus: Bus, server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for number in range(6):  # more than a page
        await offer(bus, "acme", f"own-{number}", "w-1", sessions=2)
    await offer(bus, "acme", "own-3", "w-2")
    await offer(bus, "globex", "own-secret", "w-1")
    found = await acme.own_environments()
    assert [one.environment for one in found] == [f"own-{number}" for number in range(6)]
    assert found[3] == OwnFound(
        environment="own-3", workers=["w-1", "w-2"], sessions=3, tasks={"door": "open the door"}, max_steps=9, simulator="arm 1"
    )
    monkeypatch.setattr("nexus_bus.logs.start", lambda *_: None)
    asked = ["--url", server.url, "--creds", str(server.directory / "acme.creds"), "--tenant", "acme"]

    async def nexus(*words: str) -> tuple[str, str]:
        capsys.readouterr()
        with capture_logs():  # of this process, where others work too: they are no words of the command's
            assert await asyncio.to_thread(main, ["catalog", *words, *asked]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    make(tmp_path / "root/acme/demos")
    async with worker(server.url, tmp_path / "root"):
        catalog = await acme.catalog()
        assert {"oft", "gr00t"} <= catalog["head"].keys()
        assert {"tabletop", "own-0", "own-5"} <= catalog["environment"].keys()
        assert catalog["environment"]["own-3"]["tasks"] == {"door": ("open the door",)}
        assert catalog["environment"]["own-3"]["options"]["max_steps"][0] == 9
        assert catalog["dataset"]["demos"]["features"]["observation.images.top"] == [8, 8, 3]
        out, err = await nexus()
        assert err == ""
        for line in ("environment own-3  your own, served by w-1, w-2, 3 sessions at once", "dataset demos  2 episodes"):
            assert line in out
        assert "secret" not in out
        (kind,) = json.loads((await nexus("own-3", "--json"))[0])
        assert kind == "environment"
        assert "observation.images.top  8×8×3" in (await nexus("demos"))[0]


async def test_a_policy_acts_by_the_name_of_its_newest_version() -> None:
    class Stub(SessionCalls):
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def policy(self, ref: str) -> Any:
            assert ref == "touch@latest"
            return type("Version", (), {"id": "touch@7"})

        async def call(self, name: str, message: Any, **_: Any) -> Any:
            assert isinstance(message, InferenceRequest)
            self.asked.append(message.policy)
            return InferenceReply(id=message.id, policy=message.policy)

    seen = Observation(images={}, state=Tensor(dtype="float32", shape=(0,), data=b""), instruction="touch it")
    client = Stub()
    assert (await client.act("touch@latest", seen)).policy == "touch@7"
    await client.act("touch@2", seen)
    assert client.asked == ["touch@7", "touch@2"]
