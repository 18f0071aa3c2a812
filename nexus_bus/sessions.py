"""Sessions of simulators, each leased to whoever opened it: between a worker that is asked for them and envs/host.py.

Simulators live in processes of their own. Of one tenant and kind there are a few, and sessions go where the fewest are; a
process that dies takes its own sessions along and nobody else's. A session that was closed is kept warm for the next one, for
a while: what nobody uses is charged to nobody.
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from nexus_bus.envs.catalog import EnvDescription
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.errors import ContractError, EnvironmentFault, NexusError, Refused, Unavailable
from nexus_bus.worker import Pulse
from schemas.environment import SessionCall, SessionOpen, SessionReply
from schemas.job import EnvironmentSpec

IDLE_SESSIONS = 32  # simulators kept warm for a tenant, of all kinds and tasks
IDLE_S = 300.0  # that a process without sessions is kept
SWEEP_S = 1.0

Start = Callable[[EnvironmentSpec], Awaitable[SimulatorHost]]
Close = Callable[[], Awaitable[None]]
Listen = Callable[[str, str], Awaitable[Close]]  # begin to take calls for (tenant, session), and how that ends


class Account(Protocol):
    """Notes what a job used."""

    def __call__(self, tenant: str, job: str, /, **counts: float) -> None:
        """Add it to what is known."""
        ...


@dataclass(eq=False)
class Process:
    """Simulators of one tenant and kind in one process, which may be starting still."""

    starting: "asyncio.Future[SimulatorHost]"
    load: int = 0  # sessions open, or being opened
    used: float = field(default_factory=time.monotonic)  # when it had one last

    @property
    def dead(self) -> bool:
        """Whether it never started, or has ended."""
        done = self.starting.done()
        return done and (self.starting.exception() is not None or not self.starting.result().alive)

    async def stop(self) -> None:
        """End what is left of it."""
        if self.starting.done() and self.starting.exception() is None:
            await self.starting.result().stop()


@dataclass
class Idle:
    """A session that was closed, kept warm."""

    kind: bytes  # its spec
    process: Process
    host: SimulatorHost
    sid: int


@dataclass
class Held:
    """One open session."""

    tenant: str
    job: str
    spec: EnvironmentSpec
    process: Process
    host: SimulatorHost
    sid: int
    unlisten: Close
    lease_s: float
    expires: float
    accounted: float  # monotonic time up to which its lease is
    busy: bool = False


@dataclass
class Sessions:
    """Those of one worker.

    Args:
        start: a process for simulators of this kind.
        listen: hears calls on a session; called before the simulator is there, so that the asker sees that somebody is at it.
        limit: held at once.
        processes: of one tenant and kind at most.
        idle_s: so long a process without sessions is kept.
    """

    start: Start
    listen: Listen
    limit: int
    pulse: Pulse
    log: Any
    name: str  # of the worker, for errors
    account: Account
    processes: int = 1
    idle_s: float = IDLE_S
    held: dict[str, Held] = field(default_factory=dict)
    running: dict[tuple[str, str], list[Process]] = field(default_factory=dict)  # by tenant and kind
    dead: list[Process] = field(default_factory=list)
    idle: dict[str, deque[Idle]] = field(default_factory=dict)  # by tenant, the latest last
    opening: Counter[str] = field(default_factory=Counter[str])  # by tenant, sessions whose simulators are being made

    async def open(self, tenant: str, request: SessionOpen, known: EnvDescription, allowed: int | None = None) -> str:
        """Lease a session, after the specs of policy and environment were compared; its name.

        Args:
            known: what a policy must fit there.
            allowed: sessions that the tenant may hold; None: any number.

        Raises:
            ContractError: the policy does not fit, in the field that is named.
            Unavailable: as many are held as may be.
        """
        fits(request, known)  # first: this will not change, and room may be found
        if (taken := len(self.held) + self.opening.total()) >= self.limit:
            raise Unavailable(f"environment worker {self.name} holds {taken} sessions, its limit; try again")
        own = self.opening[tenant] + sum(held.tenant == tenant for held in self.held.values())
        if allowed is not None and own >= allowed:
            raise Unavailable(
                f"sessions: the tenant holds its limit of {allowed}; close one, or try again once its lease is over"
            )
        name = request.session or uuid.uuid4().hex[:16]
        self.opening[tenant] += 1  # they count from now on, however many are opened at once
        try:
            unlisten = await self.listen(tenant, name)
            try:
                process, host, sid = await self._simulator(tenant, request.environment)
            except BaseException:
                await unlisten()
                raise
        finally:
            self.opening -= Counter((tenant,))
        self.held[name] = Held(
            tenant, request.job, request.environment, process, host, sid, unlisten, request.lease_s,
            (clock := time.monotonic()) + request.lease_s, clock,
        )  # fmt: skip
        self._gauge()
        return name

    async def call(self, name: str, request: SessionCall) -> SessionReply:
        """One call on a session. A fault of the simulator ends its process and is told as a fault, never as a reward.

        Raises:
            EnvironmentFault: the session is gone, or the simulator failed.
            Refused: it has a call running.
        """
        held = self.held.get(name)
        if held is None:
            raise EnvironmentFault(f"session {name} is gone; open another")
        if held.busy:
            raise Refused(f"session {name} has a call running; one at a time")
        held.busy = True
        self.pulse.busy += 1
        try:
            reply = await held.host.call(held.sid, request, held.spec.image_encoding)
        except EnvironmentFault:
            if held.host.alive:  # its simulator was closed with the fault, so its place is free; others of the process go on
                await self._release(name, keep=False)
            else:
                await self._lost(held.host)
            raise
        finally:
            held.busy = False
            held.expires = time.monotonic() + held.lease_s
            self.pulse.busy -= 1
            self.pulse.progress += 1
        self.account(held.tenant, held.job, simulator_s=reply.device_s, steps=len(reply.rewards))
        if request.op == "close":
            await self._release(name, keep=True)
        return reply

    async def _simulator(self, tenant: str, spec: EnvironmentSpec) -> tuple[Process, SimulatorHost, int]:
        kept, kind = self.idle.get(tenant, deque()), msgspec.json.encode(spec)
        for one in [one for one in reversed(kept) if one.kind == kind]:
            kept.remove(one)
            if one.host.alive:
                one.process.load += 1
                return one.process, one.host, one.sid
        process = self._process(tenant, spec)
        process.load += 1
        try:
            await self._bury()
            host = await asyncio.shield(process.starting)
            return process, host, await host.open(spec)
        except BaseException:
            _left(process)
            raise

    def _process(self, tenant: str, spec: EnvironmentSpec) -> Process:
        """The one with the fewest sessions, or another one while all have some and there may be more."""
        running = self.running.setdefault((tenant, spec.id), [])
        self.dead += [process for process in running if process.dead]
        running[:] = [process for process in running if not process.dead]
        least = min(running, key=lambda process: process.load, default=None)
        if least is None or (least.load and len(running) < self.processes):
            least = Process(asyncio.ensure_future(self.start(spec)))
            running.append(least)
        return least

    async def _bury(self) -> None:
        """What is left of processes that ended while nobody called them."""
        while self.dead:
            await self.dead.pop().stop()

    async def _release(self, name: str, *, keep: bool) -> None:
        held = self.held.pop(name, None)
        if held is None:
            return
        self._account(held)
        _left(held.process)
        self._gauge()
        await held.unlisten()
        if keep and held.host.alive:
            kept = self.idle.setdefault(held.tenant, deque())
            kept.append(Idle(msgspec.json.encode(held.spec), held.process, held.host, held.sid))
            if len(kept) > IDLE_SESSIONS:
                await _freed(kept.popleft())

    async def _lost(self, host: SimulatorHost) -> None:
        """Every session of a dead simulator process is gone at once; the others of this worker go on."""
        for name in [n for n, held in self.held.items() if held.host is host]:
            await self._release(name, keep=False)
        await host.stop()

    async def sweep(self) -> None:
        """End sessions whose lease ran out and processes that nobody uses, and note how long the others were held; until
        cancelled.
        """
        while True:
            await asyncio.sleep(SWEEP_S)
            clock = time.monotonic()
            late = [name for name, held in self.held.items() if not held.busy and held.expires < clock]
            await asyncio.gather(*(self._ran_out(name) for name in late), self._retire())
            for held in self.held.values():
                self._account(held)

    async def _ran_out(self, name: str) -> None:
        """The lease of a session did, unless a call has come this moment: from then on none is taken."""
        held = self.held.get(name)
        if held is None or held.busy or held.expires > time.monotonic():
            return
        held.busy = True
        self.log.warning("session lease ran out", session=name, tenant=held.tenant)
        try:
            await held.host.call(held.sid, SessionCall(op="close"))  # the next one begins with a reset
        except NexusError as error:
            self.log.info("not closed", session=name, error=str(error))
            await self._release(name, keep=False)
        else:
            await self._release(name, keep=True)

    async def _retire(self) -> None:
        """End what nobody has used for a while, and what is left of processes that ended by themselves."""
        before = time.monotonic() - self.idle_s
        for kind, running in list(self.running.items()):
            for process in [one for one in running if one.dead or (not one.load and one.used < before)]:
                running.remove(process)
                self.dead.append(process)
            if not running:
                del self.running[kind]
        for tenant, kept in list(self.idle.items()):
            self.idle[tenant] = deque(one for one in kept if one.process not in self.dead)
            if not self.idle[tenant]:
                del self.idle[tenant]
        await self._bury()

    async def close(self) -> None:
        """End every simulator process."""
        for name in list(self.held):
            await self._release(name, keep=False)
        for process in [*self.dead, *(process for running in self.running.values() for process in running)]:
            await process.stop()

    def _account(self, held: Held) -> None:
        before, held.accounted = held.accounted, time.monotonic()
        self.account(held.tenant, held.job, session_s=held.accounted - before)

    def _gauge(self) -> None:
        self.pulse.gauges["sessions"] = len(self.held)


def _left(process: Process) -> None:
    process.load -= 1
    process.used = time.monotonic()


async def _freed(one: Idle) -> None:
    """Let go of a simulator. What its process does with that is its own fault, seen by whoever calls it next."""
    with contextlib.suppress(NexusError):
        await one.host.close(one.sid)


def fits(request: SessionOpen, known: EnvDescription) -> None:
    """Refuse a policy that does not fit the environment, by the name of what differs. Raises ContractError."""
    action, observation = known.action, known.observation
    for name, wanted, given in (
        ("action.size", action.size, request.action.size),
        ("action.gripper", action.gripper, request.action.gripper),
        ("action bounds", (action.low, action.high), (request.action.low, request.action.high)),
        ("action.rotation", action.rotation, request.action.rotation),
        ("action.control", action.control, request.action.control),
        ("observation.state_size", observation.state_size, request.observation.state_size),
        ("observation.cameras", dict(observation.cameras), dict(request.observation.cameras)),
        ("observation.orientation", observation.orientation, request.observation.orientation),
    ):
        if wanted != given:
            raise ContractError(f"{name}: the environment has {wanted}, the policy expects {given}")
