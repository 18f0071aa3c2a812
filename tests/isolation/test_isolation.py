"""Nobody else's: every attack of a tenant with valid credentials gets nothing but an error that tells it nothing."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
import pytest_asyncio

from nexus_bus.bus import EmbeddedServer
from nexus_bus.bus.authority import PROVIDER_FILE
from schemas.subjects import CALLS
from tests.conftest import free_port
from tests.isolation.attack import ATTACKS, Attack
from tests.isolation.attacker import Attacker, attacker
from tests.isolation.attacks import carry_out
from tests.isolation.environments import PACKED, TASK
from tests.isolation.siege import (
    FILM,
    INTRUDER,
    JOB,
    MARK,
    OWN,
    OWN_JOB,
    OWN_POLICY,
    POLICY,
    VICTIM,
    Siege,
    besieged,
    observation,
    spec,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

Means = Callable[[Siege, Attacker], Awaitable[object]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def siege(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Siege]:
    """One field for all attacks: what an attack leaves behind, the next one finds."""
    server = EmbeddedServer(tmp_path_factory.mktemp("isolation") / "nats", port=free_port()).start()
    try:
        async with besieged(server.url, server.authority) as siege:
            yield siege
    finally:
        server.stop()
        shutil.rmtree(server.directory)


@pytest.mark.parametrize("fenced", [True, False], ids=["issued", "unfenced"])
@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: one.name)
async def test_nothing_is_got_by(siege: Siege, one: Attack, fenced: bool) -> None:
    """With the issued key, whose permissions are a fence; and with one that has none, so that the accounts alone must hold."""
    assert await carry_out(siege, one, fenced=fenced) is None, one.tries


async def test_every_attack_has_a_name_of_its_own() -> None:
    names = [one.name for one in ATTACKS]
    assert len(names) == len(set(names)) >= 100


# What a tenant may do works by the same means, so that no attack fails because everything does


async def test_every_call_is_answered_to_its_tenant(siege: Siege) -> None:
    async with attacker(siege.url, siege.creds(INTRUDER), True) as tenant:
        assert (await tenant.call("job.get", {"job": OWN_JOB})).content["job"]["phase"] == "data"
        assert [one["plan"]["spec"]["name"] for one in (await tenant.call("job.list", {})).content["jobs"]] == [OWN_JOB]
        version = (await tenant.call("policy.get", {"policy": OWN_POLICY})).content["policy"]
        assert [one["id"] for one in (await tenant.call("policy.list", {})).content["policies"]] == [OWN_POLICY]
        read = await tenant.pack("policy.read", {"policy": OWN_POLICY, "sha256": version["weights"]["sha256"]})
        assert read.content["data"] == b"minnow's weights"
        asked = {"id": "7", "job": OWN_JOB, "policy": OWN_POLICY, "observation": observation()}
        acted = (await tenant.pack("infer.request", asked)).content
        assert (acted["id"], acted["policy"], acted["feature_id"]) == ("7", OWN_POLICY, f"{INTRUDER}/{OWN_JOB}")
        assert (await tenant.call("event.read", {"job": OWN_JOB})).content["events"][0]["type"] == "job.accepted"
        assert (await tenant.call("audit.read", {})).content["audit"]
        assert (await tenant.call("account.show", {})).content["tenant"] == INTRUDER
        assert {call.local for call in CALLS} >= {"policy.state", "usage.read", "policy.pin", "policy.upload", "policy.import"}


async def test_a_job_goes_its_way_by_requests_and_events(siege: Siege) -> None:
    async with attacker(siege.url, siege.creds(INTRUDER), True) as tenant:
        await tenant.listen("event.>")
        accepted = await tenant.outcome(await tenant.call("job.submit", spec("errand"), {"Nats-Msg-Id": "errand"}))
        assert (accepted["type"], accepted["job"]) == ("job.accepted", "errand")
        assert (await tenant.call("job.submit", spec("errand"), {"Nats-Msg-Id": "errand"})).content["duplicate"]
        assert not (await tenant.call("job.cancel", {"job": "errand"})).error
        await siege.forget(INTRUDER, "errand")
        own = siege.keys[INTRUDER].record.keys[0].key
        entries, page = [], {"audit": [{}]}
        while page.get("audit"):  # the attacks have filled more than one
            page = (await tenant.call("audit.read", {"after": page.get("next", 0)})).content
            entries += page.get("audit", [])
        assert {one.get("key", "") for one in entries if one.get("job") == "errand" and one["outcome"] == "asked"} == {own}


async def test_the_victim_has_what_is_attacked(siege: Siege) -> None:
    victim = siege.victim
    await siege.tidy()
    for name, content in (
        ("job.get", {"job": JOB}), ("policy.get", {"policy": POLICY}), ("policy.state", {"job": JOB}),
        ("usage.read", {}), ("audit.read", {}), ("event.read", {}), ("eval.read", {}), ("env.describe", {"environment": OWN}),
    ):  # fmt: skip
        assert MARK.encode() in (await victim.call(name, content)).data, name
    assert (await victim.pack("eval.film", {"job": JOB, "film": FILM})).content["film"]["data"] == MARK.encode()
    await siege.played()
    for part in ("weights", "adapter", "state"):
        read = await victim.pack("policy.read", {"policy": POLICY, "sha256": siege.refs[part].sha256})
        assert read.content["data"] == f"{MARK} {part}".encode()
    assert siege.open_request is not None
    assert not siege.open_request.done()


# The watchmen see what there is to see: the same attacks with the provider's own key


async def _listens(siege: Siege, thief: Attacker) -> None:
    await thief.listen("event.>")
    await siege.stir()


async def _reads(_siege: Siege, thief: Attacker) -> object:
    return await thief.ask(f"$JS.API.DIRECT.GET.KV_registry.$KV.registry.job.{VICTIM}.{JOB}", within=60)


async def _asks_as_the_victim(_siege: Siege, thief: Attacker) -> object:
    return await thief.call(f"tenant.{VICTIM}.job.get", {"job": JOB})


async def _pins(siege: Siege, thief: Attacker) -> None:
    await thief.send(
        f"policy.pin.{VICTIM}", json.dumps({"policy": POLICY, "pinned": False}).encode(), headers={"Nats-Msg-Id": "forged"}
    )
    async with asyncio.timeout(60):
        while (await siege.property())["keys"] == siege.baseline["keys"]:
            await asyncio.sleep(0.01)


async def _feeds(_siege: Siege, thief: Attacker) -> object:
    return await thief.ask(f"train.record.{VICTIM}.{JOB}", msgspec.msgpack.encode({}), within=60)


async def _takes(_siege: Siege, thief: Attacker) -> object:
    return await thief.ask("$JS.API.STREAM.PURGE.UPLOADS", within=60)


async def _plays(siege: Siege, thief: Attacker) -> object:
    for session in siege.sessions:
        await thief.ask(f"env.session.{VICTIM}.{session}", msgspec.msgpack.encode({"op": "save"}), PACKED, within=60)
    siege.plays += 1
    return None


async def _asks_the_robot(siege: Siege, thief: Attacker) -> None:
    before = len(siege.robot.asks)
    await thief.send(f"ask.{VICTIM}.call.robot", msgspec.msgpack.encode({"id": "x", "gateway": "g", "call": {"op": "save"}}))
    async with asyncio.timeout(60):
        while len(siege.robot.asks) == before:
            await asyncio.sleep(0.01)


async def _offers(_siege: Siege, thief: Attacker) -> object:
    forged = {"environment": "own", "worker": "mine", "sessions": 1, "tasks": {}, "simulator": "mine"}
    return await thief.ask(f"$KV.offers.{VICTIM}.own.mine", forged | {"tasks": {"door": TASK}}, within=60)


async def _closes(siege: Siege, thief: Attacker) -> object:
    on = f"env.session.{VICTIM}.{siege.sessions[0]}"
    return await thief.ask(on, msgspec.msgpack.encode({"op": "close"}), PACKED, within=60)


async def _makes_a_consumer(_siege: Siege, thief: Attacker) -> object:
    config = {
        "stream_name": "TRAINING",
        "config": {"durable_name": "thief", "ack_policy": "explicit", "filter_subject": "train.x"},
    }
    return await thief.ask("$JS.API.CONSUMER.CREATE.TRAINING.thief.train.x", config, within=60)


@pytest.mark.parametrize(
    ("means", "sign"),
    [
        (_listens, "received"), (_reads, "received"), (_asks_as_the_victim, "received"), (_feeds, "changed: [('messages'"),
        (_makes_a_consumer, "changed: [('consumers'"), (_pins, "changed"), (_takes, "changed: [('messages'"),
        (_plays, "received"), (_asks_the_robot, "changed: [('asks'"), (_offers, "changed: [('offers'"),
        (_closes, "the victim's sessions are gone"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
async def test_the_watchmen_see(siege: Siege, means: Means, sign: str) -> None:
    creds = (siege.authority / PROVIDER_FILE).read_text()
    await siege.tidy()
    async with attacker(siege.url, creds, True) as thief:
        await means(siege, thief)
        assert (await siege.verdict(thief, None) or "").startswith(sign)
    await siege.bus.ask("$JS.API.CONSUMER.DELETE.TRAINING.thief")
    await siege.bus.drop("KV_offers", f"$KV.offers.{VICTIM}.own.mine")
    await siege.rebase()
