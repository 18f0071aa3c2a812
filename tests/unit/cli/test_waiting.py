"""`--wait` says how far a job is, leaves stdout to the result, and Ctrl-C leaves the job running."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from nexus_bus.cli.waiting import progress, wait
from schemas.events import Event

TIME = "2026-01-02T03:04:05+00:00"


def event(kind: Any, message: str = "", **data: Any) -> Event:
    return Event(type=kind, tenant="acme", job="pick", time=TIME, message=message, data=data)


def moved(phase: str, done: int, total: int, **more: Any) -> Event:
    return event("job.progress", phase=phase, done=done, total=total, **more)


class Stub:
    """A client whose job does what is given, then waits for ever unless it is to end."""

    def __init__(self, *events: Event, ends: bool = True) -> None:
        self.events, self.ends, self.waits = events, ends, asyncio.Event()

    async def job(self, name: str) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(spec=SimpleNamespace(kind="rl", name=name)))

    async def watch(self, _: str) -> AsyncIterator[Event]:
        for one in self.events:
            yield one
        self.waits.set()
        if not self.ends:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("happened", "said"),
    [
        (event("job.phase", "evaluating_before"), "evaluating before"),
        (moved("evaluating_after", 20, 60, successes=15), "evaluating after, 20/60 episodes, success 0.75"),
        (moved("training", 3, 20, success_rate=0.4, loss=0.123456), "training, 3/20 updates, success 0.4, loss 0.123"),
        (moved("data", 0, 1), "data"),
        (event("job.queued", "waits: 2 jobs before it"), "waits: 2 jobs before it"),
        (event("policy.published", "pick@3"), ""),
    ],
)
def test_an_event_says_how_far_a_job_is(happened: Event, said: str) -> None:
    assert progress(happened, "rl")[1] == said


async def test_without_a_terminal_a_phase_is_one_line_and_stdout_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    client = Stub(event("job.phase", "training"), moved("training", 1, 20), moved("training", 2, 20), event("job.phase", "x"))
    assert (await wait(client, "pick")).plan.spec.name == "pick"
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "training\nx\n")
    await wait(client, "pick", quiet=True)
    assert capsys.readouterr().err == ""


async def test_a_terminal_shows_one_line_that_is_gone_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    await wait(Stub(moved("training", 1, 20), moved("training", 2, 20)), "pick")
    said = capsys.readouterr()
    assert said.out == ""
    assert "\n" not in said.err
    assert "training, 2/20 updates" in said.err.rsplit("\r", 2)[1]


async def test_ctrl_c_leaves_the_job_and_says_how_to_look_at_it(capsys: pytest.CaptureFixture[str]) -> None:
    client = Stub(moved("training", 1, 20), ends=False)
    waiting = asyncio.create_task(wait(client, "pick"))
    await client.waits.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    said = capsys.readouterr().err
    assert "pick goes on without you: `nexus watch pick` follows it, `nexus cancel pick` stops it" in said
