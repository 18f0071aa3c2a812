"""The way from a tenant to the gateway and back: requests, orders with their answers, logs in pages."""

import asyncio
import logging
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog

from nexus_bus import config
from nexus_bus.bus import Bus
from nexus_bus.errors import BadJob, Denied, Unavailable
from schemas.api import (
    Account,
    AccountQuery,
    LogQuery,
    Taken,
)
from schemas.base import NAME_PATTERN, PUBLIC, Name
from schemas.events import Event, EventType
from schemas.usage import Audit, Usage

ANSWER_S = 15.0  # how long the master may take to accept or refuse
CALL_S = 15.0  # how long the gateway may be away
ONCE_S = 10.0  # for one answer of it
AGAIN_S = 0.1
FOLLOW_S = 8.0  # that one request for events waits for something new: less than for an answer
PATIENT_S = 300.0  # a follower outlives restarts


class Calls:
    """A connection on behalf of one tenant. With a tenant's credentials it speaks for that one; with the provider's for any."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        """Use `connect`, or `for_tenant` of another client."""
        self.bus = bus
        self.tenant = tenant_name(tenant)
        if bus.tenant is not None and bus.tenant != self.tenant:
            raise Denied(f"tenant: these credentials speak for {bus.tenant!r}, not for {self.tenant!r}")

    @classmethod
    async def connect(
        cls, url: str | None = None, tenant: str | None = None, *, timeout: float = 15.0, creds: str | Path | None = None
    ) -> Self:
        """Connect as a tenant.

        Args:
            url: default NEXUS_URL, else the server that `nexus up` started in NEXUS_HOME.
            tenant: default NEXUS_TENANT, else whom the credentials speak for, else "default".
            creds: a `.creds` file; default NEXUS_CREDS, else the provider's that `nexus up` made in NEXUS_HOME.

        Raises:
            BadJob: the tenant is not a name.
            Denied: the credentials are damaged, of another tenant, or not accepted.
            Unavailable: no server answers within `timeout` seconds.
        """
        asked = tenant or os.environ.get("NEXUS_TENANT")
        name = tenant_name(asked or "default")
        bus = await Bus.connect(
            url or os.environ.get("NEXUS_URL") or config.default_url(), name=f"client-{name}", timeout=timeout, creds=creds
        )
        if not structlog.is_configured():
            bus.log = _quiet()
        try:
            return cls(bus, asked or bus.tenant or "default")
        except BaseException:
            await bus.close()
            raise

    def for_tenant(self, tenant: str) -> Self:
        """The same connection on behalf of another tenant. Raises Denied with a tenant's own credentials."""
        return type(self)(self.bus, tenant)

    async def call(self, name: str, message: Any, *, timeout: float = CALL_S, headers: dict[str, str] | None = None) -> Any:
        """Ask the gateway, again while nobody answers: a call of the `api.*` rows of schemas/subjects.py, by its short name.

        Raises:
            NexusError: what the gateway said.
            Unavailable: no answer within `timeout` seconds.
        """
        ends = time.monotonic() + timeout
        while True:
            try:
                return await self.bus.request(
                    f"api.{name}", message, timeout=min(ONCE_S, timeout), headers=headers, tenant=self.tenant
                )
            except Unavailable:
                if time.monotonic() + AGAIN_S > ends:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def account(self) -> Account:
        """Limits and keys that the provider has agreed to, and how much is taken."""
        return await self.call("account.show", AccountQuery())

    async def close(self) -> None:
        """Flush and disconnect."""
        await self.bus.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Orders and logs

    async def _ask(
        self, name: str, message: Any, submission: str | None, what: str, answers: tuple[EventType, ...], timeout: float
    ) -> tuple[Event, str]:
        """Send an order, and wait for the event that answers it; that, and the order's id. Raises BadJob if it is a refusal."""
        ends = time.monotonic() + timeout
        taken: Taken = await self.call(name, message, timeout=timeout, headers={"Nats-Msg-Id": submission or uuid.uuid4().hex})
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                # An order repeated under its id may be answered already, whatever the queue remembers of it after a restart.
                async for event in self.events(after=0 if submission else taken.after):
                    if event.submission == taken.submission and event.type in answers:
                        if event.type.endswith(".refused"):
                            raise BadJob(event.message)
                        return event, taken.submission
        except TimeoutError:
            pass
        raise Unavailable(
            f"no answer from a master within {timeout:g} s; {what} is queued and begins once one runs (`nexus up`)"
        )

    async def events(
        self, job: str = "", *, after: int = 0, since: datetime | None = None, follow: bool = True
    ) -> AsyncIterator[Event]:
        """What happened, in order: from the beginning, behind a sequence number, or from a time; then what happens."""
        async for page in self._log("event.read", job, after, since, follow):
            for event in page.events:
                yield event

    async def usage(self, job: str = "", *, since: datetime | None = None) -> AsyncIterator[Usage]:
        """What was used, in order, up to now. A `sum` stands for all before it of its job; `ledger.Ledger` adds up."""
        async for page in self._log("usage.read", job, 0, since, follow=False):
            for record in page.usage:
                yield record

    async def audit(self, *, since: datetime | None = None) -> AsyncIterator[Audit]:
        """Who asked for what and what was decided, in order, up to now."""
        async for page in self._log("audit.read", "", 0, since, follow=False):
            for entry in page.audit:
                yield entry

    async def _log(self, name: str, job: str, after: int, since: datetime | None, follow: bool) -> AsyncIterator[Any]:
        began = since.isoformat() if since is not None else ""
        while True:
            query = LogQuery(job=job, after=after, since=began, wait_s=FOLLOW_S if follow else 0.0)
            page = await self.call(name, query, timeout=PATIENT_S if follow else CALL_S)
            yield page
            after = page.next
            if page.end and not follow:
                return


def _quiet() -> Any:
    """For a program that set up no logging of ours: trouble alone, and not where it prints its own."""
    loud_enough = structlog.make_filtering_bound_logger(logging.WARNING)
    return structlog.wrap_logger(structlog.WriteLogger(sys.stderr), wrapper_class=loud_enough)


def token(field: str, name: str) -> str:
    """A name that cannot break out of its place in a subject."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise BadJob(f"{field}: {name!r} is not a name (lower-case letters, digits, - and _; pattern {NAME_PATTERN})") from None


def tenant_name(name: str) -> str:
    if name == PUBLIC:
        raise BadJob(f"tenant: {name!r} is reserved for what every tenant may read; choose another name")
    return token("tenant", name)
