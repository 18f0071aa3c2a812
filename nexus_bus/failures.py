"""What a process died of, as far as its exit code and the end of its log tell. Pure; the host asks when a child ends."""

import json
import re
import signal
from pathlib import Path
from typing import Any

from schemas.control import Cause

TAIL_BYTES = 32 << 10
LONGEST = 300  # characters of last words
CRASH = "Fatal Python error"

# In this order: who runs out of memory inside a simulator ran out of memory.
SIGNS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("memory", re.compile(r"MemoryError|OutOfMemory|out of memory|cannot allocate memory|bad_alloc|can't allocate", re.I)),
    ("numerics", re.compile(r"FloatingPointError|LinAlgError|not finite|non-finite|\bnan\b|overflow", re.I)),
    ("broker", re.compile(r"\bnats\b|JetStream|no answer from the server|ConnectionRefused|ConnectionReset|BrokenPipe", re.I)),
    ("simulator", re.compile(r"EnvironmentFault|simulator|mujoco|OpenGL|\bEGL\b|OSMesa|gymnasium|metaworld", re.I)),
)
BY_SIGNAL: dict[int, Cause] = {signal.SIGFPE: "numerics", signal.SIGSEGV: "code", signal.SIGBUS: "code",
                               signal.SIGILL: "code", signal.SIGABRT: "code"}  # fmt: skip


def classify(code: int, words: str, *, out_of_memory: bool = False) -> Cause:
    """The kind of failure.

    Args:
        code: of the exit; below zero the signal that ended it.
        words: see `last_words`.
        out_of_memory: the kernel ended somebody for want of memory just before. A bare SIGKILL says no more than that.
    """
    if code == -signal.SIGKILL:
        return "memory" if out_of_memory else "killed"
    for cause, sign in SIGNS:
        if sign.search(words):
            return cause
    return BY_SIGNAL.get(-code, "killed") if code < 0 else "code"


def last_words(log: Path, since: int = 0) -> str:
    """What a log says about an end: its last error, or the last line that a library or the interpreter wrote by itself.

    Args:
        since: bytes that were there before the process began.
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(since if since <= end else 0, end - TAIL_BYTES))  # a log put aside since begins anew
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    crashed = max((n for n, line in enumerate(lines) if line.startswith(CRASH)), default=None)
    if crashed is not None:  # faulthandler: what it was, and where; below are stacks and the names of modules
        place = next((line.strip() for line in lines[crashed:] if line.startswith("  File ")), "")
        return ", ".join(filter(None, (lines[crashed].strip(), place)))[:LONGEST]
    return next((words[:LONGEST] for line in reversed(lines) if (words := _words(line))), "")


def _words(line: str) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        return line.strip()
    if entry.get("level") not in ("error", "critical"):
        return ""
    for key in ("exception", "error", "event"):
        if told := str(entry.get(key, "")).strip():
            return told.splitlines()[-1].strip()
    return ""


def oom_kills() -> int:
    """How many processes the kernel of this machine has ended for want of memory so far; 0 where it does not tell."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def ending(code: int) -> str:
    """An exit code in words."""
    try:
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    except ValueError:
        return f"ended by signal {-code}"
