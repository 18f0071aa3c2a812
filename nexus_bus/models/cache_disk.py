"""The disk below the feature cache: a file a feature, and an index that counts every byte. Shared by a host's processes.

Files are found by their names alone, so a read asks nobody. Whoever writes holds the directory's lock, which dies with its
holder, and keeps one order: a file goes before its row does, a row comes before its file does. So wherever a process is
killed, the index counts at least what is there, and the directory stays within its bound, the index itself included.
"""

import contextlib
import json
import os
import re
import sqlite3
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import structlog
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nexus_bus.models.cache_index import Index
from nexus_bus.models.features import VLAFeature
from schemas.base import NAME_PATTERN

SLACK = 64 << 10  # bytes the index may grow by in one transaction
LOCK_S = 0.25  # waited for another writer; then the feature is not kept
OPEN_S = 10.0  # waited for another process that sweeps
RETRY_S = 5.0  # after a fault, before the disk is tried again; after a wait in vain, before one waits again
TOUCHED = 512  # uses noted together
_NAME = re.compile(NAME_PATTERN)


class DiskCache:
    """Features of a directory, by scope and id. The disk's faults raise nothing: they are counted, and logged once."""

    def __init__(self, directory: Path, bound: int) -> None:
        """`bound` is for all bytes of files below `directory`; the index takes up to 0.6 MB and 200 bytes an entry of it."""
        self.bound = bound
        self.faults = 0
        self.evictions: Counter[str] = Counter()  # by scope, of this process
        self._root = str(directory)
        self._aside = f"{self._root}/.part"  # one is enough: writers take turns
        self._index: Index | None = None
        self._retry, self._rebuild, self._hurry = 0.0, False, 0.0
        self._touched: dict[tuple[str, str], None] = {}  # a set in order
        self._locked(OPEN_S, self._note)

    def read(self, scope: str, feature_id: str) -> VLAFeature | None:
        """The feature, mapped from its file, or None."""
        path = self._path(scope, feature_id)
        try:
            with safe_open(path, "pt") as file:
                start, stop = json.loads(file.metadata()["query_span"])
                feature = VLAFeature(feature_id, file.get_tensor("hidden"), file.get_tensor("token_type"), (start, stop))
        except OSError:
            return None
        except (SafetensorError, KeyError, ValueError, TypeError):  # cut short by a crash of the machine: encode it again
            with contextlib.suppress(OSError):
                os.unlink(path)  # its row still counts it, until it is written again
            return None
        self.touch(scope, feature_id)
        return feature

    def touch(self, scope: str, feature_id: str) -> None:
        """Note a use; uses reach the index many at a time, and never make a reader wait."""
        self._touched[scope, feature_id] = None
        if len(self._touched) % TOUCHED == 0:
            self._locked(0.0, self._note)
            if len(self._touched) >= 8 * TOUCHED:  # nobody lets us: forget rather than grow
                self._touched.clear()

    def write(self, scope: str, feature: VLAFeature) -> None:
        """Keep a feature, and make room for it first. Not kept: one above the bound, or while others write for too long."""
        path = self._path(scope, feature.feature_id)
        data = save(
            {"hidden": feature.hidden.contiguous(), "token_type": feature.token_type.contiguous()},
            metadata={"query_span": json.dumps(feature.query_span)},
        )

        def work(index: Index) -> None:
            if not self._admit(index, scope, feature.feature_id, len(data), path):
                return
            try:
                _write(self._aside, data)
                _rename(self._aside, path)
            except OSError:
                with contextlib.suppress(OSError):
                    _unlink(self._aside)
                    index.drop(scope, feature.feature_id)
                raise

        self._locked(LOCK_S, work)

    def sizes(self) -> dict[str, int]:
        """Bytes of features by scope, those of all processes together. From any thread."""
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self._root}/index.sqlite?mode=ro", uri=True, timeout=0.05)) as own:
                return dict(own.execute("SELECT scope, bytes FROM scopes WHERE bytes > 0"))
        except sqlite3.Error:
            return {}

    def close(self) -> None:
        """Note what was used, and let go of the index."""
        self._locked(LOCK_S, self._note)
        self._let_go()

    def _admit(self, index: Index, scope: str, feature_id: str, size: int, path: str) -> bool:
        """Count a feature in, and others out until it fits. False: it is there already, or can never fit."""
        with index.transaction():
            self._use(index)
            _unlink(self._aside)  # of a writer that was killed
            if (known := index.size(scope, feature_id)) is not None:
                if known == size and os.path.exists(path):
                    index.use([(scope, feature_id)])
                    return False
                _unlink(path)
                index.drop(scope, feature_id)
            room = self.bound - SLACK - index.own_bytes - size
            while index.total() > max(room, 0) and (oldest := index.oldest()) is not None:
                _unlink(self._path(*oldest))
                index.drop(*oldest)
                self.evictions[oldest[0]] += 1
            if room < 0:
                return False
            index.add(scope, feature_id, size)
        return True

    def _note(self, index: Index) -> None:
        with index.transaction():
            self._use(index)

    def _use(self, index: Index) -> None:
        if self._touched:
            index.use(self._touched)
            self._touched.clear()

    def _path(self, scope: str, feature_id: str) -> str:
        if not _NAME.match(scope) or not feature_id.isalnum():
            raise ValueError(f"scope {scope!r}, feature {feature_id!r}: they make a path; expected a name and a hash")
        return f"{self._root}/{scope}/{feature_id[:2]}/{feature_id}"

    def _locked(self, patience: float, work: Callable[[Index], None]) -> None:
        """Do what needs the index, alone of all processes; leave it, if others are at it for more than `patience` seconds."""
        if self._index is None and time.monotonic() < self._retry:
            return
        try:
            if self._index is None:
                os.makedirs(self._root, 0o700, exist_ok=True)
                _own(self._root)
                self._index = Index(self._root)
                self._finalizer = weakref.finalize(self, self._index.close)
            index = self._index
            if not index.lock(patience if time.monotonic() > self._hurry else 0.0):
                if patience:  # somebody hangs: not every feature of a group is to wait for him
                    self._hurry = time.monotonic() + RETRY_S
                return
            try:
                if not index.ready:
                    index.prepare(anew=self._rebuild)
                    self._rebuild = False
                    _sweep(index, self._root)
                if index.look():
                    work(index)
                else:  # another process began it anew, or somebody cleared the directory
                    self._let_go()
            finally:
                index.unlock()
        except (OSError, sqlite3.Error) as error:
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        """The cache is a convenience: a disk that refuses is left alone for a while, a broken index begun anew at once."""
        self._let_go()
        self.faults += 1
        broken = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        if broken and not self._rebuild:
            self._rebuild = True
        else:
            self._retry = time.monotonic() + RETRY_S
        if self.faults == 1:
            structlog.get_logger().warning(
                "the feature cache's disk refuses; features stay in memory", directory=self._root, error=str(error)
            )

    def _let_go(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            index.close()
            self._finalizer.detach()


def _own(root: str) -> None:
    """Whether a directory is a cache's own, for whatever else lies in it would be swept away. Raises OSError if not."""
    there = os.listdir(root)
    if there and not set(there) & set(Index.files):
        raise OSError(f"{root} holds {min(there)!r}, which is none of a feature cache; give it a directory of its own")


def _sweep(index: Index, root: str) -> None:
    """Remove files that no row counts and rows that no file has: what killed processes left. Under the lock."""
    counted, found = index.everything(), set[tuple[str, str]]()
    for folder, _, names in os.walk(root):
        for name in names:
            scope = os.path.relpath(folder, root).split(os.sep)[0]
            if folder == root and name in index.files:
                continue
            path = f"{folder}/{name}"
            if counted.get((scope, name)) == os.path.getsize(path) and path == f"{root}/{scope}/{name[:2]}/{name}":
                found.add((scope, name))
            else:
                _unlink(path)
    with index.transaction():
        for gone in counted.keys() - found:
            index.drop(*gone)


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(f"{path}: written in part")
    finally:
        os.close(descriptor)


def _rename(source: str, target: str) -> None:
    try:
        os.rename(source, target)
    except FileNotFoundError:  # the first of its folder
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
