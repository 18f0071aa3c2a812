"""`nexus metrics`: a Prometheus endpoint for dashboards, alerts and autoscalers."""

import asyncio
import signal

import click

from nexus_bus.cli.options import asynchronous, url_option
from nexus_bus.errors import Denied, Refused, Unavailable


class _Address(click.ParamType):
    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        host, _, port = str(value).rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            self.fail(f"{value!r} is not of the form HOST:PORT, as 127.0.0.1:9464", param, ctx)
        return host.strip("[]"), int(port)


@click.command("metrics")
@click.option(
    "--listen", type=_Address(), default="127.0.0.1:9464", show_default=True, help="Where to serve; 0.0.0.0:9464 for all."
)
@click.option("--by-tenant", is_flag=True, help="Add numbers of each tenant, with its name.")
@url_option
@asynchronous
async def metrics_command(listen: tuple[str, int], by_tenant: bool, url: str) -> None:
    """Serve numbers for Prometheus: queues, workers, jobs, lag and device time, over all tenants.

    Whoever reaches the address may read them. It runs until Ctrl-C or SIGTERM, and needs the provider's credentials.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise Refused("nexus metrics needs prometheus-client: pip install 'nexus-bus[metrics]'") from error
    from nexus_bus.bus import Bus
    from nexus_bus.metrics import Exporter

    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    bus = await Bus.connect(url, name="metrics")
    try:
        if bus.tenant is not None:
            raise Denied(f"metrics: these credentials are of tenant {bus.tenant}; give the provider's in NEXUS_CREDS")
        exporter, registry = Exporter(bus, by_tenant=by_tenant), CollectorRegistry()
        registry.register(exporter)
        host, port = listen
        try:
            server, _ = start_http_server(port, host, registry)
        except OSError as error:
            raise Unavailable(f"--listen {host}:{port}: {error.strerror or error}; choose another port") from error
        click.echo(f"metrics at http://{host}:{server.server_port}/metrics")
        following, stopping = asyncio.ensure_future(exporter.run()), asyncio.ensure_future(stop.wait())
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.shutdown()
        server.server_close()
        if following.done():
            following.result()
        following.cancel()
        stopping.cancel()
    finally:
        await bus.close()
