"""Whether answers tell what there is from what there is not: they must be equal, and nothing but an error or nothing."""

import asyncio
from typing import Any

from tests.isolation.attacker import Answer, Attacker
from tests.isolation.siege import ABSENT, ABSENT_POLICY, ABSENT_UPLOAD, JOB, POLICY, UPLOAD

NAMES = (POLICY, ABSENT_POLICY, JOB, ABSENT, UPLOAD, ABSENT_UPLOAD)


def differ(there: Answer, absent: Answer, *names: str) -> str | None:
    """Evidence, if an answer says more than that there is nothing, or differs between what there is and what there is not."""
    ours, theirs = there.without_ids(*names), absent.without_ids(*names)
    if ours != theirs:
        return f"tells them apart: {ours} and {theirs}"
    content: Any = {} if there.error else there.content
    found = [key for key, value in content.items() if value and key not in ("end", "next")]
    return f"says {found}: {there.data[:200]!r}" if found else None


async def both(
    intruder: Attacker, name: str, there: dict[str, Any], absent: dict[str, Any], *, packed: bool = False, names: Any = NAMES
) -> str | None:
    """Ask for what there is and for what there is not; see `differ`."""
    ask = intruder.pack if packed else intruder.call
    return differ(*await asyncio.gather(ask(name, there), ask(name, absent)), *names)


async def ordered(intruder: Attacker, name: str, there: dict[str, Any], absent: dict[str, Any], *names: str) -> str | None:
    """The same of orders: whatever the master says about them later must be equal too, and a refusal."""
    await intruder.listen("event.>")
    events = []
    for content in (there, absent):
        taken = await intruder.call(name, content)
        assert not taken.error, taken
        event = await intruder.outcome(taken)
        for own in (JOB, ABSENT, *names):
            event = {key: value.replace(own, "<name>") if isinstance(value, str) else value for key, value in event.items()}
        events.append({key: value for key, value in event.items() if key not in ("time", "submission")})
    if events[0] != events[1]:
        return f"tells them apart: {events}"
    return None if events[0]["type"].endswith("refused") else f"accepted: {events[0]}"
