"""What is attacked: a victim with something of everything, the real gateway and master before it, and watchmen.

The watchmen know three things: words that only the victim's property contains, what the victim's property looked like before an
attack, and whether the victim is still served. Whatever an attack did, one of them would see it.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import structlog

from nexus_bus import registry
from nexus_bus.bus import Bus, Delivery, Done, Outcome, ensure_tenant, ensure_topology, inference_durable
from nexus_bus.bus.authority import PROVIDER_FILE
from nexus_bus.bus.jwt import Key, unix_now
from nexus_bus.bus.topology import STREAMS
from nexus_bus.clock import now
from nexus_bus.config import EnvironmentConfig, GatewayConfig, MasterConfig
from nexus_bus.envs.catalog import describe
from nexus_bus.models.bases import describe_backbone
from nexus_bus.models.contract import build_contract
from nexus_bus.tenants import Issued, Tenants, tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.base import BlobRef
from schemas.environment import OwnOffer
from schemas.evaluation import EvaluationEpisode, EvaluationFilm
from schemas.events import Event
from schemas.inference import InferenceReply
from schemas.job import EnvironmentSpec, HeadSpec
from schemas.plan import JobState
from schemas.policy import PolicyContract, PolicyVersion, TrainingState
from schemas.tenant import TenantLimits
from schemas.usage import Audit, Usage
from tests.isolation.attacker import Attacker, attacker
from tests.isolation.environments import Robot, Theatre
from workers.gateway import Gateway
from workers.master import Master

VICTIM, INTRUDER, NAMESAKE = "acme", "mallory", "acme-2"
MARK = "quartz-heron"  # in everything of the victim's, and in nothing else
JOB, OWN_JOB, POLICY, OWN_POLICY, ABSENT, ABSENT_POLICY = "walker", "minnow", "walker@0", "minnow@0", "wanted", "wanted@0"
UPLOAD, ABSENT_UPLOAD = "a1a1a1a1", "b2b2b2b2"
CONNECTIONS, SUBSCRIPTIONS, PAYLOAD_BYTES = 6, 24, 64 << 10
TENANT_CALLS = 64
SESSIONS, SIMULATORS = 6, 12  # of a tenant, and of the environment worker
FILM = "after-failure-0"
OWN = {"id": "own-arm", "task": "door"}  # the victim's
WORK = frozenset(stream.name for stream in STREAMS if stream.work)
SCENE = EnvironmentSpec(id="tabletop", task="touch")


def spec(name: str, **fields: Any) -> dict[str, Any]:
    """A job document as a tenant writes it."""
    return {
        "kind": "sft", "name": name, "environment": {"id": "tabletop", "task": "touch"}, "data": {"expert": {"episodes": 5}},
        "algorithm": {"name": "sft", "steps": 200},
    } | fields  # fmt: skip


def observation(instruction: str = "touch") -> dict[str, Any]:
    """As small as one can be."""
    return {"images": {}, "state": {"dtype": "float32", "shape": [1], "data": b"\0\0\0\0"}, "instruction": instruction}


def contract() -> PolicyContract:
    """Of everybody's versions here."""
    known = describe(SCENE)
    return build_contract(
        backbone=describe_backbone("nexus-nano"), head=HeadSpec(horizon=4), action=known.action, observation=known.observation
    )


@dataclass
class Siege:
    """The field. Use `besieged`."""

    url: str
    authority: Path
    bus: Bus  # the provider's
    tenants: Tenants
    gateway: Gateway
    keys: dict[str, Issued]
    victim: Attacker  # the same means, used as they are meant
    refs: dict[str, BlobRef] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # what the inference worker got: tenant, headers
    stirred: int = 0  # events of the victim's that `stir` caused
    baseline: dict[str, Any] = field(default_factory=dict)
    open_request: asyncio.Task[Any] | None = None
    robots: list[Robot] = field(default_factory=list)  # own environment workers of the victim
    sessions: list[str] = field(default_factory=list)  # of the victim: in one of the provider's simulators, in its own
    plays: int = 0  # asks that the victim itself caused

    @property
    def robot(self) -> Robot:
        """The victim's own environment worker."""
        return self.robots[0]

    def creds(self, tenant: str, *, fenced: bool = True) -> str:
        """The issued credentials; or, not fenced, a key without permissions of its own, as if a tenant could sign one."""
        issued = self.keys[tenant]
        if fenced:
            return issued.creds
        from nexus_bus.bus.jwt import creds_text, mint

        key = Key.new("user")
        claims: dict[str, Any] = {"type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
        account = self.tenants.authority.tenant(tenant)
        return creds_text(mint(account, key.public, tenant, claims, issued=unix_now()), key)

    @property
    def marks(self) -> tuple[bytes, ...]:
        """What nobody but the victim may ever receive."""
        record = self.keys[VICTIM].record
        return tuple(mark.encode() for mark in (MARK, record.account, record.keys[0].key))

    async def served(self) -> None:
        """The victim asks, and is answered. Raises TimeoutError otherwise."""
        async with asyncio.timeout(60):
            answer = await self.victim.call("job.get", {"job": JOB})
        assert MARK.encode() in answer.data

    async def played(self) -> None:
        """The victim's sessions go on, and know what they knew. Raises TimeoutError otherwise."""
        self.plays += 1
        async with asyncio.timeout(60):
            for session in self.sessions:
                answer = await self.victim.pack("env.call", {"session": session, "call": {"op": "save"}})
                assert not answer.error, answer
                assert answer.content["state"] == MARK.encode(), answer

    async def stir(self) -> None:
        """The victim is busy: whoever listens could hear something."""
        await self.served()
        event = Event(type="job.progress", tenant=VICTIM, job=JOB, time=now(), message=f"step {MARK}")
        before = len(self.victim.heard)
        self.stirred += 1
        await self.bus.publish("event", event, msg_id=f"stir/{self.stirred}", tenant=VICTIM, job=JOB)
        async with asyncio.timeout(60):
            while len(self.victim.heard) == before:
                await asyncio.sleep(0.005)

    async def property(self) -> dict[str, Any]:
        """Everything of the victim's that an attack might have changed, and the streams themselves."""
        names = [stream.name for stream in STREAMS] + ["KV_registry", "OBJ_blobs"]
        infos = await asyncio.gather(*(self.bus.ask(f"$JS.API.STREAM.INFO.{name}") for name in names))
        subjects = await asyncio.gather(*(self.bus.queued(name) for name in names if name != "OBJ_blobs"))
        consumers = await asyncio.gather(*(self.bus.ask(f"$JS.API.CONSUMER.NAMES.{name}") for name in names))
        keys = [on for on in subjects[-1] if VICTIM in on.split(".")]
        revisions = await asyncio.gather(*(self.bus.last("KV_registry", on) for on in keys))
        blobs = await asyncio.gather(*(self.bus.blobs.get(ref) for ref in self.refs.values()))
        pairs = zip((name for name in names if name != "OBJ_blobs"), subjects, strict=True)
        queued = {(name, on): count for name, found in pairs for on, count in found.items() if VICTIM in on.split(".")}
        queued["EVENTS", f"event.{VICTIM}.{JOB}"] -= self.stirred
        listed = json.loads((await self.bus.ask("$JS.API.STREAM.NAMES")).data)["streams"]
        offers = await self.bus.kv("offers").entries(f"{VICTIM}.", OwnOffer)
        return {
            "offers": {key: entry.value for key, entry in offers.items()},
            "asks": len(self.robot.asks) - self.plays,
            "streams": sorted(listed),
            "configurations": {name: json.loads(info.data)["config"] for name, info in zip(names, infos, strict=True)},
            "consumers": {
                name: sorted(c for c in json.loads(one.data).get("consumers") or [] if INTRUDER not in c and NAMESAKE not in c)
                for name, one in zip(names, consumers, strict=True)
                if name in WORK  # readers of logs come and go
            },
            "messages": queued,
            "keys": {on: one.headers["Nats-Sequence"] for on, one in zip(keys, revisions, strict=True) if one},
            "blobs": [hashlib.sha256(blob).hexdigest() for blob in blobs],
            "accounts": await self._accounts(),
        }

    async def _accounts(self) -> list[bytes]:
        """Their tokens, as the server has them."""
        listed = json.loads((await self.tenants.system.ask("$SYS.REQ.CLAIMS.LIST")).data)["data"]
        tokens = [await self.tenants.system.ask(f"$SYS.REQ.ACCOUNT.{key}.CLAIMS.LOOKUP") for key in sorted(listed)]
        return [token.data for token in tokens]

    async def rebase(self) -> None:
        """What is there now is how it should be: the victim itself has done something."""
        async with asyncio.timeout(60):  # an order that is still in hand would be missed later
            while any(VICTIM in on.split(".") for on in await self.bus.queued("JOBS")):
                await asyncio.sleep(0.01)
        self.baseline = await self.property()

    async def tidy(self) -> None:
        """The victim offers its environment, as every few seconds, and nobody else does."""
        await self.robot.offer()
        for tenant in (INTRUDER, NAMESAKE):
            await self.bus.drop("KV_offers", f"$KV.offers.{tenant}.>")

    async def forget(self, tenant: str, job: str) -> None:
        """Take away a job of an intruder's that has ended, and what was said of it, as if it had never been."""
        kv, key = self.bus.kv("registry"), registry.job_key(tenant, job)
        async with asyncio.timeout(60):
            while (entry := await kv.get(key, JobState)) is not None and not entry.value.closed:
                await asyncio.sleep(0.01)
        await kv.delete(key)
        await self.bus.drop("EVENTS", f"event.{tenant}.{job}")

    async def verdict(self, intruder: Attacker, said: str | None) -> str | None:
        """Evidence that an attack got something: its own, a word of the victim's, a change, or a victim that is not served."""
        try:
            await self.served()
            await self.played()
        except TimeoutError:
            return "the victim is not answered any more"
        except AssertionError as error:
            return f"the victim's sessions are gone: {error}"
        if said is not None:
            return said
        if intruder.client.is_connected:  # what is under way arrives before this is answered
            await intruder.client.flush()
        for mark in self.marks:
            if (at := intruder.received.find(mark)) >= 0:
                return f"received {intruder.received[max(0, at - 60) : at + 60]!r}"
        if self.robot.fading:  # the attack took its time, and an honest worker has offered again meanwhile
            await self.robot.offer()
        after = await self.property()
        changed = [what for what in after if after[what] != self.baseline[what]]
        return f"changed: {[(what, self.baseline[what], after[what]) for what in changed]}"[:2000] if changed else None


@asynccontextmanager
async def besieged(url: str, authority: Path) -> AsyncIterator[Siege]:
    """Make everything on a running server whose operator's key lies in `authority`; about a second."""
    creds = authority / PROVIDER_FILE
    async with AsyncExitStack() as stack:
        stack.enter_context(mock.patch("workers.gateway.REGISTERED_S", 0.3))  # nobody here asks for an import a second time
        tenants = await stack.enter_async_context(tenants_of(url, authority))
        bus, gate, head, hand = [
            await Bus.connect(url, name=name, creds=creds) for name in ("siege", "gateway-0", "master-0", "inference-0")
        ]
        for one in (bus, gate, head, hand):
            stack.push_async_callback(one.close)
        await ensure_topology(bus)
        small = TenantLimits(
            connections=CONNECTIONS, subscriptions=SUBSCRIPTIONS, payload_bytes=PAYLOAD_BYTES, sessions=SESSIONS
        )
        keys = {
            name: await tenants.add(name, limits) for name, limits in ((VICTIM, None), (INTRUDER, small), (NAMESAKE, small))
        }
        gateway = Gateway(_context("gateway", gate, GatewayConfig(tenant_calls=TENANT_CALLS, infer_timeout_s=3600.0)))
        await gateway.open()
        victim = await stack.enter_async_context(attacker(url, keys[VICTIM].creds, True))
        siege = Siege(url, authority, bus, tenants, gateway, keys, victim)
        stop = asyncio.Event()
        for name in keys:
            await ensure_tenant(bus, name)
        master = Master(_context("master", head, MasterConfig(), stop))
        await master.quotas.allowances.load()
        serving = [
            master.serve(),
            *(hand.consume(inference_durable(name), _answering(siege, hand), stop=stop) for name in (INTRUDER, NAMESAKE)),
        ]
        tasks = [asyncio.create_task(one) for one in serving]
        stack.push_async_callback(_ended, tasks, stop)
        await _furnish(siege)
        await _stage(siege, stack)
        await siege.rebase()
        yield siege
        if siege.open_request is not None:
            siege.open_request.cancel()


def _context(role: Any, bus: Bus, config: Any, stop: asyncio.Event | None = None) -> Context:
    return Context(role, f"{role}-0", bus, config, stop or asyncio.Event(), Pulse(), cast(Any, structlog.get_logger()), "host")


async def _ended(tasks: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
    stop.set()
    await asyncio.gather(*tasks)


def _answering(siege: Siege, hand: Bus) -> Any:
    """An inference worker that says whose policy it used. It serves all but the victim, whose requests stay open."""

    async def handle(delivery: Delivery) -> Outcome:
        request = delivery.message
        siege.asked.append((delivery.tenant, dict(delivery.headers)))
        reply = InferenceReply(
            id=request.id, policy=request.policy, feature_id=f"{delivery.tenant}/{request.job}", group=9, tenants=7
        )
        await hand.cast_to(delivery.inbox, "infer.reply", reply)
        return Done()

    return handle


async def _furnish(siege: Siege) -> None:
    """Something of everything, in part by the victim itself."""
    bus, kv, victim = siege.bus, siege.bus.kv("registry"), siege.victim
    await victim.listen("event.>")
    await _submitted(victim, spec(JOB, data={"dataset": f"{MARK}-data"}))
    for tenant in (INTRUDER, NAMESAKE):
        async with attacker(siege.url, siege.keys[tenant].creds, True) as someone:
            await someone.listen("event.>")
            await _submitted(someone, spec(OWN_JOB))
    contents = {
        "weights": f"{MARK} weights",
        "adapter": f"{MARK} adapter",
        "state": f"{MARK} state",
        "unnamed": f"{MARK} old",
    }
    siege.refs = {name: await bus.blobs.put(text.encode()) for name, text in contents.items()}
    own = await bus.blobs.put(b"minnow's weights")
    for tenant, job, weights in ((VICTIM, JOB, siege.refs["weights"]), (INTRUDER, OWN_JOB, own), (NAMESAKE, OWN_JOB, own)):
        version = PolicyVersion(
            id=f"{job}@0", tenant=tenant, job=job, n=0, parent=None, contract=contract(), created=now(), weights=weights
        )
        if tenant == VICTIM:
            version = msgspec.structs.replace(
                version, adapter=siege.refs["adapter"], metrics={MARK: 1.0}, trace="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
            )
        await kv.put(registry.policy_key(tenant, job, 0), version)
    state = TrainingState(
        tenant=VICTIM,
        job=JOB,
        step=1,
        batches=1,
        records=1,
        version=0,
        state=siege.refs["state"],
        epoch=1,
        metrics={MARK: 1.0},
    )
    await kv.put(registry.state_key(VICTIM, JOB), state)
    used = Usage(tenant=VICTIM, job=JOB, worker=MARK, kind="training", device_s=5.0, time=now())
    await bus.publish("usage", used, msg_id="victim/usage", tenant=VICTIM, job=JOB)
    decided = Audit(tenant=VICTIM, action="submit", job=JOB, outcome="ok", detail=MARK, time=now())
    await bus.publish("audit", decided, msg_id="victim/audit", tenant=VICTIM)
    answer = await victim.pack("policy.upload", {"upload": UPLOAD, "offset": 0, "data": MARK.encode()})
    assert not answer.error, answer
    request = {"id": f"{MARK}-1", "job": JOB, "policy": POLICY, "observation": observation(MARK)}
    siege.open_request = asyncio.create_task(victim.ask("infer.request", msgspec.msgpack.encode(request), within=3600.0))
    async with asyncio.timeout(60):
        while f"infer.request.{VICTIM}" not in await bus.queued("INFERENCE"):
            await asyncio.sleep(0.01)


async def _stage(siege: Siege, stack: AsyncExitStack) -> None:
    """Sessions of the victim's, and an episode and a film of an evaluation."""
    bus, victim = siege.bus, siege.victim
    theatre = Theatre(_context("environment", bus, EnvironmentConfig(sessions=SIMULATORS)))
    await theatre.serving.allowances.load()
    service = await bus.serve("env.open", theatre.open, queue="environment", tenant="*")
    stack.push_async_callback(service.stop)
    hand = await stack.enter_async_context(attacker(siege.url, siege.keys[VICTIM].creds, True))
    siege.robots.append(Robot(hand.client, MARK.encode(), simulator=MARK))
    await siege.robot.listen()
    for environment in ({"id": SCENE.id, "task": SCENE.task}, OWN):
        lease = await victim.call("env.open", {"environment": environment, "lease_s": 3600.0})
        assert not lease.error, lease
        siege.sessions.append(lease.content["session"])
    kept = {"session": siege.sessions[0], "call": {"op": "restore", "state": MARK.encode()}}
    assert not (await victim.pack("env.call", kept)).error
    siege.plays = len(siege.robot.asks)
    episode = EvaluationEpisode(
        job=JOB, purpose="after", index=0, task="touch", trial=0, seed=1, policy=POLICY, success=False, end="time_limit",
        episode_return=0.0, length=1, simulate_s=0.0, forward_s=0.0, wait_s=0.0, simulator=MARK, time=now(), film=FILM,
    )  # fmt: skip
    await bus.publish("eval.episode", episode, msg_id="victim/episode", tenant=VICTIM, job=JOB)
    film = EvaluationFilm(
        job=JOB, purpose="after", task="touch", trial=0, success=False, media_type="image/gif", data=MARK.encode()
    )
    await bus.publish("eval.film", film, msg_id="victim/film", tenant=VICTIM, job=JOB, film=FILM)


async def _submitted(who: Attacker, document: dict[str, Any]) -> None:
    """And begun, by what its tenant is told."""
    event = await who.outcome(await who.call("job.submit", document, {"Nats-Msg-Id": "first"}))
    assert event["type"] == "job.accepted", event
    async with asyncio.timeout(60):
        while not any(b'"job.phase"' in msg.data for msg in who.heard):
            await asyncio.sleep(0.01)
