"""The live picture of jobs and queues: `nexus watch` and the demo show it.

It follows events, and reads the state of a job when one says that it moved; drawing is a pure function of what it has seen.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nexus_bus.bus import Bus
from nexus_bus.cli.show import STYLES, listing, success, units
from nexus_bus.client import Client
from nexus_bus.errors import Unavailable
from nexus_bus.registry import job_key
from schemas.events import Event
from schemas.plan import TERMINAL, JobState

RECENT = 8  # events shown
ALL_S = 10.0  # between two looks at all jobs
LINE_S = 5.0  # without a terminal: at most one line of progress per job in this time
QUEUES = {"JOBS": "jobs", "ROLLOUT": "rollout orders", "INFERENCE": "inference", "TRAINING": "training"}


@dataclass
class Board:
    """Jobs of some tenants; of one job each where `job` is given."""

    clients: Sequence[Client]  # one per tenant
    job: str | None = None
    states: dict[str, JobState] = field(default_factory=dict)  # registry key → state
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # registry key → newest numbers of its events
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT))
    depths: dict[str, tuple[int, int]] = field(default_factory=dict)  # stream → (waiting, being worked on)
    _moved: set[tuple[str, str]] = field(default_factory=set)  # (tenant, job) to be read again
    _looked: float = 0.0  # when all of them were read
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _console: Console | None = None  # lines go here when there is no terminal to draw on
    _said: dict[str, tuple[float, str]] = field(default_factory=dict)
    _live: Live | None = None

    async def refresh(self) -> None:
        """Begin to follow, at the first call; then read queue depths and draw."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._events(client)) for client in self.clients]
            if self.clients and self.clients[0].bus.tenant is None:
                self._tasks.append(asyncio.create_task(self._provider(self.clients[0].bus)))
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # a follower ends by an error alone: do not show a picture that stands still
        with contextlib.suppress(Unavailable):  # the server is away: the picture stays until it is back
            await self._read()
        if self._live is not None:
            self._live.update(self, refresh=True)
        elif self._console is not None:
            self._lines(self._console)

    @contextlib.contextmanager
    def live(self, console: Console) -> Iterator[None]:
        """Draw in place on a terminal; elsewhere print a line per event and now and then one per job."""
        try:
            if console.is_terminal:
                with Live(self, console=console, auto_refresh=False, vertical_overflow="crop") as self._live:
                    yield
            else:
                self._console = console
                yield
                self._lines(console, last=True)
        finally:
            self.close()

    def close(self) -> None:
        """Follow no longer."""
        for task in self._tasks:
            task.cancel()
        self._tasks, self._live, self._console = [], None, None

    @property
    def ended(self) -> bool:
        """Whether there are jobs and all of them have ended."""
        return bool(self.states) and all(state.phase in TERMINAL for state in self.states.values())

    # What it follows

    async def _read(self) -> None:
        """States of jobs that moved; now and then of all, since somebody may end without a word; and queue depths."""
        now = time.monotonic()
        everything = not self._looked or now >= self._looked + ALL_S
        if everything:
            self._looked = now
        moved, self._moved = self._moved, set()
        for client in self.clients:
            if everything:
                states = await client.jobs() if self.job is None else [await client.job(self.job)]
            else:
                states = [await client.job(job) for tenant, job in sorted(moved) if tenant == client.tenant]
            for state in filter(None, states):
                self.states[job_key(state.plan.tenant, state.plan.spec.name)] = state
        if self.clients and self.clients[0].bus.tenant is None:  # how long queues are is the provider's business
            depths = await self.clients[0].bus.depths()
            self.depths = {
                stream: (sum(waiting for waiting, _ in found.values()), sum(held for _, held in found.values()))
                for stream, found in depths.items()
            }

    async def _events(self, client: Client) -> None:
        async for event in client.events(self.job or ""):
            if event.job != "_":  # of none
                self._moved.add((event.tenant, event.job))
            self.note(event)

    async def _provider(self, bus: Bus) -> None:
        async for item in bus.tail("event", since="new", follow=True, tenant="provider"):
            self.note(item.message)

    def note(self, event: Event) -> None:
        """Take an event into account."""
        if event.type == "job.progress":
            numbers = {key: float(value) for key, value in event.data.items() if isinstance(value, int | float)}
            self.numbers.setdefault(job_key(event.tenant, event.job), {}).update(numbers)
            return
        self.recent.append(event)
        if self._console is not None:
            self._console.print(line(event), soft_wrap=True)

    # How it looks

    def __rich__(self) -> RenderableType:
        """The picture."""
        table = listing(
            "job", "phase", "", "done", "success", "version", "lag", "group", right=("done", "version", "lag", "group")
        )
        for key, state in sorted(self.states.items()):
            numbers, total = self.numbers.get(key, {}), units(state)
            ended = state.phase in TERMINAL
            table.add_row(
                f"{state.plan.tenant} · {state.plan.spec.name}",
                Text(state.phase, style=STYLES.get(state.phase, "cyan")),
                "" if ended else ProgressBar(total=max(1, total), completed=state.done, width=20),
                "" if ended or total <= 1 else f"{state.done}/{total}",
                Text(self._success(key, state)),
                str(state.version) if state.version >= 0 else "",
                f"{numbers['lag']:.2f}" if "lag" in numbers else "",
                f"{numbers['group']:.1f}" if "group" in numbers else "",
            )
        queues = Text("queues  " if self.depths else "", style="bold")
        for stream, (waiting, held) in self.depths.items():
            queues.append(f"{QUEUES.get(stream, stream)} {waiting}+{held}   ", style="" if waiting + held else "dim")
        events = Table.grid()
        for event in self.recent:
            events.add_row(line(event))
        return Group(table, Text(), queues, Text(), events)

    def _success(self, key: str, state: JobState) -> str:
        """Scores that stand, and the rate of what runs now."""
        known = success(state)
        now = ""
        if "evaluating" in state.phase and state.done:
            now = f"{state.successes / state.done:.2f} of {state.done}"
        elif state.phase == "training" and "success_rate" in self.numbers.get(key, {}):
            now = f"{self.numbers[key]['success_rate']:.2f} in training"
        return " → ".join(filter(None, (known, now)))

    def _lines(self, console: Console, *, last: bool = False) -> None:
        for key, state in sorted(self.states.items()):
            at, said = self._said.get(key, (0.0, ""))
            if state.phase in TERMINAL or (not last and time.monotonic() - at < LINE_S):
                continue
            words = [f"{state.plan.tenant}/{state.plan.spec.name}", state.phase]
            if (total := units(state)) > 1:
                words.append(f"{state.done}/{total}")
            if state.version >= 0:
                words.append(f"version {state.version}")
            words += [self._success(key, state)]
            text = " ".join(filter(None, words))
            if text != said:
                self._said[key] = (time.monotonic(), text)
                console.print(Text(text), soft_wrap=True)


def line(event: Event) -> Text:
    """One event on one line."""
    who = event.tenant if event.job == "_" else f"{event.tenant}/{event.job}"
    bad = event.type in ("job.refused", "job.failed", "worker.lost", "record.dead", "request.refused")
    text = Text(f"{event.time[11:19]} ", style="dim", no_wrap=True, overflow="ellipsis")
    return text.append(f"{who} ", style="bold").append(event.type, style="red" if bad else "cyan").append(f" {event.message}")
