"""Attacks through the tenants' door itself: names, hashes, numbers and ids of others, in calls that a tenant may make.

What belongs to somebody else must be answered like what does not exist: the answers are compared byte for byte.
"""

import asyncio
import hashlib
import uuid
from typing import Any

import msgspec

from tests.isolation.attack import attack
from tests.isolation.attacker import Answer, Attacker
from tests.isolation.comparison import both, differ, ordered
from tests.isolation.siege import (
    ABSENT,
    ABSENT_POLICY,
    ABSENT_UPLOAD,
    INTRUDER,
    JOB,
    MARK,
    NAMESAKE,
    OWN_JOB,
    OWN_POLICY,
    POLICY,
    UPLOAD,
    VICTIM,
    Siege,
    contract,
    observation,
    spec,
)

NOWHERE = "0" * 64  # a hash of nothing


@attack("The state of the victim's job, by its name.")
async def job_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    return await both(intruder, "job.get", {"job": JOB}, {"job": ABSENT})


@attack("The victim's job cancelled, paused and resumed, by its name.")
async def job_of_another_stopped(_siege: Siege, intruder: Attacker) -> str | None:
    for name in ("job.cancel", "job.pause", "job.resume"):
        if evidence := await both(intruder, name, {"job": JOB}, {"job": ABSENT}):
            return evidence
    return None


@attack("A job of the victim's job's name: is it taken?")
async def job_name_that_is_taken(siege: Siege, intruder: Attacker) -> str | None:
    await intruder.listen("event.>")
    kinds = []
    for name in (JOB, ABSENT):  # of its own it may have both, once
        event = await intruder.outcome(await intruder.call("job.submit", spec(name)))
        kinds.append(event["type"])
        entry = await siege.bus.last("KV_registry", f"$KV.registry.job.{INTRUDER}.{name}")
        assert entry is not None
    for name in (JOB, ABSENT):
        await intruder.call("job.cancel", {"job": name})
        await siege.forget(INTRUDER, name)
    return None if kinds[0] == kinds[1] == "job.accepted" else f"told apart: {kinds}"


@attack("A job that begins from the victim's version, or evaluates it.")
async def job_from_a_version_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    for fields in ({"init": POLICY}, {"init": f"{JOB}@latest"}):
        there = spec("offspring", **fields)
        absent = spec("offspring", init=fields["init"].replace(JOB, ABSENT))
        if evidence := await ordered(intruder, "job.submit", there, absent):
            return evidence
    return None


@attack("A job that reads from the victim's dataset by a path.")
async def dataset_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    await intruder.listen("event.>")
    for path in (
        f"../{VICTIM}/{MARK}-data",
        f"{VICTIM}/../../{VICTIM}/data",
        f"public/../{VICTIM}/data",
        f"/data/{VICTIM}/data",
    ):
        taken = await intruder.call("job.submit", spec("reader", data={"dataset": path.replace(MARK, "own")}))
        if not taken.error and (event := await intruder.outcome(taken))["type"] != "job.refused":
            return f"{path}: {event}"
    return None


@attack("Versions, and where training stands, by the victim's names and numbers.")
async def versions_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    pairs = (
        ("policy.get", {"policy": POLICY}, {"policy": ABSENT_POLICY}),
        ("policy.get", {"policy": f"{OWN_JOB}@1"}, {"policy": f"{OWN_JOB}@1"}),
        ("policy.state", {"job": JOB}, {"job": ABSENT}),
        ("policy.list", {"job": JOB}, {"job": ABSENT}),
    )
    for name, there, absent in pairs:
        if evidence := await both(intruder, name, there, absent):
            return evidence
    return None


@attack("The victim's version pinned, so that it would never go.")
async def version_of_another_pinned(_siege: Siege, intruder: Attacker) -> str | None:
    return await ordered(intruder, "policy.pin", {"policy": POLICY}, {"policy": ABSENT_POLICY})


@attack(
    "The victim's weights, adapter and training state, by their hashes, through a version of its own and through the victim's."
)
async def content_by_its_hash(siege: Siege, intruder: Attacker) -> str | None:
    for ref in siege.refs.values():
        for policy in (OWN_POLICY, POLICY):
            there, absent = {"policy": policy, "sha256": ref.sha256}, {"policy": policy, "sha256": NOWHERE}
            if evidence := await both(intruder, "policy.read", there, absent, packed=True):
                return evidence
        if evidence := await both(
            intruder,
            "policy.read",
            {"policy": POLICY, "sha256": ref.sha256},
            {"policy": ABSENT_POLICY, "sha256": ref.sha256},
            packed=True,
        ):
            return evidence
    return None


def _import(sha: str, size: int, upload: str, **fields: Any) -> dict[str, Any]:
    order = {"name": "brought", "contract": msgspec.to_builtins(contract()), "weights": {"sha256": sha, "size": size}} | fields
    return {"order": order, "weights": upload}


@attack("An import of the victim's weights by their hash alone.")
async def import_by_a_hash_alone(siege: Siege, intruder: Attacker) -> str | None:
    ref = siege.refs["weights"]
    return await both(
        intruder, "policy.import", _import(ref.sha256, ref.size, ABSENT_UPLOAD), _import(NOWHERE, ref.size, ABSENT_UPLOAD)
    )


@attack("An import of what the victim has uploaded and not used yet.")
async def import_of_anothers_upload(_siege: Siege, intruder: Attacker) -> str | None:
    data = MARK.encode()
    sha = hashlib.sha256(data).hexdigest()
    return await both(intruder, "policy.import", _import(sha, len(data), UPLOAD), _import(sha, len(data), ABSENT_UPLOAD))


@attack("An import whose adapter is the victim's, beside weights of its own.")
async def import_with_anothers_adapter(siege: Siege, intruder: Attacker) -> str | None:
    own, ref = b"my own weights", siege.refs["adapter"]
    digest = hashlib.sha256(own).hexdigest()

    async def import_beside(beside: str | None, sha: str) -> Answer:
        upload = uuid.uuid4().hex
        assert not (await intruder.pack("policy.upload", {"upload": upload, "offset": 0, "data": own})).error
        order = _import(digest, len(own), upload, adapter={"sha256": sha, "size": ref.size})
        adapter = upload if beside == "the same" else beside
        answer = await intruder.call("policy.import", order | ({"adapter": adapter} if adapter else {}))
        return Answer(answer.data.replace(upload.encode(), b"<upload>"), answer.headers)

    for beside in (None, "the same", ABSENT_UPLOAD):
        answers = await asyncio.gather(*(import_beside(beside, sha) for sha in (ref.sha256, NOWHERE)))
        await siege.bus.drop("UPLOADS", f"upload.{INTRUDER}.*")
        if evidence := differ(answers[0], answers[1]):
            return evidence
    return None


@attack("Pieces put into the victim's upload, by its id.")
async def pieces_for_anothers_upload(siege: Siege, intruder: Attacker) -> str | None:
    for offset in (0, len(MARK)):
        answer = await intruder.pack("policy.upload", {"upload": UPLOAD, "offset": offset, "data": b"poison"})
        assert not answer.error, answer
    await siege.bus.drop("UPLOADS", f"upload.{INTRUDER}.*")
    return None


@attack("Logs of the victim's job: by its name, and by wildcards and dots in its place.")
async def logs_of_another(siege: Siege, intruder: Attacker) -> str | None:
    for job in (JOB, ABSENT):  # what was refused to the intruder under these names is its own
        await siege.bus.drop("EVENTS", f"event.{INTRUDER}.{job}")
    for name in ("event.read", "usage.read", "audit.read"):
        if name != "audit.read" and (evidence := await both(intruder, name, {"job": JOB}, {"job": ABSENT})):
            return evidence
        for job in ("*", ">", f"{VICTIM}.{JOB}", f"*.{JOB}", f"../{VICTIM}", "_", f"{JOB}\n", f"{JOB}.>"):
            answer = await intruder.call(name, {"job": job, "since": "1970-01-01T00:00:00Z"})
            if not answer.error:
                return f"{name} took {job!r}: {answer.data[:200]!r}"
    return None


@attack("Logs read to their ends, from every place in the stream.")
async def logs_read_through(_siege: Siege, intruder: Attacker) -> str | None:
    for name in ("event.read", "usage.read", "audit.read"):
        for after in (0, 1, 2, 3, 2**53, 2**40):
            answer = await intruder.call(name, {"after": after, "limit": 200})
            entries = next(value for key, value in answer.content.items() if isinstance(value, list))
            if foreign := [one for one in entries if one["tenant"] != INTRUDER]:
                return f"{name}: {foreign[0]}"
    return None


@attack("Logs waited for while the victim works.")
async def logs_waited_for(siege: Siege, intruder: Attacker) -> str | None:
    last = (await intruder.call("event.read", {"limit": 200})).content["next"]
    await siege.stir()
    answer = await intruder.call("event.read", {"after": last, "wait_s": 0.2})
    return f"got {answer.data!r}" if answer.content["events"] else None


@attack("Lists turned to pages of the victim's.")
async def pages_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    for name in ("job.list", "policy.list"):
        for after in ("", f"job.{VICTIM}.a", f"policy.{VICTIM}.a.0", "\x00", "a" * 200, ">", "*"):
            answer = await intruder.call(name, {"after": after})
            if VICTIM.encode() in answer.data:
                return f"{name}: {answer.data!r}"
    return None


@attack("All lists and logs of a tenant whose name its own begins with.", tenant=NAMESAKE)
async def lists_of_a_namesake(_siege: Siege, intruder: Attacker) -> str | None:
    for name in ("job.list", "policy.list", "event.read", "usage.read", "audit.read", "account.show"):
        content = (await intruder.call(name, {})).content
        found = next((value for value in content.values() if isinstance(value, list)), [])
        if foreign := [one for one in found if one.get("tenant", one.get("plan", {}).get("tenant", NAMESAKE)) != NAMESAKE]:
            return f"{name}: {foreign[0]}"
    return await both(intruder, "job.get", {"job": JOB}, {"job": ABSENT})


@attack("The victim's version asked to act.")
async def version_of_another_acts(siege: Siege, intruder: Attacker) -> str | None:
    seen = len(siege.asked)
    there = {"id": "1", "job": JOB, "policy": POLICY, "observation": observation()}
    evidence = await both(intruder, "infer.request", there, there | {"job": ABSENT, "policy": ABSENT_POLICY}, packed=True)
    return evidence or (f"it reached the queue: {siege.asked[seen:]}" if siege.asked[seen:] else None)


@attack("Its own version asked to act at the victim's cost: for the victim's job, and under the id of its open request.")
async def acting_at_anothers_cost(siege: Siege, intruder: Attacker) -> str | None:
    seen = len(siege.asked)
    request = {"id": f"{'x' * 3}-1", "job": JOB, "policy": OWN_POLICY, "observation": observation(), "tenant": VICTIM}
    for name in (request["id"], next(iter(siege.gateway.asked))):  # the second is the gateway's own, as if it had been guessed
        answer = await intruder.pack("infer.request", request | {"id": name})
        if answer.error or answer.content["id"] != name:
            return f"another's answer: {answer.data!r}"
    if wrong := [one for one in siege.asked[seen:] if one[0] != INTRUDER]:
        return f"in the name of {wrong}"
    return "the victim's request is gone" if siege.open_request is None or siege.open_request.done() else None


@attack("Who else is in the group of a forward.")
async def neighbours_counted(_siege: Siege, intruder: Attacker) -> str | None:
    request = {"id": "1", "job": OWN_JOB, "policy": OWN_POLICY, "observation": observation()}
    answer = await intruder.pack("infer.request", request)
    assert not answer.error, answer
    return f"it says {answer.content}" if {"group", "tenants"} & answer.content.keys() else None


@attack("What it may take and has taken, of anybody but itself.")
async def account_of_another(_siege: Siege, intruder: Attacker) -> str | None:
    for content in ({}, {"tenant": VICTIM}, {"name": VICTIM, "account": VICTIM}):
        answer = await intruder.call("account.show", content)
        if answer.content["tenant"] != INTRUDER:
            return f"{answer.data!r}"
    return None
