"""Logs: structlog to stderr, each line with role, worker, the trace it belongs to and, where known, tenant and job.

Beside the line, in every process. JSON lines for machines, coloured text at a terminal; NEXUS_LOG=console|json decides.
"""

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import msgspec
import structlog
from opentelemetry import trace

LOUD = ("nats",)  # its line with a traceback per lost connection is one line of the bus's own


def start(role: str, worker: str, level: str = "info") -> None:
    """Set up logging of this process. What libraries log through `logging` comes out the same way, from `warning` up."""
    console = os.environ.get("NEXUS_LOG", "console" if sys.stderr.isatty() else "json") == "console"
    threshold = getattr(logging, level.upper())

    def who(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # Not by context variables: threads of a pool would not have them.
        return {"role": role, "worker": worker, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            who,
            _add_trace,
            structlog.processors.StackInfoRenderer(),
            *([structlog.dev.ConsoleRenderer()] if console else [structlog.processors.format_exc_info, _json]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[_Bridge()], force=True)
    logging.captureWarnings(True)
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def get_logger() -> structlog.stdlib.BoundLogger:
    """The process's logger."""
    return structlog.get_logger()


bound = structlog.contextvars.bound_contextvars
"""`with bound(tenant=..., job=...)`: every line inside, in this task and those it starts, carries them."""


class _Bridge(logging.Handler):
    """Lines of libraries, in our form."""

    def emit(self, record: logging.LogRecord) -> None:
        details: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            details["exc_info"] = record.exc_info
        get_logger().log(record.levelno, record.getMessage(), **details)


def _add_trace(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = format(context.trace_id, "032x")
    return event


def _json(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    """One line. What JSON does not know is shown as Python shows it: a log line is never the reason for a failure."""
    first = ("timestamp", "level", "event", "role", "worker")
    line = {key: event[key] for key in first if key in event} | {k: v for k, v in event.items() if k not in first}
    return msgspec.json.encode(line, enc_hook=repr).decode()
