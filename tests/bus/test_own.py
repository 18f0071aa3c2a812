"""A tenant's own simulator or robot: served from the tenant's side with its credentials alone, played in like any other."""

import asyncio
import base64
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from nats.aio.client import Client as Raw
from nats.errors import Error as NatsError
from tenancy import raw, written

from nexus_bus.bridge import Bridge
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.authority import PROVIDER_FILE
from nexus_bus.errors import Refused
from nexus_bus.tenants import tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.control import Ack
from schemas.environment import OwnAnswer, SessionCall, SessionStep
from tests.conftest import Eventually
from tests.own_worker import ARM as ARM_FOLDER
from tests.own_worker import own_worker
from workers.gateway import Gateway

pytestmark = pytest.mark.timeout(300)

ARM: dict[str, Any] = {"id": "own", "task": "default"}
STILL, AHEAD = np.zeros((5, 2), np.float32), np.full((5, 2), 0.5, np.float32)


class Tenant:
    """Asks in JSON, as a program in any language would."""

    def __init__(self, client: Raw, url: str, creds: Path) -> None:
        self.client, self.url, self.creds = client, url, creds

    async def ask(self, name: str, **message: Any) -> dict[str, Any]:
        """The answer, or `{"code": …, "error": …}`."""
        headers = {"Content-Type": "application/json"}
        answer = await self.client.request(name, msgspec.json.encode(message), timeout=60, headers=headers)
        if code := (answer.headers or {}).get("Nexus-Error-Code"):
            return {"code": code, "error": answer.data.decode()}
        return msgspec.json.decode(answer.data)

    async def call(self, session: str, op: str, **call: Any) -> dict[str, Any]:
        return await self.ask("env.call", session=session, call={"op": op, **call})

    async def step(self, session: str, chunk: np.ndarray = STILL) -> dict[str, Any]:
        data = base64.b64encode(chunk.tobytes()).decode()
        return await self.call(session, "step", actions={"dtype": "float32", "shape": chunk.shape, "data": data})

    async def episode(self, seed: int, environment: dict[str, Any], chunk: np.ndarray = STILL) -> list[dict[str, Any]]:
        """A session's replies, from reset to the end of the episode, under one chunk of actions again and again."""
        lease = await self.ask("env.open", environment=environment)
        replies = [await self.call(lease["session"], "reset", seed=seed)]
        while replies[-1].get("end", "running") == "running":
            replies.append(await self.step(lease["session"], chunk))
        await self.call(lease["session"], "close")
        return replies


@asynccontextmanager
async def acme_bus(acme: Tenant) -> AsyncIterator[Bus]:
    bus = await Bus.connect(acme.url, name="client", creds=acme.creds)
    yield bus
    await bus.close()


@pytest.fixture
async def acme(server: EmbeddedServer, gateway: Gateway) -> AsyncIterator[Tenant]:
    """A tenant with credentials."""
    async with tenants_of(server.url, server.authority) as operator:
        creds = written(server, (await operator.add("acme")).creds, "acme.creds")
    client = await raw(server, creds.read_text())
    yield Tenant(client, server.url, creds)
    await client.close()


async def test_an_episode_is_played_in_it_from_any_language(acme: Tenant) -> None:
    async with own_worker(acme.url, acme.creds, "--as", "arm"):
        arm = ARM | {"id": "own-arm", "options": {"max_steps": 12}}
        found = await acme.ask("env.describe", environment=arm)
        assert found["instructions"] == ["reach the spot of light"]
        assert (found["action"]["size"], found["max_steps"]) == (2, 12)
        assert found["observation"] == {"cameras": {"render": [96, 96, 3]}, "state_size": 2}
        assert "two_joint_arm" in found["simulator"]
        assert "not checked" in found["varies"]
        replies = await acme.episode(3, arm)
        assert [len(reply.get("rewards", [])) for reply in replies] == [0, 5, 5, 2]
        assert replies[-1]["end"] == "time_limit"
        assert all(
            base64.b64decode(reply["observation"]["images"]["render"]["data"]).startswith(b"\x89PNG") for reply in replies
        )
        again = await acme.episode(3, arm)
        assert [reply["observation"] for reply in again] == [reply["observation"] for reply in replies]
        _, solved = await acme.episode(3, arm, AHEAD)
        assert (solved["end"], solved["successes"][-1], solved["rewards"][-1]) == ("success", True, 1.0)


async def test_what_nobody_serves_is_said_to_be_so(acme: Tenant) -> None:
    nobody = await acme.ask("env.open", environment=ARM)
    assert nobody["code"] == "not_found"
    assert "no worker of yours serves 'own' right now; start one first: nexus worker environment --env" in nobody["error"]
    async with own_worker(acme.url, acme.creds):
        assert "session" in await acme.ask("env.open", environment=ARM)
        other = await acme.ask("env.open", environment=ARM | {"task": "juggle"})
        assert other == {"code": "not_found", "error": "environment.task: own has no task 'juggle'; there are default"}
        unfit = await acme.ask("env.open", environment=ARM, action={"size": 3, "low": [0, 0, 0], "high": [1, 1, 1]})
        assert unfit == {"code": "contract", "error": "action.size: the environment has 2, the policy expects 3"}
    gone = await acme.ask("env.open", environment=ARM)
    assert gone["code"] == "not_found", "it has said goodbye"


async def test_it_holds_as_many_sessions_as_it_was_started_with(acme: Tenant) -> None:
    async with own_worker(acme.url, acme.creds):
        first = await acme.ask("env.open", environment=ARM)
        second = await acme.ask("env.open", environment=ARM)
        assert second["code"] == "unavailable"
        assert "holds 1 sessions, its limit" in second["error"]
        await acme.call(first["session"], "close")
        assert "session" in await acme.ask("env.open", environment=ARM)
        over = await acme.call(first["session"], "reset")
        assert over["code"] == "not_found"


async def test_a_robot_that_can_be_opened_once_is_waited_for_whatever_was_asked_for(acme: Tenant, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(
        "from two_joint_arm import Arm\ntaken = []\n\n\ndef make():\n    if taken:\n"
        "        raise OSError('the port is taken')\n    taken.append(1)\n    return Arm()\n"
    )
    path = {"PYTHONPATH": f"{tmp_path}:{ARM_FOLDER}"}
    async with own_worker(acme.url, acme.creds, "--sessions", "4", target="port:make", variables=path):
        first = await acme.ask("env.open", environment=ARM)
        second = await acme.ask("env.open", environment=ARM)
        assert second["code"] == "unavailable", "it costs an episode no attempt"
        assert "holds 1 sessions and could make no other: open: OSError: the port is taken" in second["error"]
        assert (await acme.call(first["session"], "reset"))["observation"]


async def test_what_is_larger_than_the_account_may_send_is_refused_at_once(acme: Tenant) -> None:
    async with acme_bus(acme) as bus:
        limit = bus.client.max_payload
        assert limit < 8 << 20, "the account's, not the server's"
        step = SessionStep(session="s", call=SessionCall(op="restore", state=bytes(limit)))
        with pytest.raises(Refused, match=f"env.call: larger than the {limit} bytes that may be sent"):
            await bus.request("api.env.call", step, timeout=60, tenant="acme")
        assert bus.up.is_set(), "it cost the connection nothing"


async def test_one_that_is_killed_in_a_call_is_missed_at_once_and_another_takes_over(acme: Tenant) -> None:
    async with own_worker(acme.url, acme.creds) as dying:
        held = (await acme.ask("env.open", environment=ARM))["session"]
        assert (await acme.call(held, "reset", seed=1))["observation"]
        dying.send_signal(signal.SIGKILL)
        await dying.wait()
        lost = await acme.step(held)
        assert lost["code"] == "environment_fault"
        assert "did not answer" in lost["error"]
        absent = await acme.ask("env.open", environment=ARM)
        assert absent["code"] == "unavailable"
        assert "no worker of the tenant's serves it right now" in absent["error"]
    async with own_worker(acme.url, acme.creds):
        assert len(await acme.episode(1, ARM | {"options": {"max_steps": 5}})) == 2


async def test_answers_find_their_way_whichever_gateway_they_come_to(
    acme: Tenant, gateway: Gateway, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    connection = await Bus.connect(server.url, name="gateway-1")
    second = Gateway(
        Context("gateway", "gateway-1", connection, None, asyncio.Event(), Pulse(), structlog.get_logger(), "host")
    )
    await second.open()
    forwarded: list[str] = []
    for bridge in (gateway.bridge, second.bridge):

        def resolve(tenant: str, answer: OwnAnswer, bridge: Bridge = bridge) -> Ack:
            assert answer.gateway == bridge.token
            forwarded.append(bridge.token)
            return Bridge._resolve(bridge, tenant, answer)

        monkeypatch.setattr(bridge, "_resolve", resolve)
    async with own_worker(acme.url, acme.creds):

        async def both() -> bool:  # who is asked for a session, and to whom an answer comes, is a matter of luck
            assert len(await acme.episode(1, ARM | {"options": {"max_steps": 20}})) == 5
            return set(forwarded) == {gateway.bridge.token, second.bridge.token}

        await eventually(both, within=60)
    await connection.close()


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("nowhere:make_env", 2, "No module named 'nowhere'; give module:callable, found from the working directory"),
        ("two_joint_arm:make", 2, "has no attribute 'make'"),
        ("two_joint_arm:np", 1, "is not a callable object"),
    ],
)
async def test_what_cannot_be_served_ends_the_worker_with_a_reason(acme: Tenant, target: str, code: int, said: str) -> None:
    async with own_worker(acme.url, acme.creds, target=target, serves=False) as process:
        assert await asyncio.wait_for(process.wait(), 60) == code
    log = acme.creds.with_suffix(".log").read_text()
    assert said in log
    assert "Traceback" not in log


async def test_a_name_that_is_none_is_refused_at_once(acme: Tenant) -> None:
    async with own_worker(acme.url, acme.creds, "--as", "Arm", serves=False) as process:
        assert await asyncio.wait_for(process.wait(), 60) == 2
    assert "--as: 'Arm' is not a name" in acme.creds.with_suffix(".log").read_text()


async def test_the_providers_credentials_serve_nobody(acme: Tenant, server: EmbeddedServer) -> None:
    ours = written(server, (server.authority / PROVIDER_FILE).read_text(), "provider.creds")
    async with own_worker(acme.url, ours, serves=False) as process:
        assert await asyncio.wait_for(process.wait(), 60) == 2
    assert "served for one tenant; give that tenant's credentials" in ours.with_suffix(".log").read_text()


async def test_a_worker_outlives_the_server(acme: Tenant, server: EmbeddedServer, eventually: Eventually) -> None:
    """Its connection comes back, and so do its offer and its ears."""
    async with own_worker(acme.url, acme.creds):
        server.stop()
        server.start()

        async def plays() -> bool:
            client = await raw(server, acme.creds.read_text())
            try:
                found = await Tenant(client, acme.url, acme.creds).ask("env.open", environment=ARM)
            except NatsError:  # the gateway's connection is not back yet
                return False
            finally:
                await client.close()
            return "session" in found

        await eventually(plays, within=60)
