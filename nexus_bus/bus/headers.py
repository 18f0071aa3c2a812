"""The headers every message carries: idempotency, trace context, CloudEvents attributes, schema version."""

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nexus_bus.bus.codec import CONTENT_TYPES
from nexus_bus.clock import now
from schemas import SCHEMA_VERSION
from schemas.subjects import SubjectEntry

MSG_ID = "Nats-Msg-Id"
CONTENT_TYPE = "Content-Type"
TIME = "ce-time"  # RFC 3339, when it was sent, by the sender's clock
REPLY_TO = "Nexus-Reply-To"
CALLER = "Nexus-Caller"  # of the provider's requests: the key of who asks; of a tenant's the server says it
BLOB = "Nexus-Blob"  # the payload is a BlobRef; the message itself lies in the object store
ERROR_CODE = "Nexus-Error-Code"  # of a reply whose payload is the text of an error
PROBE = "Nexus-Probe"  # of a request that wants no answer but to know that somebody is there
STATUS = "Status"  # of an answer that comes from the server itself
NOBODY = "503"  # nobody listens there
EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"
ROLLUP = "Nats-Rollup"

TRACE = TraceContextTextMapPropagator()


def build(row: SubjectEntry, source: str, msg_id: str = "", extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Headers of a new message of this row."""
    headers = {
        CONTENT_TYPE: CONTENT_TYPES[row.codec],
        "Nexus-Schema": SCHEMA_VERSION,
        "ce-specversion": "1.0",
        "ce-type": row.type,
        "ce-source": f"/nexus/{source}",
        "ce-id": msg_id or os.urandom(16).hex(),
        TIME: now(),
    }
    if msg_id:
        headers[MSG_ID] = msg_id
    if extra:
        headers |= extra
    if "traceparent" not in headers:
        TRACE.inject(headers)
    return headers


def get(message: Any, name: str) -> str:
    """One header of a received message, or an empty string."""
    headers: dict[str, str] = message.headers or {}
    return headers.get(name, "")
