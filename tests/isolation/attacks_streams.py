"""Attacks on what is stored: streams, consumers, keys, blobs, and the subjects that lead into them."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from schemas.subjects import CALLS, TABLE
from tests.isolation.attack import attack
from tests.isolation.attacker import Attacker
from tests.isolation.siege import INTRUDER, JOB, NAMESAKE, OWN_JOB, POLICY, VICTIM, Siege, spec

STREAMS = (
    "JOBS",
    "ROLLOUT",
    "INFERENCE",
    "TRAINING",
    "UPLOADS",
    "EVENTS",
    "USAGE",
    "AUDIT",
    "DEAD",
    "KV_registry",
    "OBJ_blobs",
)
ACK = f"$JS.ACK.JOBS.orders-{VICTIM}.1.1.1.1700000000000000000.0"


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()


def _of_provider(tenant: str) -> Iterable[str]:
    """Every subject of the provider's on which a tenant's name, or anything else, may stand."""
    tokens = {"tenant": tenant, "job": JOB, "session": "s", "upload": "a1a1a1a1", "worker": "gateway-0", "role": "gateway"}
    for row in TABLE:
        if not row.local:
            yield row.subject(**dict.fromkeys(row.tokens, "a") | tokens)  # whatever else a row has


def _came(intruder: Attacker, on: str) -> str | None:
    got = [msg.data for msg in intruder.heard if msg.subject == on]
    return f"it came: {got[0]!r}" if got else None


@attack("Orders for the victim on the provider's own subjects, as the gateway would put them there.")
async def orders_for_the_victim(_siege: Siege, intruder: Attacker) -> str | None:
    for name in ("cancel", "pause", "resume"):
        await intruder.send(f"job.{name}.{VICTIM}", _json({"job": JOB}), headers={"Nats-Msg-Id": f"{VICTIM}/{name}"})
    await intruder.send(f"job.submit.{VICTIM}", _json(spec("planted")))
    await intruder.send(f"policy.pin.{VICTIM}", _json({"policy": POLICY}))
    return None


@attack("The same as requests, hoping for the acknowledgement of a stream.")
async def provider_subjects_with_a_reply(_siege: Siege, intruder: Attacker) -> str | None:
    return await intruder.any_of(*_of_provider(VICTIM), payload=_json({"job": JOB}))


@attack("Its own orders past the gateway, on the provider's subjects of its own name.")
async def its_own_provider_subjects(_siege: Siege, intruder: Attacker) -> str | None:
    return await intruder.any_of(*_of_provider(INTRUDER), payload=_json({"job": OWN_JOB}))


@attack("The calls of the gateway under the victim's name, which the server puts before them.")
async def calls_under_the_victims_name(_siege: Siege, intruder: Attacker) -> str | None:
    return await intruder.any_of(
        *(call.subject(tenant=VICTIM) for call in CALLS), payload=_json({"job": JOB, "policy": POLICY})
    )


@attack("Records for the victim's training, and its usage and audit rewritten.")
async def records_and_logs_of_the_victim(siege: Siege, intruder: Attacker) -> str | None:
    for on in (f"train.record.{VICTIM}.{JOB}", f"train.batch.{VICTIM}.{JOB}", f"usage.{VICTIM}.{JOB}", f"audit.{VICTIM}"):
        await intruder.send(on, msgspec.msgpack.encode({"tenant": VICTIM, "job": JOB, "batch": 0}))
    event = {"type": "job.failed", "tenant": VICTIM, "job": JOB, "time": "now", "message": "forged"}
    await intruder.send(f"event.{VICTIM}.{JOB}", _json(event))
    await siege.served()
    return "the victim heard a forged event" if any(b"forged" in msg.data for msg in siege.victim.heard) else None


@attack("Requests to act as the victim, on the Inference Queue itself.")
async def requests_to_act_as_the_victim(_siege: Siege, intruder: Attacker) -> str | None:
    body = msgspec.msgpack.encode({"id": "x", "job": JOB, "policy": POLICY})
    headers = {"Nexus-Reply-To": "_INBOX.mine", "Nats-Msg-Id": f"{VICTIM}/x"}
    return await intruder.any_of(f"infer.request.{VICTIM}", f"infer.request.{VICTIM}.{JOB}", payload=body, headers=headers)


@attack("Which streams there are, and what they hold.")
async def streams_listed(_siege: Siege, intruder: Attacker) -> str | None:
    about = [f"$JS.API.STREAM.INFO.{name}" for name in STREAMS]
    return await intruder.any_of("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", *about)


@attack("Stored messages, by their sequence, by their subject, one by one and in batches.")
async def messages_read(_siege: Siege, intruder: Attacker) -> str | None:
    last = [f"$JS.API.STREAM.MSG.GET.{name}" for name in STREAMS]
    if evidence := await intruder.any_of(*last, payload=_json({"seq": 1})):
        return evidence
    direct = [f"$JS.API.DIRECT.GET.{name}" for name in STREAMS]
    if evidence := await intruder.any_of(*direct, payload=_json({"seq": 1, "batch": 100, "next_by_subj": ">"})):
        return evidence
    named = (f"KV_registry.$KV.registry.job.{VICTIM}.{JOB}", f"EVENTS.event.{VICTIM}.{JOB}", f"AUDIT.audit.{VICTIM}")
    return await intruder.any_of(*(f"$JS.API.DIRECT.GET.{one}" for one in named))


@attack("Streams purged, deleted, changed, and single messages erased.")
async def streams_destroyed(_siege: Siege, intruder: Attacker) -> str | None:
    for name in STREAMS:
        for verb, content in (
            ("PURGE", {}), ("UPDATE", {"name": name, "subjects": ["x"]}), ("MSG.DELETE", {"seq": 1}), ("DELETE", {}),
        ):  # fmt: skip
            await intruder.send(f"$JS.API.STREAM.{verb}.{name}", _json(content))
    return await intruder.any_of("$JS.API.STREAM.PURGE.JOBS", "$JS.API.STREAM.DELETE.JOBS")


@attack("A snapshot of a stream to its own inbox, and a stream restored over another.")
async def streams_carried_away(_siege: Siege, intruder: Attacker) -> str | None:
    wanted = _json({"deliver_subject": "_INBOX.snapshot", "no_consumers": True})
    await intruder.listen("_INBOX.snapshot")
    subjects = [f"$JS.API.STREAM.{verb}.{name}" for verb in ("SNAPSHOT", "RESTORE", "LEADER.STEPDOWN") for name in STREAMS]
    return await intruder.any_of(*subjects, payload=wanted) or _came(intruder, "_INBOX.snapshot")


@attack("A stream of its own that takes the provider's subjects, or mirrors and sources its streams.")
async def streams_of_its_own(_siege: Siege, intruder: Attacker) -> str | None:
    prefixes = ("$JS.API", "$JS.hub.API", "$JS.provider.API")
    for content in (
        {"name": "THEFT", "subjects": ["job.>", "event.>", "infer.>"]},
        {"name": "THEFT", "mirror": {"name": "KV_registry"}},
        {"name": "THEFT", "sources": [{"name": "EVENTS", "external": {"api": "$JS.provider.API", "deliver": "_INBOX.theft"}}]},
    ):
        on = [f"{prefix}.STREAM.CREATE.THEFT" for prefix in prefixes]
        if evidence := await intruder.any_of(*on, payload=_json(content)):
            return evidence
    return None


@attack("Consumers on the provider's streams: made, changed, read from, paused, deleted.")
async def consumers_made_and_broken(_siege: Siege, intruder: Attacker) -> str | None:
    config = _json({"stream_name": "EVENTS", "config": {"deliver_subject": "_INBOX.theft", "filter_subject": ">"}})
    await intruder.listen("_INBOX.theft")
    for name in STREAMS:
        for verb in ("LIST", "NAMES", "CREATE"):
            await intruder.send(f"$JS.API.CONSUMER.{verb}.{name}", config)
    for on in (
        f"JOBS.orders-{VICTIM}",
        f"INFERENCE.infer-{VICTIM}",
        f"TRAINING.train-{VICTIM}-{JOB}",
        f"ROLLOUT.data-{VICTIM}",
    ):
        for verb in ("DURABLE.CREATE", "PAUSE", "INFO", "UNPIN", "RESET", "DELETE"):
            await intruder.send(f"$JS.API.CONSUMER.{verb}.{on}", config)
    taken = await intruder.any_of(
        "$JS.API.CONSUMER.NAMES.JOBS",
        f"$JS.API.CONSUMER.INFO.INFERENCE.infer-{VICTIM}",
        f"$JS.API.CONSUMER.DELETE.JOBS.orders-{VICTIM}",
    )
    return taken or _came(intruder, "_INBOX.theft")


@attack("Messages taken from consumers of workers, so that those never see them.")
async def messages_taken_from_workers(_siege: Siege, intruder: Attacker) -> str | None:
    pairs = (f"JOBS.orders-{VICTIM}", f"INFERENCE.infer-{VICTIM}", f"TRAINING.train-{VICTIM}-{JOB}", f"ROLLOUT.data-{VICTIM}")
    return await intruder.any_of(*(f"$JS.API.CONSUMER.MSG.NEXT.{one}" for one in pairs), payload=_json({"batch": 10}))


@attack("Deliveries to others acknowledged, terminated and delayed in their place; flow control answered.")
async def acknowledgements_forged(_siege: Siege, intruder: Attacker) -> str | None:
    consumers = (f"INFERENCE.infer-{VICTIM}", f"ROLLOUT.data-{VICTIM}", f"JOBS.orders-{VICTIM}")
    for body in (b"+ACK", b"+TERM", b"-NAK", b"+NXT"):
        for one in consumers:
            await intruder.send(f"$JS.ACK.{one}.1.1.1.1700000000000000000.0", body)
            await intruder.send(f"$JS.ACK._.{'A' * 8}.{one}.1.1.1.1700000000000000000.0.x", body)
    return await intruder.any_of(ACK, f"$JS.FC.JOBS.orders-{VICTIM}.x", f"$JSC.CI.x.JOBS.orders-{VICTIM}", payload=b"+NXT 10")


@attack("The registry read: accounts, jobs, versions and states under the victim's name.")
async def registry_read(_siege: Siege, intruder: Attacker) -> str | None:
    keys = (f"account.{VICTIM}", f"job.{VICTIM}.{JOB}", f"policy.{VICTIM}.{JOB}.0", f"state.{VICTIM}.{JOB}", f"tenant.{VICTIM}")
    direct = [f"$JS.API.DIRECT.GET.KV_registry.$KV.registry.{key}" for key in keys]
    return await intruder.any_of(*direct, *(f"$KV.registry.{key}" for key in keys))


@attack("The registry written: no limits for itself, a version of the victim's retired, its job ended.")
async def registry_written(_siege: Siege, intruder: Attacker) -> str | None:
    for key in (f"account.{INTRUDER}", f"account.{VICTIM}", f"job.{VICTIM}.{JOB}", f"policy.{VICTIM}.{JOB}.0"):
        await intruder.send(f"$KV.registry.{key}", _json({"name": INTRUDER, "limits": {}, "phase": "active"}))
        await intruder.send(f"$KV.registry.{key}", headers={"KV-Operation": "PURGE", "Nats-Rollup": "sub"})
    return await intruder.any_of(f"$KV.registry.account.{INTRUDER}", f"$KV.leases.slot.{VICTIM}.{JOB}", payload=b"{}")


@attack("Blobs read and replaced by their hashes, in the store itself.")
async def blobs_in_the_store(siege: Siege, intruder: Attacker) -> str | None:
    for ref in siege.refs.values():
        await intruder.send(f"$O.blobs.M.{ref.sha256}", b"{}", headers={"Nats-Rollup": "sub"})
        if evidence := await intruder.any_of(
            f"$JS.API.DIRECT.GET.OBJ_blobs.$O.blobs.M.{ref.sha256}", f"$O.blobs.C.{ref.sha256}"
        ):
            return evidence
    return None


@attack("The provider's subjects of a tenant whose name its own begins with.", tenant=NAMESAKE)
async def subjects_of_a_namesake(siege: Siege, intruder: Attacker) -> str | None:
    on = (
        f"event.{VICTIM}",
        f"event.{VICTIM}*.{JOB}",
        f"tenant.{VICTIM}.job.list",
        f"tenant.{VICTIM}-2.job.list",
        f"job.submit.{VICTIM}-2",
    )
    for subject in (f"event.{VICTIM}.*", f"tenant.{VICTIM}.>"):
        await intruder.listen(subject)
    wire = await intruder.wire()
    await wire.say(f"SUB event.{VICTIM}*.> 9\r\nSUB event.acme?.* 8\r\n".encode())
    await siege.stir()
    return await intruder.any_of(*(one for one in on if "*" not in one), payload=b"{}")
