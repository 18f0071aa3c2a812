"""Flags of `nexus up` that say where its server listens. They go into the environment, where the server looks (bus/tls.py)."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def _into(variable: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(_context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value is None or value == ():
            return
        if isinstance(value, tuple):
            value = ",".join(value)
        elif isinstance(value, bool):
            value = "on" if value else "off"
        os.environ[variable] = str(value)

    return keep


def listening_options(command: Command) -> Command:
    """`--listen`, `--tls-cert`, `--tls-key`, `--tls-name`, `--tls/--no-tls`."""
    file = click.Path(exists=True, dir_okay=False, resolve_path=True)
    for option in (
        click.option("--tls/--no-tls", default=None, expose_value=False, callback=_into("NEXUS_TLS"),
                     help="Encrypt connections.  [default: off the loopback interface]"),
        click.option("--tls-name", multiple=True, expose_value=False, callback=_into("NEXUS_TLS_NAMES"),
                     help="A further name or address by which clients reach it, for a certificate that it makes itself."),
        click.option("--tls-key", type=file, expose_value=False, callback=_into("NEXUS_TLS_KEY"),
                     help="The certificate's key."),
        click.option("--tls-cert", type=file, expose_value=False, callback=_into("NEXUS_TLS_CERT"),
                     help="Certificate of the server.  [default: one of an authority that it makes itself]"),
        click.option("--listen", metavar="ADDRESS", expose_value=False, callback=_into("NEXUS_LISTEN"),
                     help="Address of the server.  [default: 127.0.0.1]"),
    ):  # fmt: skip
        command = option(command)
    return command
