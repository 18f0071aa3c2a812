"""`nexus`: the command line. A command's module is imported when that command runs, so that `nexus --help` is instant."""

import importlib
import sys
from collections.abc import Sequence

import click

from nexus_bus.errors import NexusError, Refused

# name → (module of this package, what it does); the module has a click command of that name.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("service", "Start a server and all workers on this machine."),
    "down": ("service", "Stop what `nexus up` started."),
    "worker": ("service", "Join a bus as one worker."),
    "scale": ("workers", "Run more or fewer workers of a role."),
    "workers": ("workers", "Who works: role, host, state, progress, restarts."),
    "ps": ("workers", "The same as `workers`."),
    "doctor": ("doctor", "Check what this machine has and what is missing."),
    "plan": ("jobs", "Compile a job document and print the plan; nothing runs."),
    "submit": ("jobs", "Send a job document."),
    "eval": ("evaluation", "Evaluate a policy version."),
    "report": ("evaluation", "What an evaluation gave: numbers, a page, films."),
    "compare": ("evaluation", "Which of two evaluations is better, trial by trial."),
    "jobs": ("jobs", "List jobs."),
    "cancel": ("jobs", "Stop a job; its newest policy version stays."),
    "pause": ("jobs", "Let a job rest; `resume` goes on where it stopped."),
    "resume": ("jobs", "Go on with a paused job, if need be with a larger budget."),
    "watch": ("watch", "Follow jobs live."),
    "policies": ("policies", "List policy versions, keep one for good, or show where one comes from."),
    "export": ("export", "Write a policy version into a directory: leave with it."),
    "import": ("export", "Register an exported policy."),
    "usage": ("usage", "What jobs used, and what it costs."),
    "audit": ("usage", "Who decided what."),
    "tenant": ("tenants", "Tenants: add, limit, rotate, suspend, remove."),
    "whoami": ("tenants", "Whom you speak for, its limits, and what is taken."),
    "server": ("server", "What a nats-server of your own has to be told."),
    "trace": ("operate", "The waterfall of one trace."),
    "metrics": ("metrics", "Serve numbers for Prometheus."),
    "dead": ("dead", "Messages that were given up: list, show, retry, drop."),
    "config": ("operate", "Settings of a role and where each comes from."),
    "data": ("data", "Datasets: inspect, check, convert, record."),
    "env": ("env", "Simulators with packages of their own: list, install, check."),
    "catalog": ("catalog", "Heads and environments that a job may name."),
}


class _Lazy(click.Group):
    """Knows its commands by name, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"nexus_bus.cli.{COMMANDS[cmd_name][0]}"), f"{cmd_name}_command")

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"Did you mean `nexus {near[0]}`?" if near else f"There are {', '.join(COMMANDS)}."
            raise click.UsageError(f"no command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nexus-bus", prog_name="nexus")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def nexus(debug: bool) -> None:
    """Post-train vision-language-action models for many tenants, on shared machines."""
    del debug  # main() looks for it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code: 0 done, 1 it failed, 2 the request was wrong, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = nexus.main(arguments, prog_name="nexus", standalone_mode=False)
    except Exception as error:  # the last frame of the process: a person gets a sentence, --debug the whole
        if arguments[:1] == ["--debug"]:
            raise
        return _failed(error)
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def _failed(error: Exception) -> int:
    """Say it in one sentence; the exit code."""
    match error:
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return 0
        case click.ClickException():
            error.show()
            return error.exit_code
        case click.Abort():
            return 130
        case BrokenPipeError():
            sys.stderr.close()  # `nexus jobs | head` is no failure
            return 0
        case NexusError():
            text = str(error)
        case _:
            text = f"internal error: {type(error).__name__}: {error} (`nexus --debug …` shows where)"
    click.echo(f"nexus: {' '.join(text.split())}", err=True)
    return 2 if isinstance(error, Refused) else 1
