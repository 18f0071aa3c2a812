"""Policies leave and come back, are pinned and retired: a real master and client on a real server."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import structlog
from safetensors.numpy import save

from nexus_bus import exported, registry
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.client import Client
from nexus_bus.clock import now
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import BadJob, BadMessage, ContractError, NotFound, Unavailable
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.plan import compile_plan
from nexus_bus.serving import introduce
from nexus_bus.worker import Context, Pulse
from schemas.events import Event
from schemas.job import EnvironmentSpec, EvaluationSpec, HeadSpec, JobSpec, LoraSpec, Ppo, RetentionSpec
from schemas.plan import JobState
from schemas.policy import PolicyImport, PolicyVersion, TrainingState
from workers.master import Master

TOUCH = EnvironmentSpec(id="tabletop", task="touch")
BASE = describe_backbone("nexus-nano")
Publish = Callable[..., Awaitable[PolicyVersion]]


def weights(seed: int) -> bytes:
    return save({"head.weight": np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32)})


@pytest.fixture
async def master(bus: Bus) -> AsyncIterator[Master]:
    """A master that serves its queue; it retires when a test says `sweep`, and deletes at once."""
    context = Context("master", "master-0", bus, None, asyncio.Event(), Pulse(), cast(Any, structlog.get_logger()), "host")
    master = Master(context)
    master.policies.grace_s = 0.0
    await introduce(bus, "acme")
    serving = asyncio.create_task(master.serve())
    yield master
    context.stop.set()
    await serving


@pytest.fixture
async def client(server: EmbeddedServer, master: Master, gateway: Any) -> AsyncIterator[Client]:
    async with await Client.connect(server.url, "acme") as client:
        yield client


@pytest.fixture
def publish(bus: Bus) -> Publish:
    """`await publish("pick", 3)` puts a version into the registry, as a trainer does."""

    async def publish(job: str, n: int, data: bytes | None = None, tenant: str = "acme", **fields: Any) -> PolicyVersion:
        known = describe(TOUCH)
        contract = build_contract(backbone=BASE, head=HeadSpec(horizon=4), action=known.action, observation=known.observation)
        parent = f"{job}@{n - 1}" if n else None
        version = PolicyVersion(
            **{
                "id": f"{job}@{n}", "tenant": tenant, "job": job, "n": n, "parent": parent, "contract": contract,
                "weights": await bus.blobs.put(weights(n) if data is None else data), "created": now(), "step": n * 10,
            } | fields
        )  # fmt: skip
        await bus.kv("registry").create(registry.policy_key(tenant, job, n), version)
        return version

    return publish


async def job(bus: Bus, name: str, newest: int, **fields: Any) -> JobState:
    """A job as the registry holds it: an RL job that trains, unless told otherwise."""
    spec = {"kind": "rl", "name": name, "environment": TOUCH, "head": HeadSpec(horizon=4), "algorithm": Ppo()}
    changes = {key: fields.pop(key) for key in list(fields) if key in JobSpec.__struct_fields__}
    plan = compile_plan(JobSpec(**(spec | changes)), "acme", None)
    given = {"phase": "training", "version": newest, "done": max(0, newest), "init": changes.get("init", "")} | fields
    state = JobState(plan=plan, submission=name, submitted=now(), **given)
    await bus.kv("registry").put(registry.job_key("acme", name), state)
    return state


async def events(bus: Bus, kind: str) -> list[Event]:
    return [item.message async for item in bus.tail("event", since="all", follow=False) if item.message.type == kind]


async def test_a_policy_leaves_comes_back_under_another_name_and_is_the_same(client: Client, publish: Publish, tmp_path: Path):
    await publish("warm", 0)
    await publish("pick", 0, parent="warm@0")
    left = await publish("pick", 1, metrics={"loss": 0.5}, seed=7, trace="00-aa-bb-01")
    await client.export("pick@latest", tmp_path / "mine")
    imported = await client.import_policy(tmp_path / "mine", name="second")
    came = imported.policy
    assert (came.id, came.parent, came.origin, came.ancestors) == ("second@0", None, "acme/pick@1", ["pick@0", "warm@0"])
    assert (came.weights.sha256, came.contract) == (left.weights.sha256, left.contract)
    assert (came.step, came.seed, came.metrics, came.trace) == (10, 7, {"loss": 0.5}, "00-aa-bb-01")
    assert "warning" not in imported.message
    await client.export("second@0", tmp_path / "again")
    card = json.loads((tmp_path / "again" / exported.VERSION).read_bytes())
    assert card["ancestors"] == ["acme/pick@1", "pick@0", "warm@0"], "the whole way stays known"


async def test_an_import_whose_gateway_died_before_its_order_went_out_is_asked_again(
    client: Client, publish: Publish, bus: Bus, gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await publish("pick", 0)
    await client.export("pick@0", tmp_path / "mine")
    send, tries = gateway.bus.publish, list[str]()

    async def dying(name: str, *given: Any, **tokens: Any) -> Any:
        if name == "policy.import":
            tries.append(name)
            if len(tries) == 1:
                raise Unavailable("killed")
        return await send(name, *given, **tokens)

    monkeypatch.setattr(gateway.bus, "publish", dying)
    assert (await client.import_policy(tmp_path / "mine", name="second")).policy.id == "second@0"
    assert len(tries) == 2
    assert await bus.queued("UPLOADS") == {}, "what was used is not kept"


async def test_an_adapter_travels_along(client: Client, publish: Publish, bus: Bus, tmp_path: Path):
    lora = LoraSpec(rank=2, targets=("q_proj",))
    layer = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    data = save({f"{layer}.lora_A.weight": np.ones((2, 8), np.float32), f"{layer}.lora_B.weight": np.ones((4, 2), np.float32)})
    plain = await publish("plain", 0)
    contract = msgspec.structs.replace(plain.contract, lora=lora)
    await publish("pick", 0, adapter=await bus.blobs.put(data), contract=contract)
    files = {path.name for path in await client.export("pick@0", tmp_path / "mine")}
    assert {"adapter_model.safetensors", "adapter_config.json", "action_head.safetensors"} <= files
    assert (tmp_path / "mine" / "adapter_model.safetensors").read_bytes() == data
    came = (await client.import_policy(tmp_path / "mine", name="second")).policy
    assert came.adapter is not None
    assert await bus.blobs.get(came.adapter) == data
    assert came.contract.lora == lora


async def test_a_job_starts_from_an_imported_policy(client: Client, publish: Publish, tmp_path: Path, eventually: Any):
    await publish("pick", 0)
    await client.export("pick@0", tmp_path / "mine")
    await client.import_policy(tmp_path / "mine", name="second")
    for ref in ("second@0", "second@latest"):
        name = f"score-{ref.partition('@')[2]}"
        spec = JobSpec(kind="eval", name=name, init=ref, environment=TOUCH, evaluation=EvaluationSpec(episodes=1))
        await client.submit(spec)

        async def begun(name: str = name) -> bool:
            state = await client.job(name)
            return state is not None and (state.phase, state.init) == ("evaluating_after", "second@0")

        await eventually(begun)
    with pytest.raises(BadJob, match="init: no policy 'second@1'"):
        await client.submit(JobSpec(kind="eval", name="other", init="second@1", environment=TOUCH))
    with pytest.raises(BadJob, match="name: second@0 was imported under this name"):
        await client.submit(JobSpec(kind="eval", name="second", init="second@0", environment=TOUCH))


async def test_the_same_content_twice_is_one_version_and_other_content_is_refused(
    client: Client, publish: Publish, tmp_path: Path, bus: Bus
):
    await publish("pick", 0)
    await publish("pick", 1)
    await job(bus, "pick", 1)
    for n in (0, 1):
        await client.export(f"pick@{n}", tmp_path / str(n))
    first = await client.import_policy(tmp_path / "0", name="second")
    assert (await client.import_policy(tmp_path / "0", name="second")).policy == first.policy
    with pytest.raises(BadJob, match="second@0 exists with other content"):
        await client.import_policy(tmp_path / "1", name="second")
    with pytest.raises(BadJob, match="a job 'pick' exists; choose another name with --name"):
        await client.import_policy(tmp_path / "0")
    with pytest.raises(BadJob, match=r"name: 'a\.b' is not a name"):
        await client.import_policy(tmp_path / "0", name="a.b")


async def test_of_two_imports_at_once_under_one_name_one_wins(client: Client, publish: Publish, tmp_path: Path):
    for n in (0, 1):
        await publish("pick", n)
        await client.export(f"pick@{n}", tmp_path / str(n))
    both = await asyncio.gather(
        *(client.import_policy(tmp_path / str(n), name="second") for n in (0, 1)), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in both) == ["BadJob", "Imported"]
    same = await asyncio.gather(*(client.import_policy(tmp_path / "0", name="third") for _ in range(2)))
    assert same[0].policy == same[1].policy


async def test_the_master_does_not_believe_what_a_client_says(client: Client, publish: Publish, bus: Bus):
    """A tenant may publish the message by hand."""
    plain = await publish("pick", 0)
    poisoned = save({"head.weight": np.array([1.0, np.nan], np.float32)})
    other = msgspec.structs.replace
    for order, error in [
        ({"weights": await bus.blobs.put(poisoned)}, "'head.weight' holds numbers that are not finite"),
        ({"weights": await bus.blobs.put(b"pickled")}, "not a safetensors file"),
        ({"weights": other(plain.weights, size=3)}, "weights.size: 3"),
        ({"weights": other(plain.weights, sha256="0" * 64)}, "does not exist"),
        ({"adapter": plain.weights}, "there is an adapter, but contract.lora has none"),
        ({"contract": other(plain.contract, statistics_hash="0")}, "contract.statistics_hash"),
        ({"contract": other(plain.contract, head=HeadSpec(type="nope", horizon=4))}, "contract.head.type: 'nope'"),
        ({"contract": other(plain.contract, prompt="do {instruction}")}, "contract.prompt"),
        ({"contract": other(plain.contract, query_tokens=64)}, "contract.query_tokens"),
    ]:
        given: dict[str, Any] = {"name": "bad", "contract": plain.contract, "weights": plain.weights} | order
        await bus.publish("policy.import", PolicyImport(**given), msg_id=f"by-hand-{error}", tenant="acme")
        async with asyncio.timeout(30.0):
            said = await anext(one async for one in client.events("bad") if one.submission == f"by-hand-{error}")
        assert said.type == "policy.refused"
        assert re.search(error, said.message)
    with pytest.raises(NotFound):
        await client.policy("bad@0")


async def test_an_import_that_does_not_decode_gets_its_answer(client: Client, bus: Bus):
    given = {"Nats-Msg-Id": "malformed", "Content-Type": "application/json"}
    await bus.publisher.send("policy.import.acme", b'{"name": "a.b"}', given, 30.0)
    async with asyncio.timeout(30):
        async for item in bus.tail("event", since="all", tenant="acme", job="*"):
            if item.message.submission == "malformed":
                assert item.message.type == "policy.refused"
                assert "name" in item.message.message
                break


async def test_an_unknown_backbone_is_a_warning(client: Client, publish: Publish, tmp_path: Path):
    known = (await publish("plain", 0)).contract
    await publish("pick", 0, contract=msgspec.structs.replace(known, backbone="qwen", backbone_fingerprint="f" * 64))
    await client.export("pick@0", tmp_path / "mine")
    said = (await client.import_policy(tmp_path / "mine", name="second")).message
    assert "warning: its backbone 'qwen'" in said


async def test_a_training_state_comes_with_the_newest_version_alone(client: Client, publish: Publish, bus: Bus, tmp_path: Path):
    for n in (0, 1):
        await publish("pick", n)
    state = TrainingState(
        tenant="acme", job="pick", step=10, batches=5, records=40, version=1, epoch=1, state=await bus.blobs.put(b"optimizer")
    )
    await bus.kv("registry").put(registry.state_key("acme", "pick"), state)
    paths = await client.export("pick@1", tmp_path / "one", training_state=True)
    assert tmp_path / "one" / "training_state" / "state.safetensors" in paths
    assert (tmp_path / "one" / "training_state" / "state.safetensors").read_bytes() == b"optimizer"
    assert json.loads((tmp_path / "one" / "training_state" / "cursor.json").read_bytes())["batches"] == 5
    with pytest.raises(BadJob, match="training state: pick@0 has none; pick@1 has one"):
        await client.export("pick@0", tmp_path / "zero", training_state=True)
    assert not (tmp_path / "zero").exists()


async def test_what_is_missing_or_in_the_way_is_said(client: Client, publish: Publish, tmp_path: Path):
    await publish("pick", 0)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(NotFound, match="has no 'pick@7'"):
        await client.export("pick@7", tmp_path / "new")
    with pytest.raises(BadJob, match="is no directory"):
        await client.export("pick@0", tmp_path / "file")
    with pytest.raises(BadJob, match="is not empty"):
        await client.export("pick@0", tmp_path / "full")
    await client.export("pick@0", tmp_path / "full", force=True)
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert exported.read(tmp_path / "full").card.id == "pick@0"
    with pytest.raises(NotFound, match="is no directory"):
        await client.import_policy(tmp_path / "nowhere")
    with pytest.raises(BadMessage, match=r"has no policy_version\.json"):
        await client.import_policy(tmp_path)
    (tmp_path / "full" / exported.HEAD).write_bytes(weights(9))
    with pytest.raises((BadMessage, ContractError), match=r"action_head\.safetensors: was changed"):
        await client.import_policy(tmp_path / "full", name="second")


async def test_versions_beyond_the_retention_are_retired_and_their_weights_go(
    client: Client, master: Master, publish: Publish, bus: Bus, tmp_path: Path
):
    versions = [await publish("pick", n) for n in range(8)]
    await client.pin("pick@1")
    await job(bus, "pick", 7, phase="completed", retention=RetentionSpec(keep=2, every=5))
    await master.sweep()
    assert [version.n for version in await client.policies("pick") if not version.retired] == [0, 1, 5, 6, 7]
    for version in versions:
        gone = version.n in (2, 3, 4)
        try:
            await bus.blobs.get(version.weights)
            assert not gone
        except NotFound:
            assert gone
    assert [event.data["version"] for event in await events(bus, "policy.retired")] == [2, 3, 4]
    assert [one.id for one in await client.lineage("pick@7")] == [f"pick@{n}" for n in range(7, -1, -1)]
    with pytest.raises(NotFound, match="pick@3 was retired on 2"):
        await client.export("pick@3", tmp_path / "new")
    with pytest.raises(BadJob, match=r"pick@3 was retired on .*cannot be kept any more"):
        await client.pin("pick@3")
    with pytest.raises(BadJob, match="init: pick@3 was retired on"):
        await client.submit(JobSpec(kind="eval", name="score", init="pick@3", environment=TOUCH))


async def test_a_pin_holds_over_restarts_until_it_is_taken_off(client: Client, master: Master, publish: Publish, bus: Bus):
    for n in range(4):
        await publish("pick", n)
    await job(bus, "pick", 3, phase="completed", retention=RetentionSpec(keep=1))
    assert (await client.pin("pick@2")).pinned
    fresh = Master(master.context)
    fresh.policies.grace_s = 0.0
    await fresh.sweep()
    assert [version.n for version in await client.policies("pick") if not version.retired] == [2, 3]
    assert not (await client.pin("pick@2", pinned=False)).pinned
    await master.sweep()
    assert [version.n for version in await client.policies("pick") if not version.retired] == [3]
    with pytest.raises(NotFound, match="has no 'pick@9'"):
        await client.pin("pick@9")


async def test_weights_stay_while_a_living_version_has_the_same(client: Client, master: Master, publish: Publish, bus: Bus):
    shared = await publish("pick", 0)
    await publish("pick", 1)
    await publish("twin", 0, data=weights(0), tenant="zeta")
    await job(bus, "pick", 1, phase="completed", retention=RetentionSpec(keep=1))
    await master.sweep()
    assert (await client.policy("pick@0")).retired
    assert await bus.blobs.get(shared.weights) == weights(0)


async def test_what_a_job_needs_or_has_scored_is_kept(client: Client, master: Master, publish: Publish, bus: Bus):
    for n in range(6):
        await publish("pick", n)
    await publish("child", 0)
    await job(bus, "pick", 5, phase="completed", retention=RetentionSpec(keep=1))
    await job(bus, "child", 0, phase="training", init="pick@1")
    scored = {"phase": "completed", "scores": {"success_after": 0.5}}
    await job(bus, "score", -1, kind="eval", algorithm=None, head=None, init="pick@3", **scored)
    await master.sweep()
    assert [version.n for version in await client.policies("pick") if not version.retired] == [1, 3, 5]


async def test_deletion_waits_a_while_and_a_master_that_died_in_between_is_no_leak(
    client: Client, master: Master, publish: Publish, bus: Bus
):
    old = await publish("pick", 0)
    await publish("pick", 1)
    await job(bus, "pick", 1, phase="completed", retention=RetentionSpec(keep=1))
    master.policies.grace_s = 60.0
    await master.sweep()
    assert (await client.policy("pick@0")).retired
    assert await bus.blobs.get(old.weights), "whoever asked before is still answered"
    fresh = Master(master.context)
    fresh.policies.grace_s = 0.0
    await fresh.sweep()
    with pytest.raises(NotFound):
        await bus.blobs.get(old.weights)
    assert (await client.policy("pick@0")).purged


async def test_what_came_with_a_refused_import_is_not_kept(client: Client, publish: Publish, bus: Bus, tmp_path: Path):
    kept = await publish("pick", 0)
    await client.export("pick@0", tmp_path / "mine")
    await publish("taken", 0, weights(7))  # under whose name nothing can be imported
    with pytest.raises(BadJob, match="taken@0 exists with other content"):
        await client.import_policy(tmp_path / "mine", name="taken")
    assert await bus.blobs.get(kept.weights), "pick@0 has the same, and keeps it"
    refused = PolicyImport(name="bad", contract=kept.contract, weights=await bus.blobs.put(b"pickled"))
    await bus.publish("policy.import", refused, msg_id="refused", tenant="acme")
    async with asyncio.timeout(30.0):
        while True:
            try:
                await bus.blobs.get(refused.weights)
            except NotFound:
                break
            await asyncio.sleep(0.02)
