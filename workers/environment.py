"""Environment: sessions of real simulators, and the dataset side of the Environment Service.

Reads   env.open and env.session (core requests of rollout workers and tenants), data.* (see nexus_bus/incoming.py), ROLLOUT
        (env.prepare, env.feed: a durable consumer per tenant, served by shares of time).
Writes  TRAINING (SFT batches), JOBS (prepared reports), datasets below the data root.
Killed  its sessions are gone: whoever held one opens another and plays the episode again from its seed. A half-recorded
        dataset is never finalised, a half-done feed order is redelivered; batches carry ids and are stored once.
"""

import asyncio
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from nexus_bus import shelf, worker
from nexus_bus.bus import Bus, Delivery, Done, Incoming, Outcome, data_durable
from nexus_bus.data.layout import Root
from nexus_bus.data.reader import Dataset
from nexus_bus.data.rows import HELD_BYTES
from nexus_bus.data.sampler import batch_indices
from nexus_bus.envs.catalog import describe
from nexus_bus.envs.host import SimulatorHost
from nexus_bus.errors import BadMessage, Conflict, NexusError, Refused
from nexus_bus.incoming import Arriving
from nexus_bus.recording import Recordings
from nexus_bus.serving import AHEAD, Serving
from nexus_bus.sessions import Close, Sessions
from nexus_bus.tensors import encode_image, to_tensor
from nexus_bus.usage import Tally
from nexus_bus.worker import Context, side_by_side
from schemas.base import Image
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
from schemas.training import TrainingBatch, TrainingSample

ROLE: Role = "environment"

ENCODED_BYTES = 512 << 20  # of pictures kept encoded for later epochs
DATASETS = 16  # kept open
NOBODYS, NOBODYS_SHARE = "_", 4  # the job of sessions that belong to none, and the part of all that one tenant may hold then


class Environment:
    """Holds sessions and reads datasets."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.root = Path(context.config.data_root)
        self.datasets: OrderedDict[Path, Dataset] = OrderedDict()
        self.encoded: OrderedDict[tuple[Dataset, int, str], dict[str, Image]] = OrderedDict()
        self.encoded_bytes = 0
        self._encoding = threading.Lock()  # several threads put pictures there
        self.used = Tally(context.bus, context.name, "environment")
        self.recordings = Recordings(context, self.used)
        self.arriving = Arriving(context.bus, self.root, context.pulse, int(context.config.memory_gb * 1e9))
        self.serving = Serving(
            context.bus, lambda tenant, _: data_durable(tenant), batch=context.config.feeds + AHEAD, on_dead=self.given_up
        )
        self.sessions = Sessions(
            self._start, self._listen, context.config.sessions, context.pulse, context.log, context.name, self.used.add,
            context.config.processes,
        )  # fmt: skip

    # Sessions

    async def open(self, request: SessionOpen, incoming: Incoming) -> SessionOpened:
        """Lease a session, after the specs of policy and environment were compared."""
        tenant = incoming.tokens["tenant"]
        allowed = self.serving.allowances.of(tenant).sessions  # of all workers; whoever plays orders keeps to it by itself
        if request.job == NOBODYS:  # to keep one costs its holder nothing: it must leave room for others
            allowed = min(allowed or self.sessions.limit, max(1, self.sessions.limit // NOBODYS_SHARE))
        known = describe(request.environment)
        name = await self.sessions.open(tenant, request, known, allowed)
        return SessionOpened(
            session=name, subject=f"env.session.{tenant}.{name}", worker=self.context.name, version=known.simulator
        )

    async def _start(self, spec: EnvironmentSpec) -> SimulatorHost:
        limits = self.context.config
        return await SimulatorHost.start(30.0, limits.call_timeout_s, environment=spec.id, memory=int(limits.memory_gb * 1e9))

    async def _listen(self, tenant: str, session: str) -> Close:
        async def call(request: SessionCall, _incoming: Incoming) -> SessionReply:
            return await self.sessions.call(session, request)

        return (await self.bus.serve("env.session", call, tenant=tenant, session=session)).stop

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
        return shelf.directory(self.root, tenant, dataset)

    async def prepare(self, order: PrepareOrder) -> None:
        """Record from the expert if asked to, open the dataset, report its frames and statistics."""
        path, public = self.directory(order.tenant, order.dataset)
        if order.expert is not None and public:
            raise Refused(f"data.dataset: {order.dataset!r} is read by every tenant and recorded by none; name one of your own")
        if order.expert is not None and await self.arriving.pushed(order.tenant, path):
            raise Refused(
                f"data.dataset: {order.dataset!r} was pushed, and a recording would replace it; name another, or drop it"
            )
        if order.expert is not None and not await self.recordings.record(order, path):
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

    async def _dataset(self, path: Path) -> Dataset:
        dataset = self.datasets.get(path)
        if dataset is None or dataset.replaced:
            dataset = await asyncio.to_thread(opened, path)
            if (before := self.datasets.pop(path, None)) is not None:
                await asyncio.to_thread(self._forget, before)
            self.datasets[path] = dataset
        self.datasets.move_to_end(path)
        while len(self.datasets) > DATASETS:
            await asyncio.to_thread(self._forget, self.datasets.popitem(last=False)[1])
        return dataset

    def _forget(self, dataset: Dataset) -> None:
        """Let go of what is held of a dataset. Who feeds from it right now opens its files again."""
        dataset.close()
        with self._encoding:
            for key in [key for key in self.encoded if key[0] is dataset]:
                self.encoded_bytes -= weight(self.encoded.pop(key))

    async def feed(self, order: FeedOrder) -> None:
        """Put batches [first, last) on the Training Queue."""
        path, public = self.directory(order.tenant, order.dataset)
        dataset = await self._dataset(path)
        for number in range(order.first, order.last):
            batch = await asyncio.to_thread(self._batch, dataset, order, number, public)
            await self.bus.publish(
                "train.batch", batch, msg_id=f"{order.tenant}/{batch.id}", tenant=order.tenant, job=order.job
            )
            self.context.pulse.progress += 1
        if dataset.rows.held_bytes > HELD_BYTES:  # one column of it is that large
            await asyncio.to_thread(dataset.close)

    def _batch(self, dataset: Dataset, order: FeedOrder, number: int, public: bool) -> TrainingBatch:
        samples: list[TrainingSample] = []
        indices = batch_indices(len(dataset), order.seed, number, order.batch_size).tolist()
        # Decoded in the order in which they lie: a film is opened once, and often read on instead of sought in.
        pictures = {index: self._images(dataset, index, order.image_encoding) for index in sorted(set(indices))}
        for index in indices:
            chunk = dataset.chunk(index, order.horizon)
            observation = Observation(
                images=pictures[index], state=to_tensor(chunk.state.astype(np.float32)), instruction=chunk.instruction
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

    def _images(self, dataset: Dataset, index: int, encoding: Any) -> dict[str, Image]:
        key = (dataset, index, encoding)
        found = self.encoded.get(key)
        if found is None:
            found = {camera: encode_image(picture, encoding) for camera, picture in dataset.images(index).items()}
            with self._encoding:
                if key not in self.encoded:
                    self.encoded[key] = found
                    self.encoded_bytes += weight(found)
                while self.encoded_bytes > ENCODED_BYTES:
                    self.encoded_bytes -= weight(self.encoded.popitem(last=False)[1])
        return found

    async def close(self) -> None:
        """End every simulator process."""
        await self.sessions.close()
        await self.used.flush()


def opened(path: Path) -> Dataset:
    """A dataset. Raises as Dataset, and Conflict where another one was put in its place meanwhile: what was read is of both."""
    root = Root(path)
    try:
        return Dataset(path)
    except BadMessage as error:
        if root.replaced:
            raise Conflict(f"dataset {root.name}: was replaced while it was opened; open it again") from error
        raise


def weight(pictures: dict[str, Image]) -> int:
    """Bytes of pictures that are kept."""
    return sum(len(picture.data) for picture in pictures.values())


def size(directory: Path) -> int:
    """Bytes of the files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def main(context: Context) -> None:
    """Serve until told to stop."""
    environment = Environment(context)
    await environment.serving.allowances.load()
    service = await context.bus.serve("env.open", environment.open, queue="environment", tenant="*")
    await environment.arriving.open()
    feeds, recordings = context.config.feeds, environment.recordings
    context.pulse.state = "running"
    try:
        await side_by_side(
            environment.serving.consume(environment.handle, concurrency=lambda: feeds + recordings.waiting, stop=context.stop),
            environment.used.publish(),
            environment.sessions.sweep(),
            environment.arriving.sweep(),
            recordings.sweep(),
        )
    except NexusError:
        context.log.exception("the bus went away for good")
        raise
    finally:
        await service.stop()
        await environment.arriving.close()
        await environment.close()


def run(**options: Any) -> int:
    """Entry point of `nexus worker environment`."""
    return worker.run(ROLE, main, **options)
