"""A tenant's own environment worker, in a process of its own with nothing but the tenant's credentials: the example's arm."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ARM = Path(__file__).parents[1] / "ops" / "examples" / "robot"
TARGET = "two_joint_arm:make_env"


@asynccontextmanager
async def own_worker(
    url: str, creds: Path, *words: str, target: str = TARGET, serves: bool = True, variables: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """It, from the moment it serves; at the end of the block it is told to stop. Its log lies beside the credentials."""
    log_file = creds.with_suffix(".log")
    log_file.write_bytes(b"")
    secrets = ("NEXUS_CREDS", "NEXUS_AUTHORITY", "NEXUS_URL", "NEXUS_HOME")
    tenants = {key: value for key, value in os.environ.items() if key not in secrets}
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.cli", "worker", "environment", "--env", target, "--creds", str(creds),
            "--url", url, *words, cwd=ARM,
            env=tenants | {"NEXUS_HOME": str(creds.parent / "nowhere"), "NEXUS_LOG": "json"} | (variables or {}),
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with asyncio.timeout(90):
            while serves and '"serving"' not in log_file.read_text():
                assert process.returncode is None, log_file.read_text()
                await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0, log_file.read_text()
