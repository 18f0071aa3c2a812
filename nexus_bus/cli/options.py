"""What commands share: who asks (`--tenant`), where (`--url`), and in which form the answer comes (`--json`)."""

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from nexus_bus import config
from nexus_bus.whole import whole

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])
CONNECT_S = 4.0


def default_url() -> str:
    """NEXUS_URL, else the server that `nexus up` started in NEXUS_HOME (default `.nexus`)."""
    return os.environ.get("NEXUS_URL") or config.default_url()


def default_tenant() -> str:
    """NEXUS_TENANT, else whom the credentials speak for, else "default"."""
    if given := os.environ.get("NEXUS_TENANT"):
        return given
    from nexus_bus.bus.jwt import read_creds

    source = config.default_creds()
    return (read_creds(source).tenant if source not in (None, "none") else None) or "default"


def _use_creds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        os.environ[config.CREDS] = value  # where every connection of this process looks


def url_option(command: Command) -> Command:
    """`--url`."""
    shown = "NEXUS_URL, else that of `nexus up`"
    return click.option("--url", default=default_url, show_default=shown, help="NATS server.")(command)


def bus_options(command: Command) -> Command:
    """`--url`, `--tenant` and `--creds`."""
    tenant = click.option(
        "--tenant", default=default_tenant, show_default="NEXUS_TENANT, else whom the credentials speak for",
        help="On whose behalf.",
    )  # fmt: skip
    return url_option(tenant(creds_option(command)))


def creds_option(command: Command) -> Command:
    """`--creds`."""
    return click.option(
        "--creds", is_eager=True, expose_value=False, callback=_use_creds, type=click.Path(dir_okay=False),
        show_default="NEXUS_CREDS, else those of `nexus up`", help="A .creds file.",
    )(command)  # fmt: skip


class Group(click.Group):
    """Commands with their first sentence whole, where click would cut it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does it."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(limit=200)) for name, one in found if one is not None and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def provider_only(client: Any, what: str) -> None:
    """Raises Denied for a tenant's credentials."""
    from nexus_bus.errors import Denied

    if client.bus.tenant is not None:
        raise Denied(f"{what}: only the provider may ask for this; these credentials speak for {client.bus.tenant!r}")


def json_option(command: Command) -> Command:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


def asynchronous(command: Callable[..., Awaitable[T]]) -> Callable[..., T]:
    """Run an async command to its end; only warnings of the library reach the terminal."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> T:
        from nexus_bus import logs

        logs.start("cli", "nexus", "error")
        return asyncio.run(_awaited(command(*arguments, **options)))

    return run


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def connect(url: str, tenant: str) -> Any:
    """A client, as an async context manager."""
    from nexus_bus.client import Client

    guessed = url == config.FALLBACK and "NEXUS_URL" not in os.environ and not config.started()
    return _Connected(functools.partial(Client.connect, url, tenant, timeout=CONNECT_S), guessed)


class _Connected:
    def __init__(self, connecting: Callable[[], Awaitable[Any]], guessed: bool) -> None:
        self._connecting, self._guessed = connecting, guessed
        self._client: Any = None

    async def __aenter__(self) -> Any:
        from nexus_bus.errors import Denied, Unavailable

        try:
            self._client = await self._connecting()
        except (Denied, Unavailable) as error:
            if not self._guessed:
                raise
            hint = f"no server was started in {config.home()}, and none was named: --url or NEXUS_URL says where it is"
            raise type(error)(f"{error}; {hint}") from error
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


def pairs(given: Sequence[str], flag: str) -> dict[str, str]:
    """KEY=VALUE flags as a mapping."""
    found: dict[str, str] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals:
            raise click.BadParameter(f"{one!r} is not of the form KEY=VALUE", param_hint=flag)
        found[key] = value
    return found


def print_json(value: Any) -> None:
    """One JSON document on stdout, with the fields that messages leave out because they hold the default."""
    click.echo(msgspec.json.format(msgspec.json.encode(whole(value))).decode())


def console() -> Any:
    """The terminal; without one, wide enough that no table breaks its lines."""
    from rich.console import Console

    found = Console(highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(highlight=False, width=200)
