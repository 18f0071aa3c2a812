"""What ops/examples/step.mjs does, message for message, with the stock NATS client: JSON, a .creds file, nothing of ours."""

import base64
import json
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client as Raw
from playing import playing
from tenancy import raw

from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.tenants import tenants_of
from schemas.job import EnvironmentSpec
from tests.conftest import Eventually

EXAMPLE = Path(__file__).parents[2] / "ops/examples/step.mjs"
ENVIRONMENT = {"id": "minigrid", "task": "goto", "options": {"image_size": 32, "max_steps": 10}}
CHUNK = 4


@pytest.fixture
async def acme(bus: Bus, server: EmbeddedServer, gateway: Any, eventually: Eventually) -> AsyncIterator[Raw]:
    """A tenant's connection by its own credentials; a gateway and an environment worker serve."""
    async with tenants_of(server.url, server.authority) as operator:
        creds = (await operator.add("acme")).creds
    async with playing(bus, server.url, EnvironmentSpec(**ENVIRONMENT), eventually):
        client = await raw(server, creds)
        yield client
        await client.close()


async def call(client: Raw, subject: str, message: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    answer = await client.request(subject, json.dumps(message).encode(), timeout=70, headers=headers)
    if "Nexus-Error-Code" in (answer.headers or {}):
        raise RuntimeError(answer.data.decode())
    return json.loads(answer.data)


def tensor(rows: list[list[float]]) -> dict[str, Any]:
    values = [value for row in rows for value in row]
    data = struct.pack(f"<{len(values)}f", *values)
    return {"dtype": "float32", "shape": [len(rows), len(rows[0])], "data": base64.b64encode(data).decode()}


def numbers(tensor: dict[str, Any]) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<f", base64.b64decode(tensor["data"]))]


async def play(client: Raw, seed: int) -> list[dict[str, Any]]:
    """A session of its own, an episode in it, and the session given back; all replies."""
    lease = await call(client, "env.open", {"environment": ENVIRONMENT, "lease_s": 60})
    action = lease["environment"]["action"]

    async def session(**message: Any) -> dict[str, Any]:
        return await call(client, "env.call", {"session": lease["session"], "call": message})

    replies = [await session(op="reset", seed=seed)]
    while not replies[-1].get("terminated") and not replies[-1].get("truncated"):
        replies.append(await session(op="step", actions=tensor([action["high"]] * CHUNK)))
    await session(op="close")
    with pytest.raises(RuntimeError, match="is over or never was"):
        await session(op="reset", seed=seed)
    return replies


async def test_a_session_is_stepped_through_an_episode_in_json(acme: Raw) -> None:
    first, *steps = await play(acme, seed=3)
    seen = first["observation"]
    assert seen["instruction"] == "go to the purple box"
    assert base64.b64decode(seen["images"]["grid"]["data"]).startswith(b"\x89PNG")
    assert len(numbers(seen["state"])) == seen["state"]["shape"][0] == 4
    assert [len(step["rewards"]) for step in steps] == [4, 4, 2]
    assert (steps[-1]["end"], steps[-1]["steps"]) == ("time_limit", 10)
    assert [reply["observation"] for reply in await play(acme, seed=3)] == [reply["observation"] for reply in (first, *steps)]


async def test_a_wrong_message_is_answered_with_the_field_that_is_wrong(acme: Raw) -> None:
    lease = await call(acme, "env.open", {"environment": ENVIRONMENT})
    short = tensor([[0.0] * 7]) | {"data": "AAAA"}
    bare = {"dtype": "float32", "shape": [1, 7]}
    for message, text in (
        ({"op": "jump"}, r"Invalid enum value 'jump' - at `\$\.call\.op`"),
        ({"op": "step", "actions": bare}, r"missing required field `data` - at `\$\.call\.actions`"),
        ({"op": "step", "actions": short}, r"tensor\.data: 3 bytes, but float32 \[1, 7\] takes 28"),
        ({"op": "step", "actions": tensor([[0.0] * 7])}, "no episode is running; reset first"),
    ):
        with pytest.raises(RuntimeError, match=text):
            await call(acme, "env.call", {"session": lease["session"], "call": message})


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_example_is_valid_javascript() -> None:
    done = subprocess.run(["node", "--check", EXAMPLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
