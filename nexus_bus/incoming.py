"""Datasets that tenants bring, list and drop: the environment worker's side of `nexus data push`.

Reads   data.begin, data.put, data.commit, data.list, data.drop: core requests of the gateway, one of all workers takes each.
Writes  TENANT/NAME and TENANT/.incoming below the data root (see uploads.py), `dataset.*` in the registry.
Killed  whoever asked asks again, of any worker that shares the disk: nothing about an upload lies anywhere else.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from nexus_bus import registry, shelf, uploads
from nexus_bus.bus import Bus, Incoming, Service, die_with_parent
from nexus_bus.clock import now
from nexus_bus.data.readable import REFUSED, Readable
from nexus_bus.errors import BadMessage, Conflict, NexusError, NotFound, Refused
from nexus_bus.uploads import Manifest, Upload
from nexus_bus.worker import Pulse
from schemas.base import NAME_PATTERN, PUBLIC
from schemas.dataset import (
    DatasetAsked,
    DatasetBegun,
    DatasetCommit,
    DatasetCommitted,
    DatasetDrop,
    DatasetDropped,
    DatasetHeld,
    DatasetInfo,
    DatasetPage,
    DatasetPut,
    DatasetQuery,
    DatasetRecord,
)
from schemas.plan import TERMINAL, JobState

T = TypeVar("T")

UPLOADS = 4  # of one tenant that have begun and are not in place yet
DATASETS = 500  # of one tenant
AGE_S = 86_400.0  # after which an upload that nobody goes on with is forgotten
SWEEP_S = 600.0
ANSWER_S = 3.0  # that a commit waits for its check, before it says that it is under way
GAP_S, LOOK_S = 0.5, 0.005  # for pieces that overtook the one before them
CHECK_S = 300.0  # for a dataset to be opened


class Arriving:
    """Serves them. Everything that touches the disk runs in threads."""

    def __init__(self, bus: Bus, root: Path, pulse: Pulse, memory: int) -> None:
        """Below a data root; a process that opens what was sent may take so many bytes of memory."""
        self.bus, self.root, self.pulse, self.memory = bus, root, pulse, memory
        self.kv = bus.kv("registry")
        self.checking: dict[tuple[str, str], asyncio.Task[DatasetInfo]] = {}  # by tenant and upload: those of this worker
        self._services: list[Service] = []

    async def open(self) -> None:
        """Listen."""
        handlers: dict[str, Callable[[Any, Incoming], Awaitable[Any]]] = {
            "data.begin": self.begin, "data.put": self.put, "data.commit": self.commit, "data.list": self.list,
            "data.drop": self.drop,
        }  # fmt: skip
        for name, handler in handlers.items():
            self._services.append(await self.bus.serve(name, handler, queue="environment", tenant="*"))

    async def close(self) -> None:
        """Take nothing more. What is being checked is checked anew when it is asked for again."""
        for service in self._services:
            await service.stop()
        for task in self.checking.values():
            task.cancel()

    async def sweep(self) -> None:
        """Forget what nobody goes on with; until cancelled."""
        while True:
            for home in await asyncio.to_thread(shelf.homes, self.root):
                try:
                    await asyncio.to_thread(uploads.sweep, home, AGE_S)
                    await self._recount(home.name)
                except (NexusError, OSError) as error:  # tried again
                    self.bus.log.warning("uploads could not be swept", tenant=home.name, error=str(error))
            await asyncio.sleep(SWEEP_S)

    async def _recount(self, tenant: str) -> None:
        """What was counted and never came to lie there, or lies there no more: a job has recorded another in its place."""
        before = (datetime.now(UTC) - timedelta(seconds=AGE_S)).isoformat()
        for key, entry in (await self.kv.entries(registry.dataset_key(tenant, ""), DatasetRecord)).items():
            if entry.value.time < before and not await asyncio.to_thread(self._lies, entry.value):
                await self.kv.delete(key)

    # A push

    async def begin(self, asked: DatasetAsked, incoming: Incoming) -> DatasetBegun:
        """`data.begin`."""
        tenant, begin = incoming.tokens["tenant"], asked.begin
        if begin.dataset == PUBLIC:
            raise BadMessage(f"dataset: {PUBLIC!r} is where data for all tenants lies; choose another name")
        if await self._placed(tenant, begin.dataset, begin.upload) is not None:
            return DatasetBegun(have=[file.size for file in begin.files], done=True)
        if begin.replace and begin.page == 0:  # said before everything is sent
            await self._unused(tenant, begin.dataset, "replace it")
        return DatasetBegun(have=await asyncio.to_thread(self._begin, tenant, asked))

    def _begin(self, tenant: str, asked: DatasetAsked) -> list[int]:
        begin, home = asked.begin, self.root / tenant
        target, upload = home / begin.dataset, Upload(home, begin.upload)
        if not begin.replace and shelf.there(target):
            raise Refused(f"dataset: {begin.dataset!r} is there already; choose another name, or say --replace")
        with uploads.adding(home):
            upload.begin(UPLOADS)
        manifest = upload.manifest()
        if manifest is None:
            upload.page(begin.page, begin.files)
            if not begin.last:
                return [0] * len(begin.files)
            try:
                manifest = upload.listed(begin.page, begin.dataset)
            except BadMessage:
                upload.clear()  # nobody can go on with it
                raise
            with uploads.adding(home):
                self._allow(home, upload, manifest, asked.room, new=not shelf.there(target))
                manifest = upload.freeze(manifest)
        if manifest.dataset != begin.dataset or any(manifest.files.get(file.path) != file for file in begin.files):
            raise BadMessage(f"upload: {begin.upload!r} was begun with other files; begin another one")
        return upload.have(begin.files)

    def _allow(self, home: Path, upload: Upload, manifest: Manifest, room: int | None, *, new: bool) -> None:
        if new and len(shelf.names(home)) >= DATASETS:
            raise Refused(f"dataset: {DATASETS} of yours are there; drop one (`nexus data drop NAME`)")
        others = [one.manifest() for one in uploads.uploads(home) if one.name != upload.name]
        begun = sum(other.bytes for other in others if other is not None)
        if room is not None and manifest.bytes + begun > room:
            upload.clear()
            and_others = f", and {begun:,} of other uploads" if begun else ""
            raise Refused(
                f"limits.stored_bytes: {manifest.bytes:,} bytes{and_others}, and you may keep {room:,} more; drop what you no "
                "longer need, or ask the provider for more"
            )
        if manifest.bytes > uploads.room(home):
            upload.clear()
            raise Refused(f"the disk of the service has no room for {manifest.bytes:,} bytes; ask the provider")

    async def put(self, piece: DatasetPut, incoming: Incoming) -> DatasetHeld:
        """`data.put`."""
        upload = Upload(self.root / incoming.tokens["tenant"], piece.upload)
        ends = time.monotonic() + GAP_S
        while True:
            have = await asyncio.to_thread(upload.put, piece.path, piece.offset, piece.data)
            if have >= piece.offset:
                self.pulse.progress += 1
                return DatasetHeld(have=have)
            if time.monotonic() > ends:
                raise Conflict(f"offset: {have} bytes of {piece.path} are there; send on from there")
            await asyncio.sleep(LOOK_S)

    async def commit(self, order: DatasetCommit, incoming: Incoming) -> DatasetCommitted:
        """`data.commit`: says how it ended, or that it is under way."""
        tenant = incoming.tokens["tenant"]
        upload = Upload(self.root / tenant, order.upload)
        if (placed := await self._placed(tenant, order.dataset, order.upload)) is not None:
            await asyncio.to_thread(upload.clear)
            return DatasetCommitted(dataset=placed)
        task = self.checking.get((tenant, order.upload))
        if task is None:
            lock = await asyncio.to_thread(upload.lock)
            if lock is None:  # another worker checks it, or a piece is being written
                return DatasetCommitted()
            try:
                await asyncio.to_thread(upload.raise_refusal)
            except BaseException:
                os.close(lock)
                raise
            task = self.checking[tenant, order.upload] = asyncio.create_task(self._checked(tenant, upload, order, lock))
            task.add_done_callback(lambda _: self.checking.pop((tenant, order.upload), None))
        done, _ = await asyncio.wait({task}, timeout=ANSWER_S)
        if not done or task.cancelled():
            return DatasetCommitted()
        if task.exception() is not None:
            await asyncio.to_thread(upload.raise_refusal)  # who else asked was told already, or else this
        return DatasetCommitted(dataset=task.result())

    async def _checked(self, tenant: str, upload: Upload, order: DatasetCommit, lock: int) -> DatasetInfo:
        self.pulse.busy += 1
        try:
            manifest = await asyncio.to_thread(upload.manifest)
            if manifest is None or manifest.dataset != order.dataset:
                raise BadMessage(
                    f"upload: {order.upload!r} has no whole list of files of a dataset {order.dataset!r}; begin it"
                )
            await asyncio.to_thread(upload.verify, manifest, self._moved)
            await self._readable(upload.files)
            return await self._place(tenant, upload, manifest, replace=order.replace)
        except NexusError as error:
            await asyncio.to_thread(upload.refuse, error)
            raise
        finally:
            os.close(lock)
            self.pulse.busy -= 1

    def _moved(self) -> None:
        self.pulse.progress += 1  # a long check is not a wedged worker

    async def _readable(self, files: Path) -> Readable:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.data.readable", str(files), str(self.memory), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, preexec_fn=die_with_parent(signal.SIGKILL),
        )  # fmt: skip
        try:
            said, complaint = await asyncio.wait_for(child.communicate(), CHECK_S)
        except TimeoutError:
            raise BadMessage(f"dataset: not open after {CHECK_S:g} s; `nexus data check` on your side shows more") from None
        finally:
            if child.returncode is None:
                child.kill()
        if child.returncode == REFUSED:
            # Its folder has another name yet, which nobody gave it.
            raise BadMessage(complaint.decode(errors="replace")[:2000].replace(f"{files.parent.name}/{files.name}", "it"))
        if child.returncode:
            raise BadMessage(
                f"dataset: opening it ended a process with code {child.returncode}, by damage or by needing more than "
                f"{self.memory:,} bytes of memory; `nexus data check` on your side shows more"
            )
        return msgspec.json.decode(said, type=Readable)

    async def _place(self, tenant: str, upload: Upload, manifest: Manifest, *, replace: bool) -> DatasetInfo:
        home, dataset = self.root / tenant, manifest.dataset
        target = home / dataset
        with shelf.placing(home, dataset):
            if shelf.there(target):
                if not replace:
                    raise Refused(f"dataset: {dataset!r} is there already; choose another name, or say --replace")
                await self._unused(tenant, dataset, "replace it")
            record = DatasetRecord(
                tenant=tenant,
                dataset=dataset,
                upload=upload.name,
                mark=shelf.mark(upload.files),
                bytes=manifest.bytes,
                time=now(),
            )
            # First: nothing lies there that is not counted.
            await self.kv.put(registry.dataset_key(tenant, dataset), record)
            await asyncio.to_thread(shelf.place, upload.files, target)
            info = await asyncio.to_thread(shelf.info, target)
        await asyncio.to_thread(upload.clear)
        return info

    async def pushed(self, tenant: str, path: Path) -> bool:
        """Whether what lies there came over the tenant's account."""
        if path.parent != (self.root / tenant).resolve() or not re.match(NAME_PATTERN, path.name):
            return False
        entry = await self.kv.get(registry.dataset_key(tenant, path.name), DatasetRecord)
        return entry is not None and await asyncio.to_thread(self._lies, entry.value)

    async def _placed(self, tenant: str, dataset: str, upload: str) -> DatasetInfo | None:
        """What an upload became, if it still lies there."""
        entry = await self.kv.get(registry.dataset_key(tenant, dataset), DatasetRecord)
        if entry is None or entry.value.upload != upload or not await asyncio.to_thread(self._lies, entry.value):
            return None
        return await asyncio.to_thread(shelf.info, self.root / tenant / dataset)

    def _lies(self, record: DatasetRecord) -> bool:
        return shelf.mark(self.root / record.tenant / record.dataset) == record.mark

    async def _unused(self, tenant: str, dataset: str, what: str) -> None:
        """A job learns from one dataset from its first step to its last. Raises Refused for one that would be disturbed."""
        for entry in (await self.kv.entries(registry.job_key(tenant, ""), JobState)).values():
            state = entry.value
            data, job = state.plan.spec.data, state.plan.spec.name
            named = PurePosixPath(data.dataset or job).parts if data is not None else ()
            if state.phase not in TERMINAL and dataset in named[:1]:
                raise Refused(f"dataset: the job {job!r} reads {dataset!r}; let it end or cancel it, then {what}")

    # What is there

    async def list(self, query: DatasetQuery, incoming: Incoming) -> DatasetPage:
        """`data.list`."""
        return await asyncio.to_thread(shelf.listed, self.root, incoming.tokens["tenant"], query)

    async def drop(self, order: DatasetDrop, incoming: Incoming) -> DatasetDropped:
        """`data.drop`."""
        tenant, dataset = incoming.tokens["tenant"], order.dataset
        home, key = self.root / tenant, registry.dataset_key(tenant, dataset)
        counted = await self.kv.get(key, DatasetRecord)
        begun = [one for one in await asyncio.to_thread(uploads.uploads, home) if _of(one, dataset)]
        target = home / dataset
        if counted is None and not begun and not shelf.there(target):
            raise NotFound(f"dataset: no {dataset!r} of yours is here; `nexus data list` shows what is")
        freed = 0
        with shelf.placing(home, dataset):
            await self._unused(tenant, dataset, "drop it")
            if shelf.there(target):
                freed = (await asyncio.to_thread(shelf.info, target)).bytes
                await asyncio.to_thread(uploads.clear, home, target)
            if counted is not None:
                await self.kv.delete(key)
        for one in begun:
            freed += await asyncio.to_thread(_cleared, one)
        return DatasetDropped(bytes=freed)


def _of(upload: Upload, dataset: str) -> bool:
    manifest = upload.manifest()
    return manifest is not None and manifest.dataset == dataset


def _cleared(upload: Upload) -> int:
    with contextlib.suppress(NotFound):
        lock = upload.lock()
        if lock is None:
            raise Conflict(f"upload: {upload.name!r} is being checked or sent; drop it later")
        try:
            sent = upload.sent()
            upload.clear()
            return sent
        finally:
            os.close(lock)
    return 0
