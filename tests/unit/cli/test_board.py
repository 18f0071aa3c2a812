"""The live picture: what it shows of jobs and events, and that it follows a real bus."""

from io import StringIO
from typing import Any, cast

import msgspec
from rich.console import Console

from nexus_bus.bus import Bus
from nexus_bus.cli.board import Board
from nexus_bus.client import Client
from nexus_bus.documents import job_spec
from nexus_bus.plan import compile_plan
from nexus_bus.registry import job_key
from schemas.events import Event
from schemas.plan import JobState, Phase

TIME = "2026-01-02T03:04:05+00:00"


def state(name: str = "pick", phase: Phase = "training", **fields: Any) -> JobState:
    document = {"kind": "rl", "name": name, "environment": {"id": "tabletop", "task": "touch"}, "evaluation": {"episodes": 60}}
    return JobState(plan=compile_plan(job_spec(document), "acme"), phase=phase, submission="s", submitted=TIME, **fields)


def event(kind: Any, job: str = "pick", **fields: Any) -> Event:
    return Event(type=kind, tenant="acme", job=job, time=TIME, **fields)


def drawn(board: Board) -> str:
    console = Console(file=StringIO(), width=150, color_system=None)
    console.print(board)
    return cast("StringIO", console.file).getvalue()


def board(*states: JobState) -> Board:
    made = Board([])
    made.states = {job_key("acme", s.plan.spec.name): s for s in states}
    return made


def test_a_training_job_shows_how_far_how_good_and_how_shared():
    view = board(state(done=7, version=6, scores={"success_before": 0.25, "low_before": 0.2, "high_before": 0.3}))
    view.note(event("job.progress", data={"lag": 0.5, "group": 2.25, "success_rate": 0.75, "phase": "training"}))
    said = drawn(view)
    assert "acme · pick" in said
    for part in ("training", "7/20", "0.25 [0.20, 0.30] → 0.75 in training", " 6 ", "0.50", "2.2"):
        assert part in said


def test_an_evaluating_job_shows_success_so_far():
    assert "0.50 of 30" in drawn(board(state(phase="evaluating_before", done=30, successes=15)))
    assert "30/60" in drawn(board(state(phase="evaluating_before", done=30, successes=15)))


def test_an_ended_job_shows_its_scores_alone():
    scores = {
        f"{what}_{when}": value
        for when in ("before", "after")
        for what, value in (("success", 0.5), ("low", 0.4), ("high", 0.6))
    }
    said = drawn(board(state(phase="completed", done=3, scores=scores)))
    assert "0.50 [0.40, 0.60] → 0.50 [0.40, 0.60]" in said
    assert "3/" not in said


def test_it_has_ended_when_all_jobs_have():
    assert not board().ended
    assert not board(state(), state("push", "failed")).ended
    assert board(state("pick", "completed"), state("push", "failed")).ended


def test_events_and_queues_are_shown_and_progress_is_not_an_event():
    view = board(state())
    view.depths = {"INFERENCE": (12, 34)}
    view.note(event("policy.published", message="pick@3"))
    view.note(event("job.progress", data={"loss": 0.1}))
    said = drawn(view)
    assert "inference 12+34" in said
    assert "03:04:05 acme/pick policy.published pick@3" in said
    assert "job.progress" not in said


def test_text_of_others_is_not_taken_for_markup():
    view = board(state())
    view.note(event("job.failed", message="[red]not red[/] [/]"))
    assert "[red]not red[/] [/]" in drawn(view)


async def test_it_follows_the_bus_and_prints_lines_without_a_terminal(bus: Bus, gateway: Any, eventually: Any):
    out = StringIO()
    view = Board([Client(bus, "acme")], "pick")
    kv = bus.kv("registry")
    await kv.create(job_key("acme", "pick"), state(done=1))
    await kv.create(job_key("acme", "pick-2"), state("pick-2"))

    async def say(kind: Any, **fields: Any) -> None:
        await bus.publish("event", event(kind, **fields), msg_id=kind, tenant="acme", job="pick")

    async def refreshed(text: str) -> bool:
        await view.refresh()
        return text in out.getvalue()

    async def over() -> bool:
        await view.refresh()
        return view.ended

    with view.live(Console(file=out, width=100)):
        await say("job.accepted", message="hello")
        await eventually(lambda: refreshed("acme/pick job.accepted hello"))
        await eventually(lambda: refreshed("acme/pick training 1/20"))
        assert list(view.states) == [job_key("acme", "pick")]
        await kv.put(job_key("acme", "pick"), msgspec.structs.replace(state(), phase="completed"))
        await say("job.completed", message="done")
        await eventually(lambda: refreshed("job.completed done"))
        await eventually(over)
        assert view.depths


async def test_events_of_no_job_are_shown_too(bus: Bus, gateway: Any, eventually: Any):
    """What happened to workers, which the provider watches."""
    out = StringIO()
    view = Board([Client(bus, "provider")])
    lost = Event(type="worker.lost", tenant="provider", job="_", time=TIME, message="trainer-0 (process 1), killed")

    async def refreshed() -> bool:
        await view.refresh()
        return "worker.lost trainer-0" in out.getvalue()

    with view.live(Console(file=out, width=100)):
        await bus.publish("event", lost, msg_id="lost", tenant="provider", job="_")
        await eventually(refreshed)
        await view.refresh()  # it goes on
