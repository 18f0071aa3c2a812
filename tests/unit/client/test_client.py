"""The tenant's end: what a program gets for what it sends. A small master of this file's own answers, on a real server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from nexus_bus.bus import Bus, Delivery, Done, Durable, EmbeddedServer, Outcome
from nexus_bus.client import Client
from nexus_bus.client.sync import Client as SyncClient
from nexus_bus.clock import now
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadJob, NotFound, Unavailable
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.plan import compile_plan
from nexus_bus.registry import job_key, policy_key
from schemas.events import Event
from schemas.job import EnvironmentSpec, HeadSpec, JobCancel, JobSpec
from schemas.plan import JobState
from schemas.policy import PolicyContract, PolicyVersion

ENVIRONMENT = {"id": "tabletop", "task": "touch"}
JOB: dict[str, Any] = {"kind": "rl", "name": "pick", "environment": ENVIRONMENT}


class Master:
    """Accepts what compiles, completes it when told to."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.kv, self.got = bus, bus.kv("registry"), list[Any]()
        self.refusing = ""

    async def handle(self, delivery: Delivery) -> Outcome:
        message, tenant = delivery.message, delivery.tenant
        self.got.append(message)
        if isinstance(message, JobCancel):
            await self.end(tenant, message.job, "cancelled")
            return Done()
        why = self.refusing
        if await self.kv.get(job_key(tenant, message.name), JobState):
            why = f"name: a job {message.name!r} exists already; choose another name"
        if why:
            await self.event("job.refused", tenant, message.name, why, submission=delivery.msg_id)
            return Done()
        plan = compile_plan(message, tenant)
        state = JobState(plan=plan, phase="training", submission=delivery.msg_id, submitted=now())
        await self.kv.create(job_key(tenant, message.name), state)
        await self.event("job.accepted", tenant, message.name, "accepted", submission=delivery.msg_id)
        return Done()

    async def end(self, tenant: str, job: str, phase: Any) -> None:
        entry = await self.kv.get(job_key(tenant, job), JobState)
        assert entry is not None
        await self.kv.put(job_key(tenant, job), msgspec.structs.replace(entry.value, phase=phase, closed=True))
        await self.event(f"job.{phase}", tenant, job, phase)

    async def event(self, kind: Any, tenant: str, job: str, message: str, submission: str = "") -> None:
        event = Event(type=kind, tenant=tenant, job=job, time=now(), message=message, submission=submission)
        await self.bus.publish("event", event, msg_id=f"{tenant}/{job}/{kind}/{submission}", tenant=tenant, job=job)


@pytest.fixture
async def master(bus: Bus) -> AsyncIterator[Master]:
    master, stop = Master(bus), asyncio.Event()
    durable = Durable("JOBS", "master", ("job.submit.*", "job.cancel.*"))
    serving = asyncio.create_task(bus.consume(durable, master.handle, stop=stop))
    yield master
    stop.set()
    await serving


@pytest.fixture
async def client(server: EmbeddedServer, master: Master, gateway: Any) -> AsyncIterator[Client]:
    async with await Client.connect(server.url, "acme") as client:
        yield client


async def test_a_good_job_is_accepted(client: Client, master: Master):
    submission = await client.submit(JOB)
    assert (submission.job, submission.message) == ("pick", "accepted")
    state = await client.job("pick")
    assert state is not None
    assert state.submission == submission.id
    assert [job.plan.spec.name for job in await client.jobs()] == ["pick"]


async def test_documents_come_as_files_mappings_and_specs(client: Client, tmp_path: Path):
    paths = [tmp_path / f"{name}.json" for name in ("a", "b")]
    for path in paths:
        path.write_bytes(msgspec.json.encode(JOB | {"name": path.stem}))
    documents = (paths[0], str(paths[1]), JOB | {"name": "c"}, msgspec.convert(JOB | {"name": "d"}, JobSpec))
    assert [(await client.submit(document)).job for document in documents] == ["a", "b", "c", "d"]


async def test_a_document_that_is_no_job_is_refused_before_it_is_sent(client: Client, master: Master):
    with pytest.raises(BadJob, match=r"head\.horzon: no such field; did you mean 'horizon'"):
        await client.submit(JOB | {"head": {"horzon": 3}})
    assert master.got == []


async def test_the_masters_refusal_comes_with_its_words(client: Client):
    await client.submit(JOB)
    with pytest.raises(BadJob, match="exists already"):
        await client.submit(JOB)


async def test_a_submission_repeated_by_its_id_is_one_job(client: Client, master: Master):
    first = await client.submit(JOB, submission="mine-1")
    assert await client.submit(JOB, submission="mine-1") == first
    assert len(master.got) == 1


async def test_a_refused_document_may_come_again_once_it_is_right(client: Client, master: Master):
    master.refusing = "base: not downloaded yet"
    with pytest.raises(BadJob, match="not downloaded yet"):
        await client.submit(JOB)
    master.refusing = ""
    assert (await client.submit(JOB)).message == "accepted"


async def test_without_a_master_the_job_is_queued_and_that_is_said(server: EmbeddedServer, bus: Bus, gateway: Any):
    async with await Client.connect(server.url, "acme") as client:
        with pytest.raises(Unavailable, match="'pick' is queued"):
            await client.submit(JOB, timeout=3.0)
    assert (await bus.js.stream_info("JOBS")).state.messages == 1


async def test_watch_tells_everything_from_the_beginning_to_the_end(client: Client, master: Master):
    await client.submit(JOB)
    await master.event("job.phase", "acme", "pick", "training")
    await master.event("job.phase", "other", "pick", "not ours")

    async def types() -> list[str]:
        return [event.type async for event in client.watch("pick")]

    watching = asyncio.create_task(types())
    await master.end("acme", "pick", "completed")
    assert await watching == ["job.accepted", "job.phase", "job.completed"]
    assert await types() == ["job.accepted", "job.phase", "job.completed"]
    assert (await client.wait("pick")).phase == "completed"


async def test_submit_may_wait_for_the_end(client: Client, master: Master, eventually: Any):
    waiting = asyncio.create_task(client.submit(JOB, wait=True))
    await eventually(lambda: client.job("pick"))
    assert not waiting.done()
    await master.end("acme", "pick", "failed")
    assert (await waiting).job == "pick"


async def test_cancel_reaches_the_master_once(client: Client, master: Master):
    await client.submit(JOB)
    await client.cancel("pick", "enough")
    assert (await client.wait("pick")).phase == "cancelled"
    assert master.got[-1] == JobCancel(job="pick", reason="enough")
    with pytest.raises(BadJob, match="cancelled already"):
        await client.cancel("pick")
    with pytest.raises(NotFound, match="no job 'drop'"):
        await client.cancel("drop")


async def test_a_tenant_sees_its_own(client: Client):
    await client.submit(JOB)
    other = client.for_tenant("other")
    assert await other.jobs() == []
    with pytest.raises(NotFound):
        async for _ in other.watch("pick"):
            pass


async def test_names_cannot_break_out_of_their_place(client: Client, server: EmbeddedServer):
    for name in ("a.b", "*", ">", "A", "", "a b"):
        with pytest.raises(BadJob, match="is not a name"):
            await client.job(name)
        with pytest.raises(BadJob, match="is not a name"):
            client.for_tenant(name)
    with pytest.raises(BadJob, match="tenant"):
        await Client.connect(server.url, "no good")


async def test_policies_are_listed_found_and_taken_home(client: Client, bus: Bus, tmp_path: Path):
    weights = b"safetensors" * 1000
    versions = [await published(bus, "pick", n, weights) for n in (0, 1, 10)]
    await published(bus, "push", 0, weights)
    assert await client.policies("pick") == versions
    assert [version.id for version in await client.policies()] == ["pick@0", "pick@1", "pick@10", "push@0"]
    assert await client.policy("pick@1") == versions[1]
    assert await client.policy("pick@latest") == versions[2]
    for missing in ("pick@7", "pick", "drop@latest", "pick@x"):
        with pytest.raises(NotFound):
            await client.policy(missing)
    files = await client.export("pick@latest", tmp_path / "out")
    assert {"action_head.safetensors", "policy_contract.json", "policy_version.json"} <= {path.name for path in files}
    assert (tmp_path / "out" / "action_head.safetensors").read_bytes() == weights
    assert (
        msgspec.json.decode((tmp_path / "out" / "policy_contract.json").read_bytes(), type=PolicyContract)
        == versions[2].contract
    )


async def test_a_lineage_goes_to_the_root_over_jobs(client: Client, bus: Bus):
    await published(bus, "warm", 3, b"", parent="warm@2")
    await published(bus, "pick", 0, b"", parent="warm@3")
    await published(bus, "pick", 1, b"", parent="pick@0")
    assert [version.id for version in await client.lineage("pick@latest")] == ["pick@1", "pick@0", "warm@3"]


async def published(bus: Bus, job: str, n: int, weights: bytes, parent: str | None = None) -> PolicyVersion:
    known = describe(EnvironmentSpec(**ENVIRONMENT))
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"), head=HeadSpec(), action=known.action, observation=known.observation
    )
    version = PolicyVersion(
        id=f"{job}@{n}", tenant="acme", job=job, n=n, parent=parent, contract=contract,
        weights=await bus.blobs.put(weights), created=now(),
    )  # fmt: skip
    await bus.kv("registry").create(policy_key("acme", job, n), version)
    return version


async def test_evaluate_sends_an_eval_job(client: Client, master: Master):
    submission = await client.evaluate("pick@3", EnvironmentSpec(**ENVIRONMENT))
    spec = master.got[-1]
    assert (spec.kind, spec.init, spec.name) == ("eval", "pick@3", submission.job)
    assert submission.job.startswith("eval-pick-3-")


async def test_no_server_is_said_in_a_sentence():
    with pytest.raises(Unavailable, match="no NATS server"):
        await Client.connect("nats://127.0.0.1:1", timeout=0.3)


async def test_the_same_without_async(server: EmbeddedServer, master: Master, gateway: Any):
    def program() -> list[str]:
        with SyncClient(server.url, "acme") as client:
            client.submit(JOB)
            events = client.watch("pick")
            seen = [next(events).type]
            client.cancel("pick")
            seen += [event.type for event in events]
            assert client.wait("pick").phase == "cancelled"
            with pytest.raises(NotFound):
                client.cancel("drop")
            return seen

    assert await asyncio.to_thread(program) == ["job.accepted", "job.cancelled"]


def test_the_client_loads_no_torch_and_no_simulator():
    import subprocess
    import sys

    code = (
        "import sys, nexus_bus.client, nexus_bus.client.sync;"
        "print(sorted({'torch', 'transformers', 'mujoco'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


async def test_a_program_without_logging_of_ours_keeps_its_own_output(
    server: EmbeddedServer, gateway: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(structlog, "is_configured", lambda: False)
    async with await Client.connect(server.url, "acme") as client:
        client.bus.log.debug("of no interest")
        client.bus.log.warning("the bus is away")
    said = capfd.readouterr()
    assert said.out == ""
    assert "of no interest" not in said.err
    assert "the bus is away" in said.err
