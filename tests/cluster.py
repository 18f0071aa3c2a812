"""Servers as one cluster: processes that know each other, killed and started again one by one."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from nexus_bus.bus import Bus
from nexus_bus.bus.authority import Authority
from nexus_bus.bus.server import die_with_parent, find_binary
from nexus_bus.errors import Unavailable
from tests.conftest import free_port

NODES = 3

CONFIG = """\
server_name: "n{node}"
listen: "127.0.0.1:{port}"
log_file: "{directory}/n{node}.log"
max_payload: 8MB
{trust}
jetstream {{
  store_dir: "{directory}/n{node}"
  max_memory_store: 1GB
  max_file_store: 64GB
}}
cluster {{
  name: "nexus"
  listen: "127.0.0.1:{route}"
  routes: [{routes}]
}}
"""


class Cluster:
    """Server processes that know each other."""

    def __init__(self, directory: Path) -> None:
        """Nothing starts yet."""
        self.authority = Authority.at(Path(os.environ["NEXUS_AUTHORITY"]))
        self._directory = directory
        self._ports = [free_port() for _ in range(NODES)]
        self._routes = [free_port() for _ in range(NODES)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        directory.mkdir()

    def url(self, node: int) -> str:
        """Of one node; a client learns of the others there."""
        return f"nats://127.0.0.1:{self._ports[node]}"

    def start(self, node: int) -> None:
        """First, or again with the data it had."""
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        text = CONFIG.format(
            node=node, port=self._ports[node], route=self._routes[node], routes=routes, directory=self._directory,
            trust=self.authority.server_config(self._directory / f"accounts-{node}"),
        )  # fmt: skip
        path = self._directory / f"n{node}.conf"
        path.write_text(text)
        self._processes[node] = subprocess.Popen(
            [find_binary(), "-c", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - only a system call, made ready before the fork
        )

    def kill(self, node: int) -> None:
        """As the kernel would do it."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def end(self) -> None:
        """All of them."""
        for node in list(self._processes):
            self.kill(node)
        shutil.rmtree(self._directory)


async def stream(bus: Bus, name: str = "TRAINING") -> Any:
    """What the cluster says of a stream; None while it does not answer."""
    try:
        answer = msgspec.json.decode((await bus.ask(f"$JS.API.STREAM.INFO.{name}", deadline=2.0)).data)
    except Unavailable:
        return None
    return None if "error" in answer else answer


async def whole(bus: Bus) -> bool:
    """Whether every copy of the Training Queue is there and up to date."""
    info = await stream(bus)
    copies = (info or {}).get("cluster", {}).get("replicas") or []
    return len(copies) == NODES - 1 and all(copy.get("current") and not copy.get("offline") for copy in copies)
