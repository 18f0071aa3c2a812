"""`nexus workers` (or `ps`) and `nexus scale`: who works, and how many of them."""

from typing import Any, get_args

import click
import msgspec

from nexus_bus import config
from nexus_bus.cli.options import asynchronous, bus_options, connect, console, json_option, print_json, provider_only
from nexus_bus.errors import NotFound, Refused, Unavailable
from nexus_bus.nearest import nearest
from schemas.control import Heartbeat, Known, Role, Scaled, ScaleOrder, WorkersKnown, WorkersQuery

NEEDED = ("master", "health", "gateway")  # without one of each, nothing goes on
ASK_S = 3.0
ORDER_S = 10.0


class Worker(msgspec.Struct, omit_defaults=False):
    """One line: what it says of itself, or else what the Health Manager last heard."""

    role: str
    worker: str
    host: str
    pid: int
    state: str
    busy: bool
    progress: int
    silent_s: float | None  # since the Health Manager heard of it; None: it has not
    restarts: int
    answers: bool  # to discovery, just now
    cause: str | None = None  # of its last loss
    gauges: dict[str, float] = {}


@click.command("workers")
@bus_options
@json_option
@asynchronous
async def workers_command(url: str, tenant: str, as_json: bool) -> None:
    """Who works, on every host: found by asking all of them, and the Health Manager about those that do not answer.

    `beat` is the age of the last heartbeat. A worker that hangs or was lost answers nothing and is listed all the same.
    """
    async with connect(url, tenant) as client:
        provider_only(client, "workers")
        found = await workers(client.bus)
    if as_json:
        print_json(found)
        return
    from nexus_bus.cli.show import listing

    right = ("pid", "progress", "beat", "restarts")
    table = listing("role", "worker", "host", "pid", "state", "busy", "progress", "beat", "restarts", "last loss", right=right)
    for one in found:
        state = one.state if one.answers else f"{one.state}, no answer"
        beat = f"{one.silent_s:.1f} s" if one.silent_s is not None else ""
        table.add_row(
            one.role, one.worker, one.host, str(one.pid), state, "busy" if one.busy else "", str(one.progress), beat,
            str(one.restarts), one.cause or "",
        )  # fmt: skip
    console().print(table if found else "no worker answers; `nexus up` starts some")


ps_command = workers_command


async def workers(bus: Any) -> list[Worker]:
    """Everybody who answers, and everybody whom the Health Manager knows; by role and name."""
    from nexus_bus.bus import discover

    found: dict[str, Worker] = {}
    known: dict[str, Known] = {}
    try:
        answer: WorkersKnown = await bus.request("health.known", WorkersQuery(), timeout=ASK_S)
        known = {one.worker: one for one in answer.workers}
    except Unavailable as error:
        click.echo(f"the Health Manager does not answer, so only those are listed who do: {error}", err=True)
    for one in await discover(bus, within=ASK_S):
        if one.kind not in get_args(Role):
            continue
        says = msgspec.convert(one.data, Heartbeat)
        seen = known.get(says.worker)
        found[says.worker] = Worker(
            says.role, says.worker, says.host, says.pid, says.state, says.busy, says.progress,
            seen.silent_s if seen else None, seen.restarts if seen else 0, True, seen.cause if seen else None, says.gauges,
        )  # fmt: skip
    for name, seen in known.items():
        if name not in found:
            found[name] = Worker(
                seen.role, name, seen.host, seen.pid, seen.state, seen.busy, seen.progress, seen.silent_s, seen.restarts, False,
                seen.cause,
            )  # fmt: skip
    order = get_args(Role)
    return sorted(found.values(), key=lambda one: (order.index(one.role), one.worker))


@click.command("scale")
@click.argument("counts", nargs=-1, required=True, metavar="ROLE=N [ROLE=N …]")
@click.option("--host", help="Which one, where several run; `nexus workers` names them.")
@click.option("--force", is_flag=True, help="Also without a master, Health Manager or gateway.")
@bus_options
@json_option
@asynchronous
async def scale_command(counts: tuple[str, ...], host: str | None, force: bool, url: str, tenant: str, as_json: bool) -> None:
    """Run so many workers of these roles on one host: more are started, those too many finish or hand back what they hold.

    The next `nexus up` on the same home begins with these counts, unless its flags say otherwise.
    """
    wanted = parse_counts(counts, force=force)
    async with connect(url, tenant) as client:
        provider_only(client, "scale")
        name, before = await _host(client.bus, host)
        order = ScaleOrder(counts=wanted, reason="nexus scale")
        scaled: Scaled = await client.bus.request("host.scale", order, timeout=ORDER_S, host=name)
    if as_json:
        print_json({"host": name, "before": before, "counts": scaled.counts})
        return
    for role in wanted:
        click.echo(f"{role}: {before.get(role, 0)} → {scaled.counts[role]} on {name}")


def parse_counts(given: tuple[str, ...], *, force: bool) -> dict[Role, int]:
    """ROLE=N as counts.

    Raises:
        Refused: an unknown role (with the nearest that exists), no number, or none of a role that is needed, without `force`.
    """
    wanted: dict[Role, int] = {}
    for one in given:
        name, equals, number = one.partition("=")
        role: Role | None = next((known for known in get_args(Role) if known == name), None)
        if role is None:
            raise Refused(f"scale: no role {name!r}{nearest(name, get_args(Role))}")
        if not equals or not number.isdecimal():
            raise Refused(f"scale: {one!r} is not of the form ROLE=N, as {role}=2")
        if int(number) < 1 and role in NEEDED and not force:
            raise Refused(f"scale: {role}=0 leaves nobody to do what only a {role} does; --force does it all the same")
        wanted[role] = int(number)
    return wanted


async def _host(bus: Any, name: str | None) -> tuple[str, dict[str, int]]:
    """The host to scale, and how many it runs: the only one, that of this home, or the one named."""
    from nexus_bus.bus import discover

    hosts = {one.about["host"]: one for one in await discover(bus, "host", within=ASK_S)}
    if name is None and len(hosts) > 1:
        ours = [host for host, one in hosts.items() if one.about.get("home") == str(config.home())]
        name = ours[0] if len(ours) == 1 else None
        if name is None:
            raise Refused(f"scale: several hosts run; choose one by --host: {', '.join(sorted(hosts))}")
    if name is None and not hosts:
        raise NotFound("scale: no host answers; `nexus up` starts one, and workers of Kubernetes are scaled there")
    chosen = name or next(iter(hosts))
    if chosen not in hosts:
        raise NotFound(f"scale: no host {chosen!r} answers{nearest(chosen, hosts)}")
    return chosen, hosts[chosen].data["counts"]
