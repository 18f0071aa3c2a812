"""A tenant's own environment worker is the one environment that is not ours: what it answers is looked at before it goes on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client as Raw
from tenancy import raw

from nexus_bus import bridge
from nexus_bus.bus import EmbeddedServer
from nexus_bus.tenants import tenants_of
from tests.isolation.environments import AMISS, CHUNK, PACKED, TASK, Robot, Said, observation, offer, reply
from workers.gateway import Gateway

ARM = {"id": "own-arm", "task": "door"}


class Tenant:
    """Plays by hand in what its robot offers."""

    def __init__(self, client: Raw, robot: Robot) -> None:
        self.client, self.robot = client, robot

    async def ask(self, name: str, content: Any) -> tuple[str, Any]:
        """Code and text of an error, or an empty code and the content."""
        answer = await self.client.request(name, msgspec.msgpack.encode(content), timeout=30, headers=PACKED)
        headers = answer.headers or {}
        if code := headers.get("Nexus-Error-Code"):
            return code, answer.data.decode()
        packed = headers["Content-Type"] == PACKED["Content-Type"]
        return "", msgspec.msgpack.decode(answer.data) if packed else msgspec.json.decode(answer.data)

    async def open(self, **fields: Any) -> str:
        code, lease = await self.ask("env.open", {"environment": ARM} | fields)
        assert not code, lease
        return lease["session"]

    async def call(self, session: str, op: str, **call: Any) -> tuple[str, Any]:
        return await self.ask("env.call", {"session": session, "call": {"op": op, **call}})

    async def step(self, session: str) -> tuple[str, Any]:
        return await self.call(session, "step", actions=CHUNK)

    def answers(self, **fields: Any) -> None:
        """What the robot replies from now on, in place of what would be honest."""
        self.robot.answer = lambda ask: self.robot.honest(ask) if "open" in ask else reply(ask["call"], **fields)


@pytest.fixture
async def acme(server: EmbeddedServer, gateway: Gateway) -> AsyncIterator[Tenant]:
    """A tenant whose robot stands."""
    async with tenants_of(server.url, server.authority) as operator:
        creds = (await operator.add("acme")).creds
    client, hand = await raw(server, creds), await raw(server, creds)
    robot = Robot(hand)
    await robot.listen()
    yield Tenant(client, robot)
    await client.close()
    await hand.close()


async def test_an_honest_answer_goes_on_as_it_is(acme: Tenant) -> None:
    session = await acme.open()
    assert (await acme.call(session, "reset"))[1]["observation"] == observation()
    code, stepped = await acme.step(session)
    assert (code, stepped["rewards"], stepped["successes"]) == ("", [0.0] * 4, [False] * 4)
    acme.answers(end="success", terminated=True, rewards=[0.0, 1.0], successes=[False, True])
    assert (await acme.step(session))[1]["end"] == "success", "fewer are done where an episode ends"
    acme.answers(image={"encoding": "raw", "shape": [8, 8, 3], "data": bytes(192)})
    assert (await acme.call(session, "render"))[1]["image"]["shape"] == [8, 8, 3]


@pytest.mark.parametrize(("fields", "said"), AMISS.values(), ids=AMISS)
async def test_what_is_not_as_offered_is_a_fault_that_says_what(acme: Tenant, fields: Said, said: str) -> None:
    """A fault costs the episode a retry; neither inference nor training ever sees it."""
    session = await acme.open()
    acme.answers(**fields)
    code, text = await acme.step(session)
    assert code == "environment_fault"
    assert "the tenant's worker answered " in text
    assert said in text
    acme.answers()
    assert (await acme.step(session))[0] == "", "and leaves no trace"


async def test_an_episode_that_begins_at_its_end_is_a_fault(acme: Tenant) -> None:
    session = await acme.open()
    for fields in ({"terminated": True, "end": "success"}, {"truncated": True, "end": "time_limit"}):
        acme.answers(**fields)
        code, text = await acme.call(session, "reset")
        assert code == "environment_fault"
        assert "after a reset" in text


async def test_an_episode_that_does_not_end_where_its_task_does_is_a_fault(acme: Tenant) -> None:
    session = await acme.open(environment=ARM | {"options": {"max_steps": 8}})
    await acme.call(session, "reset")
    assert (await acme.step(session))[0] == ""
    assert await acme.step(session) == (
        "environment_fault", "the tenant's worker goes on after 8 steps; its episodes have 8",
    )  # fmt: skip
    await acme.call(session, "reset")
    assert (await acme.step(session))[0] == ""
    acme.answers(end="time_limit", truncated=True)
    assert (await acme.step(session))[1]["end"] == "time_limit"


async def test_an_episode_larger_than_a_record_may_be_is_a_fault(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "MAX_BLOB_MESSAGE", 3 * 192)
    session = await acme.open()
    await acme.call(session, "reset")
    for _ in range(2):
        assert (await acme.step(session))[0] == ""
    code, text = await acme.step(session)
    assert code == "environment_fault"
    assert "768 bytes of pictures; at most 576: make them smaller, send jpeg, or end sooner" in text
    assert (await acme.call(session, "reset"))[0] == "", "the next one begins anew"


async def test_an_episode_that_unfolds_to_more_than_a_trainer_holds_is_a_fault(
    acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes its pictures have: those of one colour have hardly any."""
    monkeypatch.setattr(bridge, "UNIT", 3 * 64)
    session = await acme.open()
    await acme.call(session, "reset")
    for _ in range(2):
        assert (await acme.step(session))[0] == ""
    code, text = await acme.step(session)
    assert code == "environment_fault"
    assert "shows 256 pixels; at most 192: make its pictures smaller, or end sooner" in text
    assert (await acme.call(session, "reset"))[0] == "", "the next one begins anew"


async def test_so_many_sessions_of_one_tenant_are_kept_until_some_are_closed(
    acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "SESSIONS", 3)
    opened = await asyncio.gather(*(acme.ask("env.open", {"environment": ARM}) for _ in range(9)))
    held = [content["session"] for code, content in opened if not code]
    assert len(held) == 3, "whoever opens many at once gets no more"
    assert {code for code, _ in opened} == {"", "unavailable"}
    assert any("3 of the tenant's own are open, its limit" in content for code, content in opened if code)
    await acme.call(held[0], "close")
    await acme.open()


async def test_a_worker_that_left_makes_room_and_one_that_never_was_takes_none(
    acme: Tenant, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "OFFERS", 3)
    for number in range(9):
        assert (await acme.ask("env.offer", offer(worker=f"ghost-{number}", sessions=0)))[0] == ""
    assert await gateway.bridge.kv.keys("acme.", deleted=True) == ["acme.own-arm.robot"]
    for name, code in (("a", ""), ("b", ""), ("a", ""), ("c", "unavailable")):
        assert (await acme.ask("env.offer", offer(worker=name)))[0] == code
    await acme.ask("env.offer", offer(worker="b", sessions=0))
    code, text = await acme.ask("env.offer", offer(worker="c"))
    assert code == "unavailable"
    assert "3 workers of yours serve environments, or have just left" in text
    await gateway.bus.drop("KV_offers", "$KV.offers.acme.own-arm.b")  # as time does
    assert (await acme.ask("env.offer", offer(worker="c")))[0] == ""


async def test_two_that_differ_under_one_name_are_not_both_served(acme: Tenant) -> None:
    """A job is planned for one of them, and its episodes would go to either."""
    wider = TASK | {"action": {"size": 3, "low": [0.0] * 3, "high": [1.0] * 3}}
    for tasks, said in (({"door": wider}, "tasks.door.action: "), ({"lid": TASK}, "tasks: ['lid'] here, ['door'] there")):
        code, text = await acme.ask("env.offer", offer(worker="other", tasks=tasks))
        assert code == "unavailable", "the other one may have just left"
        assert said in text
        assert "robot serves own-arm as well" in text
        assert "(--as NAME)" in text
    assert (await acme.ask("env.offer", offer(worker="other")))[0] == "", "of the same there may be many"
    assert (await acme.ask("env.offer", offer(worker="third", environment="own-lid", tasks={"lid": TASK})))[0] == ""
    await acme.ask("env.offer", offer(worker="other", sessions=0))
    assert (await acme.ask("env.offer", offer(tasks={"door": wider})))[0] == "", "and one may come back as another"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tasks": {"door\r\nNats-Rollup: all": TASK}}, "tasks: 'door\\r\\nNats-Rollup: all'; a name is made of what can be"),
        ({"simulator": "arm\x1b[2J"}, "simulator: 'arm\\x1b[2J'; only what can be printed, in one line"),
        ({"success": "it\nis"}, "success: 'it\\nis'; only"),
    ],
)
async def test_texts_that_would_do_something_where_they_are_shown_are_refused(acme: Tenant, fields: Said, said: str) -> None:
    code, text = await acme.ask("env.offer", offer(**fields))
    assert code == "bad_message"
    assert said in text


async def test_pictures_that_are_too_many_together_are_refused(acme: Tenant) -> None:
    cameras = {str(n): [2048, 2048, 3] for n in range(2)}
    task = TASK | {"observation": {"cameras": cameras, "state_size": 2}}
    code, text = await acme.ask("env.offer", offer(tasks={"door": task}))
    assert code == "bad_message"
    assert "tasks.door.observation.cameras: 8388608 pixels in all; at most 4194304" in text


async def test_who_is_asked_without_an_offer_is_said_to_be_away(acme: Tenant, gateway: Gateway) -> None:
    """As for a robot that is away: whoever plays tries again later."""
    known = (await acme.ask("env.describe", {"environment": ARM}))[1]
    await acme.ask("env.offer", offer(sessions=0))
    request = {"tenant": "acme", "job": "pick", "environment": ARM, "action": known["action"]}
    request |= {"observation": known["observation"]}
    answer = await gateway.bus.client.request("env.own.acme", msgspec.json.encode(request), timeout=30)
    assert (answer.headers or {})["Nexus-Error-Code"] == "unavailable"
    assert b"no worker of the tenant's serves it right now (it is not offered)" in answer.data
