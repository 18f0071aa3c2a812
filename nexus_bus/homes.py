"""The home of a service on one machine: who owns it, and how many workers were chosen for it. Beside the host.

`nexus scale` writes what it chose into `scale.json`, and the next `nexus up` on this home begins with it, unless its own flags
say otherwise: a machine that starts again comes back as it was. What the autoscaler does is not kept.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from nexus_bus.errors import Unavailable
from schemas.control import Role

KEPT = "scale.json"


@contextlib.contextmanager
def held(home: Path) -> Iterator[None]:
    """Own a home directory: its lock ends with the process, so a pid file left by a crash misleads nobody.

    Raises:
        Unavailable: another process owns it; says which and what to do.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "up.pid").open("a+") as file:
        for attempt in range(3):  # a look by `running_up` holds the lock for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt == 2:
                    raise Unavailable(already(home, _pid(home))) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def already(home: Path, pid: int | None) -> str:
    """What is said to a second `up`."""
    return f"a service runs on {home} already (process {pid}); use it, or end it with `nexus down --home {home}`"


def running_up(home: Path) -> int | None:
    """Process id of the `nexus up` that owns this home now, or None."""
    try:
        with (home / "up.pid").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return _pid(home)
    return None


def _pid(home: Path) -> int | None:
    text = (home / "up.pid").read_text().strip()
    return int(text) if text.isdecimal() else None


def kept_counts(home: Path) -> dict[Role, int]:
    """Workers by role that `nexus scale` chose for this home; a file that is damaged counts as none."""
    try:
        found = json.loads((home / KEPT).read_text())
        return {role: int(found[role]) for role in get_args(Role) if role in found}
    except (OSError, ValueError, TypeError):
        return {}


def keep_counts(home: Path, counts: Mapping[Role, int]) -> None:
    """Remember these; others stay as they were chosen."""
    path = home / f".{KEPT}"
    path.write_text(json.dumps(kept_counts(home) | dict(counts)) + "\n")
    path.replace(home / KEPT)
