"""Rehearse a crash: a plan in a file, named by NEXUS_FAULTS, says where a worker is to die or to stand still. Without: nothing.

One line a fault: WORKER POINT N ACTION. It happens once, to the first process that comes to the point for the N-th time since
it read the line; then it is noted in FILE.done, with the time and the process, and never happens again.

    trainer    after-write/state           3  kill        # after the third commit, before anything is acknowledged
    rollout-1  after-publish/train.record  1  freeze 5    # the record is out, its order is not acknowledged
    master     after-write                 20 kill

WORKER is a role or a worker's name. POINT is one of POINTS, with the beginning of what it is about behind a slash or without:
the name of a message in schemas/subjects.py, or a key of the registry (`policy`, `state.acme.pick`) or the leases (`slot`).
Lines may be added while workers run: for them too the plan has to be set when they start, the file may be empty then.
"""

import fcntl
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import structlog

from nexus_bus.errors import Refused
from nexus_bus.nearest import nearest

FILE = "NEXUS_FAULTS"
POINTS = {
    "before-handle": "a message of a queue was taken, and nothing done about it yet",
    "after-handle": "it is done, and not acknowledged",
    "after-ack": "it is acknowledged",
    "before-call": "a request came in (a session's step, an order to a host), and nothing was done about it yet",
    "after-call": "it is done, and not answered",
    "after-compute": "a grouped forward or step is done, and nothing of it is stored or answered",
    "after-cast": "an answer that no stream keeps is handed to the connection (infer.reply)",
    "after-publish": "a stream has taken a message",
    "after-write": "a key of the registry or the leases is written: `state` is a trainer's commit, `policy` a version",
    "after-blob": "content is in the object store, and nobody refers to it yet",
}


@dataclass(frozen=True)
class Fault:
    """One line."""

    number: int  # in the file, from 1
    worker: str  # or a role
    point: str
    about: str  # how that begins which the point is about
    occurrence: int
    freeze_s: float | None  # None: kill


class Plan:
    """What is to happen to this process. Follows the file."""

    def __init__(self, path: Path, role: str, worker: str) -> None:
        """Raises Refused if a line says nothing that can be done."""
        self.path, self.done = path, path.with_name(f"{path.name}.done")
        self.names = (role, worker)
        self.worker = worker
        self._seen = -1  # bytes of the file
        self._faults: list[Fault] = []
        self._reached: Counter[int] = Counter()  # fault's number → times its point was reached
        self.read()

    def read(self) -> None:
        """Read it again if it has grown. Raises Refused."""
        size = self.path.stat().st_size
        if size == self._seen:
            return
        self._seen = size
        text = self.path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
        found = [parse(number, line) for number, line in enumerate(lines, 1) if line.partition("#")[0].strip()]
        happened = self.happened()
        self._faults = [fault for fault in found if fault.worker in self.names and fault.number not in happened]

    def happened(self) -> set[int]:
        """Numbers of the lines that are done."""
        text = self.done.read_text() if self.done.is_file() else ""
        return {int(line.split()[0]) for line in text.splitlines()}

    def reached(self, point: str, about: str) -> None:
        """This process is at a point; what is planned for it happens now."""
        try:
            self.read()
        except (OSError, Refused) as error:  # it was fine when we started; who is rehearsing looks into the log
            structlog.get_logger().error("the plan of faults cannot be read", error=str(error))
        for fault in [fault for fault in self._faults if fault.point == point and about.startswith(fault.about)]:
            self._reached[fault.number] += 1
            if self._reached[fault.number] >= fault.occurrence:
                self._faults.remove(fault)
                if self._claim(fault):
                    self._happen(fault, f"{point}/{about}" if about else point)

    def _claim(self, fault: Fault) -> bool:
        """Note that it happens here; False if another process was faster."""
        with self.done.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if fault.number in self.happened():
                return False
            file.write(f"{fault.number} {time.time():.3f} {self.worker} {os.getpid()}\n")
        return True

    def _happen(self, fault: Fault, where: str) -> None:
        structlog.get_logger().warning("planned fault", line=fault.number, where=where, freeze_s=fault.freeze_s)
        if fault.freeze_s is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            time.sleep(fault.freeze_s)  # the loop stands still, and with it heartbeats and acknowledgements


_plan: Plan | None = None


def start(role: str, worker: str) -> None:
    """Begin to follow the plan that the environment names, if it names one. Raises Refused if it cannot be followed."""
    global _plan  # noqa: PLW0603 - as the environment it comes from, it is of the whole process
    given = os.environ.get(FILE)
    if given and not Path(given).is_file():
        raise Refused(f"{FILE}: {given} is no file; write one with a line per fault, or an empty one to add to")
    _plan = Plan(Path(given), role, worker) if given else None


def at(point: str, about: str = "") -> None:
    """This process is at a point. Called on the event loop."""
    if _plan is not None:
        _plan.reached(point, about)


def parse(number: int, line: str) -> Fault:
    """One line of a plan. Raises Refused, naming what is wrong with it."""
    words = line.partition("#")[0].split()
    where = f"{FILE} line {number}"
    if len(words) < 4:
        raise Refused(f"{where}: {line.strip()!r} is not WORKER POINT N ACTION, e.g. `trainer after-write/state 1 kill`")
    worker, place, times, action, *rest = words
    point, _, about = place.partition("/")
    if point not in POINTS:
        raise Refused(f"{where}: no point {point!r}{nearest(point, POINTS)}")
    if not times.isdecimal() or int(times) < 1:
        raise Refused(f"{where}: N is {times!r}, not a whole number from 1")
    if (action, len(rest)) == ("kill", 0):
        return Fault(number, worker, point, about, int(times), None)
    try:
        if action == "freeze" and len(rest) == 1 and float(rest[0]) > 0:
            return Fault(number, worker, point, about, int(times), float(rest[0]))
    except ValueError:
        pass
    raise Refused(f"{where}: the action is {' '.join(words[3:])!r}; there are `kill` and `freeze SECONDS`")
