"""Policy versions as a cache: those in use ready to act, the others as bytes in memory or on disk, all else on the bus.

Beside the line, in an inference worker. A loader thread fills it while the compute thread acts: who holds a slot holds a
pointer to something that never changes, so what is dropped meanwhile disturbs nobody.
"""

import contextlib
import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nexus_bus.models.slots import PolicySlot
from schemas.base import BlobRef
from schemas.policy import PolicyVersion

KNOWN = 4096  # versions whose record is remembered, so that they are paged in without the bus
_PAGE = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.\d+")  # a file, and one that is being written
Key = tuple[str, str]  # tenant, version: names of two tenants may agree
Build = Callable[[PolicyVersion, bytes, bytes | None], PolicySlot]


class Pages:
    """Weights by their sha256, bounded: in host memory, below it one file each, shared by the workers of a host."""

    def __init__(self, directory: Path | None = None, disk_bytes: int = 1 << 30, memory_bytes: int = 0) -> None:
        """Without a directory nothing lies on disk; without memory_bytes the files alone are kept, as best on a CPU."""
        self.directory = directory
        self.disk_used = 0
        self.memory_used = 0
        self._disk_bytes, self._memory_bytes = disk_bytes, memory_bytes
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        if directory is not None:
            with contextlib.suppress(OSError):  # what cannot be kept there is fetched again
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._trim()

    def get(self, ref: BlobRef) -> bytes | None:
        """The content, or None. A file that is not what its name says is dropped: the bus has it too."""
        with self._lock:
            if (data := self._memory.get(ref.sha256)) is not None:
                self._memory.move_to_end(ref.sha256)
                return data
        if self.directory is None:
            return None
        path = self.directory / ref.sha256
        try:
            data = path.read_bytes()
            os.utime(path)  # recently used
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            self._unlink(path)
            return None
        self._remember(ref.sha256, data)
        return data

    def put(self, ref: BlobRef, data: bytes) -> None:
        """Keep content. A full disk is not an error: it is fetched again."""
        self._remember(ref.sha256, data)
        if self.directory is None or len(data) > self._disk_bytes:
            return
        path = self.directory / ref.sha256
        aside = self.directory / f".{ref.sha256}.{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # somebody may have taken it away
            aside.write_bytes(data)
            aside.replace(path)  # a file appears whole
        except OSError:
            self._unlink(aside)
            return
        self._trim()

    def drop(self, ref: BlobRef) -> None:
        """Forget content."""
        with self._lock:
            self.memory_used -= len(self._memory.pop(ref.sha256, b""))
        if self.directory is not None:
            self._unlink(self.directory / ref.sha256)

    def _remember(self, sha: str, data: bytes) -> None:
        with self._lock:
            self.memory_used -= len(self._memory.pop(sha, b""))
            self._memory[sha] = data
            self.memory_used += len(data)
            while self.memory_used > self._memory_bytes:
                self.memory_used -= len(self._memory.popitem(last=False)[1])

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        self._trim()

    def _trim(self) -> None:
        """Look at what is there, whoever wrote it, and drop the least recently used files above the bound."""
        if self.directory is None:
            return
        with self._lock:
            files: list[tuple[float, str, int]] = []
            for path in _listed(self.directory):
                with contextlib.suppress(OSError):  # another worker dropped it
                    stat = os.stat(path)
                    files.append((stat.st_mtime, path, stat.st_size))
            self.disk_used = sum(size for *_, size in files)
            for _, path, size in sorted(files):
                if self.disk_used <= self._disk_bytes:
                    return
                with contextlib.suppress(OSError):
                    os.unlink(path)
                self.disk_used -= size


class PolicySlots:
    """Versions ready to act, bounded in number and bytes, the least recently used paged out first."""

    def __init__(self, build: Build, pages: Pages | None = None, *, slots: int = 64, slot_bytes: int = 1 << 30) -> None:
        """`build` makes a slot of a version's record, weights and adapter; it runs on the thread that loads."""
        self._build = build
        self._pages = pages or Pages()
        self._slots, self._slot_bytes = slots, slot_bytes
        self._resident: OrderedDict[Key, tuple[PolicySlot, int]] = OrderedDict()
        self._known: OrderedDict[Key, PolicyVersion] = OrderedDict()
        self._lock = threading.Lock()
        self.used = 0  # bytes of those that are ready

    def get(self, tenant: str, version: str) -> PolicySlot | None:
        """The slot if it is ready; never waits for a load."""
        with self._lock:
            found = self._resident.get((tenant, version))
            if found is None:
                return None
            self._resident.move_to_end((tenant, version))
            return found[0]

    def known(self, tenant: str, version: str) -> PolicyVersion | None:
        """The record of a version that was loaded before and is still offered."""
        with self._lock:
            return self._known.get((tenant, version))

    def page_in(self, version: PolicyVersion) -> PolicySlot | None:
        """Make a slot ready from memory or disk; None if its weights are in neither, or are damaged there.

        Raises:
            BadMessage, ContractError: the version does not fit; names the field.
        """
        weights = self._pages.get(version.weights)
        adapter = self._pages.get(version.adapter) if version.adapter is not None else None
        if weights is None or (version.adapter is not None and adapter is None):
            return None
        return self._keep(version, self._build(version, weights, adapter))

    def load(self, version: PolicyVersion, weights: bytes, adapter: bytes | None = None) -> PolicySlot:
        """Make a slot ready from what the bus holds. `store` keeps its bytes for when it is paged out; nobody waits for that.

        Raises:
            BadMessage, ContractError: the version does not fit; names the field.
        """
        return self._keep(version, self._build(version, weights, adapter))

    def store(self, version: PolicyVersion, weights: bytes, adapter: bytes | None = None) -> None:
        """Keep a version's bytes on this host, unless it was dropped meanwhile."""
        if self.known(version.tenant, version.id) is None:
            return
        self._pages.put(version.weights, weights)
        if version.adapter is not None and adapter is not None:
            self._pages.put(version.adapter, adapter)

    def drop(self, tenant: str, version: str) -> None:
        """The version is offered no more: neither the slot nor its bytes are kept."""
        with self._lock:
            record = self._known.pop((tenant, version), None)
            _, size = self._resident.pop((tenant, version), (None, 0))
            self.used -= size
        for ref in (record.weights, record.adapter) if record is not None else ():
            if ref is not None:
                self._pages.drop(ref)

    def versions(self) -> Sequence[Key]:
        """What is ready, least recently used first."""
        with self._lock:
            return list(self._resident)

    def _keep(self, version: PolicyVersion, slot: PolicySlot) -> PolicySlot:
        """From here on it is served: the swap is this one pointer. Whoever is newest stays, however large."""
        key, size = (version.tenant, version.id), slot_bytes(slot)
        with self._lock:
            self.used += size - self._resident.pop(key, (None, 0))[1]
            self._resident[key] = (slot, size)
            self._known.pop(key, None)
            self._known[key] = version
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
            while len(self._resident) > 1 and (len(self._resident) > self._slots or self.used > self._slot_bytes):
                self.used -= self._resident.popitem(last=False)[1][1]
        return slot


def _listed(directory: Path) -> list[str]:
    """Files of ours: what else lies there is neither counted nor touched."""
    try:
        return [entry.path for entry in os.scandir(directory) if _PAGE.fullmatch(entry.name)]
    except OSError:  # somebody took the directory away: nothing is kept there
        return []


def slot_bytes(slot: PolicySlot) -> int:
    """Bytes of the tensors that a slot holds."""
    modules: list[torch.nn.Module] = [slot.module]
    if isinstance(adapter := getattr(slot, "adapter", None), torch.nn.Module):
        modules.append(adapter)
    return sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))
