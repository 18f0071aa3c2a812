"""An upload of a dataset on disk: all that is known of it lies there, so that any worker that shares the disk goes on with it.

    TENANT/NAME                        datasets in place
    TENANT/.incoming/UPLOAD/lock       held shared by whoever writes a piece, alone by whoever checks or clears away; its time
                                       is that of the last piece
                           /pages/N    the list of files, until it is whole
                           /manifest   the list of files, from when the sending may begin
                           /files/...  what was sent
                           /refused    why a check failed, until somebody was told
    TENANT/.incoming/.gone-ID          what is being cleared away
                     .adding           held alone by whoever adds an upload, or a list of files

Nothing here waits for a lock but `adding`, a moment, and nothing here is awaited: call it in a thread.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import shutil
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import msgspec

from nexus_bus.errors import BadMessage, Conflict, NexusError, NotFound, Refused, from_code
from schemas.dataset import FILES, DatasetFile

INCOMING = ".incoming"
LARGEST = 256 << 30  # bytes of one dataset
DEPTH = 16  # folders
NAME_BYTES = 255  # of a file or folder
BLOCK = 1 << 20
LISTING_S = 600.0  # between two pages of a list: without all of it nobody can see an upload, nor drop it
RESERVE = 1 << 30  # of a disk that stays free, or a twentieth of a small one: others write there as well


class Manifest(msgspec.Struct, frozen=True):
    """What is to be sent."""

    dataset: str
    files: dict[str, DatasetFile]  # by path

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files.values())


class Upload:
    """One of them. It need not exist."""

    def __init__(self, home: Path, name: str) -> None:
        """In the directory of a tenant; the name must be one that the schema lets through."""
        self.home, self.name = home, name
        self.root = home / INCOMING / name
        self.files = self.root / "files"

    @property
    def exists(self) -> bool:
        """Whether it was begun."""
        return (self.root / "lock").exists()

    @property
    def time(self) -> float:
        """Of the last piece, unix time; 0 if it is gone."""
        try:
            return (self.root / "lock").stat().st_mtime
        except OSError:
            return 0.0

    def manifest(self) -> Manifest | None:
        """What is to be sent, once that is known."""
        path = self.root / "manifest"
        try:
            return _manifest(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return None

    # The list of files

    def begin(self, most: int) -> None:
        """Make it, if there is none. Raises Refused if the tenant has `most` others."""
        if not self.exists and len(uploads(self.home)) >= most:
            raise Refused(
                f"upload: {most} uploads of yours are not finished (`nexus data list` shows them); push one of them again, "
                "drop it (`nexus data drop NAME`), or wait a day"
            )
        with writing():
            (self.root / "pages").mkdir(parents=True, exist_ok=True)
            (self.root / "lock").touch()

    def page(self, number: int, files: list[DatasetFile]) -> None:
        """Keep a page of the list."""
        with writing():
            _write(self.root / "pages" / str(number), msgspec.msgpack.encode(files))

    def listed(self, last: int, dataset: str) -> Manifest:
        """The whole list. Raises BadMessage for a page that is missing, and for a path that is none or comes twice."""
        files: dict[str, DatasetFile] = {}
        seen: dict[str, tuple[str, bool]] = {}
        for number in range(last + 1):
            try:
                page = msgspec.msgpack.decode((self.root / "pages" / str(number)).read_bytes(), type=list[DatasetFile])
            except FileNotFoundError:
                raise BadMessage(f"page: {number} is missing; send all pages of the list, and the last one last") from None
            for file in page:
                _check_path(file.path, seen)
                files[file.path] = file
            if len(files) > FILES:
                raise BadMessage(
                    f"files: more than {FILES}; `nexus data convert` writes the same data as LeRobot v3.0, into few files"
                )
        manifest = Manifest(dataset, files)
        if manifest.bytes > LARGEST:
            raise BadMessage(f"files: {manifest.bytes:,} bytes; a dataset has at most {LARGEST:,}")
        return manifest

    def freeze(self, manifest: Manifest) -> Manifest:
        """From now on pieces are taken. Of two lists that become whole at once one wins."""
        fresh = self.root / f"manifest-{uuid.uuid4().hex}"
        with writing():
            fresh.write_bytes(msgspec.msgpack.encode(manifest))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, self.root / "manifest")
            fresh.unlink()
        shutil.rmtree(self.root / "pages", ignore_errors=True)
        return self.manifest() or manifest

    def have(self, files: list[DatasetFile]) -> list[int]:
        """Bytes that are there of each."""
        return [_size(self.files / file.path) for file in files]

    def sent(self) -> int:
        """Bytes that are there in all."""
        manifest = self.manifest()
        return sum(self.have(list(manifest.files.values()))) if manifest is not None else 0

    # Pieces

    def put(self, path: str, offset: int, data: bytes) -> int:
        """Write a piece; bytes that are there by now, which are less than `offset` if what comes before it is not there.

        Raises:
            NotFound: no such upload, or its list of files is not whole.
            BadMessage: no such file, or the piece leads past its end.
            Conflict: it is being checked.
            Refused: the disk is full.
        """
        manifest = self.manifest()
        if manifest is None:
            raise NotFound(f"upload: no {self.name!r} of yours takes pieces; begin it first, by the list of its files")
        file = manifest.files.get(path)
        if file is None:
            raise BadMessage(f"path: {path!r} is not among the files of this upload")
        if offset + len(data) > file.size:
            raise BadMessage(f"offset: {path}: a piece up to byte {offset + len(data)}; the list says {file.size} bytes")
        with self._held(fcntl.LOCK_SH), writing():
            if room(self.home) < len(data):
                raise OSError(errno.ENOSPC, "full")
            target = self.files / path
            target.parent.mkdir(parents=True, exist_ok=True)
            opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                there = os.fstat(opened).st_size
                if offset > there:
                    return there
                done = 0
                while done < len(data):
                    done += os.pwrite(opened, data[done:], offset + done)
                return max(there, offset + done)
            finally:
                os.close(opened)

    @contextlib.contextmanager
    def _held(self, how: int) -> Iterator[None]:
        lock = self.lock(how)
        if lock is None:
            raise Conflict(f"upload: {self.name!r} is being checked; wait for what is said of it")
        try:
            os.utime(lock)
            (self.root / "refused").unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)

    def lock(self, how: int = fcntl.LOCK_EX) -> int | None:
        """Hold it until this is closed; None if somebody else does. Raises NotFound if it is gone."""
        try:
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"upload: no {self.name!r} of yours is here") from None
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)  # which the kernel lets go when a worker dies
            if os.fstat(lock).st_nlink:  # else it was cleared away meanwhile
                return lock
        except BlockingIOError:
            pass
        os.close(lock)
        return None

    # The end

    def verify(self, manifest: Manifest, moved: Callable[[], None]) -> None:
        """Compare every byte with the list; what is wrong is thrown away, so that it is sent again. Whoever holds it alone.

        Raises:
            BadMessage: names a file that is not whole, or not what the list says.
        """
        for path, size in zip(manifest.files, self.have(list(manifest.files.values())), strict=True):
            if size != manifest.files[path].size or not (self.files / path).exists():
                raise BadMessage(f"{path}: {size} of {manifest.files[path].size} bytes are there; push again to send the rest")
        for path in walk(self.files):
            if str(path.relative_to(self.files)) not in manifest.files:
                path.unlink()  # of another list that became whole at the same time
        for path, file in manifest.files.items():
            digest = hashlib.sha256()
            with (self.files / path).open("rb") as opened:
                while part := opened.read(BLOCK):
                    digest.update(part)
                    moved()
                os.fsync(opened)  # before it is put in place: a power cut must leave the old dataset or the new one
            if digest.hexdigest() != file.sha256:
                (self.files / path).unlink()
                raise BadMessage(f"{path}: what came has not the hash that the list says; push again to send it anew")

    def refuse(self, error: NexusError) -> None:
        """Keep why a check failed for whoever asks next, of whichever worker."""
        with contextlib.suppress(OSError):
            _write(self.root / "refused", f"{error.code}\n{error}".encode())

    def raise_refusal(self) -> None:
        """Say it, once."""
        path = self.root / "refused"
        try:
            code, _, text = path.read_text().partition("\n")
            path.unlink()
        except FileNotFoundError:
            return
        raise from_code(code, text)

    def clear(self) -> None:
        """Take it away."""
        clear(self.home, self.root)


def uploads(home: Path) -> list[Upload]:
    """Those of a tenant that were begun."""
    try:
        names = sorted(one.name for one in (home / INCOMING).iterdir() if not one.name.startswith("."))
    except FileNotFoundError:
        return []
    return [Upload(home, name) for name in names]


@contextlib.contextmanager
def adding(home: Path) -> Iterator[None]:
    """Meanwhile no other worker adds to what a tenant sends: of several that begin at once each counts those before it."""
    with writing():
        (home / INCOMING).mkdir(parents=True, exist_ok=True)
        lock = os.open(home / INCOMING / ".adding", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the kernel lets go when a worker dies
        yield
    finally:
        os.close(lock)


def clear(home: Path, what: Path) -> None:
    """Take a directory away: at once out of sight, then from the disk."""
    gone = home / INCOMING / f".gone-{uuid.uuid4().hex}"
    gone.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # somebody else did
        what.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sweep(home: Path, age_s: float) -> None:
    """Clear away uploads of a tenant that nobody went on with. Any number of workers may do it side by side."""
    for upload in uploads(home):
        with contextlib.suppress(NotFound, OSError):
            longest = age_s if (upload.root / "manifest").exists() else min(age_s, LISTING_S)
            if time.time() - (upload.time or upload.root.stat().st_mtime) < longest:
                continue
            lock = upload.lock() if upload.exists else -1  # begun by a worker that was killed at once
            if lock is None:
                continue
            try:
                if upload.time and time.time() - upload.time < longest:
                    continue  # somebody went on with it this moment
                upload.clear()
            finally:
                if lock >= 0:
                    os.close(lock)
    for left in (home / INCOMING).glob(".gone-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raises Refused for a disk that is full: nothing of what was begun is lost."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound("upload: it was dropped, or forgotten, this moment; begin it again") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Refused(
            "the disk of the service is full: what was sent stays, and the same push goes on once there is room; ask the "
            "provider, or drop datasets that you no longer need"
        ) from None


def room(home: Path) -> int:
    """Bytes of the disk that uploads may still take."""
    disk = shutil.disk_usage(next(one for one in (home, *home.parents) if one.exists()))
    return max(0, disk.free - min(RESERVE, disk.total // 20))


def walk(root: Path) -> Iterator[Path]:
    """Every file below a directory; links are not followed."""
    for folder, _, names in os.walk(root):
        for name in names:
            yield Path(folder, name)


def _check_path(path: str, seen: dict[str, tuple[str, bool]]) -> None:
    """Of a file below a dataset, which must mean the same on every disk.

    Args:
        seen: folders and files so far, by how a disk that ignores case knows them; and whether it is a file.
    """
    parts = PurePosixPath(path).parts
    if "/".join(parts) != path or path.startswith("/") or len(parts) > DEPTH:
        raise BadMessage(f"path: {path[:80]!r} is not a file's below the dataset, of at most {DEPTH} parts")
    for part in parts:
        if part.startswith(".") or part.endswith((".", " ")) or not part.isprintable() or len(part.encode()) > NAME_BYTES:
            raise BadMessage(f"path: {path[:80]!r} has the part {part[:80]!r}: hidden, unprintable or too long")
        if any(sign in part for sign in '\\:*?"<>|'):
            raise BadMessage(f"path: {path[:80]!r} has the part {part[:80]!r}, with a sign that not every disk can name")
    for depth in range(1, len(parts) + 1):
        some, whole = "/".join(parts[:depth]), depth == len(parts)
        folded = unicodedata.normalize("NFC", some).casefold()
        before = seen.get(folded)
        if before is not None and (whole or before != (some, False)):
            raise BadMessage(f"path: {path[:80]!r} and {before[0][:80]!r} would be in each other's place")
        seen[folded] = some, whole


@functools.lru_cache(maxsize=16)
def _manifest(path: Path, _written: int) -> Manifest:
    return msgspec.msgpack.decode(path.read_bytes(), type=Manifest)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    fresh.write_bytes(data)
    fresh.replace(path)
