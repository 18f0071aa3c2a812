"""`nexus up` says when there is somebody of each role, and what to do then."""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nexus_bus import config
from nexus_bus.bus import Bus, discover
from nexus_bus.bus.authority import PROVIDER_FILE
from nexus_bus.errors import NexusError

LOOK_S = 0.5
SLOW_S = 60.0  # after which it is said what is missing


async def tell(home: Path, host: str, counts: Mapping[Any, int], say: Callable[[str], None]) -> None:
    """Wait until the server of this home answers and a worker of each role runs on this host, then say so, once."""
    creds = config.authority(home) / PROVIDER_FILE
    while True:
        try:
            bus = await Bus.connect((home / "url").read_text().strip(), name=f"{host}-ready", timeout=5.0, creds=creds)
            break
        except (OSError, NexusError):  # not yet
            await asyncio.sleep(LOOK_S)
    try:
        await when_ready(bus, home, host, counts, say)
    finally:
        await bus.close()


async def when_ready(bus: Bus, home: Path, host: str, counts: Mapping[Any, int], say: Callable[[str], None]) -> None:
    """The same, over a connection."""
    wanted = [role for role, count in counts.items() if count]
    slow = asyncio.get_running_loop().time() + SLOW_S
    while True:
        found = [one for one in await discover(bus) if one.about.get("host") == host]
        running = {one.kind for one in found if one.data.get("state") == "running"}
        if missing := [role for role in wanted if role not in running]:
            if asyncio.get_running_loop().time() > slow:
                say(f"still starting: {', '.join(missing)}; {home / 'logs'} has what they say")
                slow = float("inf")
            await asyncio.sleep(LOOK_S)
            continue
        say(f"ready: {', '.join(wanted)}. {_next(home)}")
        return


def _next(home: Path) -> str:
    found = config.HOME not in os.environ and home == config.home()
    where = "from this directory" if found else f"with NEXUS_HOME={home}"
    return f"In another terminal, {where}: `nexus submit FILE`, or `nexus tenant add NAME` for somebody else"
