"""A seat: one job on one trainer. Its lease, its slot, the records that wait for their batch, and the commit.

The order within a commit is the promise: blobs, then the policy version, then the training state by compare-and-set (the
commit point), then report and event, and only then the acknowledgements. Whatever is cut off is done again with the same ids.
A record that cannot be learned is committed as dead, then becomes a dead letter, and its batch is learned without it.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from nexus_bus import registry, telemetry
from nexus_bus.clock import derive_seed, now
from nexus_bus.errors import Conflict, NexusError, NotFound, Unavailable
from nexus_bus.intake import Intake, dead_record
from nexus_bus.learning.poison import Doubts
from schemas.control import JobReport, Lease
from schemas.job import Ppo
from schemas.plan import JobState
from schemas.policy import PolicyVersion, TrainingState
from schemas.usage import Usage

if TYPE_CHECKING:
    from nexus_bus.learning.group import Member, MemberResult
    from nexus_bus.worker import Context


SAFETENSORS = "application/x-safetensors"
CLOCKS = timedelta(hours=2)  # apart at most, of two machines


@dataclass(kw_only=True, eq=False)
class Seat(Intake):
    """One job being trained here."""

    lease: Lease
    slot: Any  # models.slots.Slot
    algorithm: Any  # learning.algorithms
    executor: Executor
    parking: Any  # learning.parking.Parking
    trained: TrainingState | None = None
    revision: int = 0  # of the registry's training state
    version: int = -1
    used: Usage | None = None
    gone: bool = False  # given up, whatever is still under way
    metrics: dict[str, float] = field(default_factory=dict)
    lag_sum: float = 0.0
    group_sum: float = 0.0
    groups: int = 0
    _lag: float = 0.0

    @classmethod
    async def open(
        cls, context: "Context", state: JobState, lease: Lease, backbone: Any, executor: Executor, parking: Any
    ) -> "Seat":
        """Resume from the last commit, or begin: version 0 is published before anything is learned.

        Raises:
            Refused: the plan does not fit backbone, data or initial policy; the job cannot go on.
        """
        from nexus_bus.learning.start import begin_slot
        from nexus_bus.models.checkpoint import restore_training_state

        bus, kv = context.bus, context.bus.kv("registry")
        plan = state.plan
        tenant, job = plan.tenant, plan.spec.name
        entry = await kv.get(registry.state_key(tenant, job), TrainingState)
        initial: PolicyVersion | None = None
        weights: bytes | None = None
        adapter: bytes | None = None
        if state.init:
            parent, _, n = state.init.partition("@")
            found = await kv.get(registry.policy_key(tenant, parent, int(n)), PolicyVersion)
            if found is None:
                raise NotFound(f"init: no version {state.init!r}")
            initial = found.value
            weights = await bus.blobs.get(initial.weights)
            adapter = await bus.blobs.get(initial.adapter) if initial.adapter is not None else None
        loop = asyncio.get_running_loop()
        slot, algorithm = await loop.run_in_executor(
            executor, begin_slot, state, backbone, derive_seed(plan.spec.seed, "slot"), initial, weights, adapter
        )
        spec = plan.spec.algorithm
        needed = spec.episodes_per_update if isinstance(spec, Ppo) else 1
        seat = cls(
            context=context, tenant=tenant, job=job, state=state, needed=needed, lease=lease, slot=slot, algorithm=algorithm,
            executor=executor, parking=parking,
        )  # fmt: skip
        if entry is not None:
            data = await bus.blobs.get(entry.value.state)
            await loop.run_in_executor(executor, restore_training_state, slot, data)
            await loop.run_in_executor(executor, parking.use, [slot])  # hundreds come back at once after a restart
            seat.trained, seat.revision = entry.value, entry.revision
            seat.learned = seat.committed = entry.value.batches
            seat.version, seat.metrics = entry.value.version, entry.value.metrics
            attempts = [attempt for attempt in lease.attempts if attempt.batch >= seat.learned]
            seat.doubts = Doubts(attempts, entry.value.dead)
            await seat._account(again=True)  # the one before may have died between its commit and its usage or its report
            await seat._report()
        else:
            await seat.commit()
        return seat

    async def give_up(self, condemned: Mapping[int, str]) -> None:
        """Go on without these records of the next batch, each with its reason: committed first, then dead letters.

        Raises:
            Conflict: as `commit`.
        """
        batch = self.waiting[self.learned]
        for index, reason in condemned.items():
            delivery = batch.pop(index)[1]
            dead = dead_record((self.learned, index), delivery, reason)
            self.doubts.dead[self.learned, index] = dead
            self.dying.append((delivery, dead))
        self.guilty = {}
        self.doubts.fresh(self.learned)
        await self.commit()
        while self.dying:
            await self.bury(*self.dying[0])
            self.dying.pop(0)

    def next_work(self) -> "Member":
        """What `begin` decided as work for the group; records in order of their index, whoever came first.

        Raises:
            BadMessage: a record does not fit the contract.
        """
        from nexus_bus.learning.group import Member
        from nexus_bus.learning.start import work_of

        messages = self.messages
        self._lag = sum(_lag(message, self.version) for message in messages)
        public = all(getattr(message, "public", False) for message in messages)  # rollout records are always the tenant's own
        return Member(self.slot, self.algorithm, work_of(self.algorithm, messages, self.slot.contract), public, self.trial)

    def note(self, result: "MemberResult", tenants: int) -> None:
        """Count a learned batch; it is acknowledged at the next commit."""
        self.waiting.pop(self.learned)
        self.uncommitted += self.current
        self.learned += 1
        self.barren = 0
        learned = result.result
        # JSON has no infinity: a ratio that overflowed would make everything that carries it unreadable.
        self.metrics = {k: v for k, v in learned.metrics.items() if math.isfinite(v)} if learned is not None else {}
        before = self.used
        self.used = Usage(
            tenant=self.tenant,
            job=self.job,
            worker=self.context.name,
            kind="training",
            device_s=(before.device_s if before else 0.0) + result.device_s,
            records=(before.records if before else 0) + len(self.current),
            steps=(before.steps if before else 0) + (learned.steps if learned is not None else 0),
            group_sum=(before.group_sum if before else 0) + tenants * len(self.current),
            commit=self.learned,
            time=now(),
        )
        self.lag_sum += self._lag
        self.group_sum += tenants
        self.groups += 1

    def due(self, every: int) -> bool:
        """RL commits every update; SFT every so many steps, at each version and at the end."""
        return self.publishes() or self.learned - self.committed >= every or self.learned >= self.state.plan.batches

    def publishes(self) -> bool:
        """Whether what is learned now is a policy version."""
        spec = self.state.plan.spec.algorithm
        if isinstance(spec, Ppo) or self.learned == 0 or spec is None:
            return True
        return self.learned % spec.publish_every == 0 or self.learned >= self.state.plan.batches

    async def commit(self) -> None:
        """Commit what was learned, publish a version if one is due, then acknowledge.

        Raises:
            Conflict: somebody with a later lease committed first, or the seat was given up meanwhile; nothing was acknowledged.
        """
        bus, kv = self.context.bus, self.context.bus.kv("registry")
        publish = self.publishes() and self.learned >= self.committed and (self.version < 0 or self.learned > self.committed)
        version = self.version + 1 if publish else self.version
        self.slot.version = version  # PPO tells fresh records from stale ones by it
        with telemetry.span("training.commit", root=True, tenant=self.tenant, job=self.job, learned=self.learned):
            state_bytes, files = await asyncio.get_running_loop().run_in_executor(self.executor, self._serialise, publish)
            state_ref = await bus.blobs.put(state_bytes)
            self._require()
            if files is not None and not await self._publish(version, *files):
                state_bytes, _ = await asyncio.get_running_loop().run_in_executor(self.executor, self._serialise, False)
                state_ref = await bus.blobs.put(state_bytes)
            before = self.trained
            trained = TrainingState(
                tenant=self.tenant,
                job=self.job,
                step=self.slot.step,
                batches=self.learned,
                records=self._records(),
                version=version,
                state=state_ref,
                epoch=self.lease.epoch,
                device_s=(before.device_s if before else 0.0) + (self.used.device_s if self.used else 0.0),
                lag_sum=(before.lag_sum if before else 0.0) + self.lag_sum,
                group_sum=(before.group_sum if before else 0.0) + self.group_sum,
                groups=(before.groups if before else 0) + self.groups,
                metrics=self.metrics,
                used=self.used,
                dead=list(self.doubts.dead.values()),
            )
            key = registry.state_key(self.tenant, self.job)
            self._require()
            used, self.used = self.used, None  # whoever releases the seat meanwhile accounts for what is here
            try:
                self.revision = await (kv.create(key, trained) if before is None else kv.update(key, trained, self.revision))
            except NexusError:
                self.used = used
                raise
        self.trained, self.version, self.committed = trained, version, self.learned
        await self._account()
        await self._report()
        acknowledged, self.uncommitted = self.uncommitted, []
        for error in await asyncio.gather(*(delivery.ack() for delivery in acknowledged), return_exceptions=True):
            if isinstance(error, Unavailable):  # it comes again and is recognised by its batch number
                self.context.log.info("not acknowledged yet", tenant=self.tenant, job=self.job, error=str(error))
            elif error is not None:
                raise error
        if before is not None and before.state.sha256 != state_ref.sha256:
            await bus.blobs.delete(before.state)
        self.lag_sum, self.group_sum, self.groups = 0.0, 0.0, 0

    def _require(self) -> None:
        if self.gone:  # whoever gave it up has accounted for what it learned: committing that would charge it twice
            raise Conflict(f"{self.tenant}/{self.job}: the slot was given up during its commit")

    def _serialise(self, publish: bool) -> tuple[bytes, tuple[bytes, bytes | None] | None]:
        """Training state; and, of a version to publish, the weights of head and adapter."""
        from nexus_bus.models.checkpoint import adapter_bytes, training_state_bytes, weights_bytes

        if lost := self.parking.use([self.slot]):
            raise lost[0]
        state = training_state_bytes(self.slot)
        if not publish:
            return state, None
        adapter = adapter_bytes(self.slot.adapter) if self.slot.adapter is not None else None
        return state, (weights_bytes(self.slot.module), adapter)

    async def _publish(self, n: int, weights: bytes, adapter: bytes | None) -> bool:
        """Make a version known. False if there was one of this number, which the slot has now."""
        bus, kv = self.context.bus, self.context.bus.kv("registry")
        ref = await bus.blobs.put(weights, media_type=SAFETENSORS)
        adapter_ref = await bus.blobs.put(adapter, media_type=SAFETENSORS) if adapter is not None else None
        parent = f"{self.job}@{n - 1}" if n > 0 else (self.state.init or None)
        policy = PolicyVersion(
            id=f"{self.job}@{n}",
            tenant=self.tenant,
            job=self.job,
            n=n,
            parent=parent,
            contract=self.slot.contract,
            weights=ref,
            adapter=adapter_ref,
            created=now(),
            step=self.slot.step,
            records=self._records(),
            seed=self.state.plan.spec.seed,
            metrics=self.metrics,
            trace=self._trace() or telemetry.current_traceparent(),
        )
        key = registry.policy_key(self.tenant, self.job, n)
        start, own = time.time_ns(), True
        try:
            await kv.create(key, policy)
            # Content that was there already may have gone with the last version that named it, just before this one did.
            await bus.blobs.put(weights, media_type=SAFETENSORS)
            if adapter is not None:
                await bus.blobs.put(adapter, media_type=SAFETENSORS)
        except Conflict:
            # A holder that died between version and commit left it. The replay comes to the same weights where that holds to
            # the bit; elsewhere (the fast profile, another processor) the version counts, for others have acted with it. A
            # holder that is stale itself ends at its commit.
            known = await kv.get(key, PolicyVersion)
            if known is None:
                raise Conflict(f"{policy.id} was published by another trainer and is gone again") from None
            own = (known.value.weights, known.value.adapter) == (ref, adapter_ref)
            if not own:
                await self._adopt(known.value)
        for delivery in self.current:
            telemetry.record_span(
                "policy.publish", start, time.time_ns(), parent=delivery.headers.get("traceparent", ""),
                attributes={"policy": policy.id, "step": self.slot.step},
            )  # fmt: skip
        await self.context.event(
            "policy.published", self.tenant, job=self.job, key=f"policy/{n}", message=policy.id,
            data={"version": n, "step": self.slot.step, **{k: float(v) for k, v in self.metrics.items()}},
        )  # fmt: skip
        return own

    async def _adopt(self, version: PolicyVersion) -> None:
        from nexus_bus.models.checkpoint import load_adapter, load_weights

        blobs = self.context.bus.blobs
        weights = await blobs.get(version.weights)
        adapter = await blobs.get(version.adapter) if version.adapter is not None else None

        def load() -> None:
            self.parking.use([self.slot])
            load_weights(self.slot.module, weights)
            if adapter is not None:
                load_adapter(self.slot.adapter, adapter)

        await asyncio.get_running_loop().run_in_executor(self.executor, load)
        self.context.log.warning("a version was there already, and is gone on with", tenant=self.tenant, policy=version.id)

    def _records(self) -> int:
        """Learned so far. Not what waits for its acknowledgement: a record that was sent twice does so twice."""
        return (self.trained.records if self.trained else 0) + (self.used.records if self.used else 0)

    def _trace(self) -> str:
        """Of the last record that made the version: its trace reaches from the environment's step to the publication."""
        return self.current[-1].headers.get("traceparent", "") if self.current else ""

    async def _account(self, *, again: bool = False) -> None:
        """Publish what the last commit owes. `again`: unless it is there, since the stream remembers ids for minutes alone."""
        used = self.trained.used if self.trained is not None else None
        if used is None:
            return
        bus, msg_id = self.context.bus, f"{self.tenant}/{self.job}/training/{self.committed}"
        if again:
            since = datetime.fromisoformat(used.time) - CLOCKS
            async for item in bus.tail("usage", since=since, follow=False, tenant=self.tenant, job=self.job):
                if max(record.commit for record in (item.message, *item.message.earlier)) >= used.commit:
                    return
        await bus.publish("usage", used, msg_id=msg_id, tenant=self.tenant, job=self.job)

    async def _report(self) -> None:
        finished = self.learned >= self.state.plan.batches
        trained = self.trained
        metrics = dict(self.metrics)
        if trained is not None and trained.records:
            metrics |= {
                "records": float(trained.records),
                "lag": trained.lag_sum / trained.records,
                "group": trained.group_sum / max(1, trained.groups),
                "train_device_s": trained.device_s,
            }
        if trained is not None and trained.dead:
            metrics["dead"] = float(len(trained.dead))
        report = JobReport(
            job=self.job, kind="trained" if finished else "learned", batches=self.learned, version=self.version, metrics=metrics
        )
        await self.context.bus.publish(
            "job.report", report, msg_id=f"{self.tenant}/{self.job}/learned/{self.learned}/{self.lease.epoch}",
            tenant=self.tenant, job=self.job,
        )  # fmt: skip

    async def close(self) -> None:
        """Stop receiving and hand back what was not committed."""
        if self.receiver is not None:
            self.receiver.cancel()
        if self.puller is not None:
            await self.puller.stop()
        await asyncio.get_running_loop().run_in_executor(self.executor, self.parking.drop, self.slot)
        for delivery in list(self.held()):
            await delivery.nak(0.0)


def _lag(message: Any, version: int) -> int:
    """Versions between the one that made a record and the one that learns it; an SFT batch was made by none and never lags."""
    policy = getattr(message, "policy", "")
    return version - int(policy.rpartition("@")[2]) if policy else 0
