"""A tenant's datasets at the service: pushed, listed, dropped. Whatever breaks while one is pushed, the same push goes on."""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from nexus_bus.client.calls import CALL_S, PATIENT_S, Calls, token
from nexus_bus.errors import BadJob, BadMessage, Conflict, NotFound, Refused, Unavailable
from schemas.api import CHUNK_BYTES
from schemas.dataset import (
    FILES,
    PAGE_FILES,
    PATH,
    DatasetBegin,
    DatasetBegun,
    DatasetCommit,
    DatasetCommitted,
    DatasetDrop,
    DatasetDropped,
    DatasetFile,
    DatasetInfo,
    DatasetPage,
    DatasetPut,
    DatasetQuery,
    DatasetUnfinished,
)

AT_ONCE = 8  # pieces in flight
SMALLEST = 2048
OVERHEAD = 1024 + 4 * PATH  # of a message around its piece
BLOCK = 1 << 20
AGAIN_S = 0.2  # between looks whether what was sent is checked
CHECK_S = 3600.0

Progress = Callable[[str, int, int], None]  # what: reading, sending, checking; bytes done, of how many


class DatasetCalls(Calls):
    """Everything a tenant does with datasets."""

    async def push_dataset(
        self, directory: Path | str, *, name: str | None = None, replace: bool = False, progress: Progress | None = None
    ) -> DatasetInfo:
        """Bring a LeRobot dataset, so that jobs can read it by its name. Repeated, it goes on where it was.

        Args:
            name: default the directory's.
            replace: a dataset of that name is replaced, all at once, when the new one is there and was checked.

        Raises:
            BadMessage, NotFound: the directory is no dataset that can be read; names the file.
            Refused: the name is taken, a job reads what is to be replaced, a limit or the disk says no.
            Unavailable: the service was away for five minutes; push again.
        """
        root = Path(directory)
        dataset = token("dataset", name) if name else _name(root)
        tell = progress or (lambda what, done, total: None)
        files = await asyncio.to_thread(scan, root, lambda done, total: tell("reading", done, total))
        upload = hashlib.sha256(msgspec.json.encode([dataset, files])).hexdigest()[:32]  # the same content goes on
        payload = (await self.account()).limits.payload_bytes - OVERHEAD
        pages = list(_pages(files, max(SMALLEST, payload)))

        async def begin() -> tuple[list[int], bool]:
            have, done = list[int](), False
            for number, page in enumerate(pages):
                last = number == len(pages) - 1
                order = DatasetBegin(dataset=dataset, upload=upload, page=number, files=page, last=last, replace=replace)
                begun: DatasetBegun = await self.call("data.begin", order, timeout=PATIENT_S)
                have += begun.have
                done = begun.done
            return have, done

        have, done = await begin()
        if not done:
            size = max(SMALLEST, min(CHUNK_BYTES, payload))
            try:
                await self._send(root, upload, files, have, size, lambda sent, total: tell("sending", sent, total))
            except Conflict:  # the same was pushed from elsewhere meanwhile, and is being checked
                pass
            except NotFound:
                if not (await begin())[1]:  # else it was, and is there
                    raise
        return await self._committed(DatasetCommit(dataset=dataset, upload=upload, replace=replace), tell)

    async def _send(
        self, root: Path, upload: str, files: Sequence[DatasetFile], have: list[int], size: int,
        tell: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        total, sent = sum(file.size for file in files), sum(have)
        tell(sent, total)

        def pieces() -> Iterator[tuple[str, int, int]]:
            for file, there in zip(files, have, strict=True):
                for offset in range(there, file.size, size) if file.size else (0,):
                    yield file.path, offset, min(size, file.size - offset)

        left = pieces()

        async def sender() -> None:
            nonlocal sent
            for path, offset, length in left:  # of all senders, in order
                data = await asyncio.to_thread(_piece, root / path, offset, length)
                piece = DatasetPut(upload=upload, path=path, offset=offset, data=data)
                await self.call("data.put", piece, timeout=PATIENT_S)
                sent += length
                tell(sent, total)

        senders = [asyncio.create_task(sender()) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*senders)
        finally:
            for task in senders:
                task.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    async def _committed(self, order: DatasetCommit, tell: Progress) -> DatasetInfo:
        ends = time.monotonic() + CHECK_S
        while time.monotonic() < ends:
            tell("checking", 0, 0)
            answer: DatasetCommitted = await self.call("data.commit", order, timeout=PATIENT_S)
            if answer.dataset is not None:
                return answer.dataset
            await asyncio.sleep(AGAIN_S)
        raise Unavailable(f"dataset: {order.dataset!r} is still being checked after {CHECK_S:g} s; push again to go on waiting")

    async def datasets(self) -> list[DatasetInfo]:
        """Datasets that jobs can name, by name: pushed, recorded, or put there by the provider."""
        return [one async for page in self._dataset_pages() for one in page.datasets]

    async def dataset(self, name: str) -> DatasetInfo | None:
        """One of them, as a job names it (`NAME`, `public/NAME`); None if it is not there.

        Raises:
            NotFound: it is no name of a dataset.
            Unavailable: it is not known, since no worker answers, or a job is about to record it.
        """
        page: DatasetPage = await self.call("data.list", DatasetQuery(dataset=name))
        return page.datasets[0] if page.datasets else None

    async def unfinished_datasets(self) -> list[DatasetUnfinished]:
        """Pushes that were begun and are not at their end."""
        return [one async for page in self._dataset_pages() for one in page.unfinished]

    async def _dataset_pages(self):
        query = DatasetQuery()
        while True:
            page: DatasetPage = await self.call("data.list", query)
            yield page
            if not page.next:
                return
            query = DatasetQuery(after=page.next)

    async def drop_dataset(self, dataset: str) -> int:
        """Take a dataset away, and what was sent of one of that name; bytes that it had.

        Raises:
            NotFound: there is none.
            Refused: a job reads it.
        """
        dropped: DatasetDropped = await self.call("data.drop", DatasetDrop(dataset=token("dataset", dataset)), timeout=CALL_S)
        return dropped.bytes


def scan(root: Path, tell: Callable[[int, int], None]) -> list[DatasetFile]:
    """The files of a dataset, by path, with their hashes; what is hidden is left out.

    Raises:
        NotFound, BadMessage: it is no dataset, or one that cannot be read; or a file in it leads elsewhere.
    """
    if not (root / "meta/info.json").is_file():
        raise NotFound(f"{root}: there is no meta/info.json; a dataset is a finalised LeRobot directory")
    with contextlib.suppress(ModuleNotFoundError):  # without pyarrow the service finds out, after everything was sent
        from nexus_bus.data.readable import look

        look(root)
    paths = sorted(_walk(root))
    if len(paths) > FILES:
        raise Refused(
            f"{root}: {len(paths)} files, a push takes {FILES}; `nexus data convert` writes LeRobot v3.0, into few files"
        )
    sizes = [(root / path).stat().st_size for path in paths]
    total, done = sum(sizes), 0
    found: list[DatasetFile] = []
    for path, size in zip(paths, sizes, strict=True):
        digest, read = hashlib.sha256(), 0
        with (root / path).open("rb") as file:
            while part := file.read(BLOCK):
                digest.update(part)
                read += len(part)
                tell(done + read, total)
        done += size
        if read != size:
            raise _changed(root / path)
        found.append(DatasetFile(path=path, size=size, sha256=digest.hexdigest()))
    return found


def _name(root: Path) -> str:
    name = root.resolve().name
    try:
        return token("dataset", name)
    except BadJob:
        raise BadJob(f"{name!r} is no name for a dataset (lower-case letters, digits, - and _); give it one (--name)") from None


def _walk(root: Path) -> Iterator[str]:
    base = root.resolve()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (*names, *folders):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(base):
                raise BadMessage(f"{path}: leads out of the dataset; copy the file in, links are not followed")
            if path.is_symlink() and path.is_dir():
                raise BadMessage(f"{path}: is a link to a folder; put the folder itself there")
        yield from (str(Path(folder, name).relative_to(root)) for name in names if not name.startswith("."))


def _pages(files: Sequence[DatasetFile], size: int) -> Iterator[list[DatasetFile]]:
    """So many files each, and so many bytes of JSON."""
    page: list[DatasetFile] = []
    held = 0
    for file in files:
        length = len(msgspec.json.encode(file)) + 1
        if page and (len(page) == PAGE_FILES or held + length > size):
            yield page
            page, held = [], 0
        page.append(file)
        held += length
    if page:
        yield page


def _piece(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise _changed(path)
    return data


def _changed(path: Path) -> Refused:
    return Refused(f"{path}: changed while it was pushed; push again once nobody writes to it")
