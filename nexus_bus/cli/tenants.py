"""`nexus tenant` and `nexus whoami`: who may use the service, and how much of it."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from nexus_bus import config
from nexus_bus.cli.limits import LIMITS, limit_options, limits_table, shown, warn
from nexus_bus.cli.options import (
    Group,
    asynchronous,
    bus_options,
    connect,
    console,
    json_option,
    pairs,
    print_json,
    url_option,
)
from nexus_bus.errors import BadJob, Unavailable
from schemas.tenant import TenantKey, TenantRecord

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def default_authority() -> Path:
    """NEXUS_AUTHORITY, else where `nexus up` keeps the operator's key in this home."""
    return Path(os.environ.get(config.AUTHORITY) or config.home() / "nats" / "authority")


def authority_option(command: Any) -> Any:
    """`--authority`."""
    return click.option(
        "--authority", type=click.Path(file_okay=False, path_type=Path), default=default_authority,
        show_default="NEXUS_AUTHORITY, else that of `nexus up`", help="Directory of the operator's key.",
    )(command)  # fmt: skip


def operator_options(command: Any) -> Any:
    """`--url` and `--authority`."""
    return url_option(authority_option(command))


def out_options(command: Any) -> Any:
    """`--out` and `--force`."""
    out = click.option("--out", metavar="FILE.creds", help="Where the credentials go; - prints them.  [default: NAME.creds]")
    return out(click.option("--force", is_flag=True, help="The file may be there already.")(command))


class _Duration(click.ParamType):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])", value)
        if match is None or not 1 <= (seconds := float(match[1]) * UNITS[match[2]]) < 1e10:
            self.fail(f"{value[:40]!r}; give a time like 90d, 12h or 30m, of at least 1s", param, ctx)
        return seconds


expires_option = click.option("--expires", type=_Duration(), help="How long they are good, as 90d.  [default: for ever]")
label_option = click.option("--label", default="", help="What to call this key: a person, a machine.")


@click.group("tenant", cls=Group)
def tenant_command() -> None:
    """Tenants of a running service. Every change counts at once; nothing is restarted, and no other tenant notices.

    For the operator: whoever has the key that `nexus up` made, or another one's by --authority.
    """


@tenant_command.command("add")
@click.argument("name")
@limit_options
@expires_option
@label_option
@out_options
@operator_options
@json_option
@asynchronous
async def tenant_add(
    name: str, expires: float | None, label: str, out: str | None, force: bool, url: str, authority: Path, as_json: bool,
    **flags: str | None,
) -> None:  # fmt: skip
    """Add a tenant, and write its credentials into a file that only you can read: they are shown once.

    A limit that is not given is the service's own, or none.
    """
    from nexus_bus.tenants import check_name, limits_of

    check_name(name)  # before a file has this name
    limits = limits_of(_given(flags))
    with _place(out or f"{name}.creds", force) as place:
        async with _tenants(url, authority) as tenants:
            terms = await tenants.terms()
            issued = await tenants.add(name, limits, label=label, expires_s=expires)
        place(issued.creds)
    warn(limits, terms)
    _issued(issued, out or f"{name}.creds", url, as_json, f"{name} may begin")


@tenant_command.command("list")
@operator_options
@json_option
@asynchronous
async def tenant_list(url: str, authority: Path, as_json: bool) -> None:
    """List tenants by name, those that were removed too."""
    async with _tenants(url, authority) as tenants:
        records, time = await tenants.all(), await tenants.time()
    if as_json:
        print_json(records)
        return
    from rich.text import Text

    from nexus_bus.cli.show import listing

    table = listing("tenant", "phase", "weight", "keys", "created", "reason", right=("weight", "keys"))
    for one in records:
        table.add_row(one.name, one.phase, f"{one.limits.weight:g}", _good(one, time), one.created[:19], Text(one.reason))
    console().print(table if records else "no tenants yet; `nexus tenant add NAME` adds one")


@tenant_command.command("show")
@click.argument("name")
@operator_options
@json_option
@asynchronous
async def tenant_show(name: str, url: str, authority: Path, as_json: bool) -> None:
    """One tenant: its limits, its keys, and its jobs that have not ended."""
    async with _tenants(url, authority) as tenants:
        record, jobs = await tenants.find(name), await tenants.jobs(name)
        terms, time = await tenants.terms(), await tenants.time()
    if as_json:
        print_json({"tenant": record, "jobs": jobs, "service": terms})
        return
    why = f": {record.reason}" if record.reason else ""
    click.echo(f"{record.name} is {record.phase}{why}; added {record.created[:19]}; account {record.account}")
    click.echo(f"jobs that have not ended: {', '.join(jobs) or 'none'}")
    click.echo(f"keys: {_good(record, time)}, revoked: {len(record.revoked)}")
    if record.keys:
        console().print(_keys(record.keys))
    console().print(limits_table(record.limits, terms))


@tenant_command.command("limit")
@click.argument("name")
@click.argument("changes", nargs=-1, metavar="[LIMIT=VALUE]...")
@limit_options
@operator_options
@json_option
@asynchronous
async def tenant_limit(
    name: str, changes: tuple[str, ...], url: str, authority: Path, as_json: bool, **flags: str | None
) -> None:
    """Set limits, from this moment on: `nexus tenant limit acme jobs=4 device_s=none`. `none` takes one away."""
    given = _given(pairs(changes, "LIMIT=VALUE") | {key: value for key, value in flags.items() if value is not None})
    if not given:
        raise click.UsageError(f"give what to change, as LIMIT=VALUE; there are {', '.join(LIMITS)}")
    async with _tenants(url, authority) as tenants:
        record, terms = await tenants.limit(name, given), await tenants.terms()
    _said(record, as_json, f"{name}: " + ", ".join(f"{key} {shown(record.limits, key, terms)}" for key in given))
    if "money" in given:
        warn(record.limits, terms)


@tenant_command.command("rotate")
@click.argument("name")
@click.option("--keep", is_flag=True, help="Those issued before stay good.")
@expires_option
@label_option
@out_options
@operator_options
@json_option
@asynchronous
async def tenant_rotate(
    name: str, keep: bool, expires: float | None, label: str, out: str | None, force: bool, url: str, authority: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Issue new credentials; those issued before are void at once, and who uses them is cut off."""
    from nexus_bus.tenants import check_name

    check_name(name)
    with _place(out or f"{name}.creds", force) as place:
        async with _tenants(url, authority) as tenants:
            issued = await tenants.rotate(name, label=label, expires_s=expires, keep=keep)
        place(issued.creds)
    _issued(issued, out or f"{name}.creds", url, as_json, _counted(issued.record))


@tenant_command.command("revoke")
@click.argument("name")
@click.argument("key", metavar="KEY|LABEL")
@operator_options
@json_option
@asynchronous
async def tenant_revoke(name: str, key: str, url: str, authority: Path, as_json: bool) -> None:
    """Make one key void, or all of one label; who uses it is cut off."""
    async with _tenants(url, authority) as tenants:
        record = await tenants.revoke(name, key)
    _said(record, as_json, _counted(record))


@tenant_command.command("suspend")
@click.argument("name")
@click.option("--reason", default="", help="Kept here, and in the events of its jobs.")
@operator_options
@json_option
@asynchronous
async def tenant_suspend(name: str, reason: str, url: str, authority: Path, as_json: bool) -> None:
    """Cut a tenant off; its jobs rest until `nexus tenant activate`.

    Who is cut off hears only that it is; once it is active again, it reads the reason in the events of its jobs.
    """
    async with _tenants(url, authority) as tenants:
        record = await tenants.suspend(name, reason)
    _said(record, as_json, f"{name} is suspended")


async def _activate(name: str, url: str, authority: Path, as_json: bool) -> None:
    async with _tenants(url, authority) as tenants:
        record = await tenants.activate(name)
    _said(record, as_json, f"{name} is active")


for _word in ("activate", "resume"):
    _command = click.argument("name")(operator_options(json_option(asynchronous(_activate))))
    _summary = "Let a suspended tenant go on, with the keys and the jobs that it had."
    tenant_command.command(_word, help=_summary, hidden=_word == "resume")(_command)


@tenant_command.command("remove")
@click.argument("name")
@click.option("--force", is_flag=True, help="Cancel its jobs first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@operator_options
@json_option
@asynchronous
async def tenant_remove(name: str, force: bool, yes: bool, url: str, authority: Path, as_json: bool) -> None:
    """End a tenant for good: its keys are void, its weights are deleted, its name is never given again.

    One with jobs that have not ended is refused; --force cancels them. What it used and did stays on record.
    """
    async with _tenants(url, authority) as tenants:
        await tenants.find(name)
        if not yes and sys.stdin.isatty():
            click.confirm(f"Delete all weights of {name}, and make its keys void, for good?", abort=True, err=True)
        record = await tenants.remove(name, force=force)
    _said(record, as_json, f"{name} is removed")


@click.command("whoami")
@bus_options
@json_option
@asynchronous
async def whoami_command(url: str, tenant: str, as_json: bool) -> None:
    """Whom you speak for, what the provider has agreed with it, and how much of that is taken."""
    async with connect(url, tenant) as client:
        account, creds = await client.account(), client.bus.creds
    if as_json:
        print_json(account)
        return
    speaks = "you are the provider; this is" if creds is None or creds.tenant is None else "you are"
    click.echo(f"{speaks} {account.tenant}, {account.phase}, at {url}")
    if creds is not None:
        until = f"until {_time(creds.expires)}" if creds.expires is not None else "until they are revoked"
        click.echo(f"credentials {creds.source}, key {creds.user}, good {until}")
    console().print(limits_table(account.limits, account.service, account.used))


def _tenants(url: str, authority: Path) -> Any:
    from nexus_bus.cli import options
    from nexus_bus.tenants import tenants_of

    return tenants_of(url, authority, timeout=options.CONNECT_S)


def _given(flags: Mapping[str, str | None]) -> dict[str, Any]:
    """What was given of the limits; None for those to take away."""
    return {key: None if value.lower() == "none" else value for key, value in flags.items() if value is not None}


@contextlib.contextmanager
def _place(out: str, force: bool) -> Iterator[Callable[[str], object]]:
    """Where credentials go. The file is opened before they are issued: what is wrong with the place is found in time."""
    if out == "-":
        yield lambda _: None  # printed with the rest
        return
    path = Path(out)
    if path.is_dir() or (path.exists() and not force):
        raise BadJob(f"out: {out} is there already; choose another file, or replace it with --force")
    try:
        descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    except OSError as error:
        raise BadJob(f"out: {out}: {error.strerror or error}; choose another file") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            yield file.write
        Path(made).replace(path)
    except OSError as error:
        raise Unavailable(f"{out}: {error.strerror or error}; `nexus tenant rotate` makes credentials anew") from None
    finally:
        Path(made).unlink(missing_ok=True)


def _issued(issued: Any, out: str, url: str, as_json: bool, text: str) -> None:
    if as_json:
        print_json({"tenant": issued.record} | ({"creds": issued.creds} if out == "-" else {"file": out}))
    elif out == "-":
        click.echo(issued.creds, nl=False)
    else:
        click.echo(f"{text}; credentials in {out}: they are shown once, hand them over safely")
        click.echo(f"who has them begins with: export NEXUS_CREDS={out} NEXUS_URL={url}; nexus whoami", err=True)


def _said(record: TenantRecord, as_json: bool, text: str) -> None:
    if as_json:
        print_json(record)
    else:
        click.echo(text)


def _counted(record: TenantRecord) -> str:
    return f"{record.name} has {len(record.keys)} key{'s' * (len(record.keys) != 1)}"


def _keys(keys: list[TenantKey]) -> Any:
    from rich.text import Text

    from nexus_bus.cli.show import listing

    table = listing("key", "label", "issued", "expires")
    for one in keys:
        table.add_row(one.key, Text(one.label), _time(one.issued), _time(one.expires) if one.expires is not None else "never")
    return table


def _good(record: TenantRecord, time: float) -> str:
    """How many of its keys are good, and how many more have expired."""
    expired = sum(one.expires is not None and one.expires <= time for one in record.keys)
    return f"{len(record.keys) - expired}" + (f" ({expired} expired)" if expired else "")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]
