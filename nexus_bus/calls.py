"""What the gateway answers from what is stored: jobs, policy versions, weights, logs, the account. Reads only.

Every answer is made of keys and subjects that contain the asking tenant's name, which the server put there. What belongs to
somebody else is therefore looked for under a name that does not have it, and is answered like what does not exist.
"""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from nexus_bus import pricing, registry
from nexus_bus.admission import running, trains
from nexus_bus.bus import Bus, Incoming
from nexus_bus.bus.page import page
from nexus_bus.errors import BadMessage, NotFound, Unavailable
from nexus_bus.roster import Roster
from nexus_bus.spending import Account as Spent
from nexus_bus.spending import Spending
from nexus_bus.stored import Keeping, Kept
from schemas.api import (
    Account,
    AccountQuery,
    AuditPage,
    Content,
    ContentQuery,
    EpisodePage,
    EventPage,
    FilmFound,
    FilmQuery,
    JobFound,
    JobPage,
    JobQuery,
    LogQuery,
    PageQuery,
    PolicyFound,
    PolicyPage,
    PolicyQuery,
    StateFound,
    UsagePage,
)
from schemas.plan import JobState
from schemas.policy import PolicyVersion, TrainingState
from schemas.subjects import BY_NAME, subject
from schemas.tenant import ServiceTerms, TenantRecord

AT_ONCE = 2  # weights fetched side by side: they may be large
FOLLOWED = 64  # tenants
LOOKS, LOOK_S = 150, 0.02  # for what is on record to be summed up
NEWS_LOOKS = 50  # for what was heard to be stored
KEPT_BYTES = 256 << 20  # of weights that are being read, kept between two pieces


class Turns:
    """Of each tenant so many calls are worked on side by side. The others wait: with hundreds of one tenant's at work, those of
    another would get hardly a share of the gateway.
    """

    def __init__(self, most: int) -> None:
        """Nobody calls yet."""
        self._most = most
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._there: Counter[str] = Counter()  # calls at work or waiting

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Work on a call of a tenant."""
        gate = self._gates.setdefault(tenant, asyncio.Semaphore(self._most))
        self._there[tenant] += 1
        try:
            async with gate:
                yield
        finally:
            self._there[tenant] -= 1
            if not self._there[tenant]:
                del self._there[tenant], self._gates[tenant]


class Orders:
    """Of each tenant so many now and then, and fewer all the time: each leaves entries in logs that all tenants share."""

    def __init__(self) -> None:
        """Nobody has ordered anything."""
        self._left: dict[str, tuple[float, float]] = {}  # by tenant: those it may send at once, as of a time

    def take(self, tenant: str, most: int, per_s: float) -> None:
        """Count one. Raises Unavailable for one too many."""
        clock = time.monotonic()
        left, at = self._left.get(tenant, (float(most), clock))
        left = min(most, left + (clock - at) * per_s)
        if left < 1:
            raise Unavailable(f"orders: more than {most} at once, and {per_s:g} a second; wait")
        self._left[tenant] = left - 1, clock


class Reads:
    """Answers by call, each `await method(message, incoming)`; see the `api.*` rows of schemas/subjects.py for their types."""

    def __init__(self, bus: Bus, turns: Turns) -> None:
        """Logs, which may wait for something new, take their turns themselves; whoever calls the other methods does."""
        self.bus, self.turns = bus, turns
        self.kv = bus.kv("registry")
        self._kept: OrderedDict[str, bytes] = OrderedDict()  # weights by hash
        self.prices = pricing.load()
        self._spending, self._keeping = Spending(bus), Keeping(bus)
        self._asking: OrderedDict[str, Roster] = OrderedDict()  # tenants of whom these two know, and their jobs
        self._room = asyncio.Semaphore(AT_ONCE)
        self._fetching: dict[str, asyncio.Task[bytes]] = {}

    async def job(self, query: JobQuery, incoming: Incoming) -> JobFound:
        """`job.get`."""
        entry = await self.kv.get(registry.job_key(incoming.tokens["tenant"], query.job), JobState)
        return JobFound(job=entry.value if entry is not None else None)

    async def jobs(self, query: PageQuery, incoming: Incoming) -> JobPage:
        """`job.list`."""
        found, after = await self._entries(registry.job_key(incoming.tokens["tenant"], ""), query, JobState)
        return JobPage(jobs=found, next=after)

    async def policy(self, query: PolicyQuery, incoming: Incoming) -> PolicyFound:
        """`policy.get`."""
        return PolicyFound(policy=await self._version(incoming.tokens["tenant"], query.policy))

    async def policies(self, query: PageQuery, incoming: Incoming) -> PolicyPage:
        """`policy.list`."""
        prefix = registry.policies_prefix(incoming.tokens["tenant"], query.job)
        found, after = await self._entries(prefix, query, PolicyVersion)
        return PolicyPage(policies=found, next=after)

    async def state(self, query: JobQuery, incoming: Incoming) -> StateFound:
        """`policy.state`."""
        entry = await self.kv.get(registry.state_key(incoming.tokens["tenant"], query.job), TrainingState)
        return StateFound(state=entry.value if entry is not None else None)

    async def content(self, query: ContentQuery, incoming: Incoming) -> Content:
        """`policy.read`: only what the tenant's own version or training state names. A hash by itself opens nothing."""
        tenant = incoming.tokens["tenant"]
        if not await self._names(tenant, query):
            raise NotFound(f"policy: {query.policy!r} refers to no such content")
        data = await self._whole(query.sha256)
        return Content(data=data[query.offset : query.offset + query.size])

    async def _names(self, tenant: str, query: ContentQuery) -> bool:
        version = await self._version(tenant, query.policy)
        if version is None:
            return False
        refs = [version.weights, *([version.adapter] if version.adapter is not None else [])]
        if query.sha256 in {ref.sha256 for ref in refs}:
            return True
        entry = await self.kv.get(registry.state_key(tenant, version.job), TrainingState)
        return entry is not None and entry.value.state.sha256 == query.sha256

    async def _whole(self, sha: str) -> bytes:
        if sha in self._kept:
            self._kept.move_to_end(sha)
            return self._kept[sha]
        if (task := self._fetching.get(sha)) is None:  # asked for in pieces, several at once
            task = self._fetching[sha] = asyncio.create_task(self._fetch(sha))
            task.add_done_callback(lambda _: self._fetching.pop(sha, None))
        data = self._kept[sha] = await asyncio.shield(task)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return data

    async def _fetch(self, sha: str) -> bytes:
        async with self._room:
            return await self.bus.blobs.get(sha)

    # Logs

    async def events(self, query: LogQuery, incoming: Incoming) -> EventPage:
        """`event.read`."""
        found = await self._log("event", query, incoming, job=query.job or "*")
        return EventPage(events=found.messages, next=found.next, end=found.end)

    async def usage(self, query: LogQuery, incoming: Incoming) -> UsagePage:
        """`usage.read`."""
        found = await self._log("usage", query, incoming, job=query.job or "*")
        return UsagePage(usage=found.messages, next=found.next, end=found.end)

    async def episodes(self, query: LogQuery, incoming: Incoming) -> EpisodePage:
        """`eval.read`."""
        found = await self._log("eval.episode", query, incoming, job=query.job or "*")
        return EpisodePage(episodes=found.messages, next=found.next, end=found.end)

    async def film(self, query: FilmQuery, incoming: Incoming) -> FilmFound:
        """`eval.film`."""
        on = subject("eval.film", tenant=incoming.tokens["tenant"], job=query.job, film=query.film)
        found = await page(self.bus, BY_NAME["eval.film"], on, limit=1)
        return FilmFound(film=found.messages[0] if found.messages else None)

    async def audit(self, query: LogQuery, incoming: Incoming) -> AuditPage:
        """`audit.read`; of all jobs, whatever the query says."""
        found = await self._log("audit", query, incoming)
        return AuditPage(audit=found.messages, next=found.next, end=found.end)

    async def _log(self, name: str, query: LogQuery, incoming: Incoming, **tokens: str) -> Any:
        row, on = BY_NAME[name], _pattern(name, tenant=incoming.tokens["tenant"], **tokens)
        since = _time(query.since) if query.since else None
        ends = time.monotonic() + query.wait_s
        news = asyncio.Event()

        async def heard(_: Any) -> None:
            news.set()

        listening = await self.bus.listen(on, heard) if query.wait_s else None
        try:
            looks = 0  # what was heard may not be stored yet
            while True:
                news.clear()  # before the look: what comes meanwhile is looked for again
                async with self.turns.of(incoming.tokens["tenant"]):
                    found = await page(self.bus, row, on, after=query.after, since=since, limit=query.limit)
                left = ends - time.monotonic()
                if found.messages or listening is None or left <= 0:
                    return found
                try:
                    await asyncio.wait_for(news.wait(), min(left, LOOK_S) if looks else left)
                    looks = NEWS_LOOKS
                except TimeoutError:
                    looks = max(0, looks - 1)
        finally:
            if listening is not None:
                await listening.stop()

    # The account

    async def account(self, _query: AccountQuery, incoming: Incoming) -> Account:
        """`account.show`."""
        tenant = incoming.tokens["tenant"]
        entry = await self.kv.get(registry.account_key(tenant), TenantRecord)
        own = TenantRecord(name=tenant, account="A" * 56, created="") if entry is None else entry.value
        roster, spent, kept = await self._followed(tenant)
        terms = await self.kv.get(registry.SERVICE, ServiceTerms)
        recorded, jobs = await roster.dataset_bytes(tenant), (await roster.of(tenant)).values()
        return Account(
            tenant=tenant,
            phase=own.phase,
            limits=own.limits,
            service=terms.value if terms is not None else None,
            keys=own.keys,
            used={
                "jobs": running(jobs),
                "queued": sum(state.phase == "waiting" for state in jobs),
                **({"device_s": spent.device_s, "session_s": spent.session_s} if spent.known else {}),
                **({"money": spent.cost(self.prices, datetime.now(UTC))} if spent.known and self.prices else {}),
                **({"stored_bytes": kept.size() + recorded} if kept.known else {}),
                "slots": running(filter(trains, jobs)),
            },
            time=time.time(),
        )

    async def _followed(self, tenant: str) -> tuple[Roster, Spent, Kept]:
        """Its jobs, what is on record and in store, from the first time on followed, so that asking again costs nothing."""
        roster = self._asking.setdefault(tenant, Roster(self.bus, tenant))
        self._asking.move_to_end(tenant)
        while len(self._asking) > FOLLOWED:
            forgotten, followed = self._asking.popitem(last=False)
            followed.close()
            self._spending.forget(forgotten)
            self._keeping.forget(forgotten)
        spent, kept = self._spending.of(tenant), self._keeping.of(tenant)
        for _ in range(LOOKS):
            if spent.known and kept.known:
                break
            await asyncio.sleep(LOOK_S)
        return roster, spent, kept

    async def _version(self, tenant: str, policy: str) -> PolicyVersion | None:
        job, _, n = policy.partition("@")
        entry = await self.kv.get(registry.policy_key(tenant, job, int(n)), PolicyVersion)
        return entry.value if entry is not None else None

    async def _entries(self, prefix: str, query: PageQuery, kind: type[Any]) -> tuple[list[Any], str]:
        keys = sorted(await self.kv.keys(prefix, deleted=True), key=_order)
        keys = [key for key in keys if not query.after or _order(key) > _order(query.after)]
        some = keys[: query.limit]
        entries = await asyncio.gather(*(self.kv.get(key, kind) for key in some))
        return [one.value for one in entries if one is not None], some[-1] if len(keys) > len(some) else ""


def _order(key: str) -> tuple[Any, ...]:
    """Keys as people order them: numbers by their value."""
    return tuple((0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part) for part in key.split("."))


def _pattern(name: str, **tokens: str) -> str:
    fixed = {key: value for key, value in tokens.items() if value != "*"}
    subject(name, **{key: fixed.get(key, "_") for key in BY_NAME[name].tokens})  # refuses what is no name
    return BY_NAME[name].pattern.format(**tokens)


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadMessage(f"since: {text[:80]!r} is no time as RFC 3339 writes it") from None
    if found.tzinfo is None:
        raise BadMessage(f"since: {text!r} has no time zone; end it with Z or an offset")
    return found
