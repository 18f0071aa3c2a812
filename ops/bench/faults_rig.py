"""A whole service whose parts are killed, frozen and cut off: real processes under their real supervisor, on a real server.

Shared by `make bench-faults` and the tests of chaos. `house` is the service, `Outcome` what a job came to: to be compared with
the same job's in peace.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from nexus_bus import children, faults, host, registry
from nexus_bus.bus import Bus, Delivery, EmbeddedServer, training_durable
from nexus_bus.client import Client
from nexus_bus.errors import NexusError, Unavailable
from nexus_bus.host import Supervisor
from nexus_bus.ledger import Ledger
from ops.bench.faults_proxy import Proxy
from schemas.control import Heartbeat, Role
from schemas.job import DataSpec, EnvironmentSpec, ExpertSpec, HeadSpec, JobSpec, Ppo, Sft
from schemas.plan import TERMINAL, JobState
from schemas.policy import PolicyVersion, TrainingState

COUNTS: dict[Role, int] = {
    "master": 1, "health": 1, "gateway": 1, "environment": 1, "inference": 1, "trainer": 1, "rollout": 2
}  # fmt: skip
# Nobody is left alone after many restarts here, and a busy machine must not be taken for a dead one.
SETTINGS = {"NEXUS_HEALTH_LOOP_LIMIT": "10000", "NEXUS_HEALTH_BACKOFF_S": "0.01", "NEXUS_HEALTH_MISSED": "20"}
BEAT_S = 0.5
START_S = 180.0
NOBODY = "-"  # in the place of the worker: the fault was withdrawn
HEAD = HeadSpec(horizon=4, options={"width": 16, "blocks": 1, "value_width": 8})
SCENE = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1, "max_steps": 12, "reward": "dense"})


def rl(name: str, updates: int = 3, episodes: int = 4) -> JobSpec:
    """A job of seconds; of the same size, the same numbers whatever its name."""
    algorithm = Ppo(updates=updates, episodes_per_update=episodes, minibatch=16, epochs=2)
    return JobSpec(kind="rl", name=name, head=HEAD, environment=SCENE, algorithm=algorithm, seed=3)


def sft(name: str, steps: int = 24) -> JobSpec:
    """A job of seconds; of the same size, the same numbers whatever its name."""
    algorithm = Sft(steps=steps, batch_size=4, publish_every=6)
    data = DataSpec(expert=ExpertSpec(episodes=2))
    return JobSpec(kind="sft", name=name, head=HEAD, environment=SCENE, data=data, algorithm=algorithm, seed=3)


def size(spec: JobSpec) -> int:
    """Records that a job learns."""
    algorithm = spec.algorithm
    return algorithm.updates * algorithm.episodes_per_update if isinstance(algorithm, Ppo) else cast(Sft, algorithm).steps


@dataclass(frozen=True)
class Outcome:
    """What a job came to. Equal ones are equal to the bit."""

    phase: str
    reason: str
    expected: int  # records that were to be published
    learned: int
    dead: int
    used_records: int  # by its usage
    used_steps: int
    weights: tuple[str, ...]  # sha256 of each version's
    state: str  # digest of weights, optimizer, generator and counters

    @property
    def lost(self) -> int:
        """Records that were neither learned nor given up."""
        return max(0, self.expected - self.learned - self.dead)

    @property
    def twice(self) -> int:
        """Records that were learned or charged once more."""
        return max(0, self.learned + self.dead - self.expected, self.used_records - self.learned)

    @property
    def numbers(self) -> tuple[str, ...]:
        """What must be equal to the bit."""
        return (*self.weights, self.state)


async def outcome(bus: Bus, tenant: str, spec: JobSpec) -> Outcome:
    """Read it from the registry, the object store and the usage."""
    kv, job = bus.kv("registry"), spec.name
    entry = await kv.get(registry.job_key(tenant, job), JobState)
    trained = await kv.get(registry.state_key(tenant, job), TrainingState)
    assert entry is not None
    versions = (await kv.entries(registry.policies_prefix(tenant, job), PolicyVersion)).values()
    ledger = Ledger(("kind",))
    async for item in bus.tail("usage", follow=False, tenant=tenant, job=job):
        ledger.take(item.message)
    training = [row for row in ledger.rows() if row["kind"] == "training"]
    return Outcome(
        phase=entry.value.phase,
        reason=entry.value.reason,
        expected=size(spec),
        learned=trained.value.records if trained else 0,
        dead=len(trained.value.dead) if trained else 0,
        used_records=sum(row["records"] for row in training),
        used_steps=sum(row["steps"] for row in training),
        weights=tuple(v.value.weights.sha256 for v in sorted(versions, key=lambda v: v.value.n)),
        state=_digest(await bus.blobs.get(trained.value.state)) if trained else "",
    )


def _digest(state: bytes) -> str:
    """Of a training state, whoever owns it."""
    end = 8 + int.from_bytes(state[:8], "little")
    header = json.loads(state[8:end])
    counters = json.loads(header["__metadata__"].pop("nexus"))
    del counters["owner"]
    return hashlib.sha256(json.dumps([header, counters], sort_keys=True).encode() + state[end:]).hexdigest()


async def ended(bus: Bus, tenant: str, job: str, within: float = 120.0) -> JobState:
    """Wait until a job has ended, and all that ends with it is done. Raises TimeoutError with its state."""
    ends, state = time.monotonic() + within, None
    while time.monotonic() < ends:
        with contextlib.suppress(Unavailable, TimeoutError):
            entry = await bus.kv("registry").get(registry.job_key(tenant, job), JobState)
            state = entry.value if entry else None
            if state is not None and state.phase in TERMINAL and state.closed:
                return state
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{tenant}/{job} has not ended within {within:g} s: {state}")


@dataclass
class Hurt:
    """A fault that happened, and how long its role was away."""

    role: str
    how: str
    at: float  # unix time
    worker: str = ""  # "": the server
    pid: int = 0  # of the process that it happened to
    back_s: float | None = None  # from there to the next progress


@dataclass
class House:
    """A running service."""

    home: Path
    server: EmbeddedServer
    supervisor: Supervisor
    bus: Bus  # the provider's, past the proxy
    proxy: Proxy | None
    hurt: list[Hurt] = field(default_factory=list)
    beats: dict[str, Heartbeat] = field(default_factory=dict)
    lines: int = 0
    noted: set[int] = field(default_factory=set)
    planned: list[str] = field(default_factory=list)
    committed: int = 0  # times that a trainer has committed

    def client(self, tenant: str) -> Client:
        """A tenant, through the gateway."""
        return Client(self.bus, tenant)

    async def submit(self, tenant: str, spec: JobSpec, within: float = 60.0) -> None:
        """Send a job, again until somebody answers: it is one submission."""
        ends, name = time.monotonic() + within, uuid.uuid4().hex
        while True:
            try:
                await self.client(tenant).submit(spec, submission=name)
            except Unavailable:
                if time.monotonic() > ends:
                    raise
            else:
                return

    async def run(self, tenant: str, spec: JobSpec, within: float = 120.0) -> Outcome:
        """One job from its beginning to its end."""
        await self.submit(tenant, spec)
        await ended(self.bus, tenant, spec.name, within)
        return await outcome(self.bus, tenant, spec)

    # Faults

    def plan(self, *lines: str) -> list[int]:
        """Add lines to the plan of faults; their numbers."""
        with (self.home / "faults").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        self.planned += lines
        self.lines += len(lines)
        return list(range(self.lines - len(lines) + 1, self.lines + 1))

    def note(self) -> list[Hurt]:
        """Faults of the plan that have happened since the last look."""
        path, new = self.home / "faults.done", list[Hurt]()
        for line in path.read_text().splitlines() if path.is_file() else ():
            number, at, worker, pid = line.split()
            if int(number) not in self.noted and worker != NOBODY:
                self.noted.add(int(number))
                how = " ".join(self.planned[int(number) - 1].split()[1:])
                new.append(Hurt(worker.rpartition("-")[0], how, float(at), worker, int(pid)))
        self.hurt += new
        return new

    def withdraw(self, numbers: Iterable[int]) -> None:
        """Lines that have not happened are not to happen any more."""
        with (self.home / "faults.done").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            happened = {int(line.split()[0]) for line in file}
            file.writelines(f"{number} {time.time():.3f} {NOBODY} 0\n" for number in numbers if number not in happened)

    def kill(self, worker: str) -> Hurt | None:
        """`kill -9`, wherever it is. None if it is not running."""
        child = self.supervisor.children[worker]
        if not child.running:
            return None
        hurt = Hurt(child.role, "kill", time.time(), worker, child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        self.hurt.append(hurt)
        return hurt

    async def restart_server(self, away_s: float = 0.2) -> Hurt:
        """`kill -9` of the server; it comes back with the same data."""
        hurt = Hurt("broker", "kill", time.time())
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()
        await asyncio.sleep(away_s)
        self.server.start()
        self.hurt.append(hurt)
        return hurt

    async def freeze_server(self, seconds: float) -> Hurt:
        """It holds its connections and says nothing for so long."""
        hurt = Hurt("broker", f"freeze {seconds:g}", time.time())
        pid = self.server.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        self.hurt.append(hurt)
        return hurt

    async def beat(self, beat: Heartbeat, _tokens: dict[str, str]) -> None:
        """A sign of life: of who was hurt, maybe the first that it goes on."""
        before = self.beats.get(beat.worker)
        self.beats[beat.worker] = beat
        for hurt in self.hurt:
            if hurt.back_s is not None or beat.time < hurt.at or beat.state != "running":
                continue
            same = before is not None and before.pid == beat.pid
            moved = beat.progress > (before.progress if same and before else 0) or not beat.busy  # or it has nothing to do
            if hurt.worker in (beat.worker, "") and moved and ("freeze" in hurt.how or beat.pid != hurt.pid):
                hurt.back_s = time.time() - hurt.at

    async def follow(self) -> None:
        """Count commits."""
        async for _ in self.bus.kv("registry").watch("state.", TrainingState):
            self.committed += 1

    def well(self, role: str = "") -> bool:
        """Whether everybody of a role, or of all, has recovered."""
        return all(hurt.back_s is not None for hurt in self.hurt if role in ("", hurt.role))


@asynccontextmanager
async def house(
    home: Path,
    *,
    counts: Mapping[Role, int] | None = None,
    cut: bool = False,
    settings: Mapping[str, str] | None = None,
    say: host.Say = lambda _: None,
    spare: bool = False,
    server: EmbeddedServer | None = None,
) -> AsyncIterator[House]:
    """A service in `home`, which exists. `cut`: behind a proxy that can part it from the server. `spare`: with a spare process,
    as `nexus up` keeps one. `server`: one that runs already, and goes on when the service ends.

    Must run on the main thread: the server dies with the thread that started it.
    """
    (home / "faults").touch()
    given = {**SETTINGS, "NEXUS_BEAT_S": str(BEAT_S), faults.FILE: str(home / "faults"), **(settings or {})}
    own = server is None
    server = server or EmbeddedServer(home / "nats", port=free_port()).start()
    allowed, children.STARTS_PER_MINUTE = children.STARTS_PER_MINUTE, 10_000
    try:
        bus = await Bus.connect(server.url, name="rig", creds=server.creds)
        proxy = await Proxy(server.url).start() if cut else None
        url = proxy.url if proxy else server.url
        supervisor = Supervisor(home, url, creds=server.creds, say=say, spare=spare, settings=given)
        here = House(home, server, supervisor, bus, proxy)
        stop = asyncio.Event()
        running = asyncio.create_task(supervisor.run(counts or COUNTS, stop))
        following = asyncio.create_task(here.follow())
        listening = await bus.subscribe("health.beat", here.beat, role="*", worker="*")
        try:
            async with asyncio.timeout(START_S):
                while len(here.beats) < sum((counts or COUNTS).values()) or any(
                    beat.state != "running" for beat in here.beats.values()
                ):
                    if running.done():
                        running.result()
                    await asyncio.sleep(0.1)
            yield here
        finally:
            if proxy:
                proxy.join()
            following.cancel()
            stop.set()
            await running
            await listening.stop()
            if proxy:
                await proxy.stop()
            await bus.close()
    finally:
        children.STARTS_PER_MINUTE = allowed
        if own:
            server.stop()


def free_port() -> int:
    """A port nobody listens on, and that no connection is given: the server that has it is restarted."""
    while True:
        port = random.randrange(18_000, 32_000)  # noqa: S311 - below the range from which the kernel takes
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@asynccontextmanager
async def meddling(bus: Bus, tenant: str, job: str, seed: int) -> AsyncIterator[dict[str, int]]:
    """Somebody who takes records out of a job's queue, sends some of them a second time under another id, and hands all of
    them back later and in another order. What it has done so far: `taken`, `doubled`.
    """
    draw, did = random.Random(seed), {"taken": 0, "doubled": 0}  # noqa: S311 - to draw faults, not keys

    async def twice(delivery: Delivery) -> None:
        given = {**delivery.headers, "Nats-Msg-Id": f"{delivery.msg_id}/twice/{uuid.uuid4().hex}"}
        with contextlib.suppress(NexusError):
            await bus.publisher.send(delivery.subject, delivery.raw, given, 5.0)
            did["doubled"] += 1

    async def meddle() -> None:
        # The consumer is there once the job has begun; of one that was made here nobody would know the job.
        while training_durable(tenant, job).name not in (await bus.depths()).get("TRAINING", {}):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        puller = await bus.pull(training_durable(tenant, job), batch=8)
        try:
            while True:
                taken = await puller.get(8, wait=0.5)
                draw.shuffle(taken)
                did["taken"] += len(taken)
                for delivery in taken:
                    if not did["doubled"] or draw.random() < 0.3:
                        await twice(delivery)
                    await delivery.nak(draw.uniform(0.01, 0.5))
                await asyncio.sleep(draw.uniform(0.05, 0.3))
        finally:
            await puller.stop()

    task = asyncio.create_task(meddle())
    try:
        yield did
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NexusError):
            await task
