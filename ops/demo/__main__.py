"""`make demo`: start a server and the workers, submit four tenants' jobs, show them, and say honestly what came of it."""

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from nexus_bus import config, logs
from nexus_bus.bus.authority import PROVIDER_FILE
from nexus_bus.cli.board import Board
from nexus_bus.client import Client
from nexus_bus.errors import NexusError
from nexus_bus.homes import running_up
from nexus_bus.ledger import Ledger
from nexus_bus.tenants import tenants_of
from nexus_bus.waterfall import render
from ops.demo.report import Curve, Summary, TenantResult, collect, draw, table
from ops.demo.service import Service
from ops.demo.traces import most_told_record
from ops.demo.workload import Workload, ensure_rendering, workloads
from schemas.events import Event
from schemas.plan import TERMINAL, JobState

LIMIT_S = 570.0  # jobs that still run are cancelled, so that the whole ends within ten minutes
WIDTH = 150
SMOOTH = 32  # training episodes per point of a success curve


class Curves:
    """What the picture needs, gathered from events as they come."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.losses: dict[str, Curve] = {}
        self.successes: dict[str, Curve] = {}

    def note(self, event: Event, names: dict[tuple[str, str], str]) -> None:
        """Take an event into account; only the jobs of `names` are drawn."""
        name = names.get((event.tenant, event.job))
        if name is None or event.type != "job.progress" or event.data.get("phase") != "training":
            return
        at = time.monotonic() - self.started
        if isinstance(loss := event.data.get("loss"), float | int) and "success_rate" not in event.data:
            self.losses.setdefault(name, []).append((at, float(loss)))
        if isinstance(rate := event.data.get("success_rate"), float | int) and "purpose" not in event.data:
            self.successes.setdefault(name, []).append((at, float(rate)))


async def demo(arguments: argparse.Namespace, console: Console) -> int:
    """Run it; 0 when every job completed."""
    started = time.monotonic()
    out: Path = arguments.out
    rendering = ensure_rendering(console)
    plans = workloads(arguments.seed, rendering=rendering, scale=arguments.scale, base=arguments.base)
    async with Service(out / "home", console, arguments.base) as service:
        authority = config.authority(out / "home")
        client = await Client.connect(service.url, tenant=plans[0].tenant, creds=authority / PROVIDER_FILE)
        clients = await _accounts(service.url, authority, [plan.tenant for plan in plans])
        names = {(plan.tenant, plan.job.name): f"{plan.tenant} · {plan.job.name}" for plan in plans}
        curves = Curves()
        listening = asyncio.create_task(_listen(client, curves, names))
        for plan in plans:
            for spec in filter(None, (plan.warm, plan.job)):
                await clients[plan.tenant].submit(spec)
        board = Board([client.for_tenant(plan.tenant) for plan in plans])
        with board.live(console):
            states = await _until_done(client, plans, board, started)
        listening.cancel()
        results = [await collect(client, states[plan.tenant]) for plan in plans]
        spans = await most_told_record(client.bus, [(plan.tenant, plan.job.name) for plan in plans if plan.job.kind == "rl"])
        rates = await _rates(client, results, time.monotonic() - started)
        for one in (client, *clients.values()):
            await one.close()
    seconds = time.monotonic() - started
    draw(out / "curves.png", curves.losses, curves.successes, results)
    summary = Summary(
        tenants=results, seconds=round(seconds, 1), seed=arguments.seed,
        environment="tabletop" if rendering else "minigrid", rates=rates,
    )  # fmt: skip
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    if spans:
        console.rule("One record, from environment step to published version")
        console.print(render(spans, width=min(console.width, 150)), highlight=False, markup=False)
    console.print(table(results))
    console.print("  ".join(f"{name} {value:g}" for name, value in rates.items()), style="dim")
    console.print(f"{seconds:.0f} s. Curves: {out / 'curves.png'}   Numbers: {out / 'summary.json'}")
    unfinished = [state for state in states.values() if state.phase != "completed"]
    for state in unfinished:
        console.print(f"[red]{state.plan.tenant}/{state.plan.spec.name} {state.phase}:[/] {state.reason}")
    return 1 if unfinished else 0


async def _accounts(url: str, authority: Path, names: list[str]) -> dict[str, Client]:
    """Each tenant gets an account, and a connection with credentials of its own."""
    connected: dict[str, Client] = {}
    async with tenants_of(url, authority) as tenants:
        for name in names:
            path = authority / f"{name}.creds"
            path.touch(mode=0o600)
            path.write_text((await tenants.add(name)).creds)
            connected[name] = await Client.connect(url, creds=path)
    return connected


async def _listen(client: Client, curves: Curves, names: dict[tuple[str, str], str]) -> None:
    async for item in client.bus.tail("event", since="all", follow=True, tenant="*", job="*"):
        curves.note(item.message, names)


async def _until_done(client: Client, plans: list[Workload], board: Board, started: float) -> dict[str, JobState]:
    """Wait for the four jobs that count; cancel what is left at the limit, so that the demo ends when it said."""
    cancelled = False
    while True:
        await board.refresh()
        states = {plan.tenant: await client.for_tenant(plan.tenant).job(plan.job.name) for plan in plans}
        if all(state is not None and state.phase in TERMINAL for state in states.values()):
            return {tenant: state for tenant, state in states.items() if state is not None}
        if time.monotonic() - started > LIMIT_S and not cancelled:
            cancelled = True
            for plan in plans:
                await client.for_tenant(plan.tenant).cancel(plan.job.name, f"the demo's {LIMIT_S:g} s are over")
        await asyncio.sleep(0.5)


async def _rates(client: Client, results: list[TenantResult], seconds: float) -> dict[str, float]:
    """How fast the line ran as a whole: work done over the demo's time."""
    ledger = Ledger(("kind",))
    async for item in client.bus.tail("usage", since="all", follow=False, tenant="*", job="*"):
        ledger.take(item.message)
    used = ledger.rows()
    steps = sum(row["steps"] for row in used if row["kind"] == "environment")
    requests = sum(row["requests"] for row in used)
    records = sum(result.records_learned for result in results)
    totals = {"environment_steps": steps, "inference_requests": requests, "records": records}
    return {f"{name}_per_s": round(count / seconds, 1) for name, count in totals.items()}


def main() -> int:
    """Parse flags and run."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--scale", type=float, default=1.0, help="shorten the learning, for a quick look")
    parser.add_argument("--base", help="another backbone: a directory or a hub id")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    logs.start("demo", "demo", "error")  # what happens is on the board; the workers' logs are in files
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a log: the table and the waterfall need room
    if (pid := running_up(arguments.out / "home")) is not None:
        console.print(f"A demo is running already as process {pid}; end it with `kill {pid}` or choose another --out.")
        return 2
    try:
        return asyncio.run(demo(arguments, console))
    except NexusError as error:
        console.print(f"[red]{error}[/]")
        return 1
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            console.print("Stopped; server and workers have ended.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
