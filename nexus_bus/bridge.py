"""Environments across the gateway: sessions that tenants open and step themselves, and those of simulators of their own.

A tenant's worker has no subject on which anybody could ask it: it hears `ask.>`, which comes from here alone, and answers by a
call like any other. For the rest of the line its sessions look like all others; whoever asked holds them on `env.session`.
"""

import asyncio
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from nexus_bus import registry
from nexus_bus.bus import Bus, Incoming, Service
from nexus_bus.bus.codec import MAX_BLOB_MESSAGE
from nexus_bus.bus.request import ask_aside, while_served
from nexus_bus.calls import Turns
from nexus_bus.envs.catalog import EnvDescription, describe
from nexus_bus.envs.offered import START, amiss, check, is_own, unlike
from nexus_bus.errors import (
    BadMessage,
    ContractError,
    EnvironmentFault,
    NexusError,
    NotFound,
    Refused,
    Unavailable,
)
from nexus_bus.offers import offer_key, offered
from nexus_bus.pixels import UNIT, pixels
from schemas.base import Name
from schemas.control import Ack
from schemas.environment import (
    EnvironmentFound,
    EnvironmentQuery,
    OwnAnswer,
    OwnAnswered,
    OwnAsk,
    OwnOffer,
    SessionAsk,
    SessionCall,
    SessionLease,
    SessionOpen,
    SessionOpened,
    SessionReply,
    SessionStep,
)
from schemas.job import EnvironmentSpec
from schemas.policy import ObservationSpec
from schemas.subjects import BY_NAME, subject
from schemas.tenant import TenantRecord

OPEN_S, CALL_S = 60.0, 60.0
FORWARD_S = 2.0
SWEEP_S = 1.0
NOBODYS = "_"  # the job of a session that belongs to none
OFFERS = 32  # workers of one tenant at once, those that left in the last seconds included
OFFER_BYTES = 64 << 10
VERSION = 400  # characters of a simulator's name and versions
SESSIONS = 128  # in a tenant's own environments at once, where its limits do not say
# What a tenant's worker may say went wrong; whatever else it says is a fault of its environment.
_ERRORS = {kind.code: kind for kind in (BadMessage, ContractError, NotFound, Refused, Unavailable, EnvironmentFault)}


class _Absent(Unavailable):
    """Nobody answers a question."""


@dataclass
class Bridged:
    """A session that a tenant's worker holds."""

    tenant: str
    worker: str
    service: Service
    seen: ObservationSpec  # what is expected of its observations
    max_steps: int
    lease_s: float
    expires: float
    busy: int = 0
    steps: int = 0  # of the episode
    size: int = 0  # bytes of its observations: whoever plays it holds them all
    unfolded: int = 0  # and pixels, which whoever learns from it holds

    def note(self, call: SessionCall, reply: SessionReply) -> None:
        """Raises EnvironmentFault for an answer that is not what was agreed upon, and for an episode without an end."""
        if wrong := amiss(reply, call, self.seen):
            raise EnvironmentFault(f"the tenant's worker answered {wrong}")
        if call.op in ("reset", "restore"):
            self.steps, self.size, self.unfolded = (reply.steps if call.op == "restore" else 0), 0, 0
        self.steps += len(reply.rewards)
        if reply.observation is not None:
            self.size += sum(len(image.data) for image in reply.observation.images.values())
            self.unfolded += pixels(self.seen.cameras)
        if self.size > MAX_BLOB_MESSAGE:
            raise EnvironmentFault(
                f"an episode of the tenant's worker has {self.size} bytes of pictures; at most {MAX_BLOB_MESSAGE}: make them "
                "smaller, send jpeg, or end sooner"
            )
        if self.unfolded > UNIT:
            raise EnvironmentFault(
                f"an episode of the tenant's worker shows {self.unfolded} pixels; at most {UNIT}: make its pictures "
                "smaller, or end sooner"
            )
        if call.op == "step" and self.steps >= self.max_steps and reply.end == "running":
            raise EnvironmentFault(f"the tenant's worker goes on after {self.steps} steps; its episodes have {self.max_steps}")


class Bridge:
    """The gateway's calls `env.*`, and what rollout workers ask of tenants' own environments."""

    def __init__(self, bus: Bus, turns: Turns) -> None:
        """Nothing is heard until `open`. Opening waits for others, so it takes its turns itself."""
        self.bus, self.turns = bus, turns
        self.kv = bus.kv("offers")
        self.token = f"g-{uuid.uuid4().hex[:16]}"  # names are unique on one machine only
        self.asked: dict[tuple[str, str], asyncio.Future[OwnAnswer]] = {}  # by tenant and id
        self.sessions: dict[str, Bridged] = {}
        self.opening: Counter[str] = Counter()  # of those, by tenant

    async def open(self) -> None:
        """Listen to rollout workers and other gateways."""
        await self.bus.serve("env.own", self.own_open, queue="gateway", tenant="*")
        await self.bus.serve("env.answered", self._forwarded, gateway=self.token)

    async def sweep(self) -> None:
        """Forget sessions whose lease ran out; until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            clock = time.monotonic()
            for name in [name for name, one in self.sessions.items() if not one.busy and one.expires < clock]:
                await self._release(name)

    # A tenant's own sessions

    async def describe(self, query: EnvironmentQuery, incoming: Incoming) -> EnvironmentFound:
        """`env.describe`."""
        return _found(await self._known(incoming.tokens["tenant"], query.environment))

    async def lease(self, ask: SessionAsk, incoming: Incoming) -> SessionLease:
        """`env.open`."""
        tenant = incoming.tokens["tenant"]
        async with self.turns.of(tenant):
            known = await self._known(tenant, ask.environment)
        request = SessionOpen(
            tenant=tenant, job=NOBODYS, environment=ask.environment, action=ask.action or known.action,
            observation=ask.observation or known.observation, lease_s=ask.lease_s, session=uuid.uuid4().hex,
        )  # fmt: skip
        name = "env.own" if is_own(ask.environment.id) else "env.open"
        watch = subject("env.session", tenant=tenant, session=request.session or "")
        opened: SessionOpened = await self.bus.request(name, request, timeout=OPEN_S, watch=watch, tenant=tenant)
        return SessionLease(session=opened.session, worker=opened.worker, environment=_found(known, simulator=opened.version))

    async def step(self, step: SessionStep, incoming: Incoming) -> SessionReply:
        """`env.call`."""
        tenant = incoming.tokens["tenant"]
        watch = subject("env.session", tenant=tenant, session=step.session)
        try:
            return await self.bus.request(
                "env.session", step.call, timeout=CALL_S, watch=watch, tenant=tenant, session=step.session
            )
        except Unavailable as error:
            if self.bus.up.is_set() and not await self._held(watch):
                raise NotFound(f"session: {step.session!r} is over or never was; env.open gives another") from error
            raise

    async def _held(self, on: str) -> bool:
        nothing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(FORWARD_S):
                await while_served(self.bus, nothing, on)
        except Unavailable:
            return False
        except TimeoutError:
            pass
        return True

    async def _known(self, tenant: str, environment: EnvironmentSpec) -> EnvDescription:
        own = await offered(self.bus, tenant) if is_own(environment.id) else {}
        return await asyncio.to_thread(describe, environment, own)

    # What a tenant's own worker says

    async def offer(self, offer: OwnOffer, incoming: Incoming) -> Ack:
        """`env.offer`."""
        tenant = incoming.tokens["tenant"]
        key = offer_key(tenant, offer.environment, offer.worker)
        keys = await self.kv.keys(f"{tenant}.", deleted=True)  # what was deleted takes its room until it is over
        if not offer.sessions:
            if key in keys:
                await self.kv.delete(key)
            return Ack()
        check(offer)
        if (size := len(msgspec.json.encode(offer))) > OFFER_BYTES:
            raise BadMessage(f"tasks: {size} bytes; an offer has at most {OFFER_BYTES}: serve fewer tasks by each worker")
        if len({*keys, key}) > OFFERS:
            raise Unavailable(f"env.offer: {OFFERS} workers of yours serve environments, or have just left; end one, or wait")
        # A job is planned for what one says, and its episodes go to either.
        for other in (await self.kv.entries(offer_key(tenant, offer.environment, ""), OwnOffer)).values():
            if other.value.worker != offer.worker and (differs := unlike(offer, other.value)):
                raise Unavailable(
                    f"{differs}: {other.value.worker} serves {offer.environment} as well, or has just left; serve this one by "
                    "another name (--as NAME), or wait until that one is gone"
                )
        await self.kv.put(key, offer)
        return Ack()

    async def answer(self, answer: OwnAnswer, incoming: Incoming) -> Ack:
        """`env.answer`."""
        tenant = incoming.tokens["tenant"]
        if answer.gateway == self.token:
            return self._resolve(tenant, answer)
        try:
            return await self.bus.request(
                "env.answered", OwnAnswered(tenant=tenant, answer=answer), timeout=FORWARD_S, gateway=answer.gateway
            )
        except Unavailable:
            raise NotFound(_NOT_WAITED_FOR) from None

    async def _forwarded(self, message: OwnAnswered, _incoming: Incoming) -> Ack:
        return self._resolve(message.tenant, message.answer)

    def _resolve(self, tenant: str, answer: OwnAnswer) -> Ack:
        waiting = self.asked.get((tenant, answer.id))
        if waiting is None or waiting.done():
            raise NotFound(_NOT_WAITED_FOR)
        waiting.set_result(answer)
        return Ack()

    # What is asked of it

    async def own_open(self, request: SessionOpen, incoming: Incoming) -> SessionOpened:
        """`env.own`: a session of whichever of the tenant's workers takes it."""
        tenant, environment, name = incoming.tokens["tenant"], request.environment.id, request.session or uuid.uuid4().hex
        request = msgspec.structs.replace(request, session=name)
        # First, so that the asker sees that somebody is at it.
        service = await self.bus.serve("env.session", self.own_call, tenant=tenant, session=name)
        self.opening[tenant] += 1
        try:
            known = await self._offered(tenant, request.environment)
            await self._allow(tenant)
            answer = await self._ask("ask.open", OPEN_S, tenant, {"environment": environment}, open=request)
            worker, version = _opened(answer, name)
        except BaseException as error:
            await service.stop()
            if isinstance(error, _Absent):
                raise Unavailable(f"{environment}: no worker of the tenant's serves it right now ({error}): {START}") from None
            raise
        finally:
            self.opening[tenant] -= 1
            if not self.opening[tenant]:
                del self.opening[tenant]
        self.sessions[name] = Bridged(
            tenant, worker, service, request.observation, known.max_steps, request.lease_s, time.monotonic() + request.lease_s
        )
        return SessionOpened(session=name, subject=f"env.session.{tenant}.{name}", worker=worker, version=version)

    async def _offered(self, tenant: str, environment: EnvironmentSpec) -> EnvDescription:
        own = await offered(self.bus, tenant)
        if environment.id not in own:
            raise _Absent("it is not offered")
        return describe(environment, own)

    async def _allow(self, tenant: str) -> None:
        """Each session is a subscription here, for as long as its lease says."""
        account = await self.bus.kv("registry").get(registry.account_key(tenant), TenantRecord)
        allowed = (account.value.limits.sessions if account is not None else None) or SESSIONS
        if self.opening[tenant] + sum(one.tenant == tenant for one in self.sessions.values()) > allowed:
            raise Unavailable(f"sessions: {allowed} of the tenant's own are open, its limit; close one, or wait for its lease")

    async def own_call(self, call: SessionCall, incoming: Incoming) -> SessionReply:
        """`env.session` of a session that a tenant's worker holds."""
        name = incoming.tokens["session"]
        held = self.sessions.get(name)
        if held is None:
            raise EnvironmentFault(f"session {name} is gone; open another")
        held.busy += 1
        try:
            answer = await self._ask("ask.call", CALL_S, held.tenant, {"worker": held.worker}, session=name, call=call)
        except _Absent as error:
            await self._release(name)
            raise EnvironmentFault(f"the tenant's worker {held.worker} did not answer: {error}") from None
        except EnvironmentFault:  # the worker has given it up
            await self._release(name)
            raise
        finally:
            held.busy -= 1
            held.expires = time.monotonic() + held.lease_s
        if call.op == "close":
            await self._release(name)
        if answer.reply is None:
            raise EnvironmentFault("the tenant's worker answered another question")
        held.note(call, answer.reply)
        return answer.reply

    async def _ask(self, name: str, limit: float, tenant: str, tokens: dict[str, str], **question: Any) -> OwnAnswer:
        ask = OwnAsk(id=uuid.uuid4().hex, gateway=self.token, **question)
        waiting = self.asked[tenant, ask.id] = asyncio.get_running_loop().create_future()
        on = subject(name, tenant=tenant, **tokens)
        try:
            answer = await ask_aside(self.bus, BY_NAME[name], on, ask, waiting, limit)
        except Unavailable as error:
            raise _Absent(str(error)) from None
        finally:
            del self.asked[tenant, ask.id]
        if answer.error:
            raise _error(answer)
        return answer

    async def _release(self, name: str) -> None:
        held = self.sessions.pop(name, None)
        if held is not None:
            await held.service.stop()


_NOT_WAITED_FOR = "id: nobody waits for this answer (any more)"


def _error(answer: OwnAnswer) -> NexusError:
    return _ERRORS.get(answer.error_code, EnvironmentFault)(answer.error)


def _opened(answer: OwnAnswer, session: str) -> tuple[str, str]:
    """Who holds the session that was asked for, and on which simulator."""
    opened = answer.opened
    try:
        if opened is not None and opened.session == session and opened.version.isprintable():
            return msgspec.convert(opened.worker, Name), opened.version[:VERSION]
    except msgspec.ValidationError:
        pass
    raise EnvironmentFault("the tenant's worker answered another question")


def _found(known: EnvDescription, simulator: str = "") -> EnvironmentFound:
    return EnvironmentFound(
        action=known.action, observation=known.observation, max_steps=known.max_steps, instructions=known.instructions,
        simulator=simulator or known.simulator, success=known.success, varies=known.varies,
    )  # fmt: skip
