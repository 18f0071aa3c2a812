"""Attacks on environments of others: sessions, own workers, what these are asked and answer, and what evaluations kept."""

import asyncio
import json
import uuid
from typing import Any

import msgspec
from nats.aio.msg import Msg

from tests.isolation.attack import attack
from tests.isolation.attacker import Attacker
from tests.isolation.comparison import both, differ, ordered
from tests.isolation.environments import CHUNK, PACKED, Robot, Said, offer
from tests.isolation.siege import (
    ABSENT,
    FILM,
    INTRUDER,
    JOB,
    MARK,
    OWN,
    SCENE,
    TENANT_CALLS,
    VICTIM,
    Siege,
    spec,
)

OPS: tuple[Said, ...] = (
    {"op": "save"}, {"op": "reset", "seed": 1}, {"op": "step", "actions": CHUNK}, {"op": "render"},
    {"op": "restore", "state": b"poison"}, {"op": "close"},
)  # fmt: skip
NO_NAMES = ("*", ">", f"{VICTIM}.x", f"../{VICTIM}", "", "a b", "x\n", "\x00", "x" * 64, "X")


def _named(environment: str) -> dict[str, Any]:
    return {"id": environment, "task": "door"}


@attack("Calls on the victim's sessions, by their ids: read, played, poisoned, closed.")
async def session_of_another(siege: Siege, intruder: Attacker) -> str | None:
    absent = uuid.uuid4().hex
    calls = [
        both(intruder, "env.call", {"session": one, "call": call}, {"session": absent, "call": call}, packed=True,
             names=(one, absent))
        for one in siege.sessions for call in OPS[:4]
    ]  # fmt: skip
    evidence = next(filter(None, await asyncio.gather(*calls)), None)
    await siege.played()
    worst = [
        both(intruder, "env.call", {"session": one, "call": call}, {"session": absent, "call": call}, packed=True,
             names=(one, absent))
        for one in siege.sessions for call in OPS[4:]
    ]  # fmt: skip
    return evidence or next(filter(None, await asyncio.gather(*worst)), None)


@attack("Calls on sessions by wildcards, by paths and by names that are none.")
async def sessions_by_no_name(siege: Siege, intruder: Attacker) -> str | None:
    for name in (*NO_NAMES, f"{VICTIM}.{siege.sessions[0]}", f"*.{siege.sessions[0]}", f"{siege.sessions[0]}.>"):
        answer = await intruder.pack("env.call", {"session": name, "call": {"op": "save"}})
        if answer.error != "bad_message":
            return f"{name!r}: {answer}"
    return None


@attack("What the victim's own environment is, by its name: described, opened, trained for.")
async def environment_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    there, absent = _named("own-arm"), _named("own-leg")
    for name in ("env.describe", "env.open"):
        answers = [await intruder.call(name, {"environment": one}) for one in (there, absent)]
        if evidence := differ(answers[0], answers[1], "own-arm", "own-leg"):
            return evidence
    jobs = [spec("arms", kind="rl", environment=one, data=None, algorithm=None) for one in (there, absent)]
    return await ordered(intruder, "job.submit", jobs[0], jobs[1], "own-arm", "own-leg")


@attack("The victim's own environment by wildcards, by its tenant's name, by its task alone.")
async def environment_by_no_name(_siege: Siege, intruder: Attacker) -> str | None:
    for name in (f"{VICTIM}.own-arm", f"own-arm.{VICTIM}", "own-*", "own.>", "*", "own-arm\n", "OWN-ARM", "own-" + "x" * 5000):
        for call in ("env.describe", "env.open"):
            answer = await intruder.call(call, {"environment": _named(name)})
            if answer.error not in ("not_found", "bad_message", "bad_job"):
                return f"{call} {name[:40]!r}: {answer}"
    return None


@attack("What the victim's own worker is asked: by the import, by names in its place, in a queue group of workers.")
async def asks_overheard(siege: Siege, intruder: Attacker) -> str | None:
    for on in ("ask.>", "ask.*.*", "ask.call.robot", f"ask.{VICTIM}.>", "ask.*.call.robot", f"ask.{VICTIM}.call.robot"):
        for queue in ("", "environment", "gateway"):
            await intruder.listen(on, queue)
    await siege.played()
    await siege.served()
    await intruder.client.flush()
    return f"heard {intruder.heard[0].subject}" if intruder.heard else None


@attack("The victim's offer made again: under its names, under names that break out, with its tenant's name in it.")
async def offer_of_another(siege: Siege, intruder: Attacker) -> str | None:
    for wrong in NO_NAMES:
        for field in ("worker", "environment"):
            if not (answer := await intruder.call("env.offer", offer(**{field: wrong}))).error:
                return f"{field} {wrong!r}: {answer}"
    robot = Robot(intruder.client, tenant=VICTIM, simulator="mine")
    await robot.listen()
    for queue in ("environment", "gateway"):
        await intruder.listen("ask.open.own-arm", queue)
    lease = await siege.victim.call("env.open", {"environment": OWN})
    siege.plays += 1
    known = await siege.victim.call("env.describe", {"environment": OWN})
    await siege.victim.pack("env.call", {"session": lease.content["session"], "call": {"op": "close"}})
    siege.plays += 1
    await siege.played()
    if heard := [msg.subject for msg in intruder.heard if msg.subject.startswith("ask.")] or robot.asks:
        return f"asked in the victim's place: {heard}"
    return None if known.content["simulator"] == MARK else f"the victim is told of {known.content['simulator']!r}"


@attack("The victim's worker sent away, and its offer written over, in the bucket itself.")
async def offer_of_another_withdrawn(siege: Siege, intruder: Attacker) -> str | None:
    await intruder.call("env.offer", offer(sessions=0))
    key = f"$KV.offers.{VICTIM}.own-arm.robot"
    await intruder.send(key, json.dumps(offer(simulator="mine")).encode())
    await intruder.send(key, headers={"KV-Operation": "PURGE", "Nats-Rollup": "sub"})
    await siege.played()
    return await intruder.any_of(
        f"$JS.API.DIRECT.GET.KV_offers.{key}", "$JS.API.STREAM.INFO.KV_offers", "$JS.API.STREAM.PURGE.KV_offers",
        "$JS.API.CONSUMER.CREATE.KV_offers",
    )  # fmt: skip


@attack("An answer in the victim's place, by the id of the ask and the token of its gateway.")
async def answer_for_another(siege: Siege, intruder: Attacker) -> str | None:
    robot, came = siege.robot, asyncio.Event()

    def hold(_: Said) -> None:
        came.set()

    robot.answer = hold
    siege.plays += 1
    waiting = asyncio.create_task(siege.victim.pack("env.call", {"session": siege.sessions[1], "call": {"op": "save"}}))
    try:
        async with asyncio.timeout(60):
            await came.wait()
        ask, absent, evidence = robot.asks[-1], uuid.uuid4().hex, None
        for gateway in (ask["gateway"], "g-0123456789abcdef", "gateway-0", INTRUDER):
            answers = [
                await intruder.pack("env.answer", {"id": name, "gateway": gateway, "reply": {"state": b"forged"}})
                for name in (ask["id"], absent)
            ]
            evidence = evidence or differ(answers[0], answers[1], ask["id"], absent)
            await intruder.pack("env.answer", {"id": ask["id"], "gateway": gateway, "error": "x", "tenant": VICTIM})
        body = msgspec.msgpack.encode({"tenant": VICTIM, "answer": {"id": ask["id"], "gateway": ask["gateway"], "error": "x"}})
        for on in (f"env.answered.{ask['gateway']}", ask["inbox"], f"tenant.{VICTIM}.env.answer"):
            await intruder.send(on, body, headers=PACKED)
        await siege.served()
        if waiting.done():
            evidence = evidence or f"the victim was answered: {await waiting}"
    finally:
        robot.answer = robot.honest
        await robot.say(robot.asks[-1], robot.honest(robot.asks[-1]))
        answer = await waiting
    return evidence or (None if answer.content["state"] == MARK.encode() else f"the victim got {answer}")


@attack("Tokens of gateways that are none.")
async def answers_to_no_gateway(_siege: Siege, intruder: Attacker) -> str | None:
    for gateway in NO_NAMES:
        answer = await intruder.pack("env.answer", {"id": "x", "gateway": gateway})
        if answer.error != "bad_message":
            return f"{gateway!r}: {answer}"
    return None


@attack("The victim's worker and sessions asked directly, on the subjects that the service uses.")
async def asked_directly(siege: Siege, intruder: Attacker) -> str | None:
    ask = {"id": "x", "gateway": siege.gateway.bridge.token, "session": siege.sessions[1], "call": {"op": "save"}}
    subjects = [f"ask.{tenant}{rest}" for tenant in (f"{VICTIM}.", "") for rest in ("call.robot", "open.own-arm")]
    subjects += [f"env.session.{VICTIM}.{one}" for one in siege.sessions]
    subjects += [
        f"env.own.{VICTIM}",
        f"env.open.{VICTIM}",
        f"rollout.own.{VICTIM}.own.{JOB}",
        f"rollout.own.{INTRUDER}.own.{JOB}",
    ]
    for body in (ask, {"op": "save"}):
        if evidence := await intruder.any_of(*subjects, payload=msgspec.msgpack.encode(body), headers=PACKED):
            return evidence
    return None


@attack("An answer in the inbox that an ask of its own names, where the gateway listens.")
async def answers_in_an_asks_inbox(siege: Siege, intruder: Attacker) -> str | None:
    robot, came = Robot(intruder.client), list[bytes]()
    await robot.listen()

    async def arrived(msg: Msg) -> None:
        came.append(msg.data)

    lease = await intruder.call("env.open", {"environment": OWN})
    inbox = robot.asks[-1]["inbox"]
    listening = await siege.bus.listen(f"{inbox.rpartition('.')[0]}.*", arrived)
    await intruder.send(inbox, b"forged")
    await intruder.send("env.describe", json.dumps({"environment": OWN}).encode(), inbox)
    await intruder.call("account.show", {})
    await siege.served()
    await listening.stop()
    await intruder.pack("env.call", {"session": lease.content["session"], "call": {"op": "close"}})
    return "it arrived" if b"forged" in came or any(b"arm 1" in one for one in came) else None


@attack("Calls under the header by which the service asks whether somebody is there.")
async def probes(siege: Siege, intruder: Attacker) -> str | None:
    before = siege.gateway.bus.client.stats["reconnects"]
    for reply in ("", "account.show", f"_INBOX.{INTRUDER}", "env.answer"):
        for name in ("env.open", "env.call", "env.answer", "account.show"):
            await intruder.send(name, b"{}", reply, {"Nexus-Probe": "1"})
    await intruder.call("account.show", {})
    await siege.served()
    return "the gateway was cut off" if siege.gateway.bus.client.stats["reconnects"] != before else None


# Evaluations


@attack("Episodes and films of the victim's evaluation, by its job's name, and through wildcards.")
async def evaluation_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    if evidence := await both(intruder, "eval.read", {"job": JOB}, {"job": ABSENT}):
        return evidence
    there, absent = {"job": JOB, "film": FILM}, {"job": ABSENT, "film": FILM}
    if evidence := await both(intruder, "eval.film", there, absent, packed=True):
        return evidence
    for name in (*NO_NAMES, f"{VICTIM}.{JOB}", f"*.{JOB}", f"{JOB}.>"):
        found = [await intruder.pack("eval.film", {"job": JOB, "film": FILM} | {field: name}) for field in ("job", "film")]
        if name:
            found.append(await intruder.call("eval.read", {"job": name, "since": "1970-01-01T00:00:00Z"}))
        if wrong := [one for one in found if one.error != "bad_message" and one.content.get("film", one.content)]:
            return f"{name!r}: {wrong[0]}"
    return None


@attack("Episodes read from every place in the stream, and all of them at once.")
async def episodes_read_through(_siege: Siege, intruder: Attacker) -> str | None:
    for after in (0, 1, 2, 2**40, 2**53):
        answer = await intruder.call("eval.read", {"after": after, "limit": 200})
        if answer.content.get("episodes"):
            return f"{answer.data[:200]!r}"
    return None


@attack("Episodes of the victim's waited for, by the hundred.")
async def episodes_waited_for(siege: Siege, intruder: Attacker) -> str | None:
    wire, wanted = await intruder.wire(), 2 * TENANT_CALLS
    body = json.dumps({"job": JOB, "wait_s": 0.3}).encode()
    line = f"PUB eval.read _INBOX.wait {len(body)}\r\n".encode() + body + b"\r\n"
    await wire.say(b"SUB _INBOX.wait 1\r\n" + line * wanted)
    read, lease = await asyncio.gather(
        siege.victim.call("eval.read", {"job": JOB}),
        siege.victim.call("env.open", {"environment": {"id": SCENE.id, "task": SCENE.task}}),
    )
    await wire.until(lambda: wire.said.count(b"MSG _INBOX.wait 1 ") >= wanted)
    if read.error or lease.error:
        return f"the victim is refused: {read} {lease}"
    await siege.victim.pack("env.call", {"session": lease.content["session"], "call": {"op": "close"}})
    return None if wire.said.count(b"calls of yours are under way") else "all of them were taken"
