"""Environment: sessions of real simulators, and the dataset side of the Environment Service.

Reads   env.open and env.session (core requests of rollout workers and tenants), ROLLOUT (env.prepare, env.feed:
        a durable consumer per tenant, served by shares of time).
Writes  TRAINING (SFT batches), JOBS (prepared reports), datasets below the data root.
Killed  its sessions are gone: whoever held one opens another and plays the episode again from its seed. A half-recorded
        dataset is never finalised, a half-done feed order is redelivered; batches carry ids and are stored once.
"""

import asyncio
import signal
import sys
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from nexus_bus import registry, worker
from nexus_bus.bus import Bus, Delivery, Done, Incoming, Outcome, Service, data_durable, die_with_parent
from nexus_bus.data.reader import Dataset
from nexus_bus.data.sampler import batch_indices
from nexus_bus.envs.catalog import describe
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.errors import ContractError, EnvironmentFault, NexusError, NotFound, Refused, Unavailable
from nexus_bus.serving import AHEAD, Serving
from nexus_bus.tensors import encode_image, to_tensor
from nexus_bus.usage import Tally
from nexus_bus.worker import Context
from schemas.base import PUBLIC, Image
from schemas.control import JobReport, Role
from schemas.environment import (
    FeedOrder,
    Observation,
    PrepareOrder,
    SessionCall,
    SessionOpen,
    SessionOpened,
    SessionReply,
)
from schemas.job import EnvironmentSpec
from schemas.plan import TERMINAL, JobState
from schemas.training import TrainingBatch, TrainingSample

ROLE: Role = "environment"

ENCODED_FRAMES = 20_000  # pictures kept encoded for later epochs: about 8 KB each
IDLE_SESSIONS = 32  # simulators of one kind kept warm for a tenant
SWEEP_S = 1.0


@dataclass
class Held:
    """One open session: a simulator in a host process, leased to whoever opened it."""

    tenant: str
    job: str
    spec: EnvironmentSpec
    host: SimulatorHost
    sid: int
    service: Service
    lease_s: float
    expires: float
    accounted: float  # monotonic time up to which its lease is
    busy: bool = False


class Environment:
    """Holds sessions and reads datasets."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.root = Path(context.config.data_root)
        self.hosts: dict[tuple[str, str], asyncio.Task[SimulatorHost]] = {}  # one process per tenant and simulator kind
        self.idle: dict[tuple[str, bytes], list[tuple[SimulatorHost, int]]] = {}  # closed sessions, kept warm
        self.held: dict[str, Held] = {}
        self.datasets: dict[Path, Dataset] = {}
        self.encoded: OrderedDict[tuple[Path, int, str], dict[str, Image]] = OrderedDict()
        self.used = Tally(context.bus, context.name, "environment")
        self.serving = Serving(
            context.bus, lambda tenant, _: data_durable(tenant), batch=context.config.feeds + AHEAD, on_dead=self.given_up
        )

    # Sessions

    async def open(self, request: SessionOpen, incoming: Incoming) -> SessionOpened:
        """Lease a session, after the specs of policy and environment were compared."""
        tenant = incoming.tokens["tenant"]
        if len(self.held) >= self.context.config.sessions:
            raise Unavailable(f"environment worker {self.context.name} holds {len(self.held)} sessions, its limit; try again")
        allowed = self.serving.allowances.of(tenant).sessions  # of all workers; whoever plays orders keeps to it by itself
        if allowed is not None and sum(held.tenant == tenant for held in self.held.values()) >= allowed:
            raise Unavailable(
                f"sessions: the tenant holds its limit of {allowed}; close one, or try again once its lease is over"
            )
        known = describe(request.environment)
        _fits(request, known.action, known.observation)
        name = request.session or uuid.uuid4().hex[:16]
        # Before the simulator, which takes its time: the asker sees that somebody is at it.
        service = await self.bus.serve("env.session", self.call, tenant=tenant, session=name)
        try:
            host, sid = await self._simulator(tenant, request.environment)
        except BaseException:
            await service.stop()
            raise
        self.held[name] = Held(
            tenant, request.job, request.environment, host, sid, service, request.lease_s,
            (clock := time.monotonic()) + request.lease_s, clock,
        )  # fmt: skip
        self._gauge()
        return SessionOpened(
            session=name, subject=f"env.session.{tenant}.{name}", worker=self.context.name, version=known.simulator
        )

    async def call(self, request: SessionCall, incoming: Incoming) -> SessionReply:
        """One call on a session. A fault of the simulator ends its process and is told as a fault, never as a reward."""
        name = incoming.tokens["session"]
        held = self.held.get(name)
        if held is None:
            raise EnvironmentFault(f"session {name} is gone; open another")
        if held.busy:
            raise Refused(f"session {name} has a call running; one at a time")
        held.busy = True
        self.context.pulse.busy += 1
        try:
            reply = await held.host.call(held.sid, request, held.spec.image_encoding)
        except EnvironmentFault:
            if not held.host.alive:  # a fault of one session leaves the others of its process alone
                await self._lost(held.host)
            raise
        finally:
            held.busy = False
            held.expires = time.monotonic() + held.lease_s
            self.context.pulse.busy -= 1
            self.context.pulse.progress += 1
        self.used.add(held.tenant, held.job, simulator_s=reply.device_s, steps=len(reply.rewards))
        if request.op == "close":
            await self._release(name, keep=True)
        return reply

    async def _simulator(self, tenant: str, spec: EnvironmentSpec) -> tuple[SimulatorHost, int]:
        kept = self.idle.get((tenant, msgspec.json.encode(spec)), [])
        while kept:
            host, sid = kept.pop()
            if host.alive:
                return host, sid
        key = (tenant, spec.id)
        task = self.hosts.get(key)
        if task is None or (task.done() and (task.exception() is not None or not task.result().alive)):
            limits = self.context.config
            starting = SimulatorHost.start(30.0, limits.call_timeout_s, environment=spec.id, memory=int(limits.memory_gb * 1e9))
            dead, task = task, asyncio.create_task(starting)
            self.hosts[key] = task
            if dead is not None and dead.exception() is None:  # it ended while nobody called it
                await dead.result().stop()
        host = await asyncio.shield(task)
        return host, await host.open(spec)

    async def _release(self, name: str, *, keep: bool) -> None:
        held = self.held.pop(name, None)
        if held is None:
            return
        self._account(held)
        await held.service.stop()
        if keep and held.host.alive:
            kept = self.idle.setdefault((held.tenant, msgspec.json.encode(held.spec)), [])
            if len(kept) < IDLE_SESSIONS:
                kept.append((held.host, held.sid))
            else:
                await held.host.close(held.sid)
        self._gauge()

    async def _lost(self, host: SimulatorHost) -> None:
        """Every session of a dead simulator process is gone at once; the others of this worker go on."""
        for name in [n for n, held in self.held.items() if held.host is host]:
            await self._release(name, keep=False)
        await host.stop()

    async def sweep(self) -> None:
        """End sessions whose lease ran out, and note how long the others were held."""
        while True:
            await asyncio.sleep(SWEEP_S)
            clock = time.monotonic()
            for name in [n for n, held in self.held.items() if not held.busy and held.expires < clock]:
                self.context.log.warning("session lease ran out", session=name, tenant=self.held[name].tenant)
                await self._release(name, keep=True)
            for held in self.held.values():
                self._account(held)

    def _account(self, held: Held) -> None:
        before, held.accounted = held.accounted, time.monotonic()
        self.used.add(held.tenant, held.job, session_s=held.accounted - before)

    def _gauge(self) -> None:
        self.context.pulse.gauges["sessions"] = len(self.held)

    # Datasets

    async def handle(self, delivery: Delivery) -> Outcome:
        """Prepare a dataset, or feed batches from one."""
        self.context.pulse.busy += 1
        message: PrepareOrder | FeedOrder = delivery.message
        try:
            if isinstance(message, PrepareOrder):
                await self.prepare(message)
            else:
                await self.feed(message)
        finally:
            self.context.pulse.busy -= 1
            self.context.pulse.progress += 1
        return Done()

    async def given_up(self, delivery: Delivery, reason: str) -> None:
        """Data that cannot be had fails its job by name; it would wait for ever."""
        job = delivery.tokens["job"]
        report = JobReport(job=job, kind="failed", reason=reason)
        await self.bus.publish("job.report", report, msg_id=f"{delivery.msg_id}/failed", tenant=delivery.tenant, job=job)

    def directory(self, tenant: str, dataset: str) -> tuple[Path, bool]:
        """The directory of a dataset, and whether it is one that every tenant may read: `public/…`.

        Raises:
            NotFound: a name that leaves the tenant's own root, or the public one.
        """
        first, *rest = PurePosixPath(dataset).parts or (".",)
        public = first == PUBLIC and bool(rest)
        root = (self.root / (PUBLIC if public else tenant)).resolve()
        try:
            path = root.joinpath(*rest if public else (dataset,)).resolve()
        except (OSError, ValueError) as error:  # too long, or with a zero byte
            raise NotFound(f"data.dataset: {dataset[:80]!r} is not a directory's name: {error}") from None
        if path == root or not path.is_relative_to(root):
            raise NotFound(
                f"data.dataset: {dataset!r} is not a directory below {'public' if public else 'the tenant'}'s data root"
            )
        return path, public

    async def prepare(self, order: PrepareOrder) -> None:
        """Record from the expert if asked to, open the dataset, report its frames and statistics."""
        path, public = self.directory(order.tenant, order.dataset)
        if order.expert is not None and public:
            raise Refused(f"data.dataset: {order.dataset!r} is read by every tenant and recorded by none; name one of your own")
        if order.expert is not None and not await self._record(order, path):
            return
        dataset = await self._dataset(path)
        recorded = order.expert is not None
        report = JobReport(
            job=order.job,
            kind="prepared",
            frames=len(dataset),
            stored_bytes=await asyncio.to_thread(size, path) if recorded else 0,
            state_statistics=dataset.stats("observation.state"),
            action_statistics=dataset.stats("action"),
        )
        await self.bus.publish(
            "job.report", report, msg_id=f"{order.tenant}/{order.job}/prepared", tenant=order.tenant, job=order.job
        )

    async def _record(self, order: PrepareOrder, path: Path) -> bool:
        """Whether the dataset is there; a job that ends meanwhile wants none."""
        document = msgspec.json.encode({"environment": order.environment, "expert": order.expert, "root": str(path)}).decode()
        # A child, because simulators are native code: if it dies, this worker and its sessions live.
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.data.record", document,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 20,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )  # fmt: skip
        if child.stdout is None or child.stderr is None:  # both are pipes, by the call above
            raise EnvironmentFault("recording demonstrations has no output to follow")
        complaints = asyncio.create_task(child.stderr.read())
        last, looked = b"", time.monotonic()
        try:
            async for line in child.stdout:
                last = line
                self.context.pulse.progress += 1  # a long recording is not a wedged worker
                if time.monotonic() - looked > SWEEP_S:
                    looked = time.monotonic()
                    if await self._over(order):
                        return False
            await child.wait()
            err = await complaints
        finally:
            complaints.cancel()
            if child.returncode is None:
                child.kill()
        self.datasets.pop(path, None)
        if child.returncode != 0:
            tail = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            self.context.log.error("recording failed", stderr=err.decode(errors="replace")[-4000:])
            raise EnvironmentFault(f"recording demonstrations ended with code {child.returncode}: {tail[0]}")
        self.context.log.info("recorded", job=order.job, info=last.decode(errors="replace").strip())
        return True

    async def _over(self, order: PrepareOrder) -> bool:
        entry = await self.kv.get(registry.job_key(order.tenant, order.job), JobState)
        return entry is not None and entry.value.phase in TERMINAL

    async def _dataset(self, path: Path) -> Dataset:
        if path not in self.datasets or self.datasets[path].replaced:
            self.datasets[path] = await asyncio.to_thread(Dataset, path)
        return self.datasets[path]

    async def feed(self, order: FeedOrder) -> None:
        """Put batches [first, last) on the Training Queue."""
        path, public = self.directory(order.tenant, order.dataset)
        dataset = await self._dataset(path)
        for number in range(order.first, order.last):
            batch = await asyncio.to_thread(self._batch, path, dataset, order, number, public)
            await self.bus.publish(
                "train.batch", batch, msg_id=f"{order.tenant}/{batch.id}", tenant=order.tenant, job=order.job
            )
            self.context.pulse.progress += 1

    def _batch(self, path: Path, dataset: Dataset, order: FeedOrder, number: int, public: bool) -> TrainingBatch:
        samples: list[TrainingSample] = []
        for index in batch_indices(len(dataset), order.seed, number, order.batch_size):
            chunk = dataset.chunk(int(index), order.horizon)
            images = self._images(path, dataset, int(index), order.image_encoding)
            observation = Observation(
                images=images, state=to_tensor(chunk.state.astype(np.float32)), instruction=chunk.instruction
            )
            samples.append(
                TrainingSample(
                    observation=observation,
                    actions=to_tensor(chunk.actions.astype(np.float32)),
                    action_is_pad=to_tensor(chunk.is_pad.astype(np.bool_)),
                )
            )
        name = f"{order.job}/{number}"
        return TrainingBatch(id=name, tenant=order.tenant, job=order.job, batch=number, public=public, samples=samples)

    def _images(self, path: Path, dataset: Dataset, index: int, encoding: Any) -> dict[str, Image]:
        key = (path, index, encoding)
        found = self.encoded.get(key)
        if found is None:
            found = {camera: encode_image(picture, encoding) for camera, picture in dataset.images(index).items()}
            self.encoded[key] = found
            if len(self.encoded) > ENCODED_FRAMES:
                self.encoded.popitem(last=False)
        return found

    async def close(self) -> None:
        """End every simulator process."""
        for name in list(self.held):
            await self._release(name, keep=False)
        for task in self.hosts.values():
            if task.done() and task.exception() is None:
                await task.result().stop()
        await self.used.flush()


def size(directory: Path) -> int:
    """Bytes of the files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _fits(request: SessionOpen, action: Any, observation: Any) -> None:
    """Refuse a policy that does not fit the environment, by the name of what differs."""
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


async def main(context: Context) -> None:
    """Serve until told to stop."""
    environment = Environment(context)
    await environment.serving.allowances.load()
    service = await context.bus.serve("env.open", environment.open, queue="environment", tenant="*")
    beside = [asyncio.create_task(work) for work in (environment.sweep(), environment.used.publish())]
    context.pulse.state = "running"
    try:
        await environment.serving.consume(environment.handle, concurrency=context.config.feeds, stop=context.stop)
    except NexusError:
        context.log.exception("the bus went away for good")
        raise
    finally:
        await service.stop()
        for task in beside:
            task.cancel()
        await environment.close()


def run(**options: Any) -> int:
    """Entry point of `nexus worker environment`."""
    return worker.run(ROLE, main, **options)
