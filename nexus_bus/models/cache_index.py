"""The index of a feature cache's directory: one row a feature, sums by scope, and the lock that makes writers take turns."""

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator

_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    scope TEXT NOT NULL, id TEXT NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL, PRIMARY KEY (scope, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS oldest ON entries (scope, used);
CREATE TABLE IF NOT EXISTS scopes (scope TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON entries BEGIN
    INSERT INTO scopes VALUES (new.scope, new.bytes) ON CONFLICT (scope) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON entries BEGIN
    UPDATE scopes SET bytes = bytes - old.bytes WHERE scope = old.scope;
END;
"""


class Index:
    """A connection to it. All but `lock` is called with the lock held; raises OSError and sqlite3.Error as they come."""

    files = (*_FILES, "lock")

    def __init__(self, root: str) -> None:
        self.ready = False
        self.own_bytes = 0  # of the index's files, when last looked at
        self._root = root
        self._inode = 0
        self._lock = os.open(f"{root}/lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._sql: sqlite3.Connection | None = None

    def prepare(self, *, anew: bool) -> None:
        """Connect; `anew` throws away what is there."""
        if anew:
            for name in _FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self._root}/{name}")
        self._sql = sql = sqlite3.connect(
            f"{self._root}/index.sqlite", timeout=1.0, isolation_level=None, check_same_thread=False
        )
        sql.execute("PRAGMA journal_mode = WAL")
        sql.execute("PRAGMA synchronous = OFF")  # what a power cut breaks is begun anew
        sql.execute("PRAGMA wal_autocheckpoint = 64")  # pages, so that the log stays small …
        sql.execute(f"PRAGMA journal_size_limit = {256 << 10}")  # … and shrinks again
        sql.executescript(_SCHEMA)
        self._inode = os.stat(f"{self._root}/index.sqlite").st_ino
        self.ready = True

    def look(self) -> bool:
        """Whether the file by our name is still the one we opened; takes note of its size."""
        try:
            stat = os.stat(f"{self._root}/index.sqlite")
        except FileNotFoundError:
            return False
        self.own_bytes = stat.st_size
        for name in _FILES[1:]:
            with contextlib.suppress(FileNotFoundError):
                self.own_bytes += os.stat(f"{self._root}/{name}").st_size
        return stat.st_ino == self._inode

    def lock(self, patience: float) -> bool:
        """Take the directory's lock; False after `patience` seconds."""
        ends = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= ends:
                    return False
                time.sleep(0.0005)
            else:
                return True

    def unlock(self) -> None:
        """Let others write."""
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of connection and lock. Again is harmless."""
        if self._sql is not None:
            self._sql.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._sql, self._lock = None, -1

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing."""
        self._run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._run("ROLLBACK")
            raise
        self._run("COMMIT")

    def total(self) -> int:
        """Bytes of all features."""
        return self._run("SELECT COALESCE(SUM(bytes), 0) FROM scopes").fetchone()[0]

    def size(self, scope: str, feature_id: str) -> int | None:
        """Bytes of a feature, if it is counted."""
        row = self._run("SELECT bytes FROM entries WHERE scope = ? AND id = ?", (scope, feature_id)).fetchone()
        return row[0] if row else None

    def oldest(self) -> tuple[str, str] | None:
        """(scope, id) of who goes next: the least recently used of the scope that holds most, so nobody pushes others out."""
        return self._run(
            "SELECT scope, id FROM entries WHERE scope = (SELECT scope FROM scopes ORDER BY bytes DESC LIMIT 1)"
            " ORDER BY used LIMIT 1"
        ).fetchone()

    def everything(self) -> dict[tuple[str, str], int]:
        """Bytes by (scope, id)."""
        return {(scope, name): size for scope, name, size in self._run("SELECT scope, id, bytes FROM entries")}

    def add(self, scope: str, feature_id: str, size: int) -> None:
        """Count a feature, used just now."""
        self._run("INSERT INTO entries VALUES (?, ?, ?, ?)", (scope, feature_id, size, time.time_ns()))

    def drop(self, scope: str, feature_id: str) -> None:
        """Count a feature no longer."""
        self._run("DELETE FROM entries WHERE scope = ? AND id = ?", (scope, feature_id))

    def use(self, keys: Iterable[tuple[str, str]]) -> None:
        """Features were used, the last of them last."""
        now = time.time_ns()
        rows = [(now + i, *key) for i, key in enumerate(keys)]
        self._connection().executemany("UPDATE entries SET used = ? WHERE scope = ? AND id = ?", rows)

    def _run(self, sql: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        return self._connection().execute(sql, values)

    def _connection(self) -> sqlite3.Connection:
        if self._sql is None:
            raise OSError("the index is closed")
        return self._sql
