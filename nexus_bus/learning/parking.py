"""Where slots wait that nobody steps right now: hundreds of jobs hold a seat, those at work are resident, the others parked.

A parked slot keeps its objects and loses its numbers, to host memory or disk; it gets them back, to the bit, when it is used.
"""

import contextlib
import os
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import structlog

from nexus_bus.errors import Unreadable
from nexus_bus.models.checkpoint import restore_training_state, training_state_bytes
from nexus_bus.models.slots import Slot

log: Any = structlog.get_logger()


class Parking:
    """Bounds the bytes of resident slots, least recently used first. Called on the compute thread."""

    def __init__(self, resident_bytes: int, host_bytes: int = 0, directory: Path | None = None) -> None:
        """Parked slots fill `host_bytes` of memory first, then go to the directory; without one, all of them stay in memory."""
        self.resident_bytes, self.host_bytes, self.directory = resident_bytes, host_bytes, directory
        self._resident: OrderedDict[int, Slot] = OrderedDict()
        self._parked: dict[int, bytes | Path] = {}
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                _sweep(directory)
            except OSError as error:  # memory will do
                log.warning("slots are parked in memory alone", directory=str(directory), error=str(error))
                self.directory = None

    def use(self, slots: Sequence[Slot]) -> dict[int, Unreadable]:
        """Make slots resident, then park others until the bound holds again; those in use may pass it.

        Returns:
            By position in `slots`: what could not be read back.
        """
        lost: dict[int, Unreadable] = {}
        for position, slot in enumerate(slots):
            try:
                self._fetch(slot)
            except Unreadable as error:
                lost[position] = error
                continue
            self._resident[id(slot)] = slot
            self._resident.move_to_end(id(slot))
        busy = {id(slot) for slot in slots}
        for key, slot in list(self._resident.items()):
            if self.used <= self.resident_bytes:
                break
            if key not in busy:
                self._park(slot)
        return lost

    def drop(self, slot: Slot) -> None:
        """Forget a slot whose seat is given up."""
        self._resident.pop(id(slot), None)
        if isinstance(kept := self._parked.pop(id(slot), None), Path):
            kept.unlink(missing_ok=True)

    @property
    def used(self) -> int:
        """Bytes of resident slots."""
        return sum(slot.nbytes for slot in self._resident.values())

    @property
    def parked(self) -> int:
        """Slots that are not resident."""
        return len(self._parked)

    def _park(self, slot: Slot) -> None:
        data = training_state_bytes(slot)
        held = sum(len(kept) for kept in self._parked.values() if isinstance(kept, bytes))
        kept: bytes | Path = data
        if self.directory is not None and held + len(data) > self.host_bytes:
            path = self.directory / f"{os.getpid()}-{uuid.uuid4().hex}.safetensors"
            try:
                path.write_bytes(data)
                kept = path
            except OSError:  # a full disk: it stays where it is, and the bound is passed
                with contextlib.suppress(OSError):
                    path.unlink()
                return
        self._parked[id(slot)] = kept
        self._resident.pop(id(slot), None)
        slot.empty()

    def _fetch(self, slot: Slot) -> None:
        kept = self._parked.pop(id(slot), None)
        if kept is None:
            return
        try:
            data = kept if isinstance(kept, bytes) else kept.read_bytes()
            slot.refill()
            restore_training_state(slot, data)
        except Exception as error:
            raise Unreadable(f"{slot.tenant}/{slot.job}: its parked slot cannot be read back ({error})") from error
        finally:
            if isinstance(kept, Path):
                kept.unlink(missing_ok=True)


def _sweep(directory: Path) -> None:
    """Remove what trainers left that were killed; their jobs went on from their commits."""
    for path in directory.glob("*-*.safetensors"):
        owner = path.name.partition("-")[0]
        if owner.isdecimal() and not (psutil.pid_exists(int(owner)) and int(owner) != os.getpid()):
            path.unlink(missing_ok=True)
