"""`nexus up`, `nexus down`, `nexus worker`: processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from nexus_bus import config
from nexus_bus.cli.listening import listening_options
from nexus_bus.cli.options import creds_option, pairs
from nexus_bus.errors import Refused, Unavailable
from schemas.control import Role

START_S, STOP_S = 45.0, 40.0
COUNTED = ("inference", "trainer", "rollout", "environment")
KEPT = "1, or what `nexus scale` chose"


def _home(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path:
    return (value or config.home()).resolve()


home_option = click.option(
    "--home", type=click.Path(file_okay=False, path_type=Path), callback=_home, show_default="NEXUS_HOME, else .nexus",
    help="Directory of server, logs, datasets and caches.",
)  # fmt: skip


@click.command("up")
@home_option
@click.option("--inference", type=click.IntRange(0, 64), show_default=KEPT, help="Inference workers.")
@click.option("--trainer", type=click.IntRange(0, 64), show_default=KEPT, help="Trainers.")
@click.option("--rollout", type=click.IntRange(0, 64), show_default=KEPT, help="Rollout workers.")
@click.option("--environment", type=click.IntRange(0, 64), show_default=KEPT, help="Environment workers.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the server; chosen once and kept in the home by default.")
@listening_options
@click.option("--base", help="Backbone of inference and trainer workers: a shipped name, a directory or a hub id.")
@click.option(
    "--autoscale",
    metavar="ROLE=MIN..MAX,…",
    envvar="NEXUS_AUTOSCALE",
    help="Start and drain workers by the depth of their queues, as rollout=1..4,inference=1..2.  [default: off]",
)
@click.option(
    "--spare/--no-spare",
    default=True,
    show_default=True,
    help="Keep a process with the libraries loaded, so that inference workers and trainers are back sooner.",
)
@click.option("--detach", is_flag=True, help="Go to the background once the server answers.")
def up_command(
    home: Path, port: int | None, base: str | None, autoscale: str | None, spare: bool, detach: bool, **counts: int | None
) -> None:
    """Start a server and all workers on this machine. Ctrl-C ends them: workers first, the server last.

    More than one worker of a role share its work. `nexus scale ROLE=N` changes how many there are, for the next `up` on this
    home too. `nexus worker ROLE` adds workers from any machine that reaches the server.
    """
    from nexus_bus import host, logs
    from nexus_bus.autoscale import rules
    from nexus_bus.homes import kept_counts

    text = config.up_settings().get("autoscale", "") if autoscale is None else autoscale
    bounds = rules(str(text))

    if base is not None:
        from nexus_bus.models.bases import describe_backbone, require_weights

        found = describe_backbone(base)  # a wrong one is refused here, not in every worker's log
        require_weights(found)
        os.environ["NEXUS_BASE"] = str(found.path) if Path(base).is_dir() else base
    if detach:
        _detach(home, port, counts, ["--autoscale", str(text), "--spare" if spare else "--no-spare"])
        return
    logs.start("host", host.host_id(), "error")
    kept = kept_counts(home)
    everyone: dict[Role, int] = {
        role: kept.get(role, 1) if (given := counts.get(role)) is None else given for role in host.ROLES
    }
    from nexus_bus.cli import ready

    async def up() -> None:
        telling = asyncio.create_task(ready.tell(home, host.host_id(), everyone, _say))
        try:
            await host.up(home, everyone, port=port, say=_say, autoscale=bounds, spare=spare)
        finally:
            telling.cancel()

    asyncio.run(up())


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a log that is full, or a terminal that is gone, must end nothing
        click.echo(f"{time.strftime('%H:%M:%S')} {text}")


def _detach(home: Path, port: int | None, counts: dict[str, int | None], further: list[str]) -> None:
    from nexus_bus.homes import running_up

    if (pid := running_up(home)) is not None:
        raise Unavailable(
            f"a service runs on {home} already (process {pid}); use it, or end it with `nexus down --home {home}`"
        )
    (home / "logs").mkdir(parents=True, exist_ok=True)
    log = home / "logs" / "up.log"
    arguments = ["--home", str(home), *further, *(["--port", str(port)] if port else [])]
    for role, count in counts.items():
        arguments += [f"--{role}", str(count)] if count is not None else []
    with log.open("ab") as out:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "nexus_bus.cli", "up", *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = home / "url"
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if running_up(home) == process.pid and url.is_file() and (text := url.read_text().strip()):
            click.echo(f"server at {text}, process {process.pid}; `nexus down --home {home}` ends it, logs in {home / 'logs'}")
            click.echo("workers are starting: `nexus workers` shows when they run; a job sent before waits for them")
            return
        if process.poll() is not None:
            raise Unavailable(
                f"the service ended at once: {log.read_text(errors='replace').strip().splitlines()[-1:]}; see {log}"
            )
        time.sleep(0.05)
    process.terminate()
    raise Unavailable(f"the service did not start within {START_S:g} s; see {log}")


@click.command("down")
@home_option
def down_command(home: Path) -> None:
    """Stop what `nexus up` started on this home, and wait until it has ended."""
    from nexus_bus.homes import running_up

    pid = running_up(home)
    if pid is None:
        click.echo(f"nothing runs on {home}")
        return
    os.kill(pid, signal.SIGTERM)
    ends = time.monotonic() + STOP_S
    while running_up(home) is not None:
        if time.monotonic() > ends:
            raise Unavailable(
                f"process {pid} has not ended within {STOP_S:g} s; `kill -9 {pid}` ends it and its workers at once"
            )
        time.sleep(0.05)
    click.echo(f"stopped process {pid}")


@click.command("worker")
@click.argument("role", type=click.Choice(list(config.ROLES)))
@click.option("--name", help="Name of this worker; unique on the bus.  [default: ROLE-pid]")
@click.option("--url", help="NATS server.  [default: NEXUS_URL, else that of `nexus up`]")
@creds_option
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting; `nexus config ROLE` lists them.")
@click.option("--env", metavar="MODULE:CALLABLE", help="Serve a simulator or robot of your own; found from where you are.")
@click.option("--as", "suffix", metavar="NAME", help="With --env: jobs call it own-NAME.  [default: own]")
@click.option("--sessions", type=click.IntRange(1, 64), help="With --env: so many at once.  [default: 1]")
def worker_command(
    role: str, name: str | None, url: str | None, settings: tuple[str, ...], env: str | None, suffix: str | None,
    sessions: int | None,
) -> int:  # fmt: skip
    """Join a bus as one worker, until SIGTERM or Ctrl-C.

    `nexus worker environment --env MODULE:CALLABLE --creds acme.creds` runs on a tenant's machine, with the tenant's
    credentials, and serves an environment of its own to that tenant's jobs: environment = { id = "own", task = "default" }.
    """
    import importlib

    flags = {key.replace("-", "_"): value for key, value in pairs(settings, "--set").items()}
    if env is not None:
        if role != "environment":
            raise Refused(f"--env: {role} has none; `nexus worker environment --env {env}`")
        from nexus_bus import own

        return own.run(env=env, suffix=suffix, sessions=sessions or 1, name=name, url=url, flags=flags)
    if suffix is not None or sessions is not None:
        raise Refused("--as, --sessions: only with --env; how many sessions other workers hold is a setting (--set sessions=N)")
    # By name: the library does not know its workers.
    return importlib.import_module(f"workers.{role}").run(name=name, url=url, flags=flags)
