"""Attacks by listening, by answering in somebody's place, and by naming a reply subject that is somebody else's."""

import asyncio
import json
import time

import msgspec
from nats.aio.msg import Msg

from schemas.subjects import CALLS
from tests.isolation.attack import attack
from tests.isolation.attacker import Attacker
from tests.isolation.siege import JOB, NAMESAKE, OWN_JOB, OWN_POLICY, VICTIM, Siege


async def _overhear(siege: Siege, intruder: Attacker, *subjects: str, queue: str = "") -> str | None:
    """Listen on each while the victim works; whatever is not the intruder's own is evidence."""
    for subject in subjects:
        await intruder.listen(subject, queue)
    await siege.stir()
    await intruder.client.flush()
    heard = [msg.subject for msg in intruder.heard if msg.reply or VICTIM in msg.subject]
    return f"heard {heard[:5]}" if heard else None


@attack("Everything there is.")
async def all_wildcards(siege: Siege, intruder: Attacker) -> str | None:
    return await _overhear(siege, intruder, ">", "*", "*.>", "*.*", "*.*.*", "*.*.*.*")


@attack("The provider's subjects, by their first words.")
async def provider_subjects(siege: Siege, intruder: Attacker) -> str | None:
    return await _overhear(
        siege, intruder, "tenant.>", "job.>", "infer.>", "train.>", "usage.>", "audit.>", "upload.>", "health.>"
    )


@attack("The victim's events, by its name and by wildcards in its place.")
async def events_of_the_victim(siege: Siege, intruder: Attacker) -> str | None:
    return await _overhear(siege, intruder, "event.>", f"event.{VICTIM}.>", "event.*.*", f"event.*.{JOB}", f"event.{JOB}")


@attack("The events of a tenant whose name its own begins with.", tenant=NAMESAKE)
async def events_of_a_namesake(siege: Siege, intruder: Attacker) -> str | None:
    return await _overhear(siege, intruder, "event.>", f"event.{VICTIM}.>")


@attack("Everybody's inboxes, and the subjects on which answers cross from account to account.")
async def inboxes(siege: Siege, intruder: Attacker) -> str | None:
    return await _overhear(siege, intruder, "_INBOX.>", "_INBOX.*", "_INBOX.*.*", "_R_.>", "_GR_.>", "$GR.>")


@attack("What the server tells its operator: connections, accounts, advisories of JetStream.")
async def the_servers_own_news(siege: Siege, intruder: Attacker) -> str | None:
    return await _overhear(siege, intruder, "$SYS.>", "$SYS.ACCOUNT.>", "$JS.EVENT.>", "$JS.>", "$KV.>", "$O.>", "$JSC.>")


@attack("A place in the gateway's queue group, so that calls of others come here.")
async def the_gateways_queue(siege: Siege, intruder: Attacker) -> str | None:
    names = [call.local for call in CALLS]
    return await _overhear(siege, intruder, *names[:6], *(f"tenant.*.{name}" for name in names[:6]), queue="gateway")


@attack("Answers to calls in its own account and to the service's discovery, in the gateway's place.")
async def a_service_of_its_own(siege: Siege, intruder: Attacker) -> str | None:
    async def answer(msg: object) -> None:
        intruder.heard.append(msg)  # type: ignore[arg-type]
        await intruder.client.publish(msg.reply, b'{"job": null}')  # type: ignore[attr-defined]

    for name in ("job.get", "job.submit", "$SRV.PING", "$SRV.INFO", "tenant.*.job.get"):
        await intruder.client.subscribe(name, queue="gateway", cb=answer)
    await siege.stir()
    return "the victim's call came here" if intruder.heard else None


@attack("Who serves here, by the services' discovery.")
async def discovery(_siege: Siege, intruder: Attacker) -> str | None:
    return await intruder.any_of("$SRV.PING", "$SRV.INFO", "$SRV.STATS", "$SRV.PING.gateway", "$SRV.INFO.gateway.x")


@attack("A trace by the server of its own call, across the provider's account.")
async def the_path_of_a_call(_siege: Siege, intruder: Attacker) -> str | None:
    await intruder.listen("_INBOX.trace")
    for extra in ({}, {"Nats-Trace-Only": "true"}, {"Accept-Encoding": "gzip"}):
        await intruder.ask("job.get", {"job": OWN_JOB}, {"Nats-Trace-Dest": "_INBOX.trace"} | extra)
    traces = b"".join(msg.data for msg in intruder.heard if msg.subject == "_INBOX.trace")
    found = [word for word in (b"gateway-0", b'"kind":1', b'"type":"eg"') if word in traces]  # beyond the door itself
    return f"the trace goes on to {found}: {traces!r}" if found else None


# Reply subjects


@attack("Answers of the gateway into a stream of the provider's, by naming its subject as the reply.")
async def answers_into_streams(_siege: Siege, intruder: Attacker) -> str | None:
    targets = (
        f"job.submit.{VICTIM}", f"event.{VICTIM}.{JOB}", f"train.record.{VICTIM}.{JOB}", f"audit.{VICTIM}",
        f"tenant.{VICTIM}.job.submit", f"$KV.registry.account.{VICTIM}", "$JS.API.STREAM.PURGE.JOBS", f"infer.request.{VICTIM}",
    )  # fmt: skip
    for name, body in (("job.get", {"job": OWN_JOB}), ("account.show", {}), ("job.list", {})):
        for reply in targets:
            await intruder.send(name, json.dumps(body).encode(), reply)
    await intruder.call("account.show", {})  # by now the others are answered
    return None


@attack("Answers of the gateway into the victim's inbox, whose name it has learned.")
async def answers_into_an_inbox(siege: Siege, intruder: Attacker) -> str | None:
    inbox = siege.victim.client.new_inbox()
    before = len(siege.victim.heard)
    await siege.victim.listen(inbox)
    await intruder.send("account.show", b"{}", inbox)
    await intruder.send(inbox, b"forged")
    await intruder.call("account.show", {})
    await siege.victim.client.flush()
    return "the victim got something" if len(siege.victim.heard) != before else None


@attack("A forged answer of the inference workers, in the gateway's own inbox.")
async def answers_to_the_gateway(siege: Siege, intruder: Attacker) -> str | None:
    forged = msgspec.msgpack.encode({"id": next(iter(siege.gateway.asked)), "policy": "forged@0"})
    inbox = siege.gateway.inbox
    await intruder.send(inbox, forged, headers={"Content-Type": "application/msgpack"})
    await intruder.send("account.show", b"{}", inbox)
    await intruder.call("account.show", {})
    return "the victim got a forged answer" if siege.open_request is None or siege.open_request.done() else None


@attack("Confirmations of the store forged, in the inbox that a live event of its own names.")
async def confirmations_forged(siege: Siege, intruder: Attacker) -> str | None:
    await intruder.listen("event.>")
    await intruder.outcome(await intruder.call("policy.pin", {"policy": OWN_POLICY}))
    replies = [msg.reply for msg in intruder.heard if msg.subject.startswith("event.") and msg.reply]
    came = list[bytes]()

    async def arrived(msg: Msg) -> None:
        came.append(msg.data)

    for reply in replies:
        listening = await siege.bus.listen(f"{reply.rpartition('.')[0]}.*", arrived)
        for number in range(1, 50):
            await intruder.client.publish(f"{reply.rpartition('.')[0]}.{number}", b'{"stream":"EVENTS","seq":1,"forged":1}')
        await intruder.call("account.show", {})
        await siege.served()
        await listening.stop()
    return "a forged confirmation arrived" if any(b"forged" in data for data in came) else None


@attack("Reply subjects that the server keeps for itself.")
async def reserved_reply_subjects(siege: Siege, intruder: Attacker) -> str | None:
    wire = await intruder.wire()
    for reply in (
        "_R_.abcdef",
        "_GR_.x.y.z",
        f"$JS.ACK.JOBS.orders-{VICTIM}.1.1.1.1.0",
        "$JS.FC.x",
        "$SYS.REQ.CLAIMS.LIST",
        "a..b",
        ">",
        "*",
    ):
        await wire.say(f"PUB account.show {reply} 2\r\n{{}}\r\n".encode())
        await siege.served()
    for _ in range(3):  # with `>`, the server loses an answer: the intruder's own, as nobody else's crosses its account
        await intruder.ask("account.show", {})
        await siege.served()
    return None


@attack("A loop: answers that are calls again.")
async def answers_that_are_calls(siege: Siege, intruder: Attacker) -> str | None:
    stats = siege.gateway.bus.client.stats

    async def cost() -> int:
        before = stats["in_msgs"]
        for _ in range(5):
            await intruder.call("account.show", {})
        return stats["in_msgs"] - before

    while (await intruder.call("account.show", {})).error:  # calls of an attack before are still under way
        await asyncio.sleep(0.05)
    at_rest = await cost()
    for name in ("account.show", "job.get", "job.list", "policy.pin", "infer.request", "event.read"):
        for reply in ("account.show", "job.list", name):
            await intruder.send(name, b"{}", reply)
    await siege.served()
    ends = time.monotonic() + 60
    while (after := await cost()) > 2 * at_rest:  # others' messages count, too; a loop goes on, and they do not
        if time.monotonic() > ends:
            return f"5 calls bring the gateway {after} messages, {at_rest} before"
    return None


@attack("Calls that nobody waits for.")
async def calls_without_a_reply(siege: Siege, intruder: Attacker) -> str | None:
    for call in CALLS:
        if call.local not in ("job.submit", "policy.upload"):
            await intruder.send(call.local, b"{}")
    await intruder.call("account.show", {})
    await asyncio.sleep(0)
    return None if siege.gateway.bus.client.is_connected else "the gateway lost its connection"
