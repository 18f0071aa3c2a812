"""Recordings of a scripted expert, each in a process of its own, for as long as its job wants it. Below workers/environment.py.

A recording rests when its job does: what it has stays on the disk, and the order that resuming hands out goes on from there:
no episode that was kept is played, or paid for, twice. Of one tenant a few run at a time; the others wait and hold no slot.
"""

import asyncio
import hashlib
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from nexus_bus import registry, shelf, uploads
from nexus_bus.bus import die_with_parent
from nexus_bus.data.writer import partial, resting
from nexus_bus.envs.host import held
from nexus_bus.errors import EnvironmentFault, NexusError, Refused
from nexus_bus.usage import Tally
from nexus_bus.worker import Context
from schemas.environment import PrepareOrder
from schemas.plan import TERMINAL, JobState

LOOK_S = 1.0  # between looks whether a recording is still wanted, and may go on
REST_S = 10.0  # that one has to end the step or the episode's writing that it is at; then it is killed
SHARE = 4  # the part of all slots that one tenant's recordings may hold
SWEEP_S = 60.0


class Recordings:
    """Those of one worker."""

    def __init__(self, context: Context, used: Tally) -> None:
        """By the settings of an environment worker; `used` is told for how long simulators were held."""
        self.root, self.memory = Path(context.config.data_root), int(context.config.memory_gb * 1e9)
        self.kv, self.pulse, self.log, self.used = context.bus.kv("registry"), context.pulse, context.log, used
        self.waiting = 0  # orders in hand that hold no slot
        each = max(1, context.config.feeds // SHARE)
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(each))

    async def record(self, order: PrepareOrder, path: Path) -> bool:
        """Record a dataset; False if its job wants none (any more), or not now.

        Raises:
            Refused: it takes more memory than a simulator may, or the disk is full.
            EnvironmentFault: it failed.
        """
        async with self._turn(order.tenant):
            if (phase := await self._over(order)) is not None:
                self.log.info("not recorded", job=order.job, phase=phase)
                return False
            return await self._record(order, path)

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        turn = self._turns[tenant]
        self.waiting += 1
        self.pulse.busy -= 1  # who waits for the tenant's others is not wedged
        try:
            await turn.acquire()
        finally:
            self.waiting -= 1
            self.pulse.busy += 1
        try:
            yield
        finally:
            turn.release()

    async def _record(self, order: PrepareOrder, path: Path) -> bool:
        asked = msgspec.json.encode([order.environment, order.expert])
        key = f"{order.job}/{hashlib.sha256(asked).hexdigest()}"
        document = {"environment": order.environment, "expert": order.expert, "root": str(path), "key": key}
        # A child, because simulators are native code: if it dies, this worker and its sessions live.
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nexus_bus.data.record", msgspec.json.encode(document).decode(),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 20,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )  # fmt: skip
        reading = asyncio.create_task(self._follow(child))
        looked = time.monotonic()
        try:
            while not (await asyncio.wait({reading}, timeout=LOOK_S))[0]:
                looked = self._charge(order, looked)
                if (phase := await self._over(order)) is not None:
                    if phase not in TERMINAL:
                        child.send_signal(signal.SIGTERM)
                        await asyncio.wait({reading}, timeout=REST_S)
                    self.log.info("recording stopped", job=order.job, phase=phase)
                    return False
                await asyncio.to_thread(self._check, child.pid, path)
            last, complaint = reading.result()
        finally:
            self._charge(order, looked)
            reading.cancel()
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode != 0:
            tail = complaint.strip().splitlines()[-1:] or ["no output"]
            self.log.error("recording failed", stderr=complaint[-4000:])
            raise EnvironmentFault(f"recording demonstrations ended with code {child.returncode}: {tail[0]}")
        self.log.info("recorded", job=order.job, info=last)
        return True

    async def _follow(self, child: asyncio.subprocess.Process) -> tuple[str, str]:
        """Its last line, and what it complained of; once it has ended."""
        if child.stdout is None or child.stderr is None:  # both are pipes, by the call above
            raise EnvironmentFault("recording demonstrations has no output to follow")
        complaints, last = asyncio.create_task(child.stderr.read()), b""
        try:
            async for line in child.stdout:
                last = line
                self.pulse.progress += 1  # a long recording is not a wedged worker
            await child.wait()
            return last.decode(errors="replace").strip(), (await complaints).decode(errors="replace")
        finally:
            complaints.cancel()

    def _charge(self, order: PrepareOrder, since: float) -> float:
        """Note for how long its simulator was held since the last look; the time now."""
        self.used.add(order.tenant, order.job, session_s=(clock := time.monotonic()) - since)
        return clock

    async def _over(self, order: PrepareOrder) -> str | None:
        """What its job is in, if an order is no longer to be followed: its end, a pause, or what came after one."""
        entry = await self.kv.get(registry.job_key(order.tenant, order.job), JobState)
        if entry is None:
            return None
        state = entry.value
        # An order goes out before the state that counts it: one that is ahead of the state follows a pause that is over.
        old = state.resumed > order.resumed or (state.phase == "paused" and state.resumed == order.resumed)
        return state.phase if old or state.phase in TERMINAL else None

    def _check(self, pid: int, path: Path) -> None:
        try:
            taken = held(psutil.Process(pid), self.memory)
        except psutil.Error:  # it has just ended
            taken = 0
        if taken > self.memory:
            raise Refused(
                f"data.expert: recording held {taken / 1e9:.2f} GB of memory, more than its limit of "
                f"{self.memory / 1e9:.2f} GB (memory_gb); an episode is held until it ends: choose smaller pictures"
            )
        if uploads.room(path.parent) <= 0:
            raise Refused("data.expert: the disk of the service is full; ask the provider, or drop datasets you no longer need")

    async def sweep(self) -> None:
        """Clear away what rests for jobs that have ended, and what killed recordings left; until cancelled."""
        while True:
            for path in await asyncio.to_thread(self._unfinished):
                try:
                    if not await self._rests(path):
                        await asyncio.to_thread(self._clear, path)
                except (NexusError, OSError) as error:  # somebody writes it, or it is tried again
                    self.log.info("what is left of a recording stays", dataset=path.name, error=str(error))
            await asyncio.sleep(SWEEP_S)

    def _unfinished(self) -> list[Path]:
        """Datasets whose hidden folders are there."""
        found = (one for depth in ("*/.*.partial", "*/*/.*.partial") for one in self.root.glob(depth))
        return [one.with_name(one.name.removeprefix(".").removesuffix(".partial")) for one in found]

    async def _rests(self, path: Path) -> bool:
        rest = await asyncio.to_thread(resting, path)
        job = rest.whose.partition("/")[0] if rest is not None else ""
        if not job:
            return False
        tenant = path.relative_to(self.root).parts[0]
        entry = await self.kv.get(registry.job_key(tenant, job), JobState)
        return entry is not None and entry.value.phase not in TERMINAL

    def _clear(self, path: Path) -> None:
        with shelf.placing(path.parent, path.name):  # else it is being written right now
            shutil.rmtree(partial(path), ignore_errors=True)
