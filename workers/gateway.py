"""Gateway: the tenants' door. Takes their orders to the master's queue, asks the Inference Queue for them, reads for them.

Reads   requests `tenant.<name>.<call>`, where the server has put the name; registry, logs and blobs on behalf of that tenant;
        env.own of rollout workers.
Asks    data.* of environment workers, also whether the dataset of a new job is there and fits.
Writes  JOBS (orders under ids that begin with the tenant), INFERENCE (infer.request), UPLOADS, blobs (imports), AUDIT.
Killed  whoever asked gets no answer and asks again: orders carry ids, reads change nothing. Several share the requests.
"""

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from nexus_bus import offers, plan_data, registry, worker
from nexus_bus.audit import NOTED, Notes, audit, by_provider, caller
from nexus_bus.bridge import Bridge
from nexus_bus.budgets import Budgets
from nexus_bus.bus import Bus, Incoming
from nexus_bus.bus.headers import REPLY_TO, TIME
from nexus_bus.bus.page import last_sequence, whole
from nexus_bus.calls import Orders, Reads, Turns
from nexus_bus.config import GatewayConfig
from nexus_bus.errors import BadJob, BadMessage, NotFound, Unavailable, from_code
from nexus_bus.exported import LARGEST
from nexus_bus.serving import check_known, introduce
from nexus_bus.worker import Context
from schemas.api import CHUNK_BYTES, AccountQuery, Taken, UploadChunk, UploadedImport
from schemas.base import BlobRef
from schemas.control import Ack, Role
from schemas.dataset import DatasetAsked, DatasetBegin, DatasetBegun, DatasetCommit, DatasetDrop, DatasetPage, DatasetQuery
from schemas.environment import OwnPage, OwnQuery, SessionStep
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import JobCancel, JobPause, JobResume, JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import PolicyPin, PolicyVersion
from schemas.subjects import BY_NAME, CALLS, subject

ROLE: Role = "gateway"

ORDER_S = 10.0  # to get an order stored
QUEUE_S = 2.0  # to get a request to act queued: a full queue pushes back on its tenant
PIECES = LARGEST // CHUNK_BYTES + 1  # of those
UPLOADS = 4  # of one tenant that have begun and are not used yet
ASSEMBLED = 2  # files put together side by side: each may be large
REGISTERED_S, LOOK_S = 2.0, 0.05  # for an import that was asked for before to show
DATA_S = 8.0  # that an environment worker may take for a call on datasets: less than a client waits
# Calls that wait for others, and take their turns only for what they do themselves.
PATIENT = frozenset(
    {"infer.request", "env.open", "env.call", "env.answer", "event.read", "eval.read", "usage.read", "audit.read"}
    | (DATA := frozenset({"data.begin", "data.put", "data.commit", "data.list", "data.drop"}))
)
# With what something begins that somebody will answer for.
BEGIN = frozenset({"job.submit", "policy.upload", "policy.import", "env.open", "env.offer", "data.begin"})
PAID = frozenset({"infer.request", "env.open", "env.call"})  # and refused once a budget of the tenant's is used up
ID_LENGTH = 200  # of a message id that a tenant chooses
REASON_LENGTH = 1000  # of why a job is stopped: it is kept with the job
ORDER_BYTES = 64 << 10  # of an order; it is kept with its job

Handler = Callable[[Any, Incoming], Awaitable[Any]]


@dataclass
class Asked:
    """A request to act that waits for its answer."""

    id: str  # the tenant's own
    reply: "asyncio.Future[InferenceReply]"


class Gateway:
    """Serves every call of schemas/subjects.py."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.kv = context.bus.kv("registry")
        self.settings: GatewayConfig = context.config or GatewayConfig()
        self.turns = Turns(self.settings.tenant_work)
        self.reads = Reads(context.bus, self.turns)
        self.bridge = Bridge(context.bus, self.turns)
        self.budgets, self.notes = Budgets(context.bus), Notes(context.bus)
        self.data_turns = Turns(self.settings.tenant_work)  # of their own: a push must not hold up what else is asked
        self.under_way: Counter[str] = Counter()  # by tenant
        self.orders = Orders()
        self.met: set[str] = set()  # tenants who have ordered something here
        self.assembling = asyncio.Semaphore(ASSEMBLED)
        self.asked: dict[str, Asked] = {}
        self.inbox = ""

    def handlers(self) -> dict[str, Handler]:
        """By call."""
        reads = self.reads
        return {
            "job.submit": self.order,
            "job.cancel": self.order,
            "job.pause": self.order,
            "job.resume": self.order,
            "job.get": reads.job,
            "job.list": reads.jobs,
            "policy.get": reads.policy,
            "policy.list": reads.policies,
            "policy.state": reads.state,
            "policy.read": reads.content,
            "policy.pin": self.order,
            "policy.upload": self.upload,
            "policy.import": self.take_in,
            "infer.request": self.infer,
            "env.describe": self.bridge.describe,
            "env.list": self.own,
            "env.open": self.bridge.lease,
            "env.call": self.bridge.step,
            "env.offer": self.bridge.offer,
            "env.answer": self.bridge.answer,
            **dict.fromkeys(DATA, self.data),
            "data.begin": self.begin_data,
            "event.read": reads.events,
            "eval.read": reads.episodes,
            "eval.film": reads.film,
            "usage.read": reads.usage,
            "audit.read": reads.audit,
            "account.show": reads.account,
        }

    async def open(self) -> None:
        """Listen."""
        self.inbox = (await self.bus.inbox("infer.reply", self._answered)).subject
        await self.bridge.open()
        handlers = self.handlers()
        for call in CALLS:
            handler = handlers[call.local] if call.local in PATIENT else self._in_turn(handlers[call.local])
            handler = self._noted(call.local, handler) if call.local in NOTED else handler
            handler = self._paid(handler) if call.local in PAID else handler
            handler = self._for_somebody(handler) if call.local in BEGIN else handler
            await self.bus.serve(call.name, self._within(handler), queue="gateway", tenant="*")

    def _in_turn(self, handler: Handler) -> Handler:
        async def handle(message: Any, incoming: Incoming) -> Any:
            async with self.turns.of(incoming.tokens["tenant"]):
                return await handler(message, incoming)

        return handle

    def _for_somebody(self, handler: Handler) -> Handler:
        """The provider may speak for any tenant that there is."""

        async def handle(message: Any, incoming: Incoming) -> Any:
            tenant = incoming.tokens["tenant"]
            if by_provider(incoming) and tenant not in self.met:
                await check_known(self.bus, tenant)
            return await handler(message, incoming)

        return handle

    def _paid(self, handler: Handler) -> Handler:
        """Refused once a budget is used up, except what ends the spending."""

        async def handle(message: Any, incoming: Incoming) -> Any:
            if not (isinstance(message, SessionStep) and message.call.op == "close"):
                await self.budgets.check(incoming.tokens["tenant"])
            return await handler(message, incoming)

        return handle

    def _noted(self, name: str, handler: Handler) -> Handler:
        async def handle(message: Any, incoming: Incoming) -> Any:
            answer = await handler(message, incoming)
            # Before the answer: nobody has it of whom it is not known.
            await self.notes.note(incoming.tokens["tenant"], name, message, caller(incoming))
            return answer

        return handle

    def _within(self, handler: Handler) -> Handler:
        """A tenant who asks faster than it is answered is refused, so that others find room."""

        async def handle(message: Any, incoming: Incoming) -> Any:
            tenant = incoming.tokens["tenant"]
            if self.under_way[tenant] >= self.settings.tenant_calls:
                raise Unavailable(f"{self.settings.tenant_calls} calls of yours are under way; wait for some of the answers")
            self.under_way[tenant] += 1
            self.context.pulse.busy += 1
            try:
                return await handler(message, incoming)
            finally:
                self.under_way[tenant] -= 1
                if not self.under_way[tenant]:
                    del self.under_way[tenant]
                self.context.pulse.busy -= 1
                self.context.pulse.progress += 1

        return handle

    # Orders

    async def order(self, message: Any, incoming: Incoming) -> Taken:
        """An order goes onto the master's queue, under an id that begins with the tenant: nobody can use up another's."""
        tenant, name = incoming.tokens["tenant"], _call_of(incoming)
        self._allow(tenant)
        await self._check(tenant, message)
        if isinstance(message, JobCancel | JobPause) and not message.reason:
            done = "cancelled" if isinstance(message, JobCancel) else "paused"
            who = "provider" if by_provider(incoming) else "tenant"
            message = msgspec.structs.replace(message, reason=f"{done} by the {who}")
        submission = f"{tenant}/{name}/{await self._id(tenant, message, incoming)}"
        return await self._publish(name, message, tenant, submission, incoming)

    async def _publish(self, name: str, message: Any, tenant: str, submission: str, incoming: Incoming) -> Taken:
        if (size := len(msgspec.json.encode(message))) > ORDER_BYTES:
            raise BadMessage(f"{name}: {size} bytes; an order has at most {ORDER_BYTES}")
        if tenant not in self.met:
            await introduce(self.bus, tenant)
            self.met.add(tenant)
        # First: nothing is done of which nobody can say who asked for it.
        await audit(self.bus, tenant, name, _job_of(message), "asked", "", key=submission, caller=caller(incoming))
        after = await last_sequence(self.bus, "EVENTS")
        stored = await self.bus.publish(name, message, msg_id=submission, deadline=ORDER_S, tenant=tenant)
        return Taken(submission=submission, after=0 if stored.duplicate else after, duplicate=stored.duplicate)

    def _allow(self, tenant: str) -> None:
        self.orders.take(tenant, self.settings.tenant_orders, self.settings.tenant_orders_per_s)

    async def _check(self, tenant: str, message: Any) -> None:
        """What is known to be wrong by now is said now."""
        if len(getattr(message, "reason", "")) > REASON_LENGTH:
            raise BadMessage(f"reason: longer than {REASON_LENGTH} characters; say it in fewer")
        if isinstance(message, JobSpec):
            await plan_data.check(self.bus, tenant, message)
        if isinstance(message, JobCancel | JobPause | JobResume):
            entry = await self.kv.get(registry.job_key(tenant, message.job), JobState)
            if entry is None:
                raise NotFound(f"job: no job {message.job!r}; `nexus jobs` lists yours")
            if entry.value.phase in TERMINAL and not isinstance(message, JobResume):
                raise BadJob(f"job: {message.job!r} is {entry.value.phase} already")

    async def _id(self, tenant: str, message: Any, incoming: Incoming) -> str:
        if isinstance(message, JobCancel):  # cancelled twice is cancelled once
            entry = await self.kv.get(registry.job_key(tenant, message.job), JobState)
            return f"{message.job}/{entry.value.submitted if entry is not None else ''}"
        given = incoming.headers.get("Nats-Msg-Id", "")
        if len(given) > ID_LENGTH or not given.isprintable():
            raise BadMessage(f"Nats-Msg-Id: at most {ID_LENGTH} printable characters")
        return given or uuid.uuid4().hex

    # Policies from elsewhere

    async def upload(self, chunk: UploadChunk, incoming: Incoming) -> Ack:
        """A piece of a file; see `take_in`."""
        tenant = incoming.tokens["tenant"]
        if chunk.offset + len(chunk.data) > LARGEST or not chunk.data:
            raise BadMessage(f"offset: a file has at most {LARGEST} bytes, and a piece at least one")
        begun = await self.bus.queued("UPLOADS", f"upload.{tenant}.*")
        if len({*begun, subject("upload", tenant=tenant, upload=chunk.upload)}) > UPLOADS or sum(begun.values()) >= PIECES:
            raise Unavailable(f"upload: {len(begun)} files of yours wait to be used; import them, or wait an hour")
        # Under an id of its own: a piece that comes twice is put together once, and one that was used may come again.
        name = f"{tenant}/{uuid.uuid4().hex}"
        await self.bus.publish("upload", chunk, msg_id=name, deadline=ORDER_S, tenant=tenant, upload=chunk.upload)
        return Ack()

    async def take_in(self, message: UploadedImport, incoming: Incoming) -> Taken:
        """Put files together, check them against their hashes, and ask the master to register them.

        A hash alone is worth nothing here: whoever imports has sent every byte.
        """
        tenant, order = incoming.tokens["tenant"], message.order
        self._allow(tenant)
        if (order.adapter is None) != (message.adapter is None):
            raise BadMessage("adapter: the order and the files must both have one, or neither")
        used = list[str]()
        for upload, ref in ((message.weights, order.weights), (message.adapter, order.adapter)):
            if upload is not None and ref is not None:
                used.append(subject("upload", tenant=tenant, upload=upload))
                await self._store(tenant, order.name, used[-1], ref)
        submission = f"{tenant}/policy.import/{await self._id(tenant, message, incoming)}"
        taken = await self._publish("policy.import", order, tenant, submission, incoming)
        for on in used:  # now, and no sooner: who got no answer asks again
            await self.bus.drop("UPLOADS", on)
        return taken

    async def _store(self, tenant: str, name: str, on: str, ref: BlobRef) -> None:
        """Keep one of the files as content, unless it is kept already: the answer was lost, and it is asked again."""
        ends = time.monotonic() + REGISTERED_S
        while not (begun := await self.bus.queued("UPLOADS", on)) and time.monotonic() < ends:
            known = await self.kv.get(registry.policy_key(tenant, name, 0), PolicyVersion)
            if known is not None and ref in (known.value.weights, known.value.adapter):
                return
            await asyncio.sleep(LOOK_S)
        async with self.assembling:
            data = await asyncio.to_thread(_joined, await whole(self.bus, BY_NAME["upload"], on) if begun else [])
            if len(data) != ref.size or (await asyncio.to_thread(hashlib.sha256, data)).hexdigest() != ref.sha256:
                raise BadMessage(
                    f"upload {on.rpartition('.')[2]}: {len(data)} bytes are there, and they are not the {ref.size} with the "
                    "hash given; send the file again"
                )
            await self.bus.blobs.put(data, media_type=ref.media_type)

    # What a tenant's jobs can name

    async def own(self, query: OwnQuery, incoming: Incoming) -> OwnPage:
        """Environments of its own."""
        return await offers.listed(self.bus, incoming.tokens["tenant"], query)

    async def data(self, message: Any, incoming: Incoming) -> Any:
        """A call on datasets is answered by an environment worker: they lie on its disk."""
        tenant, name = incoming.tokens["tenant"], _call_of(incoming)
        async with self.data_turns.of(tenant):
            if isinstance(message, DatasetCommit | DatasetDrop):
                self._allow(tenant)
                key = f"{tenant}/{message.upload if isinstance(message, DatasetCommit) else uuid.uuid4().hex}"
                await audit(self.bus, tenant, name, "_", "asked", message.dataset, key=key, caller=caller(incoming))
            if isinstance(message, DatasetQuery) and message.dataset:
                found = await plan_data.look(self.bus, tenant, message.dataset)
                return DatasetPage(datasets=[found] if found is not None else [])
            return await self.bus.request(name, message, timeout=DATA_S, tenant=tenant)

    async def begin_data(self, message: DatasetBegin, incoming: Incoming) -> DatasetBegun:
        """The same, with what the tenant may still keep."""
        room = None
        if message.last:
            async with self.turns.of(incoming.tokens["tenant"]):
                account = await self.reads.account(AccountQuery(), incoming)
            if (most := account.limits.stored_bytes) is not None:
                if "stored_bytes" not in account.used:
                    raise Unavailable("limits.stored_bytes: what you keep is being summed up; ask again")
                room = max(0, most - int(account.used["stored_bytes"]))
        return await self.data(DatasetAsked(begin=message, room=room), incoming)

    # Inference

    async def infer(self, request: InferenceRequest, incoming: Incoming) -> InferenceReply:
        """A tenant's own request to act: through the same queue as everybody's, in its fair turn."""
        tenant = incoming.tokens["tenant"]
        job, _, n = request.policy.partition("@")
        async with self.turns.of(tenant):
            version = await self.kv.get(registry.policy_key(tenant, job, int(n)), PolicyVersion)
        if version is None or version.value.retired:
            raise NotFound(f"policy: no {request.policy!r}; `nexus policies` lists yours")
        own = uuid.uuid4().hex  # ids of tenants may be equal
        asked = self.asked[own] = Asked(request.id, asyncio.get_running_loop().create_future())
        try:
            await self.bus.publish(
                # Used by the policy's job, whichever the tenant names: logs of all keep an entry for every name.
                "infer.request", msgspec.structs.replace(request, id=own, job=job), msg_id=f"{tenant}/{own}", tenant=tenant,
                # Its deadline is by the tenant's clock, which may be anywhere.
                deadline=QUEUE_S, headers={REPLY_TO: self.inbox, TIME: incoming.headers.get(TIME, "")[:40]},
            )  # fmt: skip
            reply = await asyncio.wait_for(asked.reply, self.settings.infer_timeout_s)
        except TimeoutError:
            raise Unavailable(f"infer.request: no answer within {self.settings.infer_timeout_s:g} s") from None
        finally:
            del self.asked[own]
        if reply.error:
            raise from_code(reply.error_code, reply.error)
        return msgspec.structs.replace(reply, id=asked.id, group=0, tenants=0)  # who else is there is nobody's business

    async def _answered(self, reply: InferenceReply, _headers: dict[str, str]) -> None:
        asked = self.asked.get(reply.id)
        if asked is not None and not asked.reply.done():
            asked.reply.set_result(reply)


def _joined(chunks: list[UploadChunk]) -> bytes:
    """Their content in order; of pieces that came twice, one."""
    pieces, position = list[bytes](), 0
    for chunk in sorted(chunks, key=lambda one: one.offset):
        if chunk.offset == position:
            pieces.append(chunk.data)
            position += len(chunk.data)
    return b"".join(pieces)


def _call_of(incoming: Incoming) -> str:
    return incoming.subject.split(".", 2)[2]


def _job_of(message: Any) -> str:
    if isinstance(message, PolicyPin):
        return message.policy.partition("@")[0]
    return message.name if isinstance(message, JobSpec) or hasattr(message, "contract") else message.job


async def main(context: Context) -> None:
    """Serve until told to stop."""
    gateway = Gateway(context)
    await gateway.open()
    sweeping = asyncio.create_task(gateway.bridge.sweep())
    context.pulse.state = "running"
    await context.stop.wait()
    sweeping.cancel()


def run(**options: Any) -> int:
    """Entry point of `nexus worker gateway`."""
    return worker.run(ROLE, main, **options)
