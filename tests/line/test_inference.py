"""The inference worker's own code on a real server: loads that hold up nobody, names that give their version or an error."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nexus_bus.bus import Bus, Durable, inference_durable, topology
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.checkpoint import weights_bytes
from nexus_bus.models.features import Look, VLAFeature
from nexus_bus.models.slots import build_module
from nexus_bus.tensors import from_tensor
from schemas.base import PROVIDER
from schemas.job import HeadSpec
from schemas.policy import PolicyVersion
from tests.conftest import Eventually
from tests.line.asking import TENANT, Asker, Start, events, held, starting
from workers import inference as worker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")


@pytest.fixture
async def asker(bus: Bus, backbone: Backbone) -> Asker:
    return await Asker(bus, backbone).open()


@pytest.fixture
async def start(bus: Bus, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`await start(slots=2)` runs a worker with these settings until the test ends."""
    async with starting(bus, backbone, tmp_path / "home", monkeypatch) as begin:
        yield begin


class Gate:
    """Holds up the loading of one job's versions until it is opened."""

    def __init__(self, job: str) -> None:
        self.job, self.opened, self.reached = job, threading.Event(), threading.Event()

    def __call__(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def gated(version: PolicyVersion, *given: Any) -> Any:
            if version.job == self.job:
                self.reached.set()
                assert self.opened.wait(60)
            return load(version, *given)

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    from nexus_bus.models import checkpoint

    gate = Gate("slow")
    monkeypatch.setattr(checkpoint, "load_policy", gate(checkpoint.load_policy))
    yield gate
    gate.opened.set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gives a request to somebody else after a second of silence."""

    def durable(tenant: str) -> Durable:
        return replace(inference_durable(tenant), ack_wait=1.0)

    monkeypatch.setattr(topology, "inference_durable", durable)
    monkeypatch.setattr(worker, "inference_durable", durable)
    monkeypatch.setattr(worker, "HOLD_S", 0.3)


async def test_a_version_that_loads_holds_up_nobody_and_its_requests_are_kept(
    impatient: None, asker: Asker, start: Start, gate: Gate, eventually: Eventually, bus: Bus
) -> None:
    await asker.publish("quick")
    await asker.publish("slow", seed=1)
    await start()
    assert (await asker.ask("quick@0")).error == ""
    waiting = [await asker.send("slow@0", scene) for scene in range(3)]
    await eventually(gate.reached.is_set)
    ends = time.monotonic() + 2.5  # longer than the server waits for a silent worker
    while time.monotonic() < ends:
        assert (await asker.ask("quick@0", 1)).policy == "quick@0"
    assert not any(name in asker.replies for name in waiting), "and nobody answers in its place"
    await eventually(lambda: held(bus, 3))  # the answered ones go once what they used is on record
    gate.opened.set()
    for name in waiting:
        reply = await asker.reply(name)
        assert (reply.error, reply.policy) == ("", "slow@0")
    assert all(len(replies) == 1 for replies in asker.replies.values())


async def test_a_request_that_nobody_waits_for_any_more_is_let_go(
    asker: Asker, start: Start, gate: Gate, eventually: Eventually, bus: Bus
) -> None:
    await asker.publish("slow")
    await start()
    expires = time.time() + 0.3
    late = await asker.send("slow@0", deadline=expires)
    patient = await asker.send("slow@0", scene=1)
    await eventually(gate.reached.is_set)
    await eventually(lambda: time.time() > expires)
    gate.opened.set()
    assert (await asker.reply(patient)).error == ""
    await eventually(lambda: held(bus))
    assert late not in asker.replies


async def test_a_name_gives_its_version_or_an_error_that_says_what_is_wrong(asker: Asker, start: Start, bus: Bus) -> None:
    await asker.publish("good")
    await asker.publish("elsewhere", backbone_fingerprint="0" * 64)
    other = asker.contract(head=HeadSpec(type="oft", horizon=2, options={"width": 16, "blocks": 1, "value_width": 8}))
    await asker.publish("foreign", weights=weights_bytes(build_module(other, asker.backbone.shape)))
    await asker.publish("text", weights=b"no weights at all")
    await asker.publish("hashed", statistics_hash="1" * 64)
    lost = await asker.publish("lost", seed=9)
    await bus.blobs.delete(lost.weights)
    await asker.retire(await asker.publish("retired"))
    await start()
    for policy, code, words in [
        ("good@1", "not_found", "good@1: there is no such version"),
        ("nobody@0", "not_found", "nobody@0: there is no such version"),
        ("retired@0", "not_found", "retired@0: it was retired on"),
        ("elsewhere@0", "contract", "elsewhere@0: contract.backbone_fingerprint"),
        ("hashed@0", "contract", "hashed@0: contract.statistics_hash"),
        ("foreign@0", "contract", "foreign@0: weights: "),
        ("text@0", "bad_message", "text@0: weights: not a safetensors file"),
        ("lost@0", "not_found", "lost@0: blob"),
    ]:
        for _ in range(2):  # the second time as the first
            reply = await asker.ask(policy)
            assert (reply.error_code, reply.actions, reply.policy) == (code, None, "")
            assert words in reply.error
    assert (await asker.ask("good@0")).policy == "good@0"
    await asker.publish("good", 1, seed=3)
    assert (await asker.ask("good@1")).policy == "good@1", "what was missing is served once it is there"


async def test_what_is_published_for_a_served_job_is_ready_before_it_is_asked_for(
    asker: Asker, start: Start, eventually: Eventually
) -> None:
    await asker.publish("served")
    await asker.publish("idle")
    serving = await start()
    await asker.ask("served@0")
    await asker.publish("idle", 1, seed=1)
    newest = await asker.publish("served", 1, seed=2)
    await eventually(lambda: serving.versions.get(TENANT, "served@1"))
    assert serving.versions.slots.versions() == [(TENANT, "served@0"), (TENANT, "served@1")]
    await asker.retire(newest)
    await eventually(lambda: serving.versions.get(TENANT, "served@1") is None)
    assert "it was retired on" in (await asker.ask("served@1")).error
    assert (await asker.ask("served@0")).error == ""


async def test_a_version_that_is_retired_while_it_loads_is_not_served(
    asker: Asker, start: Start, gate: Gate, eventually: Eventually
) -> None:
    version = await asker.publish("slow")
    serving = await start()
    name = await asker.send("slow@0")
    await eventually(gate.reached.is_set)
    await asker.retire(version)
    await eventually(lambda: serving.versions._retired)
    gate.opened.set()
    assert (await asker.reply(name)).error_code == "not_found"
    assert serving.versions.slots.versions() == []


async def test_many_versions_over_few_slots_answer_the_same_every_time(asker: Asker, start: Start) -> None:
    for i in range(12):
        await asker.publish(f"job{i}", seed=i)
    serving = await start(slots=2)
    first = [from_tensor((await asker.ask(f"job{i}@0")).actions).tobytes() for i in range(12)]  # type: ignore[arg-type]
    assert len(set(first)) == 12
    for _ in range(2):
        names = [await asker.send(f"job{i}@0") for i in range(12)]
        again = [from_tensor((await asker.reply(name)).actions).tobytes() for name in names]  # type: ignore[arg-type]
        assert again == first
    assert len(serving.versions.slots.versions()) == 2


async def test_a_head_that_breaks_costs_its_own_request_alone(
    asker: Asker, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asker.publish("sound")
    await asker.publish("broken")
    serving = await start()
    for policy in ("sound@0", "broken@0"):
        assert (await asker.ask(policy)).error == ""
    broken = serving.versions.get(TENANT, "broken@0")
    assert broken is not None
    monkeypatch.setattr(broken.module, "predict", lambda *_: 1 / 0)
    names = [await asker.send(policy, scene) for scene, policy in enumerate(["sound@0", "sound@0", "broken@0", "sound@0"])]
    replies = [await asker.reply(name) for name in names]
    assert [reply.error == "" for reply in replies] == [True, True, False, True]
    assert "policy broken@0: fails on this request" in replies[2].error


async def test_a_lone_asker_does_not_wait_for_a_group(asker: Asker, start: Start) -> None:
    await asker.publish("lone")
    serving = await start(wait_ms=5000.0)
    await asker.ask("lone@0")
    started = time.monotonic()
    for scene in range(5):
        reply = await asker.ask("lone@0", scene)
        assert reply.group == 1
    assert time.monotonic() - started < 20  # each of them could have waited for five
    gauges = serving.context.pulse.gauges
    assert 1 <= gauges["batch_knee"] <= 32
    assert gauges["group_size"] == 1
    assert gauges["wait_ms"] < 5000


async def test_the_canary_is_silent_while_answers_depend_on_the_request_alone(
    asker: Asker, start: Start, eventually: Eventually
) -> None:
    await asker.publish("watched")
    serving = await start(canary_every=3)
    for name in [await asker.send("watched@0", scene) for scene in range(12)]:
        assert (await asker.reply(name)).error == ""
    await eventually(lambda: serving.context.pulse.gauges["canary_runs"] == 4)
    assert serving.context.pulse.gauges["canary_gaps"] == 0


async def test_the_canary_sees_neighbours_that_matter(
    asker: Asker, start: Start, eventually: Eventually, bus: Bus, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asker.publish("watched")
    encode = Backbone.encode

    def leaky(self: Backbone, looks: Sequence[Look]) -> list[VLAFeature]:
        """Each neighbour leaves a trace."""
        trace = (len(looks) - 1) * torch.linspace(0, 1, self.info.hidden)
        return [replace(made, hidden=made.hidden + trace) for made in encode(self, looks)]

    serving = await start(canary_every=1)
    monkeypatch.setattr(Backbone, "encode", leaky)
    serving.pace.batch, serving.pace.patience = 8, lambda held, closes, now: 0.2 if held < 4 else 0.0  # type: ignore[method-assign]
    names = [await asker.send("watched@0", scene) for scene in range(4)]
    assert [(await asker.reply(name)).group for name in names] == [4] * 4
    gauges = serving.context.pulse.gauges
    await eventually(lambda: gauges["canary_runs"] == 4)
    assert gauges["canary_gaps"] == 4
    found = await events(bus, PROVIDER, "canary.gap", 4)
    assert {event.data["request"] for event in found} == set(names)
    for event in found:
        assert event.data["tolerance"] == 0.0
        assert event.data["gap"] > 0  # type: ignore[operator]
        assert (event.data["group"], event.data["tenant"], event.data["policy"]) == (4, TENANT, "watched@0")


async def test_what_a_stopped_worker_had_set_aside_goes_to_another(
    asker: Asker, start: Start, gate: Gate, eventually: Eventually
) -> None:
    await asker.publish("slow")
    first = await start()
    name = await asker.send("slow@0")
    await eventually(gate.reached.is_set)
    first.context.stop.set()
    await eventually(lambda: all(delivery.settled for delivery in first.held))
    gate.opened.set()
    await start()
    assert (await asker.reply(name)).policy == "slow@0"
