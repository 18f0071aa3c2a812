"""Changing accounts on a server that runs: a signed token goes in, and counts from then on. No restart, no reload."""

import asyncio
import json
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from nexus_bus.bus.jwt import contents
from nexus_bus.errors import Denied, Unavailable

if TYPE_CHECKING:
    from nexus_bus.bus.connection import Bus

ANSWER_S = 5.0
PATIENCE_S = 10.0


async def push(system: "Bus", token: str) -> None:
    """Make an account what its token says.

    Args:
        system: a connection with the system account's credentials.

    Raises:
        Denied: the server does not trust who signed it.
        Unavailable: no answer, or it could not store the token.
    """
    await _ask(system, "$SYS.REQ.CLAIMS.UPDATE", token)


async def forget(system: "Bus", token: str) -> None:
    """Delete accounts as a signed order says; whoever is connected is cut off. Raises as `push`."""
    await _ask(system, "$SYS.REQ.CLAIMS.DELETE", token)


async def known(system: "Bus", token: str) -> bool:
    """Whether the server knows an account as this token says, whenever that was issued. Raises Unavailable."""
    wanted = contents(token)
    on = f"$SYS.REQ.ACCOUNT.{wanted.get('sub')}.CLAIMS.LOOKUP"
    try:
        answer = await _answer(system, on, "")
    except (NatsError, TimeoutError) as error:
        raise Unavailable(f"accounts: no answer on {on}: {error!r}; are these the system's credentials?") from None
    return contents(answer.data.decode(errors="replace")).get("nats") == wanted["nats"]


async def clock(system: "Bus") -> int:
    """Seconds since 1970 by the server's clock, which decides what has expired. Raises as `push`."""
    content = await _ask(system, "$SYS.REQ.SERVER.PING", "")
    try:
        return int(datetime.fromisoformat(content["server"]["time"]).timestamp())
    except (KeyError, TypeError, ValueError):
        raise Unavailable("accounts: the server does not say what time it is; it must be 2.12 or newer") from None


async def _ask(system: "Bus", on: str, token: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((await _answer(system, on, token)).data)
    except (NatsError, TimeoutError, ValueError) as error:
        raise Unavailable(
            f"accounts: the server does not answer on {on}: {error!r}; are these the system's credentials?"
        ) from None
    if error := content.get("error"):
        text = f"accounts: the server refused the token: {error.get('description', error)}"
        raise Denied(text) if "trust" in text or "operator" in text else Unavailable(text)
    return content


async def _answer(system: "Bus", on: str, token: str) -> Any:
    """Asked again while the server is away: all of this may be done twice."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                await system.up.wait()
                return await system.client.request(on, token.encode(), timeout=ANSWER_S)
        except NoRespondersError:
            raise
        except (NatsError, TimeoutError):
            if time.monotonic() > ends:
                raise
