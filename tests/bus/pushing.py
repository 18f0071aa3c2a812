"""A tenant who brings datasets: some to bring, real environment workers to bring them to, and a push by hand."""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
from tenancy import written

from nexus_bus import config
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.client import Client
from nexus_bus.data.writer import DatasetWriter
from nexus_bus.tenants import tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.dataset import DatasetBegin, DatasetBegun, DatasetCommit, DatasetFile, DatasetPut
from schemas.tenant import TenantLimits
from workers import environment

FEATURES: dict[str, Any] = {
    "observation.state": {"dtype": "float32", "shape": [2], "names": None},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "observation.images.top": {"dtype": "image", "shape": [8, 8, 3], "names": None},
}
LENGTH = 6  # frames of an episode
DATA = "data/chunk-000/file-000.parquet"
EXTRA = "notes/extra.bin"  # of no use to a reader: what makes a dataset as large as a test wants it


def make(root: Path, *, episodes: int = 2, shade: int = 0, extra: int = 0) -> Path:
    """A dataset whose every number and picture says `shade`."""
    with DatasetWriter(root, 10, FEATURES, "test") as writer:
        for _ in range(episodes):
            numbers = np.full((LENGTH, 2), shade, np.float32)
            pictures = np.full((LENGTH, 8, 8, 3), shade, np.uint8)
            writer.add_episode(
                {"observation.state": numbers, "action": numbers, "observation.images.top": pictures}, "sit still"
            )
        writer.finalize()
    if extra:
        (root / EXTRA).parent.mkdir()
        (root / EXTRA).write_bytes(np.random.default_rng(shade).bytes(extra))
    return root


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@asynccontextmanager
async def worker(url: str, root: Path, name: str = "environment-0", **settings: Any) -> AsyncIterator[environment.Environment]:
    """A real environment worker of this process."""
    connection, stop, pulse = await Bus.connect(url, name=name), asyncio.Event(), Pulse()
    known = config.load("environment", flags={"data_root": str(root), **settings}).value
    log = cast(Any, structlog.get_logger())
    context = Context("environment", name, connection, known, stop, pulse, log, "here")
    running = asyncio.create_task(environment.main(context))
    async with asyncio.timeout(60):
        while pulse.state != "running":
            await asyncio.sleep(0.01)
    try:
        yield environment.Environment(context)
    finally:
        stop.set()
        await running
        await connection.close()


@asynccontextmanager
async def process(url: str, root: Path, *before: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A real environment worker in a process of its own; killed at the end, if it still lives."""
    child = await asyncio.create_subprocess_exec(
        *before, sys.executable, "-m", "nexus_bus.cli", "worker", "environment", "--url", url, "--set", f"data_root={root}",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@asynccontextmanager
async def tenant(server: EmbeddedServer, name: str = "acme", **limits: Any) -> AsyncIterator[Client]:
    """One with nothing but its credentials, `NAME.creds` in the server's directory."""
    async with tenants_of(server.url, server.authority) as operator:
        creds = written(server, (await operator.add(name, TenantLimits(**limits))).creds, f"{name}.creds")
    async with await Client.connect(server.url, creds=creds) as client:
        yield client


class Sending:
    """A push by hand, piece by piece."""

    def __init__(self, client: Client, source: Path, upload: str = "ab" * 8, dataset: str = "shelf") -> None:
        self.client, self.upload, self.dataset = client, upload, dataset
        self.files = content(source)

    async def begin(self, wrong: dict[str, str] | None = None) -> DatasetBegun:
        files = [
            DatasetFile(path=path, size=len(data), sha256=(wrong or {}).get(path, hashlib.sha256(data).hexdigest()))
            for path, data in self.files.items()
        ]
        begin = DatasetBegin(dataset=self.dataset, upload=self.upload, files=files, last=True)
        return await self.client.call("data.begin", begin)

    async def put(self, path: str, offset: int = 0, data: bytes | None = None) -> int:
        given = self.files[path] if data is None else data
        put = DatasetPut(upload=self.upload, path=path, offset=offset, data=given)
        return (await self.client.call("data.put", put, timeout=30.0)).have

    async def commit(self) -> Any:
        order = DatasetCommit(dataset=self.dataset, upload=self.upload)
        while True:
            if (answer := await self.client.call("data.commit", order, timeout=30.0)).dataset is not None:
                return answer.dataset

    async def all(self) -> None:
        for path in self.files:
            await self.put(path)
