"""Waiting for a job's end, with one line on stderr that says how far it is; stdout is for the result."""

import asyncio
import sys
from typing import Any

import click

from schemas.events import Event

UNITS = {"sft": "batches", "rl": "updates"}  # of training; of evaluations, episodes
TOLD = (
    "job.queued", "job.phase", "job.paused", "job.resumed", "eval.completed", "environment.left", "environment.joined"
)  # fmt: skip


async def wait(client: Any, job: str, *, quiet: bool = False) -> Any:
    """The state of a job at its end. Ctrl-C ends the waiting alone, and says so.

    Args:
        quiet: say nothing unless a terminal shows it.
    """
    kind = state.plan.spec.kind if (state := await client.job(job)) is not None else ""
    shown = _Line(quiet)
    try:
        async for event in client.watch(job):
            shown.show(progress(event, kind))
    except asyncio.CancelledError:
        shown.clear()
        click.echo(f"{job} goes on without you: `nexus watch {job}` follows it, `nexus cancel {job}` stops it", err=True)
        raise
    finally:
        shown.clear()
    return await client.job(job)


def progress(event: Event, kind: str) -> tuple[str, str]:
    """What an event says of how far a job is: its phase, and the whole line; both empty where it says nothing."""
    data = event.data
    if event.type != "job.progress":
        return (event.message, event.message.replace("_", " ")) if event.type in TOLD else ("", "")
    phase, done, total = str(data.get("phase", "")), data.get("done", 0), data.get("total", 0)
    evaluates = phase.startswith("evaluating")
    parts = [phase.replace("_", " ")]
    if isinstance(total, int) and total > 1:
        parts.append(f"{done}/{total} {'episodes' if evaluates else UNITS.get(kind, '')}".strip())
    if evaluates and isinstance(done, int) and done and isinstance(successes := data.get("successes"), int):
        parts.append(f"success {successes / done:.2f}")
    for name in () if evaluates else ("success_rate", "loss"):
        if isinstance(value := data.get(name), int | float):
            parts.append(f"{name.replace('_rate', '')} {value:.3g}")
    return phase, ", ".join(parts)


class _Line:
    """On a terminal one line, written over; elsewhere a line for each phase."""

    def __init__(self, quiet: bool) -> None:
        """Nothing is shown yet."""
        self._terminal = sys.stderr.isatty()
        self._quiet = quiet and not self._terminal
        self._phase = ""
        self._drawn = False

    def show(self, said: tuple[str, str]) -> None:
        """Write it, unless it is nothing."""
        phase, line = said
        if not line or self._quiet:
            return
        if self._terminal:
            import shutil

            click.echo(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", nl=False, err=True)
            self._drawn = True
        elif phase != self._phase:
            click.echo(line, err=True)
        self._phase = phase

    def clear(self) -> None:
        """Leave no line behind."""
        if self._drawn:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._drawn = False
