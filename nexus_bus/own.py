"""A tenant's own environment worker: `nexus worker environment --env MODULE:CALLABLE --creds FILE`, on the tenant's machine.

Reads   ask.open and ask.call, which the gateway sends to this tenant alone.
Writes  answers and offers, as calls of the gateway. It has the tenant's credentials and may do nothing else.
Killed  who plays in it hears so within a second, and plays the episode again once a worker offers the environment.
"""

import asyncio
import math
import signal
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import structlog

from nexus_bus import config, logs
from nexus_bus.bus import Bus
from nexus_bus.bus import headers as wire
from nexus_bus.bus.codec import decode
from nexus_bus.envs.catalog import Own, describe
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.envs.offered import ID, entries
from nexus_bus.errors import BadMessage, Denied, EnvironmentFault, NexusError, Refused, Unavailable
from nexus_bus.offers import EVERY_S
from nexus_bus.sessions import Close, Process, Sessions
from nexus_bus.worker import GRACE_S, Pulse, in_loop
from schemas.environment import MAX_TASKS, OwnAnswer, OwnAsk, OwnId, OwnOffer, OwnTask, SessionOpened
from schemas.job import EnvironmentSpec
from schemas.subjects import BY_NAME

START_S = 120.0  # robots take their time
ANSWER_S = 10.0
TEXT = 400  # characters of an error


class OwnEnvironment:
    """Serves one `module:callable` to one tenant."""

    def __init__(self, bus: Bus, worker: str, settings: config.EnvironmentConfig, target: str, sessions: int) -> None:
        """Nothing is started until `start`."""
        self.bus, self.worker, self.settings, self.target = bus, worker, settings, target
        self.tenant = bus.tenant or ""
        self.log: Any = structlog.get_logger()
        self.pulse = Pulse()
        self.sessions = Sessions(
            self._host,
            self._unheard,
            sessions,
            self.pulse,
            self.log,
            worker,
            _free_of_charge,
            min(settings.processes, sessions),
            math.inf,  # whose machine it is keeps a robot at hand for as long as it serves
        )
        self.own: Own = {}
        self.answering: set[asyncio.Task[None]] = set()

    async def start(self, environment: str) -> OwnOffer:
        """Open it once and measure what a policy must fit; what is offered.

        Raises:
            NotFound, BadJob: it cannot be loaded, or not be served.
            EnvironmentFault: it died or hung.
        """
        host = await self._host(None)
        tasks = await host.tasks(ID)
        if len(tasks) > MAX_TASKS:
            raise Refused(f"--env {self.target}: {len(tasks)} tasks; at most {MAX_TASKS} are served by one worker")
        known = {task: await host.describe(EnvironmentSpec(id=ID, task=task), START_S) for task in tasks}
        first = known[tasks[0]]
        offer = OwnOffer(
            environment=environment,
            worker=self.worker,
            sessions=self.sessions.limit,
            tasks={
                task: OwnTask(
                    action=one.action, observation=one.observation, max_steps=one.max_steps, instruction=one.instructions[0]
                )
                for task, one in known.items()
            },
            simulator=first.simulator,
            success=first.success,
        )
        self.own = entries([msgspec.structs.replace(offer, environment=ID)])
        # A robot can be opened once: the process that measured it is the one that plays.
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(host)
        self.sessions.running[self.tenant, ID] = [Process(ready)]
        return offer

    async def listen(self, offer: OwnOffer) -> None:
        """Hear what is asked."""
        await self.bus.listen(f"ask.open.{offer.environment}", self._spawn("ask.open", self._open), queue="environment")
        await self.bus.listen(f"ask.call.{offer.worker}", self._spawn("ask.call", self._call))

    async def keep_offering(self, offer: OwnOffer) -> None:
        """Say again and again that it is here. Raises Refused if the service wants none of it."""
        said = False
        while True:
            try:
                await self.bus.request("api.env.offer", offer, timeout=ANSWER_S, tenant=self.tenant)
                if not said:
                    task, first = next(iter(offer.tasks.items()))
                    self.log.info(
                        "serving", environment=offer.environment, tasks=list(offer.tasks), sessions=offer.sessions,
                        cameras=dict(first.observation.cameras), state=first.observation.state_size, action=first.action.size,
                        in_a_job=f'environment = {{ id = "{offer.environment}", task = "{task}" }}',
                    )  # fmt: skip
                said = True
            except Unavailable as error:
                self.log.warning("not offered right now", error=str(error))
                said = False
            await asyncio.sleep(EVERY_S)

    async def leave(self, offer: OwnOffer) -> None:
        """Take no more, finish what runs, and end the simulators."""
        try:
            gone = msgspec.structs.replace(offer, sessions=0)
            await self.bus.request("api.env.offer", gone, timeout=2.0, tenant=self.tenant)
        except NexusError as error:
            self.log.info("could not say goodbye; the offer is over in a few seconds", error=str(error))
        if self.answering:
            await asyncio.wait(self.answering, timeout=GRACE_S)

    def _spawn(self, name: str, handler: Callable[[OwnAsk], Awaitable[OwnAnswer]]) -> Callable[[Any], Awaitable[None]]:
        async def hear(msg: Any) -> None:
            if wire.get(msg, wire.PROBE):
                return  # that somebody listens is all it wants to know
            ask: OwnAsk = decode(BY_NAME[name], msg.data, wire.get(msg, wire.CONTENT_TYPE) or None)
            task = asyncio.create_task(self._answer(ask, handler))
            self.answering.add(task)
            task.add_done_callback(self.answering.discard)

        return hear

    async def _answer(self, ask: OwnAsk, handler: Callable[[OwnAsk], Awaitable[OwnAnswer]]) -> None:
        try:
            answer = await handler(ask)
        except NexusError as error:
            answer = self._wrong(ask, error)
        except Exception as error:  # one question must not end the worker; who asked is told, and its traceback stays here
            self.log.exception("failed")
            answer = self._wrong(ask, EnvironmentFault(f"{type(error).__name__}; see the worker's log"))
        try:
            try:
                await self._send(answer)
            except Refused as error:  # larger than the account may send, for instance: whoever waits is told
                self.log.warning("an answer was refused", error=str(error))
                await self._send(self._wrong(ask, Refused(f'{error}; smaller pictures, or image_encoding = "jpeg", fit')))
        except NexusError as error:
            self.log.warning("an answer did not arrive", error=str(error))

    async def _send(self, answer: OwnAnswer) -> None:
        try:
            await self.bus.request("api.env.answer", answer, timeout=ANSWER_S, tenant=self.tenant)
        except Unavailable:  # the gateway may be starting
            await self.bus.request("api.env.answer", answer, timeout=ANSWER_S, tenant=self.tenant)

    @staticmethod
    def _wrong(ask: OwnAsk, error: NexusError) -> OwnAnswer:
        return OwnAnswer(id=ask.id, gateway=ask.gateway, error=str(error)[:TEXT] or "failed", error_code=error.code)

    async def _open(self, ask: OwnAsk) -> OwnAnswer:
        if ask.open is None:
            raise BadMessage("open: missing")
        asked = msgspec.structs.replace(ask.open, environment=msgspec.structs.replace(ask.open.environment, id=ID))
        known = describe(asked.environment, self.own)
        try:
            name = await self.sessions.open(self.tenant, asked, known)
        except EnvironmentFault as error:
            if not (held := len(self.sessions.held)):
                raise
            # Of a robot there is one, whatever --sessions says: who asks for a second waits for it as for any place.
            self.log.warning("no further session can be made; is --sessions too many?", held=held, error=str(error))
            raise Unavailable(f"worker {self.worker} holds {held} sessions and could make no other: {error}") from error
        self.log.info("session", session=name, task=ask.open.environment.task, job=ask.open.job)
        opened = SessionOpened(session=name, subject="", worker=self.worker, version=known.simulator)
        return OwnAnswer(id=ask.id, gateway=ask.gateway, opened=opened)

    async def _call(self, ask: OwnAsk) -> OwnAnswer:
        if ask.call is None:
            raise BadMessage("call: missing")
        return OwnAnswer(id=ask.id, gateway=ask.gateway, reply=await self.sessions.call(ask.session, ask.call))

    async def _host(self, _: EnvironmentSpec | None) -> SimulatorHost:
        memory = int(self.settings.memory_gb * 1e9)
        return await SimulatorHost.start(START_S, self.settings.call_timeout_s, own=self.target, memory=memory)

    async def _unheard(self, _tenant: str, _session: str) -> Close:
        async def nothing() -> None:
            return

        return nothing  # calls come on the worker's one subject


def _free_of_charge(_tenant: str, _job: str, /, **_counts: float) -> None:
    """The tenant's own machine."""


async def _serve(worker: str, settings: config.EnvironmentConfig, target: str, environment: str, sessions: int) -> int:
    """Until SIGTERM or SIGINT; the exit code."""
    log, stop = logs.get_logger(), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    bus = await Bus.connect(settings.url, name=worker, creds=settings.creds or "none")
    if bus.tenant is None:
        await bus.close()
        raise Denied("--env: it is served for one tenant; give that tenant's credentials by --creds (`nexus tenant add`)")
    own = OwnEnvironment(bus, worker, settings, target, sessions)
    try:
        log.info("loading", environment=environment, target=target)  # a robot may take minutes
        offer = await own.start(environment)
        await own.listen(offer)
        work = {
            asyncio.create_task(own.keep_offering(offer)),
            asyncio.create_task(own.sessions.sweep()),
            asyncio.create_task(stop.wait()),
        }
        try:
            for done in (await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED))[0]:
                done.result()
            await own.leave(offer)
        finally:
            for task in work:
                task.cancel()
        log.info("drained")
    finally:
        await own.sessions.close()
        await bus.close()
    return 0


def run(*, env: str, suffix: str | None, sessions: int, name: str | None, url: str | None, flags: Mapping[str, object]) -> int:
    """Entry point of `nexus worker environment --env MODULE:CALLABLE`.

    Args:
        suffix: the environment is called own-SUFFIX in job documents; None: own.
    """
    try:
        environment = msgspec.convert(ID if suffix is None else f"{ID}-{suffix}", OwnId)
    except msgspec.ValidationError:
        raise Refused(f"--as: {suffix!r} is not a name (lower-case letters, digits, - and _)") from None
    settings = config.load("environment", flags=dict(flags) | ({"url": url} if url else {})).value
    worker = name or f"own-{uuid.uuid4().hex[:12]}"
    logs.start("environment", worker, settings.log_level)
    return in_loop(_serve(worker, settings, env, environment, sessions))
