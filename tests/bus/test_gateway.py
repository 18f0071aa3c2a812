"""The tenants' door: orders, logs in pages, a tenant's own requests to act; and that one of several may be away."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nexus_bus import registry
from nexus_bus.bus import Bus, Delivery, Done, EmbeddedServer, Outcome, ensure_tenant, inference_durable
from nexus_bus.calls import Turns
from nexus_bus.client import Client, calls
from nexus_bus.clock import now
from nexus_bus.config import GatewayConfig
from nexus_bus.envs.catalog import describe
from nexus_bus.errors import ContractError, NotFound, Unavailable
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.pricing import Prices
from nexus_bus.serving import introduce
from nexus_bus.tenants import tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.api import ContentQuery, PageQuery, UploadChunk
from schemas.base import Tensor
from schemas.environment import Observation, SessionAsk
from schemas.events import Event
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import EnvironmentSpec, HeadSpec, JobSpec
from schemas.policy import PolicyVersion
from schemas.usage import Usage
from tests.bus.tenancy import written
from workers.gateway import Gateway

JOB: dict[str, Any] = {"kind": "rl", "name": "pick", "environment": {"id": "tabletop", "task": "touch"}}
SEEN = Observation(images={}, state=Tensor(dtype="float32", shape=(1,), data=b"\0\0\0\0"), instruction="touch")


@pytest.fixture
def acme(bus: Bus) -> Client:
    """A tenant, by the provider's connection."""
    return Client(bus, "acme")


async def say(bus: Bus, number: int, tenant: str = "acme", job: str = "pick") -> None:
    event = Event(type="job.phase", tenant=tenant, job=job, time=now(), data={"number": number})
    await bus.publish("event", event, msg_id=f"{tenant}/{job}/{number}", tenant=tenant, job=job)


async def test_a_long_log_comes_in_pages_and_in_order(acme: Client, bus: Bus, gateway: Gateway):
    for first in range(0, 500, 100):
        await asyncio.gather(*(say(bus, first + number) for number in range(100)))
    await asyncio.gather(*(say(bus, number, tenant="globex") for number in range(10)), say(bus, 7, job="place"))
    numbers = [event.data["number"] async for event in acme.events("pick", follow=False)]
    assert sorted(numbers, key=int) == list(range(500))
    assert len([event async for event in acme.events(follow=False)]) == 501
    assert [event async for event in Client(bus, "initech").events(follow=False)] == []


async def test_who_follows_hears_what_comes(acme: Client, bus: Bus, gateway: Gateway):
    await say(bus, 1)
    heard = asyncio.Queue[int]()

    async def follow() -> None:
        async for event in acme.events():
            heard.put_nowait(int(event.data["number"] or 0))

    following = asyncio.create_task(follow())
    for number in (1, 2, 3):
        if number > 1:
            await say(bus, number)
        assert await asyncio.wait_for(heard.get(), 30) == number
    following.cancel()


async def test_usage_is_read_as_it_was_written(acme: Client, bus: Bus, gateway: Gateway):
    for number in range(3):
        used = Usage(tenant="acme", job="pick", worker="w", kind="training", device_s=float(number), time=now())
        await bus.publish("usage", used, msg_id=f"u/{number}", tenant="acme", job="pick")
    assert [record.device_s async for record in acme.usage("pick")] == [0.0, 1.0, 2.0]
    assert (await acme.account()).used["device_s"] == 3.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that ask once: they are told at once what else they would hear when their time is over."""
    monkeypatch.setattr(calls, "AGAIN_S", 3600.0)


@pytest.mark.usefixtures("impatient")
async def test_orders_beyond_the_pace_are_refused_and_only_their_tenants(acme: Client, bus: Bus, gateway: Gateway):
    gateway.settings = GatewayConfig(tenant_orders=3, tenant_orders_per_s=1e-6)
    spec = msgspec.convert(JOB, JobSpec)
    queued = await asyncio.gather(*(acme.call("job.submit", spec) for _ in range(3)))
    assert all(one.submission for one in queued)
    with pytest.raises(Unavailable, match="orders: more than 3"):
        await acme.submit(JOB)
    assert await acme.job("pick") is None, "what is no order goes on"
    assert (await Client(bus, "globex").call("job.submit", spec)).submission


async def test_a_gateway_that_is_away_is_waited_for_and_two_share(acme: Client, bus: Bus, server: EmbeddedServer):
    with pytest.raises(Unavailable, match="nobody serves it"):
        await acme.call("job.list", PageQuery(), timeout=2.0)
    asking = asyncio.create_task(acme.jobs())
    await asyncio.sleep(0)
    others = [await Bus.connect(server.url, name=f"gateway-{n}") for n in range(2)]
    doors = [Gateway(Context("gateway", b.name, b, None, asyncio.Event(), Pulse(), b.log, "host")) for b in others]
    for door in doors:
        await door.open()
    assert await asking == []
    await asyncio.gather(*(acme.jobs() for _ in range(40)))
    assert all(door.context.pulse.progress for door in doors)
    await others[0].close()
    await asyncio.gather(*(acme.jobs() for _ in range(10)))
    await others[1].close()


async def test_of_one_tenant_a_few_calls_are_worked_on_and_others_do_not_wait_for_the_rest(
    acme: Client, bus: Bus, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    at_work, may = list[str](), asyncio.Event()
    look = gateway.reads.kv.keys

    async def slow(prefix: str = "", **how: bool) -> list[str]:
        if ".acme." in prefix:
            at_work.append(prefix)
            await may.wait()
        return await look(prefix, **how)

    monkeypatch.setattr(gateway.reads.kv, "keys", slow)
    asked = [asyncio.create_task(acme.jobs()) for _ in range(50)]
    follower = asyncio.create_task(anext(acme.events()))  # who waits for news stands in nobody's way
    assert await Client(bus, "globex").jobs() == []
    assert len(at_work) <= gateway.settings.tenant_work
    may.set()
    assert await asyncio.gather(*asked) == [[]] * 50
    await say(bus, 1)
    assert (await asyncio.wait_for(follower, 30)).job == "pick"


async def test_more_calls_than_may_be_worked_on_wait_their_turn():
    turns, at_work, most = Turns(2), list[int](), list[int]()

    async def work(number: int) -> None:
        async with turns.of("acme"):
            at_work.append(number)
            most.append(len(at_work))
            await asyncio.sleep(0)
            at_work.remove(number)

    async with turns.of("acme"), turns.of("acme"):
        waiting = [asyncio.create_task(work(number)) for number in range(6)]
        async with turns.of("globex"):
            assert most == []
    await asyncio.gather(*waiting)
    assert max(most) == 2
    assert len(most) == 6


async def test_an_account_says_what_is_left_of_money_and_store(acme: Client, bus: Bus, gateway: Gateway, policy: PolicyVersion):
    gateway.reads.prices = Prices(currency="EUR", device_s=0.5)
    used = Usage(tenant="acme", job="pick", worker="w", kind="training", device_s=3.0, time=now())
    await bus.publish("usage", used, msg_id="used", tenant="acme", job="pick")
    found = (await acme.account()).used
    assert (found["device_s"], found["money"], found["stored_bytes"]) == (3.0, 1.5, policy.weights.size)


@pytest.mark.usefixtures("impatient")
async def test_an_order_that_could_not_be_queued_is_on_record_all_the_same(
    acme: Client, bus: Bus, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    send = gateway.bus.publish

    async def dying(name: str, *given: Any, **tokens: Any) -> Any:
        if name == "job.submit":
            raise Unavailable("killed")
        return await send(name, *given, **tokens)

    monkeypatch.setattr(gateway.bus, "publish", dying)
    with pytest.raises(Unavailable, match="killed"):
        await acme.submit(JOB)
    assert {(one.action, one.job, one.outcome) async for one in acme.audit()} == {("job.submit", "pick", "asked")}


@pytest.fixture
async def policy(bus: Bus) -> PolicyVersion:
    """acme's pick@0."""
    known = describe(EnvironmentSpec(id="tabletop", task="touch"))
    contract = build_contract(
        backbone=describe_backbone("nexus-nano"), head=HeadSpec(horizon=4), action=known.action, observation=known.observation
    )
    version = PolicyVersion(
        id="pick@0", tenant="acme", job="pick", n=0, parent=None, contract=contract, created=now(),
        weights=await bus.blobs.put(b"weights"),
    )  # fmt: skip
    await bus.kv("registry").create(registry.policy_key("acme", "pick", 0), version)
    await ensure_tenant(bus, "acme")
    return version


async def test_a_tenants_own_request_takes_its_turn_in_the_queue(
    acme: Client, bus: Bus, gateway: Gateway, policy: PolicyVersion
):
    stop, got, sent = asyncio.Event(), list[InferenceRequest](), list[float]()

    async def handle(delivery: Delivery) -> Outcome:
        request: InferenceRequest = delivery.message
        got.append(request)
        sent.append(delivery.sent)
        reply = InferenceReply(id=request.id, policy=request.policy, value=0.5, group=9, tenants=4)
        if request.seed:
            reply = InferenceReply(id=request.id, error="state has 1 values, 3 are expected", error_code="contract")
        await bus.cast_to(delivery.inbox, "infer.reply", reply)
        return Done()

    serving = asyncio.create_task(bus.consume(inference_durable("acme"), handle, stop=stop))
    request = InferenceRequest(id="mine", job="another", policy="pick@0", observation=SEEN)
    answers = await asyncio.gather(*(acme.call("infer.request", request) for _ in range(5)))
    assert [(answer.id, answer.value) for answer in answers] == [("mine", 0.5)] * 5
    assert {(answer.group, answer.tenants) for answer in answers} == {(0, 0)}, "who else is there is nobody's business"
    assert len({one.id for one in got}) == 5
    assert {one.job for one in got} == {"pick"}, "usage is the policy's, and no name that a tenant makes up gets records"
    with pytest.raises(ContractError, match="state has 1 values"):
        await acme.call("infer.request", replace(request, seed=1))
    for someone, name in ((acme, "pick@1"), (Client(bus, "globex"), "pick@0")):
        with pytest.raises(NotFound, match=f"no '{name}'"):
            await someone.call("infer.request", replace(request, policy=name))
    await acme.call("infer.request", request, headers={"ce-time": "2031-05-06T07:08:09Z"})
    told = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC).timestamp()
    assert sent[-1] == told, "a deadline is by the tenant's clock, whatever that says"
    stop.set()
    await serving


@pytest.mark.usefixtures("impatient")
async def test_a_request_nobody_answers_ends(acme: Client, gateway: Gateway, policy: PolicyVersion):
    gateway.settings = GatewayConfig(infer_timeout_s=0.2)
    with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
        await acme.call("infer.request", InferenceRequest(id="x", job="pick", policy="pick@0", observation=SEEN))
    assert gateway.asked == {}


async def test_the_provider_begins_nothing_for_a_tenant_that_there_is_not(server: EmbeddedServer, bus: Bus, gateway: Gateway):
    spec, asked = msgspec.convert(JOB, JobSpec), SessionAsk(environment=EnvironmentSpec(id="tabletop", task="touch"))
    assert (await Client(bus, "anybody").call("job.submit", spec)).submission, "nobody was added: a service of one's own"
    async with tenants_of(server.url, server.authority) as operator:
        creds = written(server, (await operator.add("acme")).creds)
    mistyped = Client(bus, "acmee")
    for call, message in (("job.submit", spec), ("env.open", asked)):
        with pytest.raises(NotFound, match=r"tenant: no 'acmee'; did you mean 'acme'\?; `nexus tenant list`"):
            await mistyped.call(call, message)
    assert await mistyped.jobs() == [], "to look is no harm"
    assert await bus.kv("registry").get(registry.tenant_key("acmee"), dict[str, Any]) is None
    assert "job.submit.acmee" not in await bus.queued("JOBS")
    await introduce(bus, "known")
    for tenant in ("acme", "default", "anybody", "known"):
        assert (await Client(bus, tenant).call("job.submit", spec)).submission
    async with await Client.connect(server.url, creds=creds) as own:
        assert (await own.call("job.submit", spec)).submission


async def test_who_read_weights_or_opened_something_is_on_record_once_an_hour(
    server: EmbeddedServer, bus: Bus, gateway: Gateway, policy: PolicyVersion, monkeypatch: pytest.MonkeyPatch
):
    hours = [500_000]
    monkeypatch.setattr("nexus_bus.audit.time", SimpleNamespace(time=lambda: hours[0] * 3600.0 + 5))
    async with tenants_of(server.url, server.authority) as operator:
        issued = await operator.add("acme")
    read = ContentQuery(policy="pick@0", sha256=policy.weights.sha256, size=3)
    async with await Client.connect(server.url, creds=written(server, issued.creds)) as own:
        for offset in (0, 3):
            await own.call("policy.read", replace(read, offset=offset))
        with pytest.raises(NotFound):
            await own.call("policy.read", replace(read, sha256="0" * 64))
        for offset in (0, 3):
            await own.call("policy.upload", UploadChunk(upload="ab" * 16, offset=offset, data=b"abc"))
        found = [(one.action, one.job, one.detail, one.key) async for one in own.audit()][1:]
    by = issued.record.keys[0].key
    assert found == [("policy.read", "pick", "pick@0", by), ("policy.upload", "_", "ab" * 16, by)]
    await Client(bus, "acme").call("policy.read", read)
    last = [one async for one in Client(bus, "acme").audit()][-1]
    assert (last.action, last.key) == ("policy.read", bus.key), "another key is another entry"
    hours[0] += 1
    await Client(bus, "acme").call("policy.read", read)
    assert len([one async for one in Client(bus, "acme").audit() if one.action == "policy.read"]) == 3


async def test_an_order_without_a_reply_is_an_order(bus: Bus, gateway: Gateway, eventually: Any):
    await bus.client.publish("tenant.acme.job.submit", msgspec.json.encode(JOB))

    async def queued() -> bool:
        return "job.submit.acme" in await bus.queued("JOBS")

    await eventually(queued)
