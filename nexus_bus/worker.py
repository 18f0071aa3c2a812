"""The frame all roles share: settings, bus, telemetry, heartbeats, drain on SIGTERM. What a role does stands in `workers/`.

A worker is a process with a role and a name. It joins the bus, says once a second that it lives and how far it got, works
until it is told to stop, finishes or hands back what it holds, says that it drained, and ends.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from nexus_bus import config, faults, logs, memory, telemetry
from nexus_bus.bus import Bus, Card, Presence, ensure_topology
from nexus_bus.bus.codec import brief
from nexus_bus.clock import now
from nexus_bus.errors import Denied
from schemas.base import PROVIDER
from schemas.control import Heartbeat, Role
from schemas.events import Event, EventType
from schemas.subjects import TABLE

GRACE_S = 8.0  # SIGTERM to the end; the supervisor kills later than that


@dataclass
class Pulse:
    """What the heartbeat says: liveness is not progress, so a role counts what it has done."""

    state: Literal["starting", "running", "draining"] = "starting"
    busy: int = 0  # units of work held
    progress: int = 0  # units of work done, and steps within one
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass
class Context:
    """What a role gets: its bus, its settings, and the event that tells it to stop."""

    role: Role
    name: str
    bus: Bus
    config: Any  # the frozen Struct of this role, see nexus_bus/config.py
    stop: asyncio.Event
    pulse: Pulse
    log: structlog.stdlib.BoundLogger
    host: str

    async def event(self, kind: EventType, tenant: str, *, job: str = "_", key: str, message: str = "", **fields: Any) -> None:
        """Publish an event. `key` makes it idempotent: the same key is stored once. A long message is shortened in its middle:
        it may quote what a tenant sent, and beyond INLINE_BYTES it would take room of the bucket that all payloads share."""
        event = Event(type=kind, tenant=tenant, job=job, time=now(), message=brief(message), **fields)
        await self.bus.publish("event", event, msg_id=f"event/{tenant}/{job}/{key}", tenant=tenant, job=job)


Main = Callable[[Context], Awaitable[None]]


def run(
    role: Role, main: Main, *, name: str | None = None, url: str | None = None, flags: Mapping[str, object] | None = None
) -> int:
    """Run one worker until SIGTERM or SIGINT; the return value is the process's exit code."""
    settings = config.load(role, flags=dict(flags or {}) | ({"url": url} if url else {})).value
    worker = name or f"{role}-{os.getpid()}"
    logs.start(role, worker, settings.log_level)
    faults.start(role, worker)
    memory.keep()
    return in_loop(_serve(role, worker, settings, main))


def in_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run a process's work on the fastest event loop there is."""
    try:
        import uvloop  # absent on some platforms; asyncio's own loop serves there
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _serve(role: Role, name: str, settings: Any, main: Main) -> int:
    log = logs.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    bus = await Bus.connect(settings.url, name=name, creds=settings.creds or "none")
    if bus.tenant is not None:
        await bus.close()
        raise Denied(f"creds: these speak for the tenant {bus.tenant!r}; a worker needs the provider's (NEXUS_CREDS)")
    await ensure_topology(bus, settings.replicas)
    traces = telemetry.start(role, name, bus, ratio=settings.trace_ratio)
    context = Context(role, name, bus, settings, stop, Pulse(), log, host_name())
    presence = await Presence(bus, _card(context), lambda: _stats(context)).start()
    beats = asyncio.create_task(_beat(context, settings.beat_s))
    log.info("joined", url=settings.url)
    code = 0
    work = asyncio.ensure_future(main(context))
    try:
        await asyncio.wait({work, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            context.pulse.state = "draining"
            log.info("draining", held=context.pulse.busy)
            await asyncio.wait({work}, timeout=GRACE_S)
        if work.done():
            work.result()
        else:
            work.cancel()
            log.warning("grace over: what was held is redelivered", held=context.pulse.busy)
        await context.event("worker.drained", PROVIDER, key=f"{name}/{os.getpid()}/drained", message=f"{name} drained")
        beats.cancel()
        await context.bus.cast("health.beat", _heartbeat(context, last=True), role=role, worker=name)
    except Exception:  # the last frame of the process: log whole, end with a code the supervisor sees
        log.exception("worker failed")
        code = 1
    finally:
        beats.cancel()
        await presence.stop()
        await traces.stop()
        await bus.close()
    return code


async def side_by_side(*work: Coroutine[Any, Any, None]) -> None:
    """Run a role's loops until the first one ends; raise what it raised.

    Only a drain ends one well. One that failed ends the process, and the health manager starts it anew: a worker that lives
    without one of its loops would look healthy and do half its work.
    """
    tasks = {asyncio.create_task(loop) for loop in work}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _beat(context: Context, every: float) -> None:
    file, moved = context.config.alive_file, -1
    while True:
        pulse = context.pulse
        stuck = pulse.busy > 0 and pulse.progress == moved and context.bus.up.is_set()  # nobody moves while the bus is away
        if file is not None and not stuck:
            _mark(Path(file), pulse.state)
        moved = pulse.progress
        await context.bus.cast("health.beat", _heartbeat(context), role=context.role, worker=context.name)
        await asyncio.sleep(every)


def _heartbeat(context: Context, *, last: bool = False) -> Heartbeat:
    pulse = context.pulse
    return Heartbeat(
        role=context.role,
        worker=context.name,
        host=context.host,
        pid=os.getpid(),
        state=pulse.state,
        busy=pulse.busy > 0,
        progress=pulse.progress,
        time=time.time(),
        gauges=dict(pulse.gauges),
        last=last,
    )


def _card(context: Context) -> Card:
    """Under what it is found. Its work comes on the first subject of the table that its role reads."""
    reads = next(row for row in TABLE if context.role in row.consumer.split(", "))
    about = {"role": context.role, "worker": context.name, "host": context.host, "pid": str(os.getpid())}
    return Card(context.role, about, reads.wildcard, reads.summary)


def _stats(context: Context) -> tuple[int, dict[str, Any]]:
    return context.pulse.progress, msgspec.to_builtins(_heartbeat(context))


def _mark(file: Path, state: str) -> None:
    """What a probe looks at: the state inside, and the time of the last progress as the file's own."""
    try:
        file.write_text(state)
    except OSError as error:
        structlog.get_logger().warning("no probe can see that this worker lives", file=str(file), error=str(error))


def host_name() -> str:
    """Name of the supervising host: set by it for its children, else this machine's, reduced to a legal token."""
    raw = os.environ.get("NEXUS_HOST", socket.gethostname()).lower()
    return "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "-" for c in raw).strip("-_")[:63] or "host"
