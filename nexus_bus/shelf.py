"""Datasets that lie in place below a tenant's directory: what there is, and how one comes there. See also uploads.py.

Nothing here is awaited: call it in a thread.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec.structs import replace

from nexus_bus.data.layout import PICTURES, features_of
from nexus_bus.errors import BadMessage, NotFound, Refused
from nexus_bus.uploads import INCOMING, uploads, walk
from schemas.base import PUBLIC
from schemas.dataset import DatasetInfo, DatasetPage, DatasetQuery, DatasetUnfinished

INFO_BYTES = 256 << 10  # of metadata that a list looks into
TOLD = ("observation.state", "action")  # whose sizes are told, besides those of pictures
MOST_TOLD, LONGEST = 32, 100  # features of one dataset, and characters of their names; of one with more none is told
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


@contextlib.contextmanager
def placing(home: Path, dataset: str) -> Iterator[None]:
    """Nobody else records, pushes or drops a dataset of that name meanwhile. Raises Refused if somebody does."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / f".{dataset}.lock").open("w") as lock:  # the lock of data/writer.py
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"dataset: {dataset!r} is being recorded or put in place; try again later") from None
        yield


def there(path: Path) -> bool:
    """Whether anything has that name."""
    return os.path.lexists(path)


def place(new: Path, target: Path) -> None:
    """Put a directory in place; what lies there comes to lie where it was. Whoever looks meanwhile finds one of them, whole."""
    if not there(target):
        new.rename(target)
        return
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None and call(_HERE, os.fsencode(new), _HERE, os.fsencode(target), _EXCHANGE) == 0:
        return
    # A system or a disk that cannot: for a moment nothing is there, and who looks then is told so.
    away = new.with_name("away")
    shutil.rmtree(away, ignore_errors=True)
    target.rename(away)
    new.rename(target)


def mark(path: Path) -> str:
    """What a dataset is known by, wherever it is moved; empty if there is none."""
    try:
        stat = (path / "meta/info.json").stat()
    except OSError:
        return ""
    return f"{stat.st_ino}-{stat.st_mtime_ns}"


def homes(root: Path) -> list[Path]:
    """Directories of tenants who have pushed something."""
    try:
        return [home for home in root.iterdir() if (home / INCOMING).is_dir()]
    except OSError:
        return []


def names(home: Path) -> list[str]:
    """What a job of a tenant can name, by name."""
    try:
        found = [one.name for one in home.iterdir() if not one.name.startswith(".") and (one / "meta/info.json").is_file()]
    except OSError:
        return []
    return sorted(found)


def directory(root: Path, tenant: str, dataset: str) -> tuple[Path, bool]:
    """The directory of a dataset, and whether it is one that every tenant may read: `public/…`.

    Raises:
        NotFound: a name that leaves the tenant's own root, or the public one.
    """
    first, *rest = PurePosixPath(dataset).parts or (".",)
    public = first == PUBLIC and bool(rest)
    root = (root / (PUBLIC if public else tenant)).resolve()
    try:
        path = root.joinpath(*rest if public else (dataset,)).resolve()
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise NotFound(f"data.dataset: {dataset[:80]!r} is not a directory's name: {error}") from None
    below = path.relative_to(root).parts if path.is_relative_to(root) else ()
    if not below or below[0].startswith("."):  # hidden is what is not finished
        raise NotFound(f"data.dataset: {dataset!r} is not a directory below {'public' if public else 'the tenant'}'s data root")
    return path, public


def info(path: Path) -> DatasetInfo:
    """What there is to say about a dataset without reading it."""
    sizes = [one.stat().st_size for one in walk(path) if one.is_file()]
    about: dict[str, Any] = {}
    found = path / "meta/info.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if found.stat().st_size <= INFO_BYTES:
            about = json.loads(found.read_bytes())
    counts = {key: about.get(f"total_{key}") if isinstance(about, dict) else 0 for key in ("episodes", "frames")}
    counts = {key: value if type(value) is int and 0 <= value < 2**53 else 0 for key, value in counts.items()}
    since = next((one.stat().st_mtime for one in (found, path) if one.exists()), 0.0)
    return DatasetInfo(
        dataset=path.name, bytes=sum(sizes), files=len(sizes), **counts, time=_time(since),
        version=str(about.get("codebase_version") or "")[:40] if isinstance(about, dict) else "",
        features=_features(about),
    )  # fmt: skip


def _features(about: Any) -> dict[str, list[int]]:
    """Shapes of what a policy sees and does; none of metadata that no reader takes."""
    try:
        found = features_of(about) if isinstance(about, dict) else {}
    except BadMessage:
        return {}
    told = {key: feature["shape"] for key, feature in found.items() if key in TOLD or feature["dtype"] in PICTURES}
    return told if len(told) <= MOST_TOLD and all(len(key) <= LONGEST for key in told) else {}


def listed(root: Path, tenant: str, query: DatasetQuery) -> DatasetPage:
    """A page of what is there. Raises NotFound for the name of one that leads out of what the tenant may read."""
    if query.dataset:
        path, _ = directory(root, tenant, query.dataset)
        there = [replace(info(path), dataset=query.dataset)] if (path / "meta/info.json").is_file() else []
        return DatasetPage(datasets=there)
    home = root / tenant
    found = [name for name in names(home) if name > query.after]
    some = found[: query.limit]
    unfinished: list[DatasetUnfinished] = []
    for one in uploads(home) if not query.after else []:
        manifest = one.manifest()
        if manifest is not None:
            unfinished.append(
                DatasetUnfinished(
                    dataset=manifest.dataset, upload=one.name, sent=one.sent(), bytes=manifest.bytes, time=_time(one.time)
                )
            )
    return DatasetPage(
        datasets=[info(home / name) for name in some], unfinished=unfinished,
        next=some[-1] if len(found) > len(some) else "",
    )  # fmt: skip


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
