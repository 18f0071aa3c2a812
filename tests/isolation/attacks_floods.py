"""Attacks by too much: more than the limits, more than anybody reads, and what no protocol allows. Others must not notice."""

import asyncio
import json
import struct

import msgspec

from nexus_bus.clock import now
from schemas.events import Event
from schemas.subjects import CALLS
from tests.isolation.attack import attack
from tests.isolation.attacker import Attacker, Wire, attacker
from tests.isolation.siege import (
    CONNECTIONS,
    INTRUDER,
    OWN_JOB,
    PAYLOAD_BYTES,
    SUBSCRIPTIONS,
    TENANT_CALLS,
    VICTIM,
    Siege,
    spec,
)

FLOOD = 2000


@attack("Messages above its limit, and lengths that are none.")
async def payloads_over_the_limit(siege: Siege, intruder: Attacker) -> str | None:
    large = b"x" * (PAYLOAD_BYTES + 1)
    for line, body in (
        (f"PUB account.show _INBOX.x {len(large)}", large),
        (f"HPUB account.show _INBOX.x 12 {len(large)}", large),
        ("PUB account.show _INBOX.x 9999999999", b""),
        ("PUB account.show _INBOX.x 99999999999999999999999", b""),
        ("PUB account.show _INBOX.x -1", b""),
        ("HPUB account.show _INBOX.x 20 10", b"x" * 20),
        ("PUB account.show _INBOX.x 2x", b"{}"),
    ):
        wire = await intruder.wire()
        said = await wire.say(b"SUB _INBOX.x 1\r\n" + line.encode() + b"\r\n" + body + b"\r\n")
        await wire.close()
        if b"MSG " in said:
            return f"{line!r} was answered"
        await siege.served()
    return None


@attack("More subscriptions than it may have.")
async def subscriptions_over_the_limit(siege: Siege, intruder: Attacker) -> str | None:
    wire = await intruder.wire()
    wanted = 20 * SUBSCRIPTIONS
    said = await wire.say(b"".join(f"SUB event.{n} {n}\r\n".encode() for n in range(wanted)))
    await siege.stir()
    refused = said.count(b"-ERR 'maximum subscriptions exceeded'")
    return f"{wanted - refused} of them" if wanted - refused > SUBSCRIPTIONS and b"PONG" in said else None


@attack("More connections than it may have, at once and again and again.")
async def connections_over_the_limit(siege: Siege, intruder: Attacker) -> str | None:
    for _ in range(3):
        wires = await asyncio.gather(*(Wire.open(siege.url) for _ in range(6 * CONNECTIONS)))
        let_in = await asyncio.gather(*(wire.login(intruder.creds) for wire in wires))
        async with attacker(siege.url, siege.creds(VICTIM), True) as another:  # the victim gets one more meanwhile
            await another.call("account.show", {})
        await siege.served()
        await asyncio.gather(*(wire.close() for wire in wires))
        if sum(let_in) > CONNECTIONS:
            return f"{sum(let_in)} at once"
    return None


@attack("Connections that never say who they are.")
async def connections_that_say_nothing(siege: Siege, _intruder: Attacker) -> str | None:
    wires = await asyncio.gather(*(Wire.open(siege.url) for _ in range(200)))
    async with attacker(siege.url, siege.creds(VICTIM), True) as another:
        await another.call("account.show", {})
    await siege.stir()
    await asyncio.gather(*(wire.close() for wire in wires))
    return None


@attack("A flood of calls, each worth a look through the registry.")
async def a_flood_of_calls(siege: Siege, intruder: Attacker) -> str | None:
    wire = await intruder.wire()
    await wire.say(b"SUB _INBOX.flood 1\r\n")
    flood = asyncio.create_task(wire.say(b"PUB job.list _INBOX.flood 2\r\n{}\r\n" * FLOOD))
    for _ in range(5):
        await siege.served()
    await flood
    await wire.until(lambda: wire.said.count(b"MSG _INBOX.flood 1 ") >= FLOOD)
    await siege.served()
    return None


@attack("As many calls as it may have under way, all of which wait.")
async def calls_that_wait(siege: Siege, intruder: Attacker) -> str | None:
    last = (await intruder.call("event.read", {"limit": 200})).content["next"]
    body = json.dumps({"after": last + 10**6, "wait_s": 0.5}).encode()
    wire = await intruder.wire()
    line = f"PUB event.read _INBOX.wait {len(body)}\r\n".encode() + body + b"\r\n"
    wanted = 2 * TENANT_CALLS
    await wire.say(b"SUB _INBOX.wait 1\r\n" + line * wanted)
    await siege.stir()
    events = await siege.victim.call("event.read", {"limit": 10})
    await wire.until(lambda: wire.said.count(b"MSG _INBOX.wait 1 ") >= wanted)
    refused = wire.said.count(b"calls of yours are under way")
    return "the victim is refused" if events.error else None if refused else "all of them were taken"


@attack("Events and answers that it asks for and does not read.")
async def a_reader_that_does_not_read(siege: Siege, intruder: Attacker) -> str | None:
    wire = await intruder.wire()
    await wire.say(b"SUB event.> 1\r\nSUB _INBOX.deaf 2\r\n")
    wire.pause()
    event = Event(type="job.progress", tenant=INTRUDER, job=OWN_JOB, time=now(), message="x" * 60_000)
    body = msgspec.json.encode(event)
    for _ in range(150):
        await siege.bus.client.publish(f"event.{INTRUDER}.deaf", body)
    wire.write(b"PUB job.list _INBOX.deaf 2\r\n{}\r\n" * 200)
    for _ in range(3):
        await siege.stir()
    await siege.bus.drop("EVENTS", f"event.{INTRUDER}.deaf")
    return None


@attack("Lines that no protocol has.")
async def malformed_lines(siege: Siege, intruder: Attacker) -> str | None:
    for line in (
        b"\r\n\r\n\r\n",
        b"PUB\r\n",
        b"PUB a\r\n",
        b"SUB\r\n",
        b"SUB a b c d\r\n",
        b"UNSUB\r\n",
        b"UNSUB x 1 2\r\n",
        b"HPUB a 1\r\n",
        b"\x00" * 100 + b"\r\n",
        b"\xff\xfe\r\n",
        b"X" * 5000 + b"\r\n",
        b"SUB " + b"event." * 800 + b"x 1\r\n",
        b"PUB " + b"a." * 3000 + b" 0\r\n\r\n",
        b"CONNECT " + b"[" * 3000 + b"\r\n",
        b"CONNECT {\r\n",
        b"PING" * 500 + b"\r\n",
        b"PONG\r\n" * 500,
        b"PUB job..get 0\r\n\r\n",
        b"PUB job.get.\xff 0\r\n\r\n",
        b"SUB event.\x00 1\r\n",
        b"PUB account.show _INBOX.\xff\xfe 2\r\n{}\r\n",
        b"SUB event.> \xff\r\n",
    ):
        wire = await intruder.wire()
        await wire.say(line)
        await wire.close()
        await siege.served()
    return None


@attack("Bodies that would stop a careless reader, in every call.")
async def bodies_that_stop_a_reader(siege: Siege, intruder: Attacker) -> str | None:
    deep = b"[" * 30_000
    bodies = (
        b"",
        b"null",
        b"\xff",
        deep,
        b'{"job":' + deep,
        b'{"job":"' + b"a" * 60_000 + b'"}',
        b'{"after":1e999}',
        b'{"after":-1}',
        b'{"wait_s":1e308}',
        b'{"since":"9999-12-31T23:59:59-23:59"}',
        b'{"since":"0001-01-01T00:00:00+23:59"}',
        b'{"job":"\\ud800"}',
        b'{"policy":"a@99999999999999999999"}',
        b'{"policy":"a@0","sha256":"' + b"f" * 64 + b'","offset":9007199254740993}',
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa3job\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 30_000,
        b"\x81\xa4data\xc6" + struct.pack(">I", 2**32 - 1),
        b"{" + b'"a":1,' * 5000 + b'"b":1}',
        b"%PDF",
        b"\x80\x04\x95",
    )
    for call in CALLS:
        for body in bodies:
            kind = "application/msgpack" if body[:1] > b"\x7f" else "application/json"
            answer = await intruder.call(call.local, body, {"Content-Type": kind})
            if answer.error == "error":
                return f"{call.local} of {body[:40]!r}: {answer.data!r}"
    return None


@attack("Orders of which much is kept for ever, where all tenants' jobs are kept.")
async def orders_that_fill_the_registry(siege: Siege, intruder: Attacker) -> str | None:
    await intruder.listen("event.>")
    info = await siege.bus.ask("$JS.API.STREAM.INFO.KV_registry")
    before = json.loads(info.data)["state"]["bytes"]
    fat = "x" * 50_000
    for number, fields in enumerate(
        ({"init": fat}, {"data": {"dataset": fat}}, {"head": {"options": {fat: 1}}}, {"base": fat})
    ):
        taken = await intruder.call("job.submit", spec(f"fat-{number}", **fields))
        if not taken.error and (event := await intruder.outcome(taken))["type"] != "job.refused":
            return f"accepted: {event}"
    for name in ("job.cancel", "job.pause"):
        if not (await intruder.call(name, {"job": OWN_JOB, "reason": fat})).error:
            return f"{name} took a reason of {len(fat)} characters"
    info = await siege.bus.ask("$JS.API.STREAM.INFO.KV_registry")
    grown = json.loads(info.data)["state"]["bytes"] - before
    # Jobs of others may come to their end meanwhile, which costs some bytes.
    return f"the registry has grown by {grown} bytes" if grown > len(fat) // 10 else None
