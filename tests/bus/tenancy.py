"""Tenants as tests see them: the stock NATS client with credentials of theirs, and files with credentials."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client as Raw
from nats.aio.client import RawCredentials
from nats.errors import Error as NatsError
from nats.errors import NoServersError

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.errors import Denied


async def quiet(_: Exception) -> None:
    return


async def raw(server: EmbeddedServer, creds: str, **options: Any) -> Raw:
    """A stock client that is cut off once."""
    client = Raw()
    given: dict[str, Any] = {"allow_reconnect": False, "connect_timeout": 30, "error_cb": quiet} | options
    try:
        await client.connect(server.url, user_credentials=RawCredentials(creds), **given)  # pyright: ignore
    except BaseException:
        await client.close()
        raise
    return client


async def admitted(server: EmbeddedServer, creds: str) -> bool:
    try:
        client = await raw(server, creds)
    except (NatsError, NoServersError):
        return False
    await client.close()
    return True


async def ask(client: Raw, call: str = "account.show") -> dict[str, Any]:
    answer = await client.request(call, b"{}", timeout=60, headers={"Content-Type": "application/json"})
    assert "Nexus-Error-Code" not in (answer.headers or {}), answer.data
    return msgspec.json.decode(answer.data)


def written(server: EmbeddedServer, text: str | bytes, name: str = "some.creds") -> Path:
    path = server.directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


async def refused(server: EmbeddedServer, path: Path) -> str:
    with pytest.raises(Denied) as caught:
        await Bus.connect(server.url, creds=path, timeout=30)
    assert str(path) in str(caught.value)
    return str(caught.value)
