"""`nexus dead`: one, some or all messages that were given up, of one tenant or job, are looked at, sent again or forgotten."""

import json
from collections.abc import Awaitable, Callable

import pytest

from nexus_bus.bus import Bus
from nexus_bus.clock import now
from schemas.control import DeadLetter

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def letters(nexus: Run, bus: Bus) -> Run:
    """Four of them: 1 and 2 of acme's jobs pick and place, 3 of globex's pick, 4 by hand."""
    for subject in ("train.record.acme.pick", "train.record.acme.place", "train.record.globex.pick", "made.by.hand"):
        letter = DeadLetter(
            stream="TRAINING", subject=subject, msg_id=subject, reason="always fails", deliveries=3, time=now(), headers={},
            payload=b"{}",
        )  # fmt: skip
        await bus.publish("dead", letter, msg_id=f"dead/{subject}", stream="training", tenant="acme")
    return nexus


async def numbers(run: Run, *words: str) -> list[int]:
    return [row["number"] for row in json.loads((await run("dead", "list", *words, "--json"))[1])]


async def test_they_are_told_by_tenant_and_by_job(letters: Run) -> None:
    assert await numbers(letters) == [1, 2, 3, 4]
    assert await numbers(letters, "--tenant", "acme") == [1, 2]
    assert await numbers(letters, "--job", "pick") == [1, 3]
    assert await numbers(letters, "--tenant", "acme", "--job", "pick") == [1]
    rows = json.loads((await letters("dead", "list", "--tenant", "globex", "--json"))[1])
    assert [(row["tenant"], row["job"], row["deliveries"], row["reason"]) for row in rows] == [
        ("globex", "pick", 3, "always fails")
    ]
    code, said, _ = await letters("dead", "list", "--tenant", "umbrella")
    assert (code, said.strip()) == (0, "no dead letters of tenant umbrella")


async def test_those_of_a_job_are_sent_again_once_each(letters: Run, bus: Bus) -> None:
    before = (await bus.queued("TRAINING")).get("train.record.acme.pick", 0)
    assert json.loads((await letters("dead", "retry", "--tenant", "acme", "--job", "pick", "--json"))[1]) == [1]
    assert json.loads((await letters("dead", "retry", "1", "--json"))[1]) == [1]  # a hasty hand: still once
    assert (await bus.queued("TRAINING"))["train.record.acme.pick"] == before + 1
    assert await numbers(letters) == [1, 2, 3, 4], "what is sent again stays until it is dropped"


async def test_some_are_dropped_and_then_all(letters: Run) -> None:
    assert (await letters("dead", "drop", 2, 4))[0] == 0
    assert await numbers(letters) == [1, 3]
    code, said, _ = await letters("dead", "drop", "--all")
    assert code == 0
    assert said.splitlines() == ["1: train.record.acme.pick: dropped", "3: train.record.globex.pick: dropped"]
    assert await numbers(letters) == []
    assert (await letters("dead", "drop", "--all"))[1].strip() == "no dead letters"


async def test_nothing_is_done_where_a_number_is_wrong_or_nobody_said_which(letters: Run) -> None:
    code, _, said = await letters("dead", "drop", 1, 17)
    assert code == 2
    assert "there is no dead letter 17;" in said
    code, _, said = await letters("dead", "drop", 3, "--tenant", "acme")
    assert code == 2
    assert "there is no dead letter 3 of tenant acme;" in said
    for words in ((), (1, "--all")):
        assert (await letters("dead", "drop", *words))[0] == 2
    assert await numbers(letters) == [1, 2, 3, 4]
