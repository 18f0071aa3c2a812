"""`nexus server`: what a nats-server of one's own has to be told."""

import re
from pathlib import Path

import click

from nexus_bus.cli.tenants import authority_option
from nexus_bus.errors import Refused, Unavailable

RESOLVER = "/var/lib/nexus/accounts"
TRUST = """\
# Whom a nats-server trusts, and where it keeps the tokens of tenants' accounts: the part of its configuration that
# ops/nats/server.conf includes. Nothing in it is secret. All servers of a cluster get the same.
#
#   nexus server config --out ops/nats/trust.conf    where the operator's key is: {authority}
#   nats-server -c ops/nats/server.conf
#   nexus worker ROLE --url nats://HOST:4222         anywhere, with NEXUS_CREDS naming a copy of {provider}
#   nexus tenant add NAME --url nats://HOST:4222     where the operator's key is; no restart, no reload
#
# Back the operator's key up, and copy it onto no server. After an update of this software make this file anew and restart the
# servers one after another: there may be more that tenants can ask.

"""


@click.group("server")
def server_command() -> None:
    """A nats-server of your own, in place of the one that `nexus up` starts."""


@server_command.command("config")
@click.option(
    "--accounts", default=RESOLVER, show_default=True, metavar="DIR", help="Where the server keeps tokens of tenants' accounts."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A file for it; without, it is printed.")
@authority_option
def server_config(accounts: str, out: Path | None, authority: Path) -> None:
    """Print what a server's configuration must say about whom it trusts. Nothing in it is secret.

    Without an operator's key one is made: a new service begins with it.
    """
    from nexus_bus.bus.authority import OPERATOR_FILE, PROVIDER_FILE, Authority

    if re.search(r'["\\\n]', accounts):
        raise Refused(f"accounts: {accounts!r} cannot stand in a server's configuration; choose another directory")
    if not (authority / OPERATOR_FILE).exists():
        click.echo(f"made a new operator's key in {authority}; back it up", err=True)
    text = TRUST.format(authority=authority, provider=authority / PROVIDER_FILE)
    text += Authority.at(authority).server_config(Path(accounts))
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise Unavailable(f"{out}: {error.strerror or error}") from None
