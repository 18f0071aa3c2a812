"""Attacks by headers: who asked, which message this is, where its content lies, what a stream is to check."""

import json
import uuid
from typing import Any

import msgspec

from tests.isolation.attack import attack
from tests.isolation.attacker import Attacker
from tests.isolation.siege import INTRUDER, JOB, OWN_JOB, OWN_POLICY, POLICY, VICTIM, Siege, observation

PIN = json.dumps({"policy": OWN_POLICY}).encode()


def _claim(siege: Siege) -> str:
    """What the server would say of the victim, in its own form."""
    record = siege.keys[VICTIM].record
    return json.dumps({"acc": record.account, "user": record.keys[0].key, "name": VICTIM, "svc": VICTIM})


async def _signed(siege: Siege, intruder: Attacker, *headers: bytes) -> str | None:
    """An order under each header block; evidence, if the audit names anybody but the intruder for one of them."""
    wire, submissions = await intruder.wire(), dict[str, bytes]()
    for header in headers:
        block = header[:-2] + f"Nats-Msg-Id: signed-{uuid.uuid4().hex}\r\n\r\n".encode()
        answer = await wire.request("policy.pin", PIN, block)
        if not answer.error:
            submissions[answer.content["submission"]] = header
    entries = [item.message async for item in siege.bus.tail("audit", since="all", follow=False, tenant=INTRUDER)]
    callers = {one.submission: one.key for one in entries if one.outcome == "asked" and one.submission in submissions}
    assert callers.keys() == submissions.keys()
    own, victims = (siege.keys[name].record.keys[0].key for name in (INTRUDER, VICTIM))
    wrong = {key for key in callers.values() if (key != own if intruder.fenced else key in (victims, "", "unreadable"))}
    return (
        f"the audit names {wrong}: {[submissions[one] for one, key in callers.items() if key in wrong][:1]}" if wrong else None
    )


@attack("An order under the victim's key, by the header that the server writes.")
async def caller_forged(siege: Siege, intruder: Attacker) -> str | None:
    return await _signed(siege, intruder, f"NATS/1.0\r\nNats-Request-Info: {_claim(siege)}\r\n\r\n".encode())


@attack("An order under the victim's key, by the header with which the provider says who asks.")
async def caller_said(siege: Siege, intruder: Attacker) -> str | None:
    return await _signed(siege, intruder, f"NATS/1.0\r\nNexus-Caller: {siege.keys[VICTIM].record.keys[0].key}\r\n\r\n".encode())


@attack("The same in other cases, which a careless reader takes for the same.")
async def caller_forged_in_other_cases(siege: Siege, intruder: Attacker) -> str | None:
    claim = _claim(siege)
    block = "".join(f"{name}: {claim}\r\n" for name in ("nats-request-info", "NATS-REQUEST-INFO", "Nats-request-Info"))
    return await _signed(siege, intruder, f"NATS/1.0\r\n{block}\r\n".encode())


@attack("The same many times over, of which the server might replace one.")
async def caller_forged_many_times(siege: Siege, intruder: Attacker) -> str | None:
    line = f"Nats-Request-Info: {_claim(siege)}\r\n"
    return await _signed(siege, intruder, *(f"NATS/1.0\r\n{line * count}\r\n".encode() for count in (2, 3, 7)))


@attack("The same hidden: behind a line end within a value, behind spaces, behind an end of the block.")
async def caller_smuggled(siege: Siege, intruder: Attacker) -> str | None:
    claim = _claim(siege)
    blocks = (
        f"X: y\nNats-Request-Info: {claim}\r\n\r\n",
        f"X: y\rNats-Request-Info: {claim}\r\n\r\n",
        f"X: y\r\n Nats-Request-Info: {claim}\r\n\r\n",
        f"Nats-Request-Info : {claim}\r\n\r\n",
        f"\tNats-Request-Info: {claim}\r\n\r\n",
        f"X:\r\n\tfolded\r\nNats-Request-Info:{claim}\r\n\r\n",
        f"Nats-Request-Info: {{\r\n {claim[1:]}\r\n\r\n",
        f"X-Nats-Request-Info: {claim}\r\nNats-Request-Info: \r\n\r\n",
        f"\r\nNats-Request-Info: {claim}\r\n\r\n",
        f"X: \x00\r\nNats-Request-Info: {claim}\r\n\r\n",
    )
    return await _signed(siege, intruder, *(f"NATS/1.0\r\n{block}".encode() for block in blocks))


@attack("The same in the status line.")
async def caller_in_the_status_line(siege: Siege, intruder: Attacker) -> str | None:
    claim = _claim(siege)
    lines = (f"NATS/1.0 Nats-Request-Info: {claim}\r\n\r\n", f"NATS/1.0 200\r\nNats-Request-Info: {claim}\r\n\r\n")
    return await _signed(siege, intruder, *(line.encode() for line in lines))


@attack("The ids of orders that the victim is going to send, used up beforehand.")
async def ids_of_the_victims_orders(siege: Siege, intruder: Attacker) -> str | None:
    mine = uuid.uuid4().hex
    for given in (mine, f"{VICTIM}/policy.pin/{mine}", f"../{VICTIM}/policy.pin/{mine}", f"{VICTIM}/job.cancel/{mine}"):
        answer = await intruder.call("policy.pin", {"policy": OWN_POLICY}, {"Nats-Msg-Id": given})
        if not answer.error and not answer.content["submission"].startswith(f"{INTRUDER}/policy.pin/"):
            return f"an order under the id {answer.content['submission']}"
    taken = await siege.victim.call("policy.pin", {"policy": POLICY}, {"Nats-Msg-Id": mine})
    event = await siege.victim.outcome(taken)
    await siege.rebase()
    if taken.content.get("duplicate") or event["type"] != "policy.pinned":
        return f"the victim's order is lost: {taken.data!r} {event}"
    return None


@attack("The ids that the service itself gives: of its events, its audit, its reports, its requests to act.")
async def ids_of_the_service(siege: Siege, intruder: Attacker) -> str | None:
    for given in (
        f"event/{VICTIM}/{JOB}/phase/training",
        f"audit/{VICTIM}/submit/{JOB}/accepted/{VICTIM}/job.submit/first",
        f"{VICTIM}/{JOB}/1",
        f"remove/{VICTIM}/{JOB}",
        f"{VICTIM}/{next(iter(siege.gateway.asked))}",
        f"asked/{VICTIM}",
        "/",
        "//..",
    ):
        answer = await intruder.call("policy.pin", {"policy": OWN_POLICY}, {"Nats-Msg-Id": given})
        if not answer.error and answer.content["submission"] != f"{INTRUDER}/policy.pin/{given}":
            return f"an order under the id {answer.content['submission']}"
    return None


@attack("The victim's order sent again, as it was captured.")
async def an_order_replayed(siege: Siege, intruder: Attacker) -> str | None:
    headers = {
        "Nats-Msg-Id": f"{VICTIM}/job.submit/first", "ce-id": f"{VICTIM}/job.submit/first", "ce-source": "/nexus/gateway-0",
        "ce-type": "nexus.job.cancel", "Content-Type": "application/json", "Nexus-Schema": "1",
    }  # fmt: skip
    answer = await intruder.call("job.cancel", {"job": JOB}, headers)
    return None if answer.error else f"taken: {answer.data!r}"


@attack("An id too long, or of what no id is made of.")
async def ids_that_break_out(_siege: Siege, intruder: Attacker) -> str | None:
    wire = await intruder.wire()
    for given in (b"x" * 3000, b"a\x00b", "\u202eevil".encode(), b"a\x1bb"):
        answer = await wire.request("policy.pin", PIN, b"NATS/1.0\r\nNats-Msg-Id: " + given + b"\r\n\r\n")
        if not answer.error:
            return f"{given[:20]!r} taken: {answer.data!r}"
    return None


@attack("What a stream checks and does by headers: expected sequences, roll-ups, times to live, schedules, republishing.")
async def headers_for_streams(siege: Siege, intruder: Attacker) -> str | None:
    headers = {
        "Nats-Rollup": "all", "Nats-Expected-Stream": "USAGE", "Nats-Expected-Last-Subject-Sequence": "1", "Nats-TTL": "1s",
        "Nats-Expected-Last-Msg-Id": "x", "Nats-Schedule": "@every 1s", "Nats-Schedule-Target": f"job.submit.{VICTIM}",
        "KV-Operation": "PURGE", "Nats-Marker-Reason": "Purge", "Nats-Batch-Id": "1", "Nats-Batch-Sequence": "1",
    }  # fmt: skip
    before = len(siege.asked)
    pinned = await intruder.call("policy.pin", {"policy": OWN_POLICY}, headers)
    request = {"id": "1", "job": OWN_JOB, "policy": OWN_POLICY, "observation": observation()}
    packed = {"Content-Type": "application/msgpack"}
    acted = await intruder.call("infer.request", msgspec.msgpack.encode(request), headers | packed)
    passed = [one for _, given in siege.asked[before:] for one in given if one in headers]
    return f"passed on: {passed}" if passed or pinned.error or acted.error else None


@attack("Answers of the inference workers to whom it likes.")
async def answers_to_whom_it_likes(siege: Siege, intruder: Attacker) -> str | None:
    victims = siege.victim.client.new_inbox()
    await siege.victim.listen(victims)
    before = len(siege.victim.heard)
    for name in ("Nexus-Reply-To", "nexus-reply-to"):
        for inbox in (victims, f"job.submit.{VICTIM}", siege.gateway.inbox, f"event.{VICTIM}.{JOB}"):
            request: dict[str, Any] = {"id": "1", "job": OWN_JOB, "policy": OWN_POLICY, "observation": observation()}
            headers = {name: inbox, "Content-Type": "application/msgpack"}
            answer = await intruder.call("infer.request", msgspec.msgpack.encode(request), headers)
            assert not answer.error, answer
    wrong = [given for _, given in siege.asked if given.get("Nexus-Reply-To") != siege.gateway.inbox]
    heard = len(siege.victim.heard) - before
    return f"to {wrong[:1]}, heard {heard}" if wrong or heard else None


@attack("A message whose content is said to lie in the store: the victim's, by its hash.")
async def content_said_to_lie_in_the_store(siege: Siege, intruder: Attacker) -> str | None:
    for ref in siege.refs.values():
        body = json.dumps({"sha256": ref.sha256, "size": ref.size}).encode()
        for name in ("policy.pin", "job.get", "policy.upload", "infer.request"):
            answer = await intruder.call(name, body, {"Nexus-Blob": ref.sha256})
            if not answer.error:
                return f"{name} took it: {answer.data!r}"
    return None


@attack("The victim's trace taken for its own, and traces that are none.")
async def traces_of_another(siege: Siege, intruder: Attacker) -> str | None:
    before = len(siege.asked)
    request = msgspec.msgpack.encode({"id": "1", "job": OWN_JOB, "policy": OWN_POLICY, "observation": observation()})
    for trace in (f"00-{'ab' * 16}-{'cd' * 8}-01", "00-0-0-0", "x" * 3000, "\x00"):
        headers = {
            "traceparent": trace,
            "tracestate": "x=y," * 200,
            "baggage": f"tenant={VICTIM}",
            "Content-Type": "application/msgpack",
        }
        answer = await intruder.call("infer.request", request, headers)
        assert not answer.error, answer
    return f"asked as {siege.asked[before:]}" if any(tenant != INTRUDER for tenant, _ in siege.asked[before:]) else None


@attack("Header blocks that would stop a careless reader, for everybody.")
async def blocks_that_stop_a_reader(siege: Siege, intruder: Attacker) -> str | None:
    stats = siege.gateway.bus.client.stats
    before = stats["reconnects"]
    for block in (
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0 \r\n\r\n",
        b"NATS/1.0 \xff\xff\xff \xfe\r\n\r\n",
        b"NATS/1.0 1\r\n\xff: \xfe\r\n\r\n",
        b"NATS/1.0\r\n\xff\xfe: \xff\r\n\r\n",
        b"NATS/1.0\r\n: \r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0\r\nX\r\n\r\n",
        b"NATS/1.0\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
        b"NATS/1.0\r\nX: " + b"z" * 30_000 + b"\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Consumer-Stalled: job.submit.acme\r\n\r\n",
        b"NATS/1.0\r\nX: \xc3\x28\r\n\r\n",
    ):
        wire = await intruder.wire()
        inbox = f"_INBOX.{uuid.uuid4().hex}"
        sent = f"HPUB account.show {inbox} {len(block)} {len(block) + 2}\r\n".encode() + block + b"{}\r\n"
        await wire.say(f"SUB {inbox} 1\r\n".encode() + sent)
        await wire.close()
        await siege.served()
        if not siege.gateway.bus.client.is_connected or stats["reconnects"] != before:
            return f"{block[:60]!r} cut the gateway off"
    return None
