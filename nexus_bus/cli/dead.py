"""`nexus dead`: messages that were given up, for whoever runs the service to look at, send again or forget."""

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import click
import msgspec

from nexus_bus.cli.options import (
    Group,
    asynchronous,
    connect,
    console,
    creds_option,
    default_tenant,
    json_option,
    print_json,
    provider_only,
    url_option,
)
from nexus_bus.errors import NotFound


@click.group("dead", cls=Group)
def dead_command() -> None:
    """Messages that were given up, each with the reason and the original."""


def _of(command: Callable[..., Any]) -> Callable[..., Any]:
    tenant = click.option("--tenant", help="Of this tenant alone.")
    return url_option(tenant(click.option("--job", help="Of the job of this name alone.")(creds_option(command))))


def _several(command: Callable[..., Any]) -> Callable[..., Any]:
    numbers = click.argument("numbers", nargs=-1, type=int, metavar="[NUMBER]...")
    everything = click.option("--all", "everything", is_flag=True, help="Whatever there is.")
    return numbers(_of(everything(json_option(command))))


class _Letters:
    """The dead letters that one command is about."""

    def __init__(self, url: str, tenant: str | None = None, job: str | None = None) -> None:
        self._connected, self._tenant, self._job = connect(url, default_tenant()), tenant, job

    async def __aenter__(self) -> "_Letters":
        self._client = await self._connected.__aenter__()
        provider_only(self._client, "dead")
        self.bus = self._client.bus
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._connected.__aexit__(*raised)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any, str, str]]:
        """Number, letter, tenant and job of each, oldest first."""
        from nexus_bus.bus.dead import belongs

        async for item in self.bus.tail("dead", since="all", follow=False):
            tenant, job = belongs(item.message)
            if self._tenant in (None, tenant) and self._job in (None, job):
                yield item.seq, item.message, tenant, job

    async def named(self, numbers: tuple[int, ...]) -> list[tuple[int, Any, str, str]]:
        """Those with these numbers. Raises NotFound before anything is done with any of them."""
        found = {row[0]: row async for row in self if row[0] in numbers}
        missing = sorted(set(numbers) - set(found))
        if missing:
            which = f"dead letter {missing[0]}" if len(missing) == 1 else f"dead letters {', '.join(map(str, missing))}"
            raise NotFound(f"there is no {which}{self.whose}; `nexus dead list` shows what there is")
        return list(found.values())

    async def chosen(self, numbers: tuple[int, ...], everything: bool) -> list[tuple[int, Any, str, str]]:
        """Those with these numbers, else all of the tenant and job. Raises UsageError where nobody said which."""
        if numbers and everything:
            raise click.UsageError("numbers and --all: which of both?")
        if numbers:
            return await self.named(numbers)
        if self._tenant is None and self._job is None and not everything:
            raise click.UsageError("which? Give numbers, --tenant or --job, or --all")
        return [row async for row in self]

    @property
    def whose(self) -> str:
        """What narrows it, in words."""
        narrowed = (f"tenant {self._tenant}" if self._tenant else "", f"job {self._job}" if self._job else "")
        return "".join(f" of {one}" for one in narrowed if one)


@dead_command.command("list")
@_of
@json_option
@asynchronous
async def dead_list(url: str, tenant: str | None, job: str | None, as_json: bool) -> None:
    """One line per dead letter, of all tenants."""
    async with _Letters(url, tenant, job) as letters:
        rows = [
            {
                "number": number, "time": letter.time, "tenant": whose, "job": of, "subject": letter.subject,
                "deliveries": letter.deliveries, "reason": letter.reason,
            }
            async for number, letter, whose, of in letters
        ]  # fmt: skip
    if as_json:
        print_json(rows)
        return
    from nexus_bus.cli.show import listing

    table = listing("number", "time", "subject", "deliveries", "reason", right=("number", "deliveries"))
    for row in rows:
        table.add_row(str(row["number"]), row["time"][:19], row["subject"], str(row["deliveries"]), row["reason"])
    console().print(table if rows else f"no dead letters{letters.whose}")


@dead_command.command("show")
@click.argument("number", type=int)
@url_option
@creds_option
@asynchronous
async def dead_show(number: int, url: str) -> None:
    """One dead letter as JSON, with its payload where that can be read."""
    async with _Letters(url) as letters:
        ((_, letter, _, _),) = await letters.named((number,))
    print_json(msgspec.structs.asdict(letter) | {"payload": _readable(letter.payload, letter.headers)})


def _readable(payload: bytes, headers: dict[str, str]) -> Any:
    decode = msgspec.json.decode if "json" in headers.get("Content-Type", "json") else msgspec.msgpack.decode
    try:
        return decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return repr(payload[:2000])


@dead_command.command("retry")
@_several
@asynchronous
async def dead_retry(
    numbers: tuple[int, ...], url: str, tenant: str | None, job: str | None, everything: bool, as_json: bool
) -> None:
    """Put originals back on their queues, once each; a dead letter stays until it is dropped.

    Which: by number, --tenant or --job, or --all.
    """
    from nexus_bus.bus.dead import revive

    await _each("retry", revive, "sent again", _Letters(url, tenant, job), numbers, everything, as_json)


@dead_command.command("drop")
@_several
@asynchronous
async def dead_drop(
    numbers: tuple[int, ...], url: str, tenant: str | None, job: str | None, everything: bool, as_json: bool
) -> None:
    """Forget dead letters.

    Which: by number, --tenant or --job, or --all.
    """

    async def drop(bus: Any, _letter: Any, number: int) -> None:
        await bus.forget("DEAD", number)

    await _each("drop", drop, "dropped", _Letters(url, tenant, job), numbers, everything, as_json)


async def _each(
    action: str,
    act: Callable[..., Any],
    done: str,
    letters: _Letters,
    numbers: tuple[int, ...],
    everything: bool,
    as_json: bool,
) -> None:
    """Do it with one after another, each on record as asked before it is done, and said when it is."""
    from nexus_bus.audit import audit
    from schemas.base import PROVIDER

    acted: list[int] = []
    async with letters:
        for number, letter, tenant, job in await letters.chosen(numbers, everything):
            detail = f"dead letter {number}, {letter.subject}: {letter.reason}"
            key = uuid.uuid4().hex
            await audit(
                letters.bus, tenant or PROVIDER, f"dead.{action}", job, "asked", detail, key=key, caller=letters.bus.key
            )
            await act(letters.bus, letter, number)
            acted.append(number)
            if not as_json:
                click.echo(f"{number}: {letter.subject}: {done}")
    if as_json:
        print_json(acted)
    elif not acted:
        click.echo(f"no dead letters{letters.whose}")
