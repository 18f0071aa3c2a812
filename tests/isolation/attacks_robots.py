"""Attacks with environments: floods of offers, of sessions and of asks without an answer; sizes, and answers, that are lies."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from nexus_bus.bridge import OFFERS
from schemas.environment import OwnOffer
from tests.isolation.attack import attack
from tests.isolation.attacker import Answer, Attacker, attacker
from tests.isolation.environments import AMISS, CHUNK, INF, NAN, PACKED, TASK, Robot, Said, offer, reply
from tests.isolation.siege import INTRUDER, OWN, SCENE, SESSIONS, SIMULATORS, VICTIM, Siege

FLOOD = 120
BESIDE = 8  # calls of one tenant that are worked on side by side
SIMULATED = {"id": SCENE.id, "task": SCENE.task}


async def _flood(intruder: Attacker, name: str, contents: Sequence[Any]) -> list[Answer]:
    """Calls, many at once, each answered."""
    answers = list[Answer]()
    for at in range(0, len(contents), 16):  # of its subscriptions, a few are taken
        answers += await asyncio.gather(*(intruder.call(name, one) for one in contents[at : at + 16]))
    return answers


async def _offered(siege: Siege, *, deleted: bool = False) -> int:
    return len(await siege.bus.kv("offers").keys(f"{INTRUDER}.", deleted=deleted))


async def _victim_opens(siege: Siege) -> str | None:
    """The victim finds room, in the provider's simulators and in its own; evidence if not."""
    for environment in (SIMULATED, OWN):
        lease = await siege.victim.call("env.open", {"environment": environment})
        if lease.error:
            return f"the victim finds no room: {lease}"
        await siege.victim.pack("env.call", {"session": lease.content["session"], "call": {"op": "close"}})
    siege.plays += 2
    return None


async def _closed(intruder: Attacker, leases: Sequence[Answer]) -> None:
    for lease in leases:
        await intruder.pack("env.call", {"session": lease.content["session"], "call": {"op": "close"}})


@attack("Offers of hundreds of workers, whose names are made up.")
async def offers_by_the_hundred(siege: Siege, intruder: Attacker) -> str | None:
    flood = asyncio.create_task(_flood(intruder, "env.offer", [offer(worker=f"w-{n}") for n in range(FLOOD)]))
    evidence = await _victim_opens(siege)
    await siege.robot.offer()
    await flood
    kept = await _offered(siege)
    return evidence or (f"{kept} are kept" if kept >= OFFERS + BESIDE else None)


@attack("Offers made and withdrawn, and all of them made again once they are known.")
async def offers_of_known_names(siege: Siege, intruder: Attacker) -> str | None:
    names = [f"w-{n}" for n in range(2 * OFFERS)]
    for name in names:
        await intruder.call("env.offer", offer(worker=name))
        await intruder.call("env.offer", offer(worker=name, sessions=0))
    await _flood(intruder, "env.offer", [offer(worker=name) for name in names])
    kept = await _offered(siege)
    return f"{kept} are kept" if kept >= OFFERS + BESIDE else None


@attack("Goodbyes of hundreds of workers that never were.")
async def goodbyes_of_nobody(siege: Siege, intruder: Attacker) -> str | None:
    await _flood(intruder, "env.offer", [offer(worker=f"w-{n}", sessions=0) for n in range(FLOOD)])
    kept = await _offered(siege, deleted=True)
    return f"{kept} are remembered" if kept else None


def _task(action: Said | None = None, seen: Said | None = None, **fields: Any) -> Said:
    task = TASK | {"action": TASK["action"] | (action or {}), "observation": TASK["observation"] | (seen or {})} | fields
    return offer(tasks={"door": task})


@attack("Offers that would cost memory, or break whoever reads them: sizes, bounds, cameras, tables, names.")
async def offers_of_impossible_things(siege: Siege, intruder: Attacker) -> str | None:
    offers = [
        _task({"size": 2**31 - 1}), _task({"size": 2**31}), _task({"size": 0}), _task({"size": -1}), _task({"size": 2**70}),
        _task({"size": 300, "low": [0.0] * 300, "high": [1.0] * 300}), _task({"low": [0.0] * 2000}), _task({"low": []}),
        _task({"low": [NAN, 0.0]}), _task({"high": [INF, 1.0]}), _task({"low": [-INF, 0.0]}), _task({"low": [2.0, 0.0]}),
        _task({"low": [-1e300, 0.0]}), _task({"high": [3e38, 1.0]}), _task({"low": [None, None]}),
        _task(None, {"cameras": {"wide": [1_000_000, 1, 3]}}), _task(None, {"cameras": {"wide": [2**31 - 1, 2**31 - 1, 3]}}),
        _task(None, {"cameras": {f"c{n}": [2048, 2048, 3] for n in range(8)}}), _task(None, {"cameras": {}}),
        _task(None, {"cameras": {"wide": [8, 8, 4]}}), _task(None, {"cameras": {"wide": [0, 0, 3]}}),
        _task(None, {"cameras": {str(n): [8, 8, 3] for n in range(500)}}), _task(None, {"cameras": {"x" * 9000: [8, 8, 3]}}),
        _task(None, {"cameras": {"a\r\nb": [8, 8, 3]}}), _task(None, {"state_size": 2**40}), _task(None, {"state_size": -1}),
        _task(max_steps=0), _task(max_steps=2**63), _task(max_steps=100_001), _task(instruction="x" * 5000),
        offer(tasks={}), offer(tasks={str(n): TASK for n in range(257)}), offer(tasks={"x" * 5000: TASK}),
        offer(tasks={"door\r\nNats-Rollup: all": TASK}), offer(tasks={"door\x1b[2J": TASK}), offer(simulator="x" * 5000),
        offer(simulator="\x1b]0;mine\x07"), offer(success="a\nb"), offer(sessions=65), offer(sessions=-1),
        offer(sessions=2**63),
        offer(environment="tabletop"), offer(environment="own-"), offer(environment="own-a.b"), offer(worker="w" * 64),
    ]  # fmt: skip
    for one in offers:
        for body, headers in ((json.dumps(one).encode(), {}), (_packed(one), PACKED)):
            answer = await intruder.call("env.offer", body, headers)
            if answer.error != "bad_message":
                return f"{str(one)[:300]}: {answer}"
    await siege.served()
    kept = await _offered(siege)
    return f"{kept} are kept" if kept else None


def _packed(content: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(content)
    except (OverflowError, msgspec.MsgspecError):  # it holds no number as large
        return b"\xc1"


@attack("Leases without an end, and of times that are none.")
async def leases_without_an_end(_siege: Siege, intruder: Attacker) -> str | None:
    for lease in (0, -1, 3601, 2**63, 1e308, NAN, INF, -INF, "60", None, [60]):
        content = {"environment": SIMULATED, "lease_s": lease}
        for body, headers in ((json.dumps(content).encode(), {}), (_packed(content), PACKED)):
            answer = await intruder.call("env.open", body, headers)
            if answer.error != "bad_message":
                return f"{lease}: {answer}"
    return None


@attack("As many sessions in the provider's simulators as it gets, all at once, and none of them closed.")
async def sessions_by_the_hundred(siege: Siege, intruder: Attacker) -> str | None:
    leases = await _flood(intruder, "env.open", [{"environment": SIMULATED, "lease_s": 3600.0}] * 64)
    held = [lease for lease in leases if not lease.error]
    evidence = await _victim_opens(siege)
    wrong = [lease for lease in leases if lease.error and lease.error != "unavailable"]
    await _closed(intruder, held)
    if evidence or wrong or not held:
        return evidence or f"refused as {wrong[:1]}, {len(held)} opened"
    return f"{len(held)} of {SIMULATORS} were opened" if len(held) > SIMULATORS // 4 else None


@attack("As many sessions in an environment of its own as its worker says yes to, for an hour each.")
async def own_sessions_by_the_hundred(siege: Siege, intruder: Attacker) -> str | None:
    robot = Robot(intruder.client, sessions=64)
    await robot.listen()
    leases = await _flood(intruder, "env.open", [{"environment": OWN, "lease_s": 3600.0}] * 64)
    held = [lease for lease in leases if not lease.error]
    kept = [one for one in siege.gateway.bridge.sessions.values() if one.tenant == INTRUDER]
    evidence = await _victim_opens(siege)
    await _closed(intruder, held)
    if evidence or not held:
        return evidence or f"none was opened: {leases[0]}"
    return f"{len(held)} were opened, {len(kept)} are kept" if max(len(held), len(kept)) > SESSIONS else None


@attack("Asks that its own worker never answers, until it goes away.")
async def asks_never_answered(siege: Siege, intruder: Attacker) -> str | None:
    async with attacker(siege.url, siege.creds(INTRUDER), True) as hand:
        robot = Robot(hand.client)
        await robot.listen()
        session = (await intruder.call("env.open", {"environment": OWN})).content["session"]
        robot.answer = lambda _: None
        wanted = [intruder.call("env.open", {"environment": OWN}) for _ in range(2)]
        wanted += [intruder.pack("env.call", {"session": session, "call": {"op": "save"}}) for _ in range(6)]
        waiting = asyncio.gather(*wanted)
        async with asyncio.timeout(60):
            while len(robot.asks) <= len(wanted):  # the first was answered
                await asyncio.sleep(0.01)
        evidence = await _victim_opens(siege)
    answers = await waiting  # as soon as it is gone
    if left := [one for one in siege.gateway.bridge.asked if one[0] == INTRUDER]:
        return f"still waited for: {left}"
    return evidence or next((f"{one}" for one in answers if one.error not in ("unavailable", "environment_fault")), None)


@attack("Actions whose shape is not that of their bytes, in a session of the provider's.")
async def actions_that_lie(siege: Siege, intruder: Attacker) -> str | None:
    lease = await intruder.call("env.open", {"environment": SIMULATED})
    many = 1 << 24
    evidence = None
    for fields in (
        {"shape": [1 << 20, 1 << 20]}, {"shape": [many] * 8}, {"shape": [many] * 9}, {"shape": [4, 3]}, {"shape": [0]},
        {"shape": [-1, 2]}, {"shape": [2**63]}, {"shape": [4, 2], "data": b""}, {"dtype": "object"}, {"dtype": "float64"},
        {"shape": None}, {"data": None}, {"data": "x"},
    ):  # fmt: skip
        call = {"op": "step", "actions": CHUNK | fields}
        answer = await intruder.pack("env.call", {"session": lease.content["session"], "call": call})
        if answer.error not in ("bad_message", "contract"):
            evidence = evidence or f"{fields}: {answer}"
    await _closed(intruder, [lease])
    return evidence


@attack("Answers of its own worker that are not what it offered: they go on to where others' are.")
async def answers_that_lie(_siege: Siege, intruder: Attacker) -> str | None:
    robot = Robot(intruder.client)
    await robot.listen()
    lease = await intruder.call("env.open", {"environment": OWN})
    step = {"session": lease.content["session"], "call": {"op": "step", "actions": CHUNK}}
    for wrong, (fields, _) in AMISS.items():
        robot.answer = lambda ask, fields=fields: reply(ask["call"], **fields)
        answer = await intruder.pack("env.call", step)
        if answer.error != "environment_fault":
            return f"{wrong}: {answer}"
    robot.answer = robot.honest
    answer = await intruder.pack("env.call", step)  # what was refused left no trace
    await _closed(intruder, [lease])
    return f"an honest answer is refused: {answer}" if answer.error else None


@attack("Errors of its own worker that are the service's: of credentials, of the bus, of a bug; and long ones.")
async def errors_that_lie(siege: Siege, intruder: Attacker) -> str | None:
    robot = Robot(intruder.client)
    await robot.listen()
    for code in ("denied", "error", "conflict", "unreadable", "bad_job", "", "x" * 60, "\x00", "503"):
        robot.answer = robot.honest
        lease = await intruder.call("env.open", {"environment": OWN})  # a fault ends its session
        robot.answer = lambda _, code=code: {"error": "no", "error_code": code}
        answer = await intruder.pack("env.call", {"session": lease.content["session"], "call": {"op": "save"}})
        if answer.error != "environment_fault":
            return f"{code!r}: {answer}"
    for fields in ({"error": "x" * 50_000}, {"error": "x", "error_code": "y" * 5000}, {"reply": {"steps": -1}}):
        answer = await intruder.pack("env.answer", {"id": "x", "gateway": siege.gateway.bridge.token} | fields)
        if answer.error != "bad_message":
            return f"taken: {answer}"
    large = b"x" * (10 << 20)
    wire = await intruder.wire()
    await wire.say(f"PUB env.answer {len(large)}\r\n".encode() + large + b"\r\n")
    await wire.close()
    robot.answer = robot.honest
    return None


@attack("A session that its own worker says is the victim's, with the victim's worker.")
async def a_session_said_to_be_the_victims(siege: Siege, intruder: Attacker) -> str | None:
    robot = Robot(intruder.client)

    def open_as(**fields: str) -> None:
        def answer(ask: Said) -> Said:
            if "open" not in ask:
                return {"error": "here"}
            opened = {"session": ask["open"]["session"], "subject": "", "worker": "robot", "version": "arm 1"}
            return {"opened": opened | fields}

        robot.answer = answer

    await robot.listen()
    for fields in (
        {"session": siege.sessions[1]}, {"session": f"{VICTIM}.{siege.sessions[1]}"}, {"worker": f"{VICTIM}.robot"},
        {"worker": "*"}, {"worker": ">"}, {"worker": ""}, {"version": "\x1b[2J"},
    ):  # fmt: skip
        open_as(**fields)
        answer = await intruder.call("env.open", {"environment": OWN})
        if answer.error != "environment_fault":
            return f"{fields}: {answer}"
    open_as(subject=f"env.session.{VICTIM}.{siege.sessions[1]}")
    lease = await intruder.call("env.open", {"environment": OWN})
    answer = await intruder.pack("env.call", {"session": lease.content["session"], "call": {"op": "save"}})
    robot.answer = robot.honest
    await _closed(intruder, [lease])
    return None if answer.error == "environment_fault" else f"{answer}"


@attack("Offers whose names are the victim's and those of its sessions, while orders of the victim's wait.")
async def offers_for_anothers_orders(siege: Siege, intruder: Attacker) -> str | None:
    for worker in (VICTIM, siege.sessions[1], "robot", "gateway-0"):
        for environment in ("own", "own-arm", f"own-{VICTIM}"):
            assert not (await intruder.call("env.offer", offer(worker=worker, environment=environment))).error
    offers = await siege.bus.kv("offers").entries("", OwnOffer)
    return next((key for key in offers if key.split(".")[0] not in (VICTIM, INTRUDER)), None)
